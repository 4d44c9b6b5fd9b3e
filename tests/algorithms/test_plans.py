"""Every execution plan, chunk and number of devices gives the same numbers to the rounding of float64.

Here for a few methods; that every other runs on every plan stands in the contract's tests.
"""

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax.experiments.method_registry import find_algorithm
from tests.algorithms.problems import Case, make_problem, simulate, state_of
from tests.algorithms.table import METHODS
from tests.slow import slow_cases

EVERY_PLAN = {
    f"{plan}-{chunk}-on-{devices}": {"plan": plan, "chunk": chunk, "devices": devices}
    for plan, chunk, devices in [
        ("scan", None, 2),
        *(("vmap", chunk, devices) for chunk in (1, 2, 3) for devices in (1, 2)),
        *(("loop", None, devices) for devices in (1, 2)),
    ]
} | {"debug": {"plan": "debug", "devices": 1}}
REPRESENTATIVE = ("Scaffold", "Episode", "MIFA-server")
"""State on clients, two phases, something kept by the server for each client."""
UNROLLED = ("FedAvg-rich", "LoSAC-printed")
"""A known number of local steps, which plan loop lays out one after another."""
PAIRS = [
    *((name, plan) for name in REPRESENTATIVE for plan in EVERY_PLAN if plan != "debug"),
    *((name, "loop-None-on-2") for name in UNROLLED),
    ("Episode", "debug"),  # slow, as it runs operation by operation
]


def two_rounds(name: str) -> Case:
    """The case with the rounds in which state first goes out and comes back: debugging is slow."""
    return dataclasses.replace(METHODS[name], rounds=2)


@cache
def one_after_another(name: str) -> fedrax.Result:
    """What all plans are compared with."""
    return simulate(two_rounds(name))


TOLD_APART = [
    ("Scaffold", plan) for plan in ("scan-None-on-2", "vmap-1-on-2", "vmap-2-on-1", "vmap-3-on-2", "loop-None-on-2")
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("name", "plan"), slow_cases(PAIRS, TOLD_APART))
def test_plan(name: str, plan: str):
    """All state agrees to float64 rounding; events agree to float32, which is what they are recorded in."""
    base, result = one_after_another(name), simulate(two_rounds(name), **EVERY_PLAN[plan])
    assert result.plan.startswith(str(EVERY_PLAN[plan]["plan"]))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)  # noqa: E731
    jax.tree.map(close, state_of(result), state_of(base))
    for ours, theirs in zip(result.events, base.events, strict=True):
        assert ours.keys() == theirs.keys()
        counts = ("round", "clients", "bytes_down", "bytes_up", "gradients")
        assert [ours[k] for k in counts] == [theirs[k] for k in counts]
        rest = [k for k in ours if k not in counts and not k.startswith("seconds")]
        np.testing.assert_allclose([ours[k] for k in rest], [theirs[k] for k in rest], rtol=2e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Scaffold", "MimeSVRG"])
def test_random_batches_are_the_same_on_every_plan(name: str):
    """Shuffled batches and drawn cohorts come from counters, so who computes them where does not matter."""
    problem = make_problem()
    method: Any = find_algorithm(name)
    algorithm = method(local=fedrax.LocalSGD(lr=0.1, epochs=2, batch_size=3))
    settings = fedrax.Settings(rounds=2, cohort_size=3, stragglers=0.4, dtype="float64")
    plans: list[dict[str, Any]] = [
        {"plan": "scan", "devices": 1},
        {"plan": "vmap", "chunk": 2, "devices": 2},
        {"plan": "loop", "devices": 2},
    ]
    runs = [fedrax.simulate(algorithm, problem.task, problem.federation, settings, **plan) for plan in plans]
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)  # noqa: E731
    for other in runs[1:]:
        jax.tree.map(close, state_of(other), state_of(runs[0]))


def test_the_same_run_twice_is_bitwise_the_same():
    first, second = (simulate(METHODS["Scaffold"], dtype="float32", devices=2) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, state_of(first), state_of(second))
