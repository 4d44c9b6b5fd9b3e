"""The profiler on small experiments: its parts sum to the whole, and its counts are those made by hand."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax.algorithms.mime import MimeSVRG
from fedrax.errors import FedraxError
from fedrax.models import LSTM, Logistic, TwoNN
from fedrax.profiling import Limits, Profile, limits, profile
from fedrax.simulation import plans
from fedrax.wrappers.upcycle import Upcycled

CLASSES, CLIENTS, ROWS = 10, 4, 24
COHORT, STEPS, BATCH = 3, 4, 6
LOCAL = fedrax.LocalSGD(lr=0.01, steps=STEPS, batch_size=BATCH)
BLOCKS = fedrax.LocalSGD(lr=0.01, steps=STEPS, blocks=4)


@pytest.fixture(autouse=True)
def given_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured by a test of their own."""
    monkeypatch.setattr(limits, "measure", lambda mesh, dtype: Limits(gflops=100.0, gigabytes=10.0))


def federation(*shape: int) -> fedrax.Federation:
    """Clients of one size with random samples of this shape."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS * ROWS, *shape)).astype(np.float32)
    y = rng.integers(0, CLASSES, CLIENTS * ROWS)
    offsets = np.arange(CLIENTS + 1) * ROWS
    return fedrax.Federation.from_arrays(x, y, offsets=offsets, test=(x[:30], y[:30]), num_classes=CLASSES)


def run(algorithm: Any = None, model: Any = None, shape: tuple[int, ...] = (20,), **changes: Any) -> Profile:
    """A profile of two rounds."""
    task = fedrax.classification((model or Logistic()).build(shape, CLASSES))
    settings = fedrax.Settings(**({"rounds": 4, "cohort_size": COHORT, "eval_every": 2} | changes))
    return profile(algorithm or fedrax.FedAvg(local=LOCAL), task, federation(*shape), settings, rounds=2)


def check_sums(made: Profile) -> None:
    """Parts, their shares and the kinds each make up the whole."""
    assert made.ms > 0
    assert math.isclose(sum(part.ms for part in made.parts), made.ms)
    assert math.isclose(sum(part.share for part in made.parts), 1.0)
    assert math.isclose(sum(made.kinds.values()), made.ms)
    assert math.isclose(sum(part.operations for part in made.parts), made.operations)
    assert all(part.ms >= 0 for part in made.parts)
    assert made.verdict.bound == "compile" or made.verdict.bound == max(made.kinds, key=made.kinds.__getitem__)


def dense(inputs: int, outputs: int, first: bool = False) -> int:
    """Of a dense layer's step: its product, that of its weights' gradient and, unless first, of its inputs'."""
    return (2 if first else 3) * 2 * BATCH * inputs * outputs


def output(features: int, first: bool = False) -> int:
    """The same of an output layer, whose weights' gradient is no product for a batch as small as this."""
    return (1 if first else 2) * 2 * BATCH * features * CLASSES


def lstm(steps: int, inputs: int, hidden: int) -> int:
    """Of an LSTM's step: the gates' products from inputs and state, both weights' gradients and the state's."""
    return 2 * BATCH * steps * 4 * hidden * (2 * inputs + 3 * hidden)


@pytest.mark.parametrize(
    ("model", "shape", "flops"),
    [
        (Logistic(), (20,), output(20, first=True)),
        (TwoNN(), (20,), dense(20, 200, first=True) + dense(200, 200) + output(200)),
        (LSTM(hidden=16), (5, 8), lstm(5, 8, 16) + output(16)),
    ],
    ids=["softmax regression", "2NN", "LSTM"],
)
def test_matrix_products_are_those_counted_by_hand(model: Any, shape: tuple[int, ...], flops: int):
    made = run(model=model, shape=shape)
    assert made.flops_a_round == COHORT * STEPS * flops
    assert made.gradients == COHORT * STEPS * BATCH
    assert made.gflops > 0 and made.gflops_in_products >= made.gflops
    check_sums(made)


def test_products_are_counted_with_clients_side_by_side_and_on_one_device():
    made = run(plan="vmap", chunk=COHORT, devices=1)
    weighted_sum = 2 * COHORT * (20 * 10 + 10)  # side by side it is a product too
    assert made.flops_a_round == COHORT * STEPS * output(20, first=True) + weighted_sum
    assert made.devices == 1 and "wait for other devices" not in {part.name for part in made.parts}
    check_sums(made)


@pytest.mark.parametrize("algorithm", [fedrax.Episode(local=LOCAL), MimeSVRG(local=LOCAL)], ids=["EPISODE", "Mime"])
def test_phases_are_apart(algorithm: Any):
    made = run(algorithm)
    gradients = {part.phase: part for part in made.parts if part.name == "gradients"}
    assert set(gradients) == {1, 2}
    assert gradients[2].operations > gradients[1].operations  # local steps against one gradient
    assert {"gather batches", "local steps", "server", "aggregate", "evaluate", "host"} <= {p.name for p in made.parts}
    check_sums(made)


@pytest.mark.parametrize(
    "algorithm",
    [fedrax.Scaffold(local=LOCAL), Upcycled(fedrax.Scaffold(local=LOCAL))],
    ids=["SCAFFOLD", "Upcycled SCAFFOLD"],
)
def test_methods_with_client_states(algorithm: Any):
    made = run(algorithm)
    assert "client states" in {part.name for part in made.parts if part.ms > 0}
    check_sums(made)


def test_tables_in_client_states_are_not_moved():
    made = run(fedrax.LoSAC(local=BLOCKS))
    assert "client states" not in {part.name for part in made.parts if part.ms > 0}
    check_sums(made)


@pytest.mark.parametrize("plan", ["loop", "debug"])
def test_plans_that_are_not_one_program_are_timed_as_a_whole(plan: str):
    made = run(plan=plan)
    assert {part.name for part in made.parts} == {"rounds", "evaluate", "host"}
    assert any(f"Plan {plan} is not one program" in note for note in made.notes)
    assert made.flops_a_round == 0 and made.compile_seconds == 0
    check_sums(made)


def test_the_bytes_of_a_step_are_those_of_its_arrays():
    """Batches are rows, not tables: a thousand times the data is no more traffic."""
    few = run()
    step = 4 * (BATCH * 20 + 20 * 10 + BATCH * 10)  # batch, weights, logits: each is touched a few times
    assert 2 * step < few.bytes_a_round / (COHORT * STEPS) < 20 * step


def test_compilation_is_measured_anew_each_time():
    before = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore
    first, second = run().compile_seconds, run().compile_seconds
    assert second > 0.3 * first
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before  # pyright: ignore


def test_divergence_is_a_sentence():
    with pytest.raises(FedraxError, match="diverges"):
        run(fedrax.FedAvg(local=fedrax.LocalSGD(lr=1e38, steps=STEPS)), TwoNN())


def test_limits_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    made = limits.measure(plans.make_mesh(None), budget=0.05)
    assert 1 < made.gflops < 1e6 and 0.5 < made.gigabytes < 1e5
