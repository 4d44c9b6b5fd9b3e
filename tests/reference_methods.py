"""Methods in NumPy float64 that fedrax is compared with, see ``reference``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.reference import Client, Method, Part, Vector, factor
from tests.reference_gradma import GradMA, GradMAS, GradMAW
from tests.reference_momentum import FedADMM, FedCM, Mime, MimeLite
from tests.reference_others import (
    Attacked,
    Ditto,
    EFSign,
    FedBuff,
    FedExP,
    FedLion,
    PFedMe,
    QFedAvg,
    QuantizedBroadcast,
    Robust,
    Scaffnew,
    SignSGD,
)


class FedAvg(Method):
    def round(self, parts):
        delta = 0
        for p in parts:
            delta = delta + p.weight * (self.clients[p.client].descend(self.x, p).params - self.x)
        self.x = self.rule.step(self.x, delta, parts[0].round)


@dataclass
class FedProx(Method):
    mu: float = 0.1

    def round(self, parts):
        delta = 0
        for p in parts:
            pull = lambda x: self.mu * (x - self.x)  # noqa: E731
            delta = delta + p.weight * (self.clients[p.client].descend(self.x, p, term=pull).params - self.x)
        self.x = self.rule.step(self.x, delta, parts[0].round)


@dataclass
class FedSGD(Method):
    server: tuple[str, dict] = ("SGD", {"lr": 0.1})

    def round(self, parts):
        gradient = 0
        for p in parts:
            client = self.clients[p.client]
            own = client.full_gradient(self.x) + client.local.weight_decay * self.x
            gradient = gradient + p.weight * own
        self.x = self.rule.step(self.x, -gradient, parts[0].round)


@dataclass
class Scaffold(Method):
    option: str = "II"

    def start(self):
        self.c = np.zeros_like(self.x)
        self.ci = [np.zeros_like(self.x) for _ in self.clients]

    def renewed(self, p: Part, result: Any) -> Vector:
        """c_i after the local steps."""
        client = self.clients[p.client]
        if self.option == "I":
            return client.full_gradient(self.x)
        if not client.local.plain:
            return result.mean_gradient
        return self.ci[p.client] - self.c + (self.x - result.params) / (result.steps * result.eta)

    def round(self, parts):
        delta, change, renewed = 0, 0, {}
        for p in parts:
            old = self.ci[p.client]
            result = self.clients[p.client].descend(self.x, p, lambda g, x, t, o=old: g - o + self.c)
            renewed[p.client] = self.renewed(p, result)
            delta = delta + (result.params - self.x) / len(parts)
            change = change + (renewed[p.client] - old) / len(parts)
        self.x = self.rule.step(self.x, delta, parts[0].round)
        self.c = self.c + len(parts) / len(self.clients) * change
        for i, value in renewed.items():
            self.ci[i] = value

    def server_state(self):
        return {"control": self.c}

    def client_state(self, i):
        return {"control": self.ci[i]}


class FedSaga(Method):
    def start(self):
        blocks = self.clients[0].local.blocks
        self.y = [np.zeros((blocks, len(self.x))) for _ in self.clients]
        self.phi = [np.zeros_like(self.x) for _ in self.clients]

    def round(self, parts):
        delta = 0
        for p in parts:
            client, i = self.clients[p.client], p.client

            def saga(gij, x, t, client=client, i=i, p=p):
                j = p.blocks[t]
                d = gij - self.y[i][j] + self.phi[i]
                self.phi[i] = self.phi[i] + (gij - self.y[i][j]) / client.local.blocks
                self.y[i][j] = gij
                return d

            delta = delta + p.weight * (client.descend(self.x, p, saga).params - self.x)
        self.x = self.rule.step(self.x, delta, parts[0].round)

    def client_state(self, i):
        return {"gradient_sum": self.phi[i], "block_gradients": self.y[i]}


@dataclass
class LoSAC(Method):
    reading: str = "printed"

    def start(self):
        blocks = self.clients[0].local.blocks
        self.y = [np.zeros((blocks, len(self.x))) for _ in self.clients]
        self.phi: Vector = np.zeros_like(self.x)

    def round(self, parts):
        n, s = len(self.clients), len(parts)
        delta, change = 0, 0
        for p in parts:
            client, i = self.clients[p.client], p.client
            phi: Any = SimpleNamespace(now=self.phi)
            share = 1.0 if self.reading == "printed" else 1 / client.local.blocks

            def losac(gij, x, t, i=i, p=p, phi=phi, share=share):
                j = p.blocks[t]
                d = phi.now / n - self.y[i][j] + gij
                phi.now = phi.now + share * (gij - self.y[i][j])
                self.y[i][j] = gij
                return d

            delta = delta + client.descend(self.x, p, losac).params - self.x
            change = change + (phi.now - self.phi)
        if self.reading == "printed":
            self.x, self.phi = self.x + delta / n, self.phi + n / s * change
        else:
            self.x, self.phi = self.x + delta / s, self.phi + change

    def server_state(self):
        return {"gradient_sum": self.phi}

    def client_state(self, i):
        return {"block_gradients": self.y[i]}


class MimeSVRG(Method):
    def round(self, parts):
        decay = self.clients[0].local.weight_decay * self.x
        self.c = decay + sum(p.weight * self.clients[p.client].full_gradient(self.x) for p in parts)
        delta = 0
        for p in parts:
            client = self.clients[p.client]
            svrg = lambda g, x, t, k=client, p=p: g - k.step_gradient(self.x, t, p.blocks) - decay + self.c  # noqa: E731
            delta = delta + p.weight * (client.descend(self.x, p, svrg).params - self.x)
        self.x = self.rule.step(self.x, delta, parts[0].round)

    def server_state(self):
        return {"gradient": self.c}


@dataclass
class Episode(Method):
    gamma: Any = None

    def round(self, parts):
        own = {p.client: self.first_batch(p) for p in parts}
        self.g: Vector = sum(p.weight * own[p.client] for p in parts)
        eta = self.clients[0].local.lr
        self.clipped = self.gamma is not None and math.sqrt(float(self.g @ self.g)) > self.gamma / eta
        delta = 0
        for p in parts:
            episode = lambda g, x, t, i=p.client: self.clip_if_needed(g - own[i] + self.g, eta)  # noqa: E731
            delta = delta + p.weight * (self.clients[p.client].descend(self.x, p, episode).params - self.x)
        self.x = self.rule.step(self.x, delta, parts[0].round)

    def first_batch(self, p: Part) -> Vector:
        """The gradient at x on the fresh batch, which is the first one in stored order."""
        client = self.clients[p.client]
        return client.gradient(self.x, client.batches()[0]) + client.local.weight_decay * self.x

    def clip_if_needed(self, d: Vector, eta: float) -> Vector:
        """d, or (gamma / eta) d / |d| in a clipped round; the schedule multiplies both gamma and eta."""
        length = math.sqrt(float(d @ d))
        return self.gamma / eta * d / length if self.clipped and length > 0 else d

    def server_state(self):
        return {"gradient": self.g}


class NaiveParallelClip(Method):
    def round(self, parts):
        g = 0
        for p in parts:
            client = self.clients[p.client]
            g = g + p.weight * (client.gradient(self.x, client.batches()[0]) + client.local.weight_decay * self.x)
        client = self.clients[0]
        scale = factor(client.local.schedule, parts[0].round)
        gamma = None if client.local.clip is None else client.local.clip * scale
        self.x = client.move(self.x, g, client.local.lr * scale, gamma)


@dataclass
class MIFA(Method):
    memory: str = "clients"

    def start(self):
        self.updates = np.zeros((len(self.clients), len(self.x)))

    def round(self, parts):
        scale = factor(self.clients[0].local.schedule, parts[0].round)
        renewed = {p.client: self.clients[p.client].descend(self.x, p).params - self.x for p in parts}
        for i, update in renewed.items():
            self.updates[i] = update / scale
        self.x = self.rule.step(self.x, scale * self.updates.mean(0), parts[0].round)

    def server_state(self):
        kept = {"memory": self.updates} if self.memory == "server" else {}
        return {"mean": self.updates.mean(0)} | kept

    def client_state(self, i):
        return {"": self.updates[i]} if self.memory == "clients" else {}


@dataclass
class FedDyn(Method):
    """h and lambda_i are named c and ci, as SCAFFOLD's control variates, because Upcycled extrapolates both."""

    alpha: float = 0.1

    def start(self):
        self.c: Vector = np.zeros_like(self.x)
        self.ci = [np.zeros_like(self.x) for _ in self.clients]

    def round(self, parts):
        ends = {}
        for p in parts:
            own = lambda x, i=p.client: -self.ci[i] + self.alpha * (x - self.x)  # noqa: E731
            ends[p.client] = self.clients[p.client].descend(self.x, p, term=own).params
        for i, end in ends.items():
            self.ci[i] = self.ci[i] - self.alpha * (end - self.x)
        self.c = self.c - self.alpha / len(self.clients) * sum(end - self.x for end in ends.values())
        self.x = sum(ends.values()) / len(parts) - self.c / self.alpha

    def server_state(self):
        return {"dual": self.c}

    def client_state(self, i):
        return {"dual": self.ci[i]}


