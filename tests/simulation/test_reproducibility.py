"""The same experiment and seed have the same results for any grouping of rounds into blocks."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax.models import MLP
from fedrax.optim import SGD
from fedrax.simulation import NonFiniteError
from fedrax.simulation import run as running
from fedrax.simulation.process import numeric_context
from fedrax.simulation.setup import prepare
from tests.simulation.problems import (
    CLASSES,
    FEATURES,
    FEDERATION,
    LOCAL,
    TASK,
    assert_close,
    assert_identical,
    run,
    state_of,
)

SCAFFOLD = fedrax.Scaffold(local=LOCAL)
OPTIONS = {"rounds": 9, "eval_every": 4, "stragglers": 0.3, "seed": 5, "per_client": True}


@pytest.fixture(scope="module")
def reference() -> fedrax.Result:
    """The run to which others are compared."""
    return run(SCAFFOLD, **OPTIONS)


@pytest.mark.parametrize(("longest", "seconds"), [(64, 1.0), (1, 1.0), (2, 100.0), (64, 0.0)])
def test_block_lengths_do_not_change_results(
    reference: fedrax.Result, longest: int, seconds: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(running, "LONGEST_BLOCK", longest)
    monkeypatch.setattr(running, "_BLOCK_SECONDS", seconds)
    assert_identical(run(SCAFFOLD, **OPTIONS), reference)


def test_checkpoints_do_not_change_results(reference: fedrax.Result, tmp_path):
    for every in (1, 2):
        again = run(SCAFFOLD, **OPTIONS, checkpoint_every=every, directory=tmp_path / str(every))
        assert_identical(again, reference)


def test_seeds_change_all_random_draws(reference: fedrax.Result):
    other = run(SCAFFOLD, **(OPTIONS | {"seed": 6}))
    assert not np.allclose(state_of(other)[0], state_of(reference)[0])
    assert set(other.homes) != set(reference.homes) or other.events[0] != reference.events[0]
    largest = run(SCAFFOLD, **(OPTIONS | {"seed": 2**32 - 1}))
    assert not np.allclose(state_of(largest)[0], state_of(other)[0])


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.threefry_partitionable(False),
        lambda: jax.disable_jit(),
        lambda: jax.transfer_guard("disallow"),
    ],
    ids=["generator", "partitionable", "jit", "transfers"],
)
def test_jax_settings_of_the_caller_do_not_change_results(setting: Callable[[], Any]):
    task = fedrax.classification(MLP(hidden=(3,)).build((FEATURES,), CLASSES))
    with setting():
        here = run(SCAFFOLD, task=task, **OPTIONS)
    assert_identical(here, run(SCAFFOLD, task=task, **OPTIONS))


def test_jax_debug_nans_does_not_change_the_message():
    with jax.debug_nans(True), pytest.raises(NonFiniteError, match=r"^FedAvg, round 2, client \d+: .+ is not finite"):
        run(fedrax.FedAvg(local=dataclasses.replace(LOCAL, lr=1e38)), rounds=2)


def test_devices_agree_to_rounding(reference: fedrax.Result):
    alone = run(SCAFFOLD, **OPTIONS, devices=1)
    assert_close(alone, reference)
    assert set(alone.homes) == set(reference.homes)  # the same clients took part
    assert [event["gradients"] for event in alone.events] == [event["gradients"] for event in reference.events]


def test_other_floats_seeds_and_rounds_do_not_recompile(caplog: pytest.LogCaptureFixture):
    """Two sequences of runs: the second one finds all programs of the first, with and without client states."""
    task, ends = dataclasses.replace(TASK, name="of its own"), []
    compiled = lambda: sum("Compiling jit(block_on_mesh)" in record.getMessage() for record in caplog.records)  # noqa: E731
    with jax.log_compiles():
        for lr, seed in ((0.1, 0), (0.2, 1), (0.4, 2)):
            local = dataclasses.replace(LOCAL, lr=lr)
            blocks = fedrax.LocalSGD(lr=lr / 10, steps=2, blocks=2)
            kept = fedrax.Scaffold(local=local), fedrax.algorithms.MIFA(local=local), fedrax.LoSAC(local=blocks)
            for method in (fedrax.FedAvg(local=local), *kept):
                result = run(method, task=task, seed=seed, rounds=3 + seed)
            ends.append(result.params["output"]["weight"])
            assert compiled() == 4
    assert not np.allclose(ends[0], ends[1])


def test_number_types_neither_recompile_nor_change_the_run(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    """Integers and NumPy scalars in float fields become floats, in methods, policies and settings."""
    task, types = (
        dataclasses.replace(TASK, name="of a number"),
        (float, int, np.float32, np.float64, np.int64, np.array),
    )
    compiled = lambda: sum("Compiling jit(block_on_mesh)" in record.getMessage() for record in caplog.records)  # noqa: E731
    with jax.log_compiles():
        for rounds, number in enumerate(types, 1):
            local = dataclasses.replace(LOCAL, lr=number(1), momentum=number(0))
            method = fedrax.FedAvg(local=local, server_optimizer=SGD(lr=number(1), momentum=number(0)))
            options: dict[str, Any] = {"stragglers": number(0), "cohort_size": np.int64(3) if rounds % 2 else 3}
            result = run(method, task=task, rounds=rounds, directory=tmp_path / "run", resume=True, **options)
            assert len(result.events) == rounds and compiled() == 1


def test_programs_with_different_static_fields_are_cached_separately():
    """JAX's cache is per function; with one function per setting, programs can be evicted one by one."""
    with numeric_context("float32"):
        engine = prepare(SCAFFOLD, TASK, FEDERATION, fedrax.Settings(cohort_size=3)).engine
    other, longer = (dataclasses.replace(LOCAL, **change) for change in ({"lr": 0.1}, {"steps": 5}))
    setting, same, apart = (engine.block(fedrax.Scaffold(local=local)) for local in (LOCAL, other, longer))
    assert setting is same and setting is not apart


def test_setup_can_be_run_twice():
    """Its initial arrays are not donated."""
    setup = prepare(SCAFFOLD, TASK, FEDERATION, fedrax.Settings(cohort_size=3, rounds=3))
    first, second = (
        running.Run(setup, running.make_block_loader(setup), (), True, None).finish(False) for _ in range(2)
    )
    assert_identical(first, second)


def test_given_parameters_are_not_donated():
    """Also arrays of an earlier run that are already on the devices."""
    first = run(rounds=1)
    onward = [run(rounds=2, params=first.params) for _ in range(2)]
    assert_identical(*onward)
    assert np.isfinite(first.params["output"]["weight"]).all()
