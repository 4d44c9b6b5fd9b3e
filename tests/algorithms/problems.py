"""Small federations, and algorithms with their options for both fedrax and the NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedrax
from fedrax.algorithms.gradma import ServerMemory
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.table import VectorTable
from fedrax.contract.vectors import ServerVectors
from fedrax.contract.wrapper import Wrapped
from fedrax.experiments.method_registry import find_algorithm
from fedrax.optim import InverseTimeDecay, OptaxSchedule, proximal, server
from fedrax.robust import attacked_clients, rules
from tests import reference, reference_methods

FEATURES, CLASSES = 4, 3
SIZES = {
    "uneven": (7, 4, 9, 5, 12, 6, 3),  # incomplete last batches, blocks of different sizes
    "equal": (6, 6, 6, 6, 6, 6, 6),  # static shapes
    "multiples": (6, 3, 9, 3, 12, 6, 9),  # no incomplete batches with batch size 3
}
NUM_CLIENTS = 7


@cache
def quadratic_task() -> fedrax.Task:
    """Loss (a w - b)^2 / 2."""
    return fedrax.Task(
        init=lambda key: {"w": jnp.zeros(FEATURES)},
        loss=lambda params, batch, key: 0.5 * (batch.x @ params["w"] - batch.y) ** 2,
    )


@cache
def softmax_task() -> fedrax.Task:
    """Cross entropy of a linear model with a bias."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        logits = batch.x @ params["kernel"] + params["bias"]
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, batch.y[:, None], 1)[:, 0]

    return fedrax.Task(
        init=lambda key: {"bias": jnp.zeros(CLASSES), "kernel": jnp.zeros((FEATURES, CLASSES))}, loss=loss
    )


@dataclass(frozen=True)
class Problem:
    """A federation for both implementations; float32 data, so that both read identical numbers."""

    task: fedrax.Task
    federation: fedrax.Federation
    problem: reference.Problem
    x0: np.ndarray

    @property
    def params(self) -> dict[str, np.ndarray]:
        """Initial parameters for fedrax."""
        return reference.split(self.problem, self.x0)

    def clients(self, local: reference.Local) -> list[reference.Client]:
        """Clients for the NumPy reference."""
        x, y = (np.asarray(a) for a in self.federation.train)
        x = x.astype(np.float64)
        y = y if y.dtype == np.int32 else y.astype(np.float64)
        ranges = zip(self.federation.offsets[:-1], self.federation.offsets[1:], strict=True)
        return [reference.Client(self.problem, x[i:j], y[i:j], local) for i, j in ranges]


def make_problem(kind: str = "softmax", sizes: str | tuple[int, ...] = "uneven") -> Problem:
    """A federation whose clients differ in their features, labels and sizes."""
    return _problem(kind, SIZES[sizes] if isinstance(sizes, str) else sizes)


@cache
def _problem(kind: str, sizes: tuple[int, ...]) -> Problem:
    rng = np.random.default_rng(7)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x = (rng.normal(size=(offsets[-1], FEATURES)) + rng.normal(size=(len(sizes), FEATURES))[owner]).astype(np.float32)
    if kind == "softmax":
        task, problem = softmax_task(), reference.Softmax(FEATURES, CLASSES)
        y = rng.integers(0, CLASSES, offsets[-1])
    else:
        task, problem = quadratic_task(), reference.Quadratic(FEATURES)
        y = rng.normal(size=offsets[-1]).astype(np.float32)
    federation = fedrax.Federation.from_arrays(x, y, offsets=offsets, shuffle=False)
    size = sum(int(np.prod(shape)) for shape in problem.shapes.values())
    return Problem(task, federation, problem, 0.5 * rng.normal(size=size))


