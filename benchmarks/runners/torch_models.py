"""The four models, local SGD and evaluation in PyTorch, shared by every simulator that is built on it."""

# Every simulator lives in an environment of its own, so its imports are unknown to the type checker here.
# pyright: reportMissingImports=false

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import Arrays, Workload


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 200), nn.Linear(200, 200), nn.Linear(200, 10)

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


MODELS = {"W1": MLP, "W2": SoftmaxRegression, "W3": ConvNet, "W4": LSTM}


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
    x, y = torch.from_numpy(arrays.x_test), torch.from_numpy(arrays.y_test)
    loss = correct = 0.0
    for start in range(0, len(y), 500):
        batch = slice(start, start + 500)
        logits = model(x[batch])
        loss += F.cross_entropy(logits, y[batch], reduction="sum").item()
        correct += (logits.argmax(1) == y[batch]).sum().item()
    return loss / len(y), correct / len(y)
