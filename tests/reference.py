"""Problems, local steps and server optimizers in plain NumPy float64; methods are in ``reference_*.py``.

Nothing is imported from fedrax. Gradients are written by hand, and the code follows the equations of the papers line by
line without optimization. Parameters are one flat vector; clients visit their samples in stored order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

Vector = Any
"""A float64 array of one axis (sums over clients start from the number 0)."""


# ---------------------------------------------------------------------------------------------- problems


class Quadratic:
    """Sample (a [d], b): loss = (a w - b)^2 / 2."""

    def __init__(self, num_features: int):
        self.shapes = {"w": (num_features,)}

    def losses(self, x: Vector, a: np.ndarray, b: np.ndarray) -> Vector:
        """Loss of each sample, [n]."""
        return np.array([0.5 * (row @ x - target) ** 2 for row, target in zip(a, b, strict=True)])

    def gradients(self, x: Vector, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Gradient of each sample's loss, [n, d]."""
        return np.array([(row @ x - target) * row for row, target in zip(a, b, strict=True)])


class Softmax:
    """Sample (a [d], label): cross entropy of softmax(bias + a W); x is bias [classes], then W [d, classes]."""

    def __init__(self, num_features: int, num_classes: int):
        self.shapes = {"bias": (num_classes,), "kernel": (num_features, num_classes)}

    def _probabilities(self, x: Vector, row: Vector) -> Vector:
        classes = self.shapes["bias"][0]
        logits = x[:classes] + row @ x[classes:].reshape(self.shapes["kernel"])
        powers = np.exp(logits - logits.max())
        return powers / powers.sum()

    def losses(self, x: Vector, a: np.ndarray, labels: np.ndarray) -> Vector:
        """Loss of each sample, [n]."""
        return np.array([-np.log(self._probabilities(x, r)[k]) for r, k in zip(a, labels, strict=True)])

    def gradients(self, x: Vector, a: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Gradient of each sample's loss, [n, d]: (p - onehot) for the bias, outer(a, p - onehot) for W."""
        rows = []
        for row, label in zip(a, labels, strict=True):
            error = self._probabilities(x, row)
            error[label] -= 1
            rows.append(np.concatenate([error, np.outer(row, error).ravel()]))
        return np.array(rows)


Problem = Quadratic | Softmax


def split(problem: Problem, x: Vector) -> dict[str, np.ndarray]:
    """A flat vector as named arrays."""
    result, start = {}, 0
    for name, shape in problem.shapes.items():
        size = math.prod(shape)
        result[name] = x[start : start + size].reshape(shape)
        start += size
    return result


def join(problem: Problem, arrays: dict[str, Any], leading: tuple[int, ...] = ()) -> np.ndarray:
    """Named arrays as a flat vector, or as vectors if the arrays have ``leading`` axes."""
    parts = [np.asarray(arrays[name], np.float64).reshape(*leading, -1) for name in problem.shapes]
    return np.concatenate(parts, axis=-1)


# ------------------------------------------------------------------------- schedules and proximal operators


def factor(schedule: tuple[str, dict] | None, r: int) -> float:
    """Factor of the learning rate in round r."""
    if schedule is None:
        return 1.0
    name, o = schedule
    if name == "StepDecay":
        return o["factor"] ** len([m for m in o["milestones"] if r >= m])
    if name == "ExponentialDecay":
        return o["factor"] ** r
    if name == "InverseTimeDecay":
        return 1 / (1 + o["rate"] * r)
    if name == "CosineDecay":
        return o["final"] + (1 - o["final"]) * (1 + math.cos(math.pi * min(r / o["rounds"], 1))) / 2
    raise ValueError(name)


def prox(problem: Problem, spec: tuple[str, dict] | None, x: Vector, t: float) -> Vector:
    """argmin_z Psi(z) + |z - x|^2 / (2 t)."""
    if spec is None:
        return x
    name, o = spec
    if name == "L1":
        return np.array([math.copysign(max(abs(v) - t * o["weight"], 0.0), v) for v in x])
    if name == "ElasticNet":
        shrunk = [math.copysign(max(abs(v) - t * o["l1"], 0.0), v) for v in x]
        return np.array(shrunk) / (1 + t * o["l2"])
    if name == "Box":
        return np.array([min(max(v, o["low"]), o["high"]) for v in x])
    if name == "NuclearNorm":
        arrays = split(problem, x)
        for key, a in arrays.items():
            if a.ndim == 2:  # A V diag(max(s - t w, 0) / s) V^T with the eigenvectors V of A^T A
                squares, v = np.linalg.eigh(a.T @ a)
                s = np.sqrt(np.maximum(squares, 0))
                gain = [max(value - t * o["weight"], 0) / value if value > 0 else 0.0 for value in s]
                arrays[key] = a @ (v * np.array(gain)) @ v.T
        return join(problem, arrays)
    raise ValueError(name)


# ------------------------------------------------------------------------------------------- local steps


@dataclass
class Local:
    """Options of the local steps."""

    lr: float = 0.1
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | str = 10
    blocks: Any = None
    reduction: str = "mean"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    prox: tuple[str, dict] | None = None
    schedule: tuple[str, dict] | None = None

    @property
    def plain(self) -> bool:
        """Whether a step is -eta times the direction."""
        return not self.momentum and not self.weight_decay and self.clip is None and self.prox is None


@dataclass
class Client:
    """Data of a client."""

    problem: Problem
    a: np.ndarray
    b: np.ndarray
    local: Local
    evaluated: int = 0
    """Per-sample gradients computed so far."""

    @property
    def size(self) -> int:
        """n_i."""
        return len(self.a)

    def gradient(self, x: Vector, rows: range) -> Vector:
        """Estimate of the gradient of f_i, the mean (or sum) of the client's losses, on a batch."""
        self.evaluated += len(rows)
        mean = self.problem.gradients(x, self.a[rows], self.b[rows]).mean(0)
        return self.size * mean if self.local.reduction == "sum" else mean

    def full_gradient(self, x: Vector) -> Vector:
        """Gradient of f_i."""
        return self.gradient(x, range(self.size))

    def block(self, j: int) -> range:
        """Rows of block j."""
        return range(j * self.size // self.local.blocks, (j + 1) * self.size // self.local.blocks)

    def block_gradient(self, x: Vector, j: int) -> Vector:
        """g_ij = M grad f_ij, where f_i is the sum of the f_ij."""
        rows = self.block(j)
        if len(rows) == 0:
            return np.zeros_like(x)
        self.evaluated += len(rows)
        total = self.problem.gradients(x, self.a[rows], self.b[rows]).sum(0)
        return self.local.blocks * (total if self.local.reduction == "sum" else total / self.size)

    def batches(self) -> list[range]:
        """Batches of an epoch; the last one may be smaller."""
        size = self.size if self.local.batch_size == "full" else int(self.local.batch_size)
        return [range(start, min(start + size, self.size)) for start in range(0, self.size, size)]

    def num_steps(self, work: float) -> int:
        """T_i; a straggler does a share of the steps, or of the epochs, rounded up."""
        if self.local.steps is not None:
            return math.ceil(np.float32(work) * np.float32(self.local.steps))
        return math.ceil(np.float32(work) * np.float32(self.local.epochs or 1)) * len(self.batches())

    def step_gradient(self, x: Vector, t: int, blocks: Any) -> Vector:
        """Gradient of local step t, before weight decay and momentum."""
        if self.local.blocks is not None:
            return self.block_gradient(x, blocks[t])
        batches = self.batches()
        return self.gradient(x, batches[t % len(batches)])

    def move(self, x: Vector, d: Vector, eta: float, gamma: float | None) -> Vector:
        """prox_{eta Psi}(x - eta d min(1, gamma / (eta |d|)))."""
        length = math.sqrt(float(d @ d))
        if gamma is not None and length > 0:
            d = d * min(1.0, gamma / (eta * length))
        return prox(self.problem, self.local.prox, x - eta * d, eta)

    def descend(self, x: Vector, part: Any, direction: Any = lambda g, x, t: g, term: Any = lambda x: 0.0) -> Any:
        """Local steps from x; ``direction`` gets the gradient after decay and momentum.

        ``term`` is the gradient of a term of the local loss, which the momentum includes.

        Returns params, steps, and mean_gradient, the mean of the raw gradients.
        """
        eta, gamma = self.local.lr, self.local.clip
        scale = factor(self.local.schedule, part.round)
        eta, gamma = eta * scale, None if gamma is None else gamma * scale
        steps = self.num_steps(part.work) if part.steps is None else part.steps
        velocity, total = np.zeros_like(x), np.zeros_like(x)
        for t in range(steps):
            g = self.step_gradient(x, t, part.blocks)
            total = total + g
            g = g + self.local.weight_decay * x + term(x)
            velocity = self.local.momentum * velocity + g
            x = self.move(x, direction(velocity, x, t), eta, gamma)
        return SimpleNamespace(params=x, steps=steps, mean_gradient=total / steps, eta=eta)


# ------------------------------------------------------------------------------------ server optimizers


class ServerRule:
    """Update of x by the mean update Delta."""

    def __init__(self, name: str = "SGD", options: dict | None = None):
        defaults = {"SGD": {"lr": 1.0}, "Adagrad": {"lr": 0.1, "b1": 0.0, "tau": 1e-3}}
        adaptive = {"lr": 0.1, "b1": 0.9, "b2": 0.99, "tau": 1e-3}
        self.name, self.o = name, {**defaults.get(name, adaptive), **(options or {})}
        self.m: Any = 0.0
        self.v: Any = None if name == "SGD" else self.o["tau"] ** 2

    def step(self, x: Vector, delta: Vector, r: int) -> Vector:
        """One step."""
        o = self.o
        lr = o["lr"] * factor(o.get("schedule"), r)
        if self.name == "SGD":
            self.m = o.get("momentum", 0.0) * self.m - delta
            return x - lr * self.m
        self.m = o["b1"] * self.m + (1 - o["b1"]) * delta
        square = delta**2
        if self.name == "Adagrad":
            self.v = self.v + square
        elif self.name == "Adam":
            self.v = o["b2"] * self.v + (1 - o["b2"]) * square
        elif self.name == "Yogi":
            self.v = self.v - (1 - o["b2"]) * square * np.sign(self.v - square)
        return x + lr * self.m / (np.sqrt(self.v) + o["tau"])


# ---------------------------------------------------------------------------------------------- methods


@dataclass
class Part:
    """A client's part in a round: its number, weight, share of the local work, blocks, steps if given, and staleness of
    its upload in rounds.
    """

    client: int
    weight: float
    round: int
    work: float = 1.0
    blocks: Any = None
    steps: int | None = None
    delay: int = 0


@dataclass
class Method:
    """Base class: N clients, the parameters x, and the server optimizer."""

    clients: list[Client]
    x: Vector
    server: tuple[str, dict] = ("SGD", {})
    default_server = ("SGD", {})
    rule: ServerRule = field(init=False)

    def __post_init__(self) -> None:
        self.rule = ServerRule(*self.server)
        self.start()

    def start(self) -> None:
        """Initialize the state before the first round."""

    def round(self, parts: list[Part]) -> None:
        """A round with the given cohort."""
        raise NotImplementedError

    def server_state(self) -> dict[str, Vector]:
        """Vectors of the server state by name, without x."""
        return {}

    def client_state(self, i: int) -> dict[str, np.ndarray]:
        """Vectors (or stacks of vectors) of the state of client i by name."""
        return {}
