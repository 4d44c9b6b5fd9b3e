"""Properties of every registered algorithm, including new ones."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedrax import Episode, Federation, Scaffold, Settings, classification, simulate, tree
from fedrax.algorithms import SignSGD
from fedrax.compression import EFSign, Quantized, QuantizedBroadcast, RandomK, TopK
from fedrax.config.hyperparameters import check
from fedrax.contract.algorithm import Algorithm
from fedrax.experiments import experiment
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.method_registry import algorithms
from fedrax.models import Logistic
from fedrax.simulation import Event, Result, RunInfo, Script, read_events
from fedrax.simulation.settings import cohort_sampler
from tests.examples import example
from tests.slow import slow_cases

SIZES = (3, 7, 4, 12, 6, 5)
ROUNDS, COHORT = 3, 2
every_algorithm = pytest.mark.parametrize("kind", algorithms().values(), ids=algorithms().keys())
TESTED_IN_TEST_PLANS = (Episode, Scaffold)
"""Methods whose plans vmap and loop are compared more precisely in tests/algorithms/test_plans.py."""
ON_PLANS = [
    pytest.param(kind, plan, id=f"{plan}-{name}")
    for plan in ("vmap in float64", "vmap", "loop", "debug")
    for name, kind in algorithms().items()
    if not (kind in TESTED_IN_TEST_PLANS and plan in ("vmap", "loop"))
]


def federation() -> Federation:
    """Clients of different sizes, labels and inputs."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x = (rng.normal(size=(len(owner), 4)) + 0.5 * rng.normal(size=(len(SIZES), 4))[owner]).astype(np.float32)
    y = ((x @ rng.normal(size=(4, 3))).argmax(1) + owner % 2) % 3
    return Federation.from_arrays(x, y, owner, test=(x, y), num_classes=3)


TASK = classification(Logistic().build((4,), 3))
FEDERATION = federation()


def run(algorithm: Algorithm, **changes: Any) -> Result:
    settings = {"rounds": ROUNDS, "cohort_size": COHORT, "plan": "scan", "checkpoint_every": 1}
    return simulate(algorithm, TASK, FEDERATION, **(settings | changes))  # type: ignore[arg-type]


@cache
def reference(kind: type[Algorithm]) -> Result:
    """The run to which others are compared."""
    return run(example(kind))


@cache
def in_float64(kind: type[Algorithm]) -> Result:
    """The run in float64 with plan vmap, which serves the tests of both."""
    return run(example(kind), plan="vmap", dtype="float64")


