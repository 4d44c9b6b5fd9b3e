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


def build(workload: Workload, initial: dict[str, np.ndarray] | None = None) -> nn.Module:
    model = MODELS[workload.name]()
    if initial is not None:
        load(model, initial)
    return model


def load(model: nn.Module, weights: dict[str, np.ndarray]) -> None:
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})


def local_sgd(model: nn.Module, x: torch.Tensor, y: torch.Tensor, workload: Workload) -> None:
    """Plain SGD over the samples in stored order, ``workload.epochs`` times."""
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.learning_rate)
    for _ in range(workload.epochs):
        for start in range(0, len(y), workload.batch):
            batch = slice(start, start + workload.batch)
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
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
        loss += F.cross_entropy(logits, y[batch], reduction="sum").item()
        correct += (logits.argmax(1) == y[batch]).sum().item()
    return loss / len(y), correct / len(y)
