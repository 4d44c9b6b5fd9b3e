"""Models, local SGD and evaluation in PyTorch, for all simulators that use it."""

# Each simulator has its own environment, whose packages the type checker does not find here.
# pyright: reportMissingImports=false

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import Arrays, Workload

EPSILON = 1e-6  # of the norms of W5 to W9, as in Flax


def on_device(name: str, precision: str) -> torch.device:
    """The device called ``name``, with TensorFloat-32 products ("tensorfloat32") or float32 ones ("highest")."""
    short = precision == "tensorfloat32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = short
    return torch.device(name)


def finished(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def device_peak_mb(device: torch.device) -> float | None:
    """Peak memory of tensors on a GPU."""
    return round(torch.cuda.max_memory_allocated() / 2**20, 1) if device.type == "cuda" else None


class MLP(nn.Module):
    widths = (784, 200, 200, 10)

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(*widths) for widths in pairwise(self.widths))

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class SoftmaxRegression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(60, 10)

    def forward(self, x):
        return self.fc(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 32, 5), nn.Conv2d(32, 64, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(1600, 512), nn.Linear(512, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(50, 128, batch_first=True), nn.Linear(128, 2)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1])


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(8, channels, eps=EPSILON)


class NormedConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(*widths, 3, padding=1) for widths in pairwise((3, 32, 64, 128)))
        self.norms = nn.ModuleList(group_norm(width) for width in (32, 64, 128))
        self.fc = nn.Linear(128, 10)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(conv(x))), 2)
        return self.fc(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grows = inputs != outputs
        stride = 2 if self.grows else 1
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), group_norm(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), group_norm(outputs)
        if self.grows:
            self.shortcut, self.shortcut_norm = nn.Conv2d(inputs, outputs, 1, 2, bias=False), group_norm(outputs)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (self.shortcut_norm(self.shortcut(x)) if self.grows else x))


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), group_norm(16)
        self.blocks = nn.Sequential(*(Residual(*w) for w in pairwise((16, 16, 16, 16, 32, 32, 32, 64, 64, 64))))
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.stem_norm(self.stem(x))))
        return self.fc(x.mean((2, 3)))


class GRU(nn.Module):
    """``nn.GRU`` of one layer with Flax's biases: a reset and an update gate have one bias each, where ``nn.GRU`` has
    the sum of two, which plain SGD moves twice as far.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.zeros(3 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.zeros(3 * hidden, hidden))
        self.bias_ih, self.bias_hn = nn.Parameter(torch.zeros(3 * hidden)), nn.Parameter(torch.zeros(hidden))

    def forward(self, x):
        hidden = len(self.bias_hn)
        weights = (self.weight_ih, self.weight_hh, self.bias_ih, F.pad(self.bias_hn, (2 * hidden, 0)))
        start = x.new_zeros(1, len(x), hidden)
        # has_biases, num_layers, dropout, train, bidirectional, batch_first: arguments of nn.GRU
        return torch.gru(x, start, weights, True, 1, 0.0, self.training, False, True)[0]


class NextSymbol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru, self.fc = nn.Embedding(90, 128), GRU(128, 128), nn.Linear(128, 90)

    def forward(self, x):
        return self.fc(self.gru(self.embedding(x))[:, -1])


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 4, 4)
        self.positions = nn.Parameter(torch.zeros(64, 128))
        self.blocks = nn.Sequential(*(self.block() for _ in range(4)))
        self.norm, self.fc = nn.LayerNorm(128, eps=EPSILON), nn.Linear(128, 10)

    @staticmethod
    def block() -> nn.Module:
        # Not nn.GELU("tanh"): PyTorch 2.13 then evaluates with the exact GELU.
        gelu = partial(F.gelu, approximate="tanh")
        return nn.TransformerEncoderLayer(128, 4, 256, 0.0, gelu, EPSILON, batch_first=True, norm_first=True)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.fc(self.norm(self.blocks(x)).mean(1))


class Separable(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm1, self.norm2 = group_norm(inputs), group_norm(outputs)

    def forward(self, x):
        x = F.relu(self.norm1(self.depthwise(x)))
        return F.relu(self.norm2(self.pointwise(x)))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 32, 3, padding=1, bias=False), group_norm(32)
        widths = pairwise((32, 64, 128, 128, 256, 256))
        self.blocks = nn.Sequential(*(Separable(*w, s) for w, s in zip(widths, (1, 2, 1, 2, 1), strict=True)))
        self.fc = nn.Linear(256, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.stem_norm(self.stem(x))))
        return self.fc(x.mean((2, 3)))


class RaggedMLP(MLP):
    widths = (30, 64, 64, 5)


class SmallConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(*widths, 3) for widths in pairwise((3, 32, 64)))
        self.fc1, self.fc2 = nn.Linear(14 * 14 * 64, 128), nn.Linear(128, 10)

    def forward(self, x):
        for conv in self.convs:
            x = F.relu(conv(x))
        x = F.max_pool2d(x, 2).permute(0, 2, 3, 1).flatten(1)  # channels last, as Flax flattens
        return self.fc2(F.relu(self.fc1(x)))


class DroppedConvNet(nn.Module):
    """Two 3x3 convolutions, max pooling and two dense layers, with dropout before each of these."""

    def __init__(self, side: int, widths: tuple[int, int], hidden: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(*pair, 3) for pair in pairwise((3, *widths)))
        self.fc1, self.fc2 = nn.Linear((side // 2 - 2) ** 2 * widths[-1], hidden), nn.Linear(hidden, classes)
        self.dropped, self.halved = nn.Dropout(0.25), nn.Dropout(0.5)

    def forward(self, x):
        for conv in self.convs:
            x = F.relu(conv(x))
        x = self.dropped(F.max_pool2d(x, 2)).permute(0, 2, 3, 1).flatten(1)  # channels last, as Flax flattens
        return self.fc2(self.halved(F.relu(self.fc1(x))))


class PooledConvNet(nn.Module):
    """Two padded 5x5 convolutions, each with max pooling, and two dense layers."""

    def __init__(self, side: int, widths: tuple[int, int], hidden: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(*pair, 5, padding=2) for pair in pairwise((1, *widths)))
        self.fc1, self.fc2 = nn.Linear((side // 4) ** 2 * widths[-1], hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.permute(0, 2, 3, 1).flatten(1))))


class ResNet18(nn.Module):
    """ResNet-18 for small images: a 3x3 stem without pooling, group norm."""

    def __init__(self, width: int, side: int, classes: int) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, width, 3, padding=1, bias=False), group_norm(width)
        widths = [width, *(width << stage for stage in range(4) for _ in range(2))]
        self.blocks = nn.Sequential(*(Residual(*pair) for pair in pairwise(widths)))
        self.fc = nn.Linear(width << 3, classes)

    def forward(self, x):
        x = self.blocks(F.relu(self.stem_norm(self.stem(x))))
        return self.fc(x.mean((2, 3)))


class Adapter(nn.Module):
    """x A B, with A [rank, width] and B [width, rank] in PyTorch's order of axes."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(rank, width)), nn.Parameter(torch.zeros(width, rank))

    def forward(self, x):
        return F.linear(F.linear(x, self.a), self.b)