def assert_close(a: Any, b: Any) -> None:
    """Assert equality of two trees up to rounding."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), a, b)


def shapes_and_dtypes(state: Any) -> dict[str, tuple]:
    leaves = zip(tree.leaf_names(state), jax.tree.leaves(state), strict=True)
    return {name: (a.shape, str(a.dtype)) for name, a in leaves}


def without_times(events: list[dict]) -> list[dict]:
    """Events without durations."""
    return [{k: v for k, v in event.items() if not k.startswith("seconds")} for event in events]


class Crash:
    """A sink that raises after a round, like a crash."""

    def __init__(self, round: int):
        self.round = round

    def start(self, run: RunInfo) -> None:
        """Do nothing."""

    def event(self, event: Event) -> None:
        """Raise after the given round."""
        if event["round"] == self.round:
            raise RuntimeError("power cut")

    def finish(self, result: Any | None) -> None:
        """Do nothing."""


@every_algorithm
def test_defaults_are_in_bounds_and_explained(kind: type[Algorithm]):
    check(kind())
    assert inspect.getdoc(kind) != inspect.getdoc(Algorithm)
    assert kind.__module__.startswith("fedrax.")


@every_algorithm
def test_is_not_overridden(kind: type[Algorithm]):
    known = set(algorithms().values())
    assert not known.intersection(kind.__mro__[1:]), "a method of the package overrides another one"


@every_algorithm
def test_is_a_pytree_with_its_floats_as_leaves(kind: type[Algorithm]):
    algorithm = example(kind)
    leaves, structure = jax.tree.flatten(algorithm)
    assert structure.unflatten(leaves) == algorithm
    assert all(isinstance(leaf, float) for leaf in leaves)
    doubled = jax.jit(lambda a: jax.tree.map(lambda leaf: 2 * leaf, a))(algorithm)
    np.testing.assert_allclose(jax.tree.leaves(doubled), [2 * leaf for leaf in leaves])


@pytest.mark.slow(keep=5)
@every_algorithm
def test_training_moves_the_parameters_and_is_counted(kind: type[Algorithm]):
    result = reference(kind)
    assert any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(result.params))  # lr begins at zero
    last, size = result.events[-1], tree.num_bytes(result.params)
    sends_less = {"bytes_up": (EFSign, Quantized, RandomK, SignSGD, TopK), "bytes_down": (QuantizedBroadcast,)}
    for way, kinds_of_less in sends_less.items():
        assert last[way] > 0
        assert (last[way] < ROUNDS * COHORT * size) == (kind in kinds_of_less)
    assert last["gradients"] > 0


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(("kind", "plan"), slow_cases(ON_PLANS, len(algorithms())))
def test_plans_agree(kind: type[Algorithm], plan: str):
    rounds = 1 if plan == "debug" else ROUNDS  # operations run one by one
    one = run(example(kind), rounds=rounds) if plan == "debug" else reference(kind)
    other = in_float64(kind) if plan == "vmap in float64" else run(example(kind), plan=plan, rounds=rounds)
    assert_close(other.server, one.server)
    for client in range(len(SIZES)):
        assert_close(other.client_state(client), one.client_state(client))
    assert [event["gradients"] for event in other.events] == [event["gradients"] for event in one.events]


@pytest.mark.slow(keep=9)
@every_algorithm
def test_order_of_the_cohort_does_not_matter(kind: type[Algorithm]):
    sampler = cohort_sampler(Settings(cohort_size=COHORT), FEDERATION.sizes)
    backwards = Script(cohorts=[sampler.cohort(round)[::-1] for round in range(ROUNDS)])
    assert_close(run(example(kind), script=backwards).server, reference(kind).server)


@pytest.mark.slow(keep=12)
@every_algorithm
@pytest.mark.parametrize("dtype", slow_cases(["float32", "float64"]))
def test_states_keep_their_shapes_and_precision(kind: type[Algorithm], dtype: str):
    algorithm = example(kind)
    result = reference(kind) if dtype == "float32" else in_float64(kind)
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda a: a.astype(dtype), TASK.init(jax.random.key(0)))
        assert shapes_and_dtypes(result.params) == shapes_and_dtypes(params)
        assert shapes_and_dtypes(result.server) == shapes_and_dtypes(algorithm.init(params, len(SIZES)))
        for client in range(len(SIZES)):
            assert shapes_and_dtypes(result.client_state(client)) == shapes_and_dtypes(algorithm.init_client(params))


@pytest.mark.slow(keep=9)
@every_algorithm
def test_resumed_run_equals_the_uninterrupted_one(kind: type[Algorithm], tmp_path: Path):
    algorithm, uninterrupted = example(kind), reference(kind)
    with pytest.raises(RuntimeError, match="power cut"):
        run(algorithm, directory=tmp_path, sinks=[Crash(round=2)])
    resumed = run(algorithm, directory=tmp_path, resume=True)
    assert without_times(resumed.events) == without_times(uninterrupted.events)
    assert without_times(read_events(tmp_path)) == without_times(uninterrupted.events)
    jax.tree.map(np.testing.assert_array_equal, resumed.server, uninterrupted.server)


@every_algorithm
def test_experiment_file_restores_it(kind: type[Algorithm], tmp_path: Path):
    spec = Experiment(algorithm=example(kind))
    experiment.write(spec, tmp_path / "experiment.toml")
    assert experiment.read(tmp_path / "experiment.toml").algorithm == spec.algorithm
