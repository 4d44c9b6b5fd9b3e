"""Fair, extrapolated, sign-based, personalized, robust and attacked methods in NumPy, see ``reference``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.reference import Client, Method, Part, Vector, factor, join, split


def updates(method: Method, parts: list[Part]) -> np.ndarray:
    """Updates by plain local steps from x, a row for each client of the cohort."""
    return np.array([method.clients[p.client].descend(method.x, p).params - method.x for p in parts])


@dataclass
class FedExP(Method):
    epsilon: float = 1e-3

    def round(self, parts):
        deltas = updates(self, parts)
        mean = sum(p.weight * d for p, d in zip(parts, deltas, strict=True))
        squares = sum(p.weight * float(d @ d) for p, d in zip(parts, deltas, strict=True))
        self.x = self.x + max(1.0, squares / (2 * (float(mean @ mean) + self.epsilon))) * mean


@dataclass
class QFedAvg(Method):
    """In the order of the paper: L = 1 / eta, Delta w, Delta_k and h_k, with the authors' 1e-10 added to a loss."""

    q: float = 1.0

    def round(self, parts):
        above, below = 0, 0.0
        for p in parts:
            client = self.clients[p.client]
            losses = client.problem.losses(self.x, client.a, client.b)
            loss = (losses.sum() if client.local.reduction == "sum" else losses.mean()) + 1e-10
            lipschitz = 1 / (client.local.lr * factor(client.local.schedule, p.round))
            dw = lipschitz * (self.x - client.descend(self.x, p).params)
            above = above + p.weight * loss**self.q * dw
            below += p.weight * (self.q * loss ** (self.q - 1) * float(dw @ dw) + lipschitz * loss**self.q)
        self.x = self.rule.step(self.x, -above / below, parts[0].round)


@dataclass
class Scaffnew(Method):
    p: float = 0.2

    def start(self):
        self.h = [np.zeros_like(self.x) for _ in self.clients]

    def round(self, parts):
        ends = {}
        for part in parts:
            own = lambda g, x, t, h=self.h[part.client]: g - h  # noqa: E731
            ends[part.client] = self.clients[part.client].descend(self.x, part, own)
        self.x = np.mean([end.params for end in ends.values()], axis=0)
        for i, end in ends.items():
            self.h[i] = self.h[i] + self.p / end.eta * (self.x - end.params)

    def client_state(self, i):
        return {"control": self.h[i]}


@dataclass
class SignSGD(Method):
    beta: float | None = None
    abstain: bool = True

    def start(self):
        self.m = [np.zeros_like(self.x) for _ in self.clients]

    def round(self, parts):
        votes = np.zeros_like(self.x)
        for p in parts:
            client = self.clients[p.client]
            gradient = client.gradient(self.x, client.batches()[0])
            if self.beta is not None:
                gradient = self.m[p.client] = self.beta * self.m[p.client] + (1 - self.beta) * gradient
            votes = votes + (np.sign(gradient) if self.abstain else np.where(gradient >= 0, 1, -1))
        local = self.clients[0].local
        eta = local.lr * factor(local.schedule, parts[0].round)
        self.x = self.x - eta * (np.sign(votes) + local.weight_decay * self.x)

    def client_state(self, i):
        return {} if self.beta is None else {"momentum": self.m[i]}


@dataclass
class FedBuff(Method):
    """Uploads arrive by their staleness; for clients on a clock see ``tests/participation/test_asynchronous.py``."""

    power: float = 0.5
    max_delay: int = 10

    def start(self):
        self.coming = {}
        self.next = 0

    def round(self, parts):
        for p, u in zip(parts, updates(self, parts), strict=True):
            later = self.coming.get(p.round + p.delay, 0)
            self.coming[p.round + p.delay] = later + u / math.sqrt(1 + p.delay) ** (2 * self.power) / len(parts)
        self.next = parts[0].round + 1
        self.x = self.rule.step(self.x, self.coming.pop(parts[0].round, np.zeros_like(self.x)), parts[0].round)

    def server_state(self):
        none = np.zeros_like(self.x)
        return {"coming": np.stack([self.coming.get(self.next + d, none) for d in range(self.max_delay + 1)])}


