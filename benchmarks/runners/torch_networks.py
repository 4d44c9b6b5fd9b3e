"""The networks of `linen_networks` in PyTorch, channels first."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Conv3 = partial(nn.Conv2d, kernel_size=3, padding=1)


class Function(nn.Module):
    """A layer defined by a function of the input and of given layers."""

    def __init__(self, function: Callable, *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.layers)


def mean_of_space() -> nn.Module:
    return Function(lambda x: x.flatten(2).mean(2))


def residual(*layers: nn.Module) -> nn.Module:
    return Function(lambda x, inner: x + inner(x), nn.Sequential(*layers))


def mnist_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((1, 32), (32, 64)):
        layers += [Conv3(into, out), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 256), nn.ReLU(), nn.Linear(256, 10))


def wide_kernels() -> nn.Module:
    layers: list[nn.Module] = []
    for into in (3, 64):
        layers += [nn.Conv2d(into, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers.append(nn.Flatten())
    for into, out in ((4096, 384), (384, 192)):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(192, 10))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((3, 32), (32, 64), (64, 128)):
        layers += [Conv3(into, out), nn.ReLU(), Conv3(out, out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 10))


def densenet() -> nn.Module:
    channels, layers = 24, [Conv3(3, 24, bias=False)]
    norm = lambda channels: [nn.GroupNorm(4, channels), nn.ReLU()]  # noqa: E731
    for block in range(3):
        for _ in range(4):
            grown = nn.Sequential(*norm(channels), Conv3(channels, 12, bias=False))
            layers.append(Function(lambda x, inner: torch.cat([x, inner(x)], 1), grown))
            channels += 12
        if block < 2:
            out = channels // 8 * 4
            layers += [*norm(channels), nn.Conv2d(channels, out, 1, bias=False), nn.AvgPool2d(2)]
            channels = out
    return nn.Sequential(*layers, *norm(channels), mean_of_space(), nn.Linear(channels, 10))


def batch_norm_resnet() -> nn.Module:
    into, layers = 16, [Conv3(3, 16, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for stage, out in enumerate((16, 32, 64)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            inner = nn.Sequential(
                Conv3(into, out, stride=stride, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
                Conv3(out, out, bias=False),
                nn.BatchNorm2d(out),
            )
            beside = nn.Identity() if into == out else nn.Conv2d(into, out, 1, stride, bias=False)
            layers.append(Function(lambda x, inner, beside: F.relu(inner(x) + beside(x)), inner, beside))
            into = out
    return nn.Sequential(*layers, mean_of_space(), nn.Linear(64, 10))


def over_channels(norm: nn.Module) -> nn.Module:
    return Function(lambda x, norm: norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm)


def convnext() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 2, 2), over_channels(nn.LayerNorm(48))]
    for stage, channels in enumerate((48, 96)):
        if stage:
            layers += [over_channels(nn.LayerNorm(48)), nn.Conv2d(48, channels, 2, 2)]
        for _ in range(2):
            wide = nn.Sequential(
                nn.LayerNorm(channels),
                nn.Linear(channels, 4 * channels),
                nn.GELU("tanh"),
                nn.Linear(4 * channels, channels),
            )
            layers.append(residual(nn.Conv2d(channels, channels, 7, padding=3, groups=channels), over_channels(wide)))
    return nn.Sequential(*layers, mean_of_space(), nn.LayerNorm(96), nn.Linear(96, 10))


def efficientnet() -> nn.Module:
    into, layers = 16, [Conv3(3, 16, bias=False), nn.GroupNorm(4, 16), nn.SiLU()]
    for out, stride, size in ((24, 2, 3), (24, 1, 3), (40, 2, 5), (40, 1, 5)):
        wide = 4 * into
        squeeze = nn.Sequential(mean_of_space(), nn.Linear(wide, into), nn.SiLU(), nn.Linear(into, wide), nn.Sigmoid())
        block = [
            nn.Conv2d(into, wide, 1, bias=False),
            nn.GroupNorm(4, wide),
            nn.SiLU(),
            nn.Conv2d(wide, wide, size, stride, size // 2, groups=wide, bias=False),
            nn.GroupNorm(4, wide),
            nn.SiLU(),
            Function(lambda x, squeeze: x * squeeze(x)[..., None, None], squeeze),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.GroupNorm(4, out),
        ]
        layers.append(residual(*block) if (into, stride) == (out, 1) else nn.Sequential(*block))
        into = out
    return nn.Sequential(*layers, mean_of_space(), nn.Linear(40, 10))


def shufflenet() -> nn.Module:
    layers: list[nn.Module] = [Conv3(3, 48, stride=2, bias=False), nn.GroupNorm(4, 48), nn.ReLU()]
    for _ in range(4):
        block = residual(
            nn.Conv2d(48, 48, 1, groups=4, bias=False),
            nn.GroupNorm(4, 48),
            nn.ReLU(),
            nn.ChannelShuffle(4),
            Conv3(48, 48, groups=48, bias=False),
            nn.GroupNorm(4, 48),
            nn.Conv2d(48, 48, 1, groups=4, bias=False),
        )
        layers += [block, nn.ReLU()]
    return nn.Sequential(*layers, mean_of_space(), nn.Linear(48, 10))


def inception() -> nn.Module:
    layers: list[nn.Module] = [Conv3(3, 32), nn.ReLU()]
    for into in (32, 80):
        branches = (
            nn.Conv2d(into, 16, 1),
            nn.Sequential(nn.Conv2d(into, 16, 1), nn.ReLU(), Conv3(16, 32)),
            nn.Sequential(nn.Conv2d(into, 8, 1), nn.ReLU(), nn.Conv2d(8, 16, 5, padding=2)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(into, 16, 1)),
        )
        beside = Function(lambda x, *branches: torch.cat([branch(x) for branch in branches], 1), *branches)
        layers += [beside, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5120, 10))


def dilated() -> nn.Module:
    return nn.Sequential(
        Conv3(3, 32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=2, dilation=2),
        nn.ReLU(),
        Conv3(64, 64, groups=4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 10),
    )


def unet() -> nn.Module:
    twice = lambda into, out: nn.Sequential(Conv3(into, out), nn.ReLU(), Conv3(out, out), nn.ReLU())  # noqa: E731

    def around(into: int, channels: int, inner: nn.Module, inside: int) -> nn.Module:
        """Downsample to ``inner`` and upsample again, concatenated with the input."""
        path = nn.Sequential(nn.MaxPool2d(2), inner, nn.ConvTranspose2d(inside, channels, 2, 2))
        join = lambda x, first, path, last: last(torch.cat([path(y := first(x)), y], 1))  # noqa: E731
        return Function(join, twice(into, channels), path, twice(2 * channels, channels))

    return nn.Sequential(around(3, 16, around(16, 32, twice(32, 64), 64), 32), nn.Conv2d(16, 3, 1))


def autoencoder() -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(into, out, 4, 2, 1), nn.LeakyReLU()]
    for into, out in ((128, 64), (64, 32)):
        layers += [nn.ConvTranspose2d(into, out, 4, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(32, 4, 4, 2, 1))


def volumes() -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((1, 16), (16, 32)):
        layers += [nn.Conv3d(into, out, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)]
    return nn.Sequential(*layers, nn.Conv3d(32, 64, 3, padding=1), nn.ReLU(), mean_of_space(), nn.Linear(64, 5))


def waveform() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv1d(1, 32, 80, 4, 38), nn.GroupNorm(4, 32), nn.ReLU()]
    for into, out in ((32, 32), (32, 64), (64, 64)):
        layers += [nn.MaxPool1d(4), nn.Conv1d(into, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU()]
    return nn.Sequential(*layers, mean_of_space(), nn.Linear(64, 10))


def temporal() -> nn.Module:
    layers: list[nn.Module] = []
    for level, into in enumerate((8, 48, 48, 48)):
        past = nn.ConstantPad1d((2 * 2**level, 0), 0.0)
        conv = partial(nn.Conv1d, kernel_size=3, dilation=2**level)
        inner = nn.Sequential(past, conv(into, 48), nn.ReLU(), past, conv(48, 48), nn.ReLU())
        beside = nn.Identity() if into == 48 else nn.Conv1d(into, 48, 1)
        layers.append(Function(lambda x, inner, beside: F.relu(inner(x) + beside(x)), inner, beside))
    return nn.Sequential(*layers, Function(lambda x: x[:, :, -1]), nn.Linear(48, 10))


def characters() -> nn.Module:
    lstm = nn.LSTM(8, 256, 2, batch_first=True)
    return nn.Sequential(nn.Embedding(90, 8), Function(lambda x, lstm: lstm(x)[0], lstm), nn.Linear(256, 90))


def both_ways() -> nn.Module:
    lstm = nn.LSTM(64, 64, batch_first=True, bidirectional=True)
    return nn.Sequential(
        nn.Embedding(2000, 64), Function(lambda x, lstm: lstm(x)[0].max(1)[0], lstm), nn.Linear(128, 2)
    )


def causal(places: int, tokens: int) -> nn.Module:
    gelu = partial(F.gelu, approximate="tanh")
    layer = lambda: nn.TransformerEncoderLayer(128, 4, 512, 0.0, gelu, batch_first=True, norm_first=True)  # noqa: E731
    mask = nn.Transformer.generate_square_subsequent_mask(places)
    attend = [Function(lambda x, layer: layer(x, src_mask=mask, is_causal=True), layer()) for _ in range(2)]
    return nn.Sequential(nn.Embedding(tokens, 128), *attend, nn.LayerNorm(128), nn.Linear(128, tokens))


language_model, long_context = partial(causal, 64, 1000), partial(causal, 1024, 100)


def mixer() -> nn.Module:
    dense = lambda size, wide: (nn.Linear(size, wide), nn.GELU("tanh"), nn.Linear(wide, size))  # noqa: E731
    turn = lambda: Function(lambda x: x.transpose(1, 2))  # noqa: E731
    layers: list[nn.Module] = [nn.Conv2d(3, 128, 4, 4), Function(lambda x: x.flatten(2).transpose(1, 2))]
    for _ in range(4):
        layers += [residual(nn.LayerNorm(128), turn(), *dense(64, 128), turn())]
        layers += [residual(nn.LayerNorm(128), *dense(128, 512))]
    return nn.Sequential(*layers, nn.LayerNorm(128), Function(lambda x: x.mean(1)), nn.Linear(128, 10))


def emnist_dropout() -> nn.Module:
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    dense = [nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 62)]
    return nn.Sequential(*convolutions, *dense)


def cifar_dropout() -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((3, 32), (32, 64)):
        layers += [Conv3(into, out), nn.ReLU(), Conv3(out, out), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    dense = [nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 10)]
    return nn.Sequential(*layers, *dense)


def encoder(dropout: float = 0.1) -> nn.Module:
    gelu = partial(F.gelu, approximate="tanh")
    layer = lambda: nn.TransformerEncoderLayer(128, 4, 512, dropout, gelu, batch_first=True, norm_first=True)  # noqa: E731
    pooled = Function(lambda x: x.mean(1))
    return nn.Sequential(nn.Embedding(2000, 128), layer(), layer(), nn.LayerNorm(128), pooled, nn.Linear(128, 4))


documents = partial(encoder, 0.0)


def resnet56() -> nn.Module:
    into, layers = 16, [Conv3(3, 16, bias=False), nn.GroupNorm(4, 16), nn.ReLU()]
    for stage, out in enumerate((16, 32, 64)):
        for block in range(9):
            stride = 2 if stage and not block else 1
            inner = nn.Sequential(
                Conv3(into, out, stride=stride, bias=False),
                nn.GroupNorm(4, out),
                nn.ReLU(),
                Conv3(out, out, bias=False),
                nn.GroupNorm(4, out),
            )
            smaller = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.GroupNorm(4, out))
            beside = nn.Identity() if into == out else smaller
            layers.append(Function(lambda x, inner, beside: F.relu(inner(x) + beside(x)), inner, beside))
            into = out
    return nn.Sequential(*layers, mean_of_space(), nn.Linear(64, 10))


def mobilenet() -> nn.Module:
    into, layers = 32, [Conv3(3, 32, bias=False), nn.GroupNorm(4, 32), nn.ReLU6()]
    stages = (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
    for wider, out, blocks, stride in stages:
        for number in range(blocks):
            wide, stride = wider * into, 1 if number else stride
            block = [
                *(nn.Conv2d(into, wide, 1, bias=False), nn.GroupNorm(4, wide), nn.ReLU6()),
                *(Conv3(wide, wide, stride=stride, groups=wide, bias=False), nn.GroupNorm(4, wide), nn.ReLU6()),
                *(nn.Conv2d(wide, out, 1, bias=False), nn.GroupNorm(4, out)),
            ]
            layers.append(residual(*block) if (into, stride) == (out, 1) else nn.Sequential(*block))
            into = out
    last = nn.Conv2d(into, 1280, 1, bias=False), nn.GroupNorm(4, 1280), nn.ReLU6()
    return nn.Sequential(*layers, *last, mean_of_space(), nn.Linear(1280, 10))


def deep_transformer() -> nn.Module:
    gelu = partial(F.gelu, approximate="tanh")
    layer = lambda: nn.TransformerEncoderLayer(192, 3, 768, 0.0, gelu, batch_first=True, norm_first=True)  # noqa: E731
    patches = nn.Conv2d(3, 192, 4, 4), Function(lambda x: x.flatten(2).transpose(1, 2))
    attend = [layer() for _ in range(12)]
    return nn.Sequential(*patches, *attend, nn.LayerNorm(192), Function(lambda x: x.mean(1)), nn.Linear(192, 10))


def next_word() -> nn.Module:
    lstm = nn.LSTM(96, 670, batch_first=True)
    dense = nn.Linear(670, 96), nn.Linear(96, 10004)
    return nn.Sequential(nn.Embedding(10004, 96), Function(lambda x, lstm: lstm(x)[0], lstm), *dense)


def text_cnn() -> nn.Module:
    convolutions = [nn.Conv1d(128, 100, size) for size in (3, 4, 5)]
    largest = Function(lambda x, *layers: torch.cat([F.relu(layer(x)).amax(2) for layer in layers], 1), *convolutions)
    return nn.Sequential(nn.Embedding(5000, 128), Function(lambda x: x.transpose(1, 2)), largest, nn.Linear(300, 4))


def eegnet() -> nn.Module:
    conv = partial(nn.Conv2d, bias=False)
    return nn.Sequential(
        *(conv(1, 8, (1, 64), padding="same"), nn.BatchNorm2d(8)),
        *(conv(8, 16, (22, 1), groups=8), nn.BatchNorm2d(16), nn.ELU(), nn.AvgPool2d((1, 4))),
        conv(16, 16, (1, 16), groups=16, padding="same"),
        *(conv(16, 16, 1), nn.BatchNorm2d(16), nn.ELU(), nn.AvgPool2d((1, 8))),
        *(nn.Flatten(), nn.Linear(128, 4)),
    )


def vgg11() -> nn.Module:
    into, layers = 3, []
    for out, convolutions in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(convolutions):
            layers += [Conv3(into, out), nn.ReLU()]
            into = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def alexnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(Conv3(192, 384), nn.ReLU(), Conv3(384, 256), nn.ReLU(), Conv3(256, 256), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Flatten(), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def resnext() -> nn.Module:
    into, layers = 64, [Conv3(3, 64, bias=False), nn.GroupNorm(4, 64), nn.ReLU()]
    for stage, channels in enumerate((64, 128, 256)):
        for block in range(2):
            stride, out = 2 if stage and not block else 1, 2 * channels
            inner = nn.Sequential(
                *(nn.Conv2d(into, channels, 1, bias=False), nn.GroupNorm(4, channels), nn.ReLU()),
                Conv3(channels, channels, stride=stride, groups=16, bias=False),
                *(nn.GroupNorm(4, channels), nn.ReLU(), nn.Conv2d(channels, out, 1, bias=False), nn.GroupNorm(4, out)),
            )
            smaller = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.GroupNorm(4, out))
            beside = nn.Identity() if into == out else smaller
            layers.append(Function(lambda x, inner, beside: F.relu(inner(x) + beside(x)), inner, beside))
            into = out
    return nn.Sequential(*layers, mean_of_space(), nn.Linear(512, 10))


def network(name: str) -> nn.Module:
    """The network with this name."""
    return globals()[name]()
