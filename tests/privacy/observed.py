"""What an adversary observes of a mechanism: noise alone, and messages of a client with extreme data."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import fedrax
from fedrax import Algorithm, ClientData, ClientOutput, Cohort, Wrapper, hyperparameters, tree
from fedrax.contract import Info, Phase, Wrapped
from fedrax.prng.keys import NamedKeys
from fedrax.tree import Tree
from tests.simulation.problems import CLASSES, FEATURES, SIZES, TASK, run

ROUNDS, COHORT, N = 2, 3, len(SIZES)
SHAPES = {"a": (20, 50), "b": (1000,)}
OTHER_PLANS: list[dict[str, Any]] = [{"plan": "vmap", "chunk": 2}, {"plan": "loop"}, {"plan": "debug"}, {"devices": 1}]


class Observed(NamedTuple):
    """Parameters, and the messages that reached the server: leaves [rounds, phases, clients or 1, ...]."""

    params: Tree
    seen: Tree


@hyperparameters
class ZeroUploads(Algorithm):
    """Two phases in which every client uploads zeros; the server records what it receives."""

    stacked: bool = False
    """Record uploads one by one instead of their mean."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The same phase twice."""
        record = lambda p: lambda server, cohort: self.record(server, cohort, p)  # noqa: E731
        return tuple(Phase(self.broadcast, self.client, record(p), stacked=self.stacked) for p in (0, 1))

    def init(self, params: Tree, num_clients: int) -> Observed:
        """Nothing received yet."""
        rows = num_clients if self.stacked else 1
        return Observed(params, {name: jnp.zeros((ROUNDS, 2, rows, *shape)) for name, shape in SHAPES.items()})

    def client(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """Zeros."""
        return ClientOutput(upload={name: jnp.zeros(shape) for name, shape in SHAPES.items()})

    def record(self, server: Observed, cohort: Cohort, p: int) -> tuple[Observed, Info]:
        """Record the uploads."""

        def write(seen: jax.Array, mean: jax.Array, each: jax.Array | None) -> jax.Array:
            if each is None:
                return seen.at[cohort.round, p, 0].set(mean)
            return seen.at[cohort.round, p, cohort.clients].set(each, mode="drop")

        each = cohort.uploads if self.stacked else dict.fromkeys(SHAPES)
        return server._replace(seen={n: write(server.seen[n], cohort.mean[n], each[n]) for n in SHAPES}), {}


def noise_of(wrap: Callable[[Algorithm], Wrapper], stacked: bool, **options: Any) -> np.ndarray:
    """Noise of two rounds: [draws, 1000], a row for each leaf of each phase of each round (and client)."""
    result = run(wrap(ZeroUploads(stacked)), rounds=ROUNDS, cohort_size=COHORT, **options)
    server = result.server
    while isinstance(server, Wrapped):  # of a wrapper with its own state
        server = server.inner
    rows = np.concatenate([np.asarray(server.seen[name]).reshape(-1, 1000) for name in SHAPES])
    return rows[(rows != 0).any(1)]


def assert_gaussian(rows: np.ndarray, deviation: float) -> None:
    """Assert a normal distribution with this standard deviation and uncorrelated rows; each check fails for one in 10^5
    seeds.
    """
    count = rows.size
    assert abs(rows.std() / deviation - 1) < 4.4 / np.sqrt(2 * count)
    assert abs(rows.mean()) < 4.4 * deviation / np.sqrt(count)
    assert stats.kstest(rows.ravel() / deviation, "norm").pvalue > 1e-5
    pairs = list(combinations(rows, 2))
    worst = max(abs(np.corrcoef(a, b)[0, 1]) for a, b in pairs)
    assert worst < stats.norm.isf(0.5e-5 / len(pairs)) / np.sqrt(rows.shape[1]), "two draws are related"


def sent_by(algorithm: Algorithm, x: Any, y: Any, round: int = 0) -> list[Tree]:
    """All uploads of a client that is alone in a round, as the server receives them, phase by phase."""
    params = TASK.init(jax.random.key(0))
    server, state, key = algorithm.init(params, N), algorithm.init_client(params), jax.random.key(7)
    sent = []
    for p, phase in enumerate(algorithm.phases):
        data = ClientData.alone(TASK, x, y, key, round=round, num_clients=N, cohort_size=1, phase=p)
        output = phase.client(phase.broadcast(server), state, data)
        received, state = phase.receive(output.upload), output.state
        sent.append((received, output.each, output.total))
        if p + 1 == len(algorithm.phases):
            break
        one = jnp.ones(())
        who = (jnp.zeros(1, jnp.int32), jnp.ones(1), one, N, jnp.int32(round))
        cohort = Cohort(received, (), output.total, *who, NamedKeys(key), expected=one)
        server, _ = phase.server(server, cohort)
    return sent


def upload_norm(algorithm: Algorithm) -> Callable[[np.ndarray], float]:
    """x [5, features] -> norm of everything that a client with these samples uploads in a round."""
    labels = jnp.arange(5) % CLASSES
    length = jax.jit(lambda x: tree.norm(sent_by(algorithm, x, labels)))
    return lambda x: float(length(jnp.asarray(x, jnp.float32).reshape(5, FEATURES)))


def assert_bounded(length: Callable[[np.ndarray], float], x: np.ndarray, bound: float) -> None:
    """Assert the bound up to rounding."""
    assert length(x) <= bound * (1 + 1e-5)


def extreme_data() -> list[np.ndarray]:
    """Samples with the longest updates, or with nonfinite ones."""
    rng = np.random.default_rng(0)
    ordinary = rng.normal(size=(5, FEATURES))
    single = np.where(np.arange(5 * FEATURES).reshape(5, -1) == 3, 1e30, 0.0)
    return [
        ordinary,
        1e6 * ordinary,
        single,
        np.full((5, FEATURES), np.nan),
        np.full((5, FEATURES), np.inf),
        0 * single,
    ]


def zero_task(size: int) -> fedrax.Task:
    """A loss that is zero for all parameters, of which there are ``size``."""
    return fedrax.Task(
        init=lambda key: {"w": jnp.zeros(size)}, loss=lambda params, batch, key: 0 * params["w"].sum() * batch.x[:, 0]
    )