@dataclass
class FedNova(Method):
    """The weight of each step's gradient is found by repeating the steps with unit gradients, not by the closed forms
    of the paper.
    """

    mu: float | None = None

    def normalization(self, steps: int, eta: float, momentum: float) -> float:
        """|a|_1: sum over k of how far a unit gradient in step k moves x_i, in units of -eta."""
        total = 0.0
        for k in range(steps):
            moved, velocity = 0.0, 0.0
            for t in range(steps):
                velocity = momentum * velocity + (t == k) + (self.mu or 0.0) * moved
                moved = moved - eta * velocity
            total += abs(-moved / eta)
        return total

    def round(self, parts):
        direction, tau = 0, 0.0
        for p in parts:
            client = self.clients[p.client]
            pull = lambda x: (self.mu or 0.0) * (x - self.x)  # noqa: E731
            result = client.descend(self.x, p, term=pull)
            normalization = self.normalization(result.steps, result.eta, client.local.momentum)
            direction = direction + p.weight * (result.params - self.x) / normalization
            tau += p.weight * normalization
        self.x = self.rule.step(self.x, tau * direction, parts[0].round)


@dataclass
class Upcycled(Method):
    """The inner method, then x <- x + a (x - x-); for SCAFFOLD and FedDyn optionally also c and c_i."""

    inner: Any = None
    a: float = 0.5
    schedule: tuple[str, dict] | None = None
    extrapolate: str = "none"

    def round(self, parts):
        a = self.a * factor(self.schedule, parts[0].round)
        x = self.inner.x
        c, ci = getattr(self.inner, "c", None), list(getattr(self.inner, "ci", []))
        self.inner.round(parts)
        self.x = self.inner.x = self.inner.x + a * (self.inner.x - x)
        if self.extrapolate != "none" and c is not None:
            self.inner.c = self.inner.c + a * (self.inner.c - c)
        if self.extrapolate == "both" and c is not None:
            for p in parts:
                new = self.inner.ci[p.client]
                self.inner.ci[p.client] = new + a * (new - ci[p.client])

    def server_state(self):
        return self.inner.server_state()

    def client_state(self, i):
        return self.inner.client_state(i)