@dataclass(frozen=True)
class Case:
    """An algorithm with its options, a federation and settings."""

    method: str
    options: dict = field(default_factory=dict)
    sizes: str | tuple[int, ...] = "uneven"
    weights: str = "uniform"
    stragglers: float = 0.0
    varying_cohorts: bool = False
    rounds: int = 4
    coin: float | None = None
    """Probability that a round ends after a local step, if the number of steps is not given."""
    max_staleness: int = 0
    """Maximum staleness of uploads, in rounds."""
    note: str = ""

    @property
    def name(self) -> str:
        """Identifier of the test case."""
        return f"{self.method}-{self.note}" if self.note else self.method

    @property
    def local(self) -> dict:
        """Options of the local steps."""
        options = self.options
        while "local" not in options:
            options = options["inner"][1]
        return options["local"]

    def algorithm(self) -> Algorithm:
        """The algorithm in fedrax."""
        return make_algorithm(self.method, self.options)

    def cohorts(self) -> list[np.ndarray]:
        """Scripted cohorts in random order: some clients are never sampled, client 2 always is."""
        rng = np.random.default_rng(11)
        size = lambda r: 4 if not self.varying_cohorts else (4, 2, 5, 1)[r % 4]  # noqa: E731
        others = lambda r: rng.permutation(np.array([0, 1, 3, 4, 5]))[: size(r) - 1]  # noqa: E731
        return [rng.permutation(np.append(others(r), 2)) for r in range(self.rounds)]

    def script(self) -> fedrax.simulation.Script:
        """Cohorts, with blocks, staleness or numbers of local steps if the method needs them."""
        blocks = self.local.get("blocks")
        if self.max_staleness:
            delay = np.random.default_rng(19).integers(0, self.max_staleness + 1, (self.rounds, 5))
            return fedrax.simulation.Script(cohorts=self.cohorts(), delay=delay)
        if self.coin is not None:
            steps = np.random.default_rng(17).geometric(self.coin, (self.rounds, 1))
            return fedrax.simulation.Script(cohorts=self.cohorts(), steps=np.broadcast_to(steps, (self.rounds, 5)))
        if blocks is None:
            return fedrax.simulation.Script(cohorts=self.cohorts())
        drawn = np.random.default_rng(13).integers(0, blocks, (self.rounds, 5, self.local["steps"]))
        return fedrax.simulation.Script(cohorts=self.cohorts(), blocks=drawn.astype(np.int32))


def _object(module: Any, spec: Any) -> Any:
    name, options = spec
    return getattr(module, name)(**options_of(options))


def options_of(options: dict) -> dict:
    """Replace ("Name", {...}) by objects of fedrax."""
    kinds = {"prox": proximal, "server_optimizer": server, "rule": rules, "attack": attacked_clients}
    objects = {key: _object(kinds[key], value) if key in kinds else value for key, value in options.items()}
    return objects | ({"schedule": make_schedule(*options["schedule"])} if "schedule" in options else {})


def make_schedule(name: str, options: dict) -> Any:
    """The schedule of fedrax or optax that corresponds to ``factor`` of the reference."""
    if name == "StepDecay":
        factors = dict.fromkeys(options["milestones"], options["factor"])
        return OptaxSchedule.of(optax.piecewise_constant_schedule, init_value=1.0, boundaries_and_scales=factors)
    if name == "ExponentialDecay":
        return optax.exponential_decay(1.0, transition_steps=1, decay_rate=options["factor"])
    if name == "CosineDecay":
        steps, final = options["rounds"], options["final"]
        return OptaxSchedule.of(optax.cosine_decay_schedule, init_value=1.0, decay_steps=steps, alpha=final)
    return InverseTimeDecay(**options)


def make_algorithm(method: str, options: dict) -> Algorithm:
    """The algorithm in fedrax for an entry of the table."""
    options = options_of(options)
    if "local" in options:
        options["local"] = fedrax.LocalSGD(order="stored", **options_of(options["local"]))
    if "inner" in options:
        options["inner"] = make_algorithm(*options["inner"])
    return find_algorithm(method)(**options)