@dataclass
class FedLion(Method):
    """Algorithm 1; clients upload x_i itself."""

    beta1: float = 0.9
    beta2: float = 0.99

    def start(self):
        self.m = np.zeros_like(self.x)

    def round(self, parts):
        x, m = 0, 0
        for p in parts:
            own, client = self.m, self.clients[p.client]

            def lion(g, x, t):
                nonlocal own
                sign = np.sign(self.beta1 * own + (1 - self.beta1) * g)
                own = self.beta2 * own + (1 - self.beta2) * g
                return sign

            x = x + p.weight * client.descend(self.x, p, lion).params
            m = m + p.weight * own
        self.x, self.m = x, m

    def server_state(self):
        return {"momentum": self.m}


@dataclass
class Ditto(Method):
    inner: Any = None
    lam: float = 1.0

    def start(self):
        self.v = [self.x for _ in self.clients]

    def round(self, parts):
        x = self.inner.x
        for p in parts:
            pull = lambda v: self.lam * (v - x)  # noqa: E731
            self.v[p.client] = self.clients[p.client].descend(self.v[p.client], p, term=pull).params
        self.inner.round(parts)
        self.x = self.inner.x

    def client_state(self, i):
        return {"own": self.v[i]}


# ------------------------------------------------------------------------------- compression, around FedAvg


@dataclass
class EFSign(Method):
    inner: Any = None

    def start(self):
        self.rest = [np.zeros_like(self.x) for _ in self.clients]

    def round(self, parts):
        mean = 0
        for p, u in zip(parts, updates(self, parts), strict=True):
            whole = self.rest[p.client] + u
            sent = np.abs(whole).mean() * np.where(whole >= 0, 1, -1)
            self.rest[p.client] = whole - sent
            mean = mean + p.weight * sent
        self.x = self.inner.rule.step(self.x, mean, parts[0].round)

    def client_state(self, i):
        return {"own": self.rest[i]}


@dataclass
class QuantizedBroadcast(Method):
    inner: Any = None
    bits: int = 16

    def round(self, parts):
        exact, problem = self.x, self.clients[0].problem
        arrays, levels = split(problem, self.x), 2 ** (self.bits - 1) - 1
        steps = {name: np.abs(a).max() / levels for name, a in arrays.items()}
        self.x = join(problem, {name: np.round(a / steps[name]) * steps[name] for name, a in arrays.items()})
        mean = sum(p.weight * u for p, u in zip(parts, updates(self, parts), strict=True))
        self.x = self.inner.rule.step(exact, mean, parts[0].round)


# ----------------------------------------------------------------------------------------------- robust rules


def median(u: np.ndarray, weights: np.ndarray) -> Vector:
    return np.median(u, axis=0)


def trimmed_mean(u: np.ndarray, weights: np.ndarray, trim: float = 0.2) -> Vector:
    cut = math.floor(trim * len(u))
    return np.array([np.mean(sorted(column)[cut : len(u) - cut]) for column in u.T])


def norm_bound(u: np.ndarray, weights: np.ndarray, bound: float = 1.0) -> Vector:
    lengths = [math.sqrt(row @ row) for row in u]
    assert min(lengths) < bound < max(lengths) or len(u) < 4
    return sum(w * row * min(1.0, bound / n) for w, row, n in zip(weights, u, lengths, strict=True))  # type: ignore[return-value]