class CausalBlock(nn.Module):
    """Causal attention and two dense layers, each after a norm; adapters at queries and values if ``rank`` is
    positive.
    """

    def __init__(self, width: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPSILON), nn.LayerNorm(width, eps=EPSILON)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.linear1, self.linear2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if rank:
            self.query_adapter, self.value_adapter = Adapter(width, rank), Adapter(width, rank)
        self.adapted = rank > 0

    def forward(self, x):
        y = self.norm1(x)
        query, key, value = self.query(y), self.key(y), self.value(y)
        if self.adapted:
            query, value = query + self.query_adapter(y), value + self.value_adapter(y)
        by_head = [a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x)), approximate="tanh"))


class CausalTransformer(nn.Module):
    """Predicts each next symbol."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, symbols: int, rank: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.Sequential(*(CausalBlock(width, heads, rank) for _ in range(layers)))
        self.norm, self.fc = nn.LayerNorm(width, eps=EPSILON), nn.Linear(width, symbols)

    def forward(self, x):
        return self.fc(self.norm(self.blocks(self.embedding(x) + self.positions)))


class CharacterLSTM(nn.Module):
    """Embedded characters, two LSTM layers; the last hidden state predicts the next character."""

    def __init__(self, hidden: int, embedding: int, tokens: int, symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedding)
        self.lstm, self.fc = nn.LSTM(embedding, hidden, 2, batch_first=True), nn.Linear(hidden, symbols)

    def forward(self, x):
        return self.fc(self.lstm(self.embedding(x))[0][:, -1])


NETWORKS = {
    network.__name__: network for network in (DroppedConvNet, PooledConvNet, ResNet18, CausalTransformer, CharacterLSTM)
}
"""Networks with sizes that the workload sets."""

MODELS = {
    "W1": MLP,
    "W2": SoftmaxRegression,
    "W3": ConvNet,
    "W4": LSTM,
    "W5": NormedConvNet,
    "W6": ResNet20,
    "W7": NextSymbol,
    "W8": VisionTransformer,
    "W9": MobileNet,
    "W10": RaggedMLP,
    "W11": SmallConvNet,
}


def network(workload: Workload) -> type[nn.Module]:
    """The class of the workload's network."""
    return NETWORKS[workload.network] if workload.network else MODELS[workload.name]


def build(workload: Workload, initial: dict[str, np.ndarray] | None = None) -> nn.Module:
    """The workload's network, in which only its trained weights require a gradient."""
    model = network(workload)(**workload.sizes)
    for name, weight in model.named_parameters():
        weight.requires_grad_(workload.is_trained(name))
    if initial is not None:
        load(model, initial)
    return model


def load(model: nn.Module, weights: dict[str, np.ndarray]) -> None:
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The weights that are trained."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def cross_entropy(logits: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Of labels [B], or [B, T] with one for each position."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


def local_sgd(model: nn.Module, x: torch.Tensor, y: torch.Tensor, workload: Workload) -> None:
    """Plain SGD over the samples in stored order, ``workload.epochs`` times."""
    optimizer = torch.optim.SGD(trained(model), lr=workload.learning_rate)
    for _ in range(workload.epochs):
        for start in range(0, len(y), workload.batch):
            batch = slice(start, start + workload.batch)
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, arrays: Arrays) -> tuple[float, float]:
    """Mean loss and accuracy on the test samples."""
    model.eval()
    device = next(model.parameters()).device
    x, y = torch.from_numpy(arrays.x_test).to(device), torch.from_numpy(arrays.y_test).to(device)
    loss = correct = 0.0
    for start in range(0, len(y), 500):
        batch = slice(start, start + 500)
        logits = model(x[batch])
        loss += cross_entropy(logits, y[batch], "sum").item()
        correct += (logits.argmax(-1) == y[batch]).sum().item()
    return loss / y.numel(), correct / y.numel()
