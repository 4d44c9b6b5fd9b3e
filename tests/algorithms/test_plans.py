"""Execution plans, chunk sizes and numbers of devices agree up to float64 rounding for representative methods.

The contract tests run all other methods on all plans.
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
"""Client states, two phases, and a server state with a row for each client."""
UNROLLED = ("FedAvg-all-options", "LoSAC-printed")
"""A static number of local steps, which plan loop unrolls."""
PAIRS = [
    *((name, plan) for name in REPRESENTATIVE for plan in EVERY_PLAN if plan != "debug"),
    *((name, "loop-None-on-2") for name in UNROLLED),
    ("Episode", "debug"),  # slow, because operations are executed one by one
]


def two_rounds(name: str) -> Case:
    """The case with two rounds, in which states are first sent and received; plan debug is slow."""
    return dataclasses.replace(METHODS[name], rounds=2)


@cache
def baseline_run(name: str) -> fedrax.Result:
    """The run with plan scan on one device, to which all plans are compared."""
    return simulate(two_rounds(name))


IN_MAKE_TEST = [
    ("Scaffold", plan) for plan in ("scan-None-on-2", "vmap-1-on-2", "vmap-2-on-1", "vmap-3-on-2", "loop-None-on-2")
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("name", "plan"), slow_cases(PAIRS, IN_MAKE_TEST))
def test_plans_agree_to_rounding(name: str, plan: str):
    """States agree to float64 rounding; events to float32, in which they are recorded."""
    base, result = baseline_run(name), simulate(two_rounds(name), **EVERY_PLAN[plan])
    assert result.plan.startswith(str(EVERY_PLAN[plan]["plan"]))
    assert_close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)  # noqa: E731
    jax.tree.map(assert_close, state_of(result), state_of(base))
    for actual, desired in zip(result.events, base.events, strict=True):
        assert actual.keys() == desired.keys()
        counts = ("round", "clients", "bytes_down", "bytes_up", "gradients")
        assert [actual[k] for k in counts] == [desired[k] for k in counts]
        rest = [k for k in actual if k not in counts and not k.startswith("seconds")]
        np.testing.assert_allclose([actual[k] for k in rest], [desired[k] for k in rest], rtol=2e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Scaffold", "MimeSVRG"])
def test_random_batches_are_the_same_on_every_plan(name: str):
    """Shuffled batches and cohorts are drawn from counters and do not depend on the place of computation."""
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
    assert_close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)  # noqa: E731
    for other in runs[1:]:
        jax.tree.map(assert_close, state_of(other), state_of(runs[0]))


def test_repeated_runs_are_bitwise_equal():
    first, second = (simulate(METHODS["Scaffold"], dtype="float32", devices=2) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, state_of(first), state_of(second))
