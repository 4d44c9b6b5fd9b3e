"""Conformance tests for authors of methods: does an algorithm satisfy the contract?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fedrax import tree
from fedrax.config.arguments import checked_arguments
from fedrax.config.hyperparameters import check, check_class_definition
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.checks import check_method
from fedrax.contract.task import Task, classification
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.models import Linear
from fedrax.participation import Poisson
from fedrax.simulation.executors.debug import NonFiniteError
from fedrax.simulation.results.result import Result
from fedrax.simulation.run import simulate
from fedrax.simulation.settings import Script, Settings, cohort_sampler
from fedrax.tree import Tree

__all__ = ["check_algorithm"]

_SIZES = (3, 7, 4, 12, 6, 5)
"""Client sizes of the built-in problem: unequal, and not multiples of the batch size."""
_ROUNDS, _COHORT = 2, 3
_TOLERANCE = 2e-4
"""Tolerance for float32 rounding of two rounds of softmax regression in different orders of summation."""


class _Problem(NamedTuple):
    """A small problem on which a method is checked."""

    task: Task
    federation: Federation

    @property
    def cohort(self) -> int:
        """Cohort size."""
        return min(_COHORT, self.federation.num_clients)


@checked_arguments
def check_algorithm(
    method: type[Algorithm] | Algorithm,
    task: Task | None = None,
    federation: Federation | None = None,
    **fields: Any,
) -> None:
    """Check that an algorithm satisfies the contract; takes about half a minute.

    The algorithm is run for two rounds, with cohorts of two sizes unless it needs a fixed one. It must change the model
    and count its gradients, all values must be finite, executors must agree, on one device and on two, results must not
    depend on the order of the cohort, an empty Poisson cohort must not destroy the model (a server may move by its
    momentum or by noise), and float64 runs must stay in float64.

    Args:
        method: An algorithm class, or an instance of it.
        task: Task to check it on, together with ``federation``; by default softmax regression with three classes and
            four features. Methods that need other layers or labels need a small task of their kind.
        federation: The data of ``task``.
        **fields: Hyper-parameters of the class that have no default.

    Raises:
        FedraxError: Names every violated rule and the remedy.

    Example:
        >>> fedrax.testing.check_algorithm(fedrax.FedAvg)
    """
    if (task is None) != (federation is None):
        raise FedraxError("give check_algorithm both a task and its federation, or neither")
    problem = _softmax_regression() if task is None or federation is None else _Problem(task, federation)
    if isinstance(method, type) and not issubclass(method, Algorithm):
        raise FedraxError(f"{method.__name__} is not an algorithm: derive it from fedrax.Algorithm")
    if isinstance(method, type):
        check_class_definition(method)
    algorithm = _instance(method, fields) if isinstance(method, type) else method
    if not isinstance(algorithm, Algorithm):
        raise FedraxError(f"{algorithm!r} is not an algorithm: derive its class from fedrax.Algorithm")
    check(algorithm)
    check_method(algorithm)
    base = _run(algorithm, problem)  # an algorithm that fails already here gets the simulator's own message
    rules: tuple[Callable[[Algorithm, _Problem, Result], str | None], ...] = (
        _learns,
        _floats_are_inputs,
        partial(_agrees_on, plan="debug"),
        partial(_agrees_on, plan="vmap", chunk=2),
        partial(_agrees_on, plan="scan", devices=2),
        _order_does_not_matter,
        _survives_empty_rounds,
        _keeps_float64,
    )
    violations = [message for message in (_violation(rule, algorithm, problem, base) for rule in rules) if message]
    if violations:
        raise FedraxError("\n".join(f"{type(algorithm).__name__} {message}" for message in violations))


def _instance(method: type[Algorithm], fields: dict[str, Any]) -> Algorithm:
    """An instance with the given fields, or FedraxError."""
    try:
        return method(**fields)
    except TypeError as error:
        raise FedraxError(f"{method.__name__} cannot be constructed ({error}): give every field a default") from error


def _violation(rule: Callable, algorithm: Algorithm, problem: _Problem, base: Result) -> str | None:
    """The message of a rule, also if the algorithm cannot be run."""
    try:
        return rule(algorithm, problem, base)
    except FedraxError as error:
        return f"cannot be run: {error}"


@cache
def _softmax_regression() -> _Problem:
    """The built-in problem."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(_SIZES)), _SIZES)
    x = (rng.normal(size=(len(owner), 4)) + 0.5 * rng.normal(size=(len(_SIZES), 4))[owner]).astype(np.float32)
    y = (x @ rng.normal(size=(4, 3))).argmax(1)
    federation = Federation.from_arrays(x, y, owner, test=(x, y), num_classes=3)
    return _Problem(classification(Linear().build((4,), 3)), federation)


def _run(algorithm: Algorithm, problem: _Problem, **changes: Any) -> Result:
    """A short run; the local learning rate is lowered so that nothing diverges."""
    local = algorithm.local_steps
    if local is not None and hasattr(algorithm, "local"):
        algorithm = dataclasses.replace(algorithm, local=dataclasses.replace(local, lr=0.02))  # type: ignore[call-arg]
    script = Script(cohorts=_cohorts(algorithm, problem))
    settings = {"rounds": _ROUNDS, "script": script, "plan": "scan", "devices": 1}
    return simulate(algorithm, *problem, progress=False, **(settings | changes))  # type: ignore[arg-type]


# -- rules: each returns None, or the message that follows the method's name ---------------------------------------


