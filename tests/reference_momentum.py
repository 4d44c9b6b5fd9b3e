"""FedCM, Mime, MimeLite and FedADMM in NumPy float64, see ``reference``."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.reference import Method, Vector, factor, prox


@dataclass
class FedCM(Method):
    alpha: float = 0.1

    def start(self):
        self.momentum: Vector = np.zeros_like(self.x)

    def round(self, parts):
        delta, per_step, eta = 0, 0, 0.0
        for p in parts:
            mix = lambda g, x, t: self.alpha * g + (1 - self.alpha) * self.momentum  # noqa: E731
            result = self.clients[p.client].descend(self.x, p, mix)
            delta = delta + p.weight * (result.params - self.x)
            per_step, eta = per_step + p.weight * (result.params - self.x) / result.steps, result.eta
        if eta > 0:
            self.momentum = -per_step / eta
        self.x = self.rule.step(self.x, delta, parts[0].round)

    def server_state(self):
        return {"momentum": self.momentum}


@dataclass
class Mime(Method):
    beta: float = 0.9

    def start(self):
        self.s: Vector = np.zeros_like(self.x)

    def round(self, parts):
        decay = self.clients[0].local.weight_decay * self.x
        self.c: Vector = decay + sum(p.weight * self.clients[p.client].full_gradient(self.x) for p in parts)
        delta = 0
        for p in parts:
            client = self.clients[p.client]

            def mime(g, x, t, client=client, p=p):
                corrected = g - (client.step_gradient(self.x, t, p.blocks) + decay) + self.c
                return (1 - self.beta) * corrected + self.beta * self.s

            delta = delta + p.weight * (client.descend(self.x, p, mime).params - self.x)
        self.s = (1 - self.beta) * self.c + self.beta * self.s
        self.x = self.rule.step(self.x, delta, parts[0].round)

    def server_state(self):
        return {"gradient": self.c, "momentum": self.s}


@dataclass
class MimeLite(Method):
    beta: float = 0.9

    def start(self):
        self.s: Vector = np.zeros_like(self.x)

    def round(self, parts):
        delta, gradient = 0, 0
        for p in parts:
            client = self.clients[p.client]
            mix = lambda g, x, t: (1 - self.beta) * g + self.beta * self.s  # noqa: E731
            delta = delta + p.weight * (client.descend(self.x, p, mix).params - self.x)
            gradient = gradient + p.weight * (client.full_gradient(self.x) + client.local.weight_decay * self.x)
        self.s = (1 - self.beta) * gradient + self.beta * self.s
        self.x = self.rule.step(self.x, delta, parts[0].round)

    def server_state(self):
        return {"momentum": self.s}


@dataclass
class FedADMM(Method):
    """Algorithm 3 as printed: the server stores pi_i + rho x_i of every client, and a round begins with Eq. 82.

    The parameters that fedrax reports after a round are the z at the start of the next one.
    """

    rho: float = 1.0
    prox: Any = None
    server_steps: int = 1
    server_lr: Any = None

    def start(self):
        self.xi = [self.x for _ in self.clients]
        self.pi = [np.zeros_like(self.x) for _ in self.clients]
        self.sent = np.array([self.rho * self.x for _ in self.clients])
        self.minimize()

    def minimize(self):
        """Eq. 81, with N Psi because the f_i are not divided by N."""
        n = len(self.clients)
        lr = self.server_lr or 1 / (n * self.rho)
        for _ in range(self.server_steps):
            slope = n * self.rho * self.x - self.sent.sum(0)
            self.x = prox(self.clients[0].problem, self.prox, self.x - lr * slope, n * lr)

    def round(self, parts):
        for p in parts:
            i, client = p.client, self.clients[p.client]
            eta = client.local.lr * factor(client.local.schedule, p.round)
            own: Any = SimpleNamespace(pi=self.pi[i], x=self.xi[i])
            for t in range(client.num_steps(p.work)):
                g = client.step_gradient(own.x, t, p.blocks) + client.local.weight_decay * own.x
                own.x = (self.rho * eta * self.x - eta * own.pi + own.x - eta * g) / (1 + self.rho * eta)
                own.pi = own.pi + self.rho * (own.x - self.x)
            self.xi[i], self.pi[i] = own.x, own.pi
            self.sent[i] = own.pi + self.rho * own.x
        self.minimize()

    def server_state(self):
        return {"total": self.sent.sum(0)}

    def client_state(self, i):
        return {"model": self.xi[i], "dual": self.pi[i]}