def geometric_median(u: np.ndarray, weights: np.ndarray, iterations: int = 8, nu: float = 1e-6) -> Vector:
    middle = u[sorted(range(len(u)), key=lambda k: math.sqrt(u[k] @ u[k]))[(len(u) - 1) // 2]]
    far = np.linalg.norm(u - middle, axis=1)
    median = sorted(far)[min(len(u) // 2, len(u) - 1)]
    z = middle + weights @ ((u - middle) * np.minimum(1, median / np.maximum(far, 1e-300))[:, None])
    for _ in range(iterations):
        b = np.array([w / max(nu, math.sqrt((z - row) @ (z - row))) for w, row in zip(weights, u, strict=True)])
        z = b @ u / b.sum()
    return z


def krum(u: np.ndarray, weights: np.ndarray, attackers: int = 1, keep: int = 1) -> Vector:
    scores = []
    for i, row in enumerate(u):
        squares = sorted(float((row - other) @ (row - other)) for j, other in enumerate(u) if j != i)
        scores.append(sum(squares[: max(len(u) - attackers - 2, 1)]))
    return u[np.argsort(scores, kind="stable")[:keep]].mean(0)


RULES = {
    "Median": median,
    "TrimmedMean": trimmed_mean,
    "NormBound": norm_bound,
    "GeometricMedian": geometric_median,
    "Krum": krum,
}


@dataclass
class Robust(Method):
    """Robust aggregation around FedAvg."""

    inner: Any = None
    rule: Any = ("Median", {})

    def __post_init__(self) -> None:
        self.using, self.rule = self.rule, None
        super().__post_init__()

    def round(self, parts):
        self.take(updates(self, parts), parts)

    def take(self, u: np.ndarray, parts: list[Part]) -> None:
        """Server step on the uploads of the cohort, sorted by client."""
        order = np.argsort([p.client for p in parts])
        name, options = self.using
        mean = RULES[name](u[order], np.array([parts[k].weight for k in order]), **options)
        self.x = self.inner.x = self.inner.rule.step(self.x, mean, parts[0].round)


# ---------------------------------------------------------------------------------------------------- attacks


@dataclass
class Attacked(Method):
    """An attack around FedAvg, or around Robust around FedAvg."""

    inner: Any = None
    attack: Any = ("Scaling", {})
    listed: tuple = ()

    def start(self):
        name, options = self.attack
        if name == "LabelFlip":
            for i in self.listed:
                c = self.clients[i]
                self.clients[i] = Client(c.problem, c.a, options["classes"] - 1 - c.b, c.local)

    def round(self, parts):
        u, name = updates(self, parts), self.attack[0]
        bad = np.array([p.client in self.listed for p in parts])
        if name == "Scaling":
            u[bad] *= self.attack[1]["factor"]
        elif name == "ALittle" and bad.any():
            n, m = len(u), int(bad.sum())
            needed = math.floor(n / 2 + 1) - m
            further = (n - m - needed) / (n - m) if n > m else 1.0
            z = max(NormalDist().inv_cdf(min(max(further, 0.5), 0.999)), 0.0)
            u[bad] = u[bad].mean(0) - z * u[bad].std(0)
        if isinstance(self.inner, Robust):
            self.inner.take(u, parts)
        else:
            mean = sum(p.weight * row for p, row in zip(parts, u, strict=True))
            self.inner.x = self.inner.rule.step(self.inner.x, mean, parts[0].round)
        self.x = self.inner.x


@dataclass
class PFedMe(Method):
    lam: float = 15.0
    inner_steps: int = 5
    inner_lr: float = 0.05
    restart: bool = False

    def start(self):
        self.theta = [self.x for _ in self.clients]

    def round(self, parts):
        delta = 0
        for p in parts:
            w, theta = self.own_steps(p)
            self.theta[p.client] = theta
            delta = delta + p.weight * (w - self.x)
        self.x = self.rule.step(self.x, delta, parts[0].round)

    def own_steps(self, p: Part) -> tuple[Vector, Vector]:
        """w and theta_i after the local steps from x."""
        client, w, theta = self.clients[p.client], self.x, self.x
        scale = factor(client.local.schedule, p.round)
        clip = None if client.local.clip is None else client.local.clip * scale
        for t in range(client.num_steps(p.work)):
            theta = w if self.restart else theta
            for _ in range(self.inner_steps):
                g = client.step_gradient(theta, t, p.blocks) + client.local.weight_decay * theta
                theta = theta - self.inner_lr * (g + self.lam * (theta - w))
            w = client.move(w, self.lam * (w - theta), client.local.lr * scale, clip)
        return w, theta

    def client_state(self, i):
        return {"personal": self.theta[i]}