def simulate(case: Case, kind: str = "softmax", **settings: Any) -> fedrax.Result:
    """Run a case in fedrax, by default in float64."""
    problem = make_problem(kind, case.sizes)
    defaults = {"dtype": "float64", "plan": "scan", "devices": 1, "eval_every": 1000}
    changes = {**defaults, "weights": case.weights, "stragglers": case.stragglers, "rounds": case.rounds} | settings
    return fedrax.simulate(
        case.algorithm(), problem.task, problem.federation, params=problem.params, script=case.script(), **changes
    )


def expected(case: Case, kind: str = "softmax", works: Any = None) -> reference_methods.Method:
    """Run a case in the NumPy reference."""
    problem, script = make_problem(kind, case.sizes), case.script()
    clients = problem.clients(reference.Local(**case.local))
    method = reference_methods.build(clients, problem.x0, case.method, case.options)
    assert script.cohorts is not None
    return reference_methods.run(
        method, list(script.cohorts), case.weights, works, script.blocks, script.steps, script.delay
    )


def vectors(problem: reference.Problem, state: Any) -> dict[str, np.ndarray]:
    """Flat vectors of a state by name, without the parameters and the state of the optimizer."""
    if isinstance(state, Wrapped):
        own_state = state.own[0] if isinstance(state.own, tuple) and state.own else state.own  # one phase
        own = {"own": _flat(problem, own_state)} if jax.tree.leaves(own_state) else {}
        return vectors(problem, state.inner) | own
    if not hasattr(state, "_fields"):
        return {"": _flat(problem, state)} if jax.tree.leaves(state) else {}
    names = [n for n in state._fields if n not in ("params", "optimizer") and jax.tree.leaves(getattr(state, n))]
    return {name: _flat(problem, getattr(state, name)) for name in names}


def server_vectors(problem: reference.Problem, algorithm: Algorithm, server: Any) -> dict[str, np.ndarray]:
    """Flat vectors of the server state; what GradMA's memory stores for a client is named by the client."""
    if not isinstance(algorithm, ServerMemory):
        return vectors(problem, server)
    remembered = {f"D[{i}]": _flat(problem, d) for i, d in algorithm.remembered(server).items()}
    return {"momentum": _flat(problem, server.momentum)} | remembered


def _flat(problem: reference.Problem, arrays: Any) -> np.ndarray:
    arrays = arrays.rows if isinstance(arrays, VectorTable | ServerVectors) else arrays
    name, shape = next(iter(problem.shapes.items()))
    leading = np.shape(arrays[name])[: np.ndim(arrays[name]) - len(shape)]
    return reference.join(problem, arrays, leading)


def assert_same(
    result: fedrax.Result, method: reference_methods.Method, case: Case, kind: str, tolerance: float
) -> None:
    """Assert that parameters, server state and client states agree within ``tolerance`` times max(1, largest entry)."""
    problem = make_problem(kind, case.sizes).problem

    def close(actual: np.ndarray, desired: np.ndarray, name: str) -> None:
        np.testing.assert_allclose(
            actual, desired, rtol=0, atol=tolerance * max(1, np.abs(desired).max()), err_msg=name
        )

    close(reference.join(problem, result.params), method.x, "parameters")
    _assert_same_vectors(
        server_vectors(problem, case.algorithm(), result.server), method.server_state(), "server", close
    )
    for i in range(len(method.clients)):
        _assert_same_vectors(vectors(problem, result.client_state(i)), method.client_state(i), f"client {i}", close)


def _assert_same_vectors(actual: dict, desired: dict, owner: str, close: Any) -> None:
    assert actual.keys() == desired.keys(), owner
    for name, value in desired.items():
        close(actual[name], value, f"{owner}: {name}")


def state_of(result: fedrax.Result, clients: Sequence[int] = range(NUM_CLIENTS)) -> Any:
    """Server state and client states after a run."""
    return jax.tree.map(np.asarray, (result.server, [result.client_state(i) for i in clients]))
