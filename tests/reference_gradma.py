"""GradMA, GradMA-W and GradMA-S in NumPy float64 (Luo et al. 2023, Algorithms 1-4, 7 and 8), see ``reference``.

The quadratic program is solved by scipy's non-negative least squares on the columns themselves: the minimum over z >= 0
of z'M'M z / 2 + p'M z is that of |M z + p|.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.optimize

from tests.reference import Client, Method, Part, Problem, Vector, join, split

SATISFIED = 1e-10
"""A constraint <p~, M_k> >= 0 holds where the cosine is not further below zero than this: rounding errors alone
make columns antiparallel or not, and the solution jumps between the two.
"""


def nearest(p: Vector, columns: list[Vector]) -> Vector:
    """The nearest p~ to p with <p~, M_k> >= 0 for every column, by least squares on the violated columns."""
    if not p.any():
        return p
    left, size = [_unit(column) for column in columns if column.any()], float(np.linalg.norm(p))
    p, chosen = p / size, []
    corrected = p
    while left:
        worst = min(range(len(left)), key=lambda k: float(left[k] @ corrected))
        if left[worst] @ corrected >= -SATISFIED:
            break
        chosen.append(left.pop(worst))
        m = np.stack(chosen, axis=1)
        corrected = p + m @ scipy.optimize.nnls(m, -p)[0]
    return size * corrected


def _unit(v: Vector) -> Vector:
    v = v / np.abs(v).max()  # squares of decayed numbers underflow
    return v / np.linalg.norm(v)


def project(problem: Problem, p: Vector, columns: list[Vector], scope: str) -> Vector:
    """``nearest`` for the whole vector or leaf by leaf."""
    if scope == "vector":
        return nearest(p, columns)
    leaves, cut = split(problem, p), [split(problem, column) for column in columns]
    flat = {name: nearest(leaf.ravel(), [c[name].ravel() for c in cut]) for name, leaf in leaves.items()}
    return join(problem, flat)


def corrected_steps(client: Client, x: Vector, before: Vector, part: Part, scope: str) -> Vector:
    """Algorithm 2: the local model after T steps from x, where ``before`` is x_{-1}."""
    point = SimpleNamespace(before=before)

    def direction(p, xi, t):
        known = {id(xi): p} if t == 0 else {}  # then p is the gradient at x: the gradient at a point is computed once

        def gradient(y):
            if id(y) not in known:
                known[id(y)] = client.step_gradient(y, t, part.blocks) + client.local.weight_decay * y
            return known[id(y)]

        columns = [gradient(point.before), gradient(x), xi - x]
        point.before = xi
        return project(client.problem, p, columns, scope)

    return client.descend(x, part, direction).params


@dataclass
class GradMAW(Method):
    previous: str = "global"
    scope: str = "vector"

    def start(self):
        self.last = [self.x.copy() for _ in self.clients]

    def round(self, parts):
        delta = 0
        for p in parts:
            before = self.x if self.previous == "global" else self.last[p.client]
            self.last[p.client] = corrected_steps(self.clients[p.client], self.x, before, p, self.scope)
            delta = delta + p.weight * (self.last[p.client] - self.x)
        self.x = self.rule.step(self.x, delta, parts[0].round)

    def client_state(self, i):
        return {"": self.last[i]} if self.previous == "local" else {}


@dataclass
class GradMAS(Method):
    server_lr: float = 1.0
    beta1: float = 0.5
    beta2: float = 0.5
    memory: int = 100
    scope: str = "vector"

    def start(self):
        self.momentum: Vector = np.zeros_like(self.x)
        self.buffer: dict[int, Any] = {}
        """By client: its counter, the round in which it entered, and D[i] once it has one."""

    def admit(self, cohort: list[int], r: int) -> None:
        """Algorithm 4."""
        for i in cohort:
            if i not in self.buffer:
                if len(self.buffer) == min(self.memory, len(self.clients)):
                    others = [k for k in self.buffer if k not in cohort]
                    del self.buffer[min(others, key=lambda k: (self.buffer[k].counter, self.buffer[k].entered, k))]
                self.buffer[i] = SimpleNamespace(counter=0, entered=r, d=None)
            self.buffer[i].counter += 1

    def local_model(self, p: Part) -> Vector:
        """The final local model of client p."""
        return self.clients[p.client].descend(self.x, p).params

    def round(self, parts):
        if self.memory:
            self.admit([p.client for p in parts], parts[0].round)
        d = {p.client: self.x - self.local_model(p) for p in parts}
        m = self.beta1 * self.momentum + sum(p.weight * d[p.client] for p in parts)
        for i, entry in self.buffer.items():  # Algorithm 3
            if entry.d is None:
                entry.d = d[i]
            else:
                entry.d = self.beta2 * entry.d + d.get(i, 0)
        columns = [entry.d for entry in self.buffer.values()]
        self.momentum = project(self.clients[0].problem, m, columns, self.scope)
        self.x = self.x - self.server_lr * self.momentum

    def server_state(self):
        return {"momentum": self.momentum} | {f"D[{i}]": entry.d for i, entry in self.buffer.items()}


@dataclass
class GradMA(GradMAS):
    previous: str = "global"

    def start(self):
        super().start()
        self.last = [self.x.copy() for _ in self.clients]

    def local_model(self, p):
        before = self.x if self.previous == "global" else self.last[p.client]
        self.last[p.client] = corrected_steps(self.clients[p.client], self.x, before, p, self.scope)
        return self.last[p.client]

    def client_state(self, i):
        return {"": self.last[i]} if self.previous == "local" else {}