def _learns(algorithm: Algorithm, problem: _Problem, base: Result) -> str | None:
    """The model changes, and uploads and gradients are counted."""
    start = simulate(algorithm, *problem, rounds=1, cohort_size=1, trajectory=True, progress=False)
    moved = any(np.any(a != b) for a, b in zip(_leaves(start.params), _leaves(base.params), strict=True))
    if not moved and algorithm.personal(base.params, base.client_state(0)) is None:
        names = ", ".join(tree.leaf_names(base.params)[:5])
        return (
            f"does not move the parameters, {names}: its server must use cohort.mean, cohort.each or cohort.total; if"
            " it trains only layers of other names, give check_algorithm a task and a federation"
        )
    if not base.events[-1]["bytes_up"]:
        return "uploads nothing: put what the server needs into ClientOutput(upload=...)"
    if not base.events[-1]["gradients"]:
        return "does not count its gradients: pass result.info on, ClientOutput(..., info=result.info)"
    return None


def _floats_are_inputs(algorithm: Algorithm, problem: _Problem, base: Result) -> str | None:
    """All leaves of the algorithm are numbers."""
    leaves = jax.tree.leaves(algorithm)
    wrong = [leaf for leaf in leaves if not isinstance(leaf, float | int | jax.Array | np.ndarray | np.generic)]
    return f"has a field that is not a number: {wrong[0]!r}; annotate it so that it is static" if wrong else None


def _agrees_on(algorithm: Algorithm, problem: _Problem, base: Result, **plan: Any) -> str | None:
    """Another plan, or two devices if there are two, give the same result; all values are finite."""
    if plan.get("devices", 1) > len(jax.devices()):
        return None
    try:
        other = _run(algorithm, problem, **plan)
    except NonFiniteError as error:
        return f"computes a number that is not finite: {error}"
    if _agree(other, base, problem.federation.num_clients):
        return None
    how = {"debug": "without jit", "vmap": "with vectorized clients", "scan": "on two devices"}[plan["plan"]]
    return (
        f"gives other numbers {how} than compiled on one device: its methods must be pure functions of their arguments,"
        " and its server must mask by cohort.real the rows of cohort.each and cohort.uploads beyond the cohort"
    )


def _order_does_not_matter(algorithm: Algorithm, problem: _Problem, base: Result) -> str | None:
    """The order of the cohort does not change the result."""
    backwards = Script(cohorts=[cohort[::-1] for cohort in _cohorts(algorithm, problem)])
    if not _agree(_run(algorithm, problem, script=backwards), base, problem.federation.num_clients):
        return "depends on the order of the cohort: index server state by cohort.clients"
    return None


def _cohorts(algorithm: Algorithm, problem: _Problem) -> list[np.ndarray]:
    """The cohorts of the runs; one client fewer in the last round, whose padding compiled plans cannot avoid."""
    sampler = cohort_sampler(Settings(cohort_size=problem.cohort), problem.federation.sizes)
    fewer = 0 if algorithm.traits.fixed_cohort or problem.cohort == 1 else 1
    return [sampler.cohort(r)[: problem.cohort - fewer * (r == _ROUNDS - 1)] for r in range(_ROUNDS)]


def _survives_empty_rounds(algorithm: Algorithm, problem: _Problem, base: Result) -> str | None:
    """A round with an empty cohort does not destroy the model."""
    seed = _seed_of_an_empty_cohort(problem.federation.sizes)
    if algorithm.traits.fixed_cohort or seed is None:
        return None
    try:
        end = _run(algorithm, problem, cohort_size=1, participation=Poisson(), script=None, seed=seed)
        if any(np.any(leaf) for leaf in _leaves(end.params)):
            return None
    except NonFiniteError:
        pass
    return (
        "loses the model in a round with an empty cohort, where cohort.mean and cohort.size are zero: upload updates"
        " instead of models, and guard divisions by jnp.maximum(cohort.size, 1)"
    )


def _seed_of_an_empty_cohort(sizes: np.ndarray) -> int | None:
    """The first seed whose Poisson cohort is non-empty in round 1 and empty in round 2; None for a single client."""
    for seed in range(100):
        sampler = cohort_sampler(Settings(cohort_size=1, participation=Poisson(), seed=seed), sizes)
        if len(sampler.cohort(0)) and not len(sampler.cohort(1)):
            return seed
    return None


def _keeps_float64(algorithm: Algorithm, problem: _Problem, base: Result) -> str | None:
    """The server state of a float64 run has no float32 leaves."""
    try:
        double = _run(algorithm, problem, dtype="float64")
    except FedraxError as error:
        return f"cannot be run in float64: {error}"
    short = [
        name
        for name, leaf in zip(tree.leaf_names(double.server), jax.tree.leaves(double.server), strict=True)
        if leaf.dtype == np.float32
    ]
    if short:
        return (
            f"rounds {short[0]} of its server state to float32 in a float64 run: use fedrax.tree, or .astype(x.dtype)"
        )
    return None


def _agree(a: Result, b: Result, clients: int) -> bool:
    """Whether the final states of two runs agree up to rounding."""
    pairs = zip(_leaves(_final_states(a, clients)), _leaves(_final_states(b, clients)), strict=True)
    return all(np.allclose(x, y, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True) for x, y in pairs)


def _final_states(result: Result, clients: int) -> Tree:
    """Server state and all client states."""
    return result.server, [result.client_state(client) for client in range(clients)]


def _leaves(values: Tree) -> list[np.ndarray]:
    """The leaves as NumPy arrays."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(values)]