METHODS = {
    m.__name__: m
    for m in (
        *(FedAvg, FedProx, FedSGD, Scaffold, FedSaga, LoSAC, MimeSVRG, Episode, NaiveParallelClip, MIFA, Upcycled),
        *(GradMAW, GradMAS, GradMA, FedDyn, FedNova, PFedMe, FedCM, Mime, MimeLite, FedADMM),
        *(FedBuff, FedExP, FedLion, QFedAvg, Scaffnew, SignSGD, Ditto, Robust, Attacked, EFSign, QuantizedBroadcast),
    )
}


def build(clients: list[Client], x: Vector, name: str, options: dict) -> Method:
    """The method ``name`` with ``options`` of the table of cases."""
    options = {k: v for k, v in options.items() if k != "local"}
    if "server_optimizer" in options:
        options["server"] = options.pop("server_optimizer")
    if name == "Attacked":
        options["listed"] = options.pop("clients")
    if "inner" in options:
        options["inner"] = build(clients, x, *options.pop("inner"))
    return METHODS[name](clients, x, **options)


def run(
    method: Method,
    cohorts: list,
    weights: str = "uniform",
    works: Any = None,
    blocks: Any = None,
    steps: Any = None,
    delay: Any = None,
) -> Method:
    """Run all rounds; works [r][k], blocks [r][k][t], steps and delay [r][k] are in the order of ``cohorts[r]``."""
    for r, cohort in enumerate(cohorts):
        sizes = [method.clients[i].size if weights == "samples" else 1 for i in cohort]
        parts = [
            Part(
                int(i),
                sizes[k] / sum(sizes),
                r,
                1.0 if works is None else works[r][k],
                None if blocks is None else blocks[r][k],
                None if steps is None else int(steps[r][k]),
                0 if delay is None else int(delay[r][k]),
            )
            for k, i in enumerate(cohort)
        ]
        method.round(parts)
    return method
