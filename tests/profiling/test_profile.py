"""The profiler on small experiments: parts sum to the total, and counts equal those computed by hand."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax.algorithms.upcycled import Upcycled
from fedrax.errors import FedraxError
from fedrax.models import LSTM, Logistic, TwoNN, from_linen
from fedrax.profiling import MachineLimits, Profile, machine_limits, measurement, profile
from fedrax.profiling.advice import advise, heaviest
from fedrax.profiling.attribution import OperationTime
from fedrax.profiling.hlo import OperationDescription, ProgramText
from fedrax.simulation.client_evaluation import PersonalEvaluator
from fedrax.simulation.executors import execution_plan
from fedrax.simulation.setup import Setup, prepare
from tests.slow import slow_cases

CLASSES, CLIENTS, ROWS = 10, 4, 24
COHORT, STEPS, BATCH = 3, 4, 6
LOCAL = fedrax.LocalSGD(lr=0.01, steps=STEPS, batch_size=BATCH)
LIMITS = MachineLimits(gflops=100.0, gigabytes=10.0)


@pytest.fixture(autouse=True)
def given_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given limits of the machine, which a separate test measures."""
    monkeypatch.setattr(machine_limits, "measure", lambda mesh, dtype, precision: LIMITS)


def federation(*shape: int, sizes: tuple[int, ...] = (ROWS,) * CLIENTS) -> fedrax.Federation:
    """Clients with random samples of this shape."""
    rng = np.random.default_rng(0)
    offsets = np.cumsum((0, *sizes))
    x = rng.normal(size=(offsets[-1], *shape)).astype(np.float32)
    y = rng.integers(0, CLASSES, offsets[-1])
    return fedrax.Federation.from_arrays(x, y, offsets=offsets, test=(x[:30], y[:30]), num_classes=CLASSES)


def arguments(algorithm: Any, model: Any, shape: tuple[int, ...], **changes: Any) -> tuple:
    """Arguments of `profile`."""
    task = fedrax.classification((model or Logistic()).build(shape, CLASSES))
    given: dict[str, Any] = {"rounds": 4, "cohort_size": COHORT, "eval_every": 2} | changes
    return algorithm or fedrax.FedAvg(local=LOCAL), task, federation(*shape), fedrax.Settings(**given)


def run(algorithm: Any = None, model: Any = None, shape: tuple[int, ...] = (20,), **changes: Any) -> Profile:
    """A profile of two rounds."""
    made = profile(*arguments(algorithm, model, shape, **changes), rounds=2)
    assert made.ms > 0 and all(part.ms >= 0 for part in made.parts)
    for whole, parts in (
        (made.ms, [part.ms for part in made.parts]),
        (1.0, [part.share for part in made.parts]),
        (made.ms, list(made.kinds.values())),
        (made.operations, [part.operations for part in made.parts]),
    ):
        assert math.isclose(sum(parts), whole)
    return made


def dense(inputs: int, outputs: int, first: bool = False) -> int:
    """FLOPs of a step of a dense layer: its product, that of the weight gradient and, unless first, of the input
    gradient.
    """
    return (2 if first else 3) * 2 * BATCH * inputs * outputs


def output(features: int, first: bool = False) -> int:
    """FLOPs of a step of an output layer, whose weight gradient is no product for such a small batch."""
    return (1 if first else 2) * 2 * BATCH * features * CLASSES


def lstm(steps: int, inputs: int, hidden: int) -> int:
    """FLOPs of a step of an LSTM: products of the gates with input and state, gradients of both weights and of the
    state.
    """
    return 2 * BATCH * steps * 4 * hidden * (2 * inputs + 3 * hidden)


@pytest.mark.parametrize(
    ("model", "shape", "flops"),
    slow_cases(
        [
            (TwoNN(), (20,), dense(20, 200, first=True) + dense(200, 200) + output(200)),
            (LSTM(hidden=16), (5, 8), lstm(5, 8, 16) + output(16)),
        ]
    ),
    ids=["2NN", "LSTM"],
)
def test_matrix_products_are_counted(model: Any, shape: tuple[int, ...], flops: int):
    made = run(model=model, shape=shape)
    assert made.flops_a_round == COHORT * STEPS * flops
    assert made.gradients == COHORT * STEPS * BATCH and made.gflops_in_products > 0
    assert all(row.share >= 0.02 for row in made.heaviest)
    assert sum(row.ms for row in made.heaviest) <= made.ms


@pytest.mark.slow
def test_products_are_counted_with_vectorized_clients_on_one_device():
    made = run(plan="vmap", chunk=COHORT, devices=1)
    weighted_sum = 2 * COHORT * (20 * 10 + 10)  # with vectorized clients the weight gradient is a product too
    assert made.flops_a_round == COHORT * STEPS * output(20, first=True) + weighted_sum
    assert made.devices == 1 and "wait for other devices" not in {part.name for part in made.parts}


@pytest.mark.slow
def test_compilation_is_measured_in_every_profile():
    first = run(devices=1).compile_seconds
    before = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore
    assert run(devices=1).compile_seconds > 0.3 * first
    assert jax.config.jax_persistent_cache_min_compile_time_secs == before  # pyright: ignore


@pytest.mark.slow
def test_phases_are_separated():
    made = run(fedrax.Episode(local=LOCAL))
    gradients = {part.phase: part for part in made.parts if part.name == "gradients"}
    assert set(gradients) == {1, 2}
    assert gradients[2].operations > gradients[1].operations  # local steps versus one gradient
    assert {"gather batches", "local steps", "server", "aggregate", "evaluate", "host"} <= {p.name for p in made.parts}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("algorithm", "moved"),
    [
        (Upcycled(fedrax.Scaffold(local=LOCAL)), True),
        (fedrax.LoSAC(local=fedrax.LocalSGD(lr=0.01, steps=STEPS, blocks=4)), False),
    ],
    ids=["vectors", "tables"],
)
def test_client_states_are_copied_unless_they_are_tables(algorithm: Any, moved: bool):
    assert ("client states" in {part.name for part in run(algorithm).parts if part.ms > 0}) is moved


def test_plans_with_many_programs_are_timed_as_a_whole():
    made = run(plan="loop")
    assert {part.name for part in made.parts} == {"rounds", "evaluate", "host"} and not made.heaviest
    assert any("Plan loop is not one program" in note for note in made.notes)
    assert made.flops_a_round == 0 and made.compile_seconds == 0


@pytest.mark.slow
def test_layers_are_named_and_convolutions_rewritten(monkeypatch: pytest.MonkeyPatch):
    nn = pytest.importorskip("flax.linen")
    texts: list[str] = []
    monkeypatch.setattr(measurement, "ProgramText", lambda text: texts.append(text) or ProgramText(text))
    layers = [nn.Conv(16, (3, 3)), nn.relu, nn.Conv(16, (3, 3)), lambda x: x.reshape(len(x), -1), nn.Dense(CLASSES)]
    task = fedrax.classification(from_linen(nn.Sequential(layers), jnp.ones((1, 8, 8, 1))))
    profile(
        fedrax.FedAvg(local=LOCAL), task, federation(8, 8, 1), fedrax.Settings(rounds=2, cohort_size=COHORT), rounds=2
    )
    program = ProgramText(texts[0])
    found = {program.describe(name)[:3] for name in program.operations}
    assert {("convolution", "Sequential/layers_2", way) for way in ("forward", "backward")} <= found
    assert set(re.findall(r"dim_labels=(\S+),", texts[0])) == {"b01f_01io->b01f"}


@pytest.mark.parametrize("rounds", [0, -3])
def test_zero_rounds_are_rejected(rounds: int):
    with pytest.raises(FedraxError, match=f"must be 1 or more .*, not {rounds}"):
        profile(*arguments(None, None, (20,)), rounds=rounds)


def test_trace_is_written_to_a_path_given_as_string(tmp_path: Path):
    profile(*arguments(None, None, (20,)), rounds=1, keep_trace=str(tmp_path / "kept"))
    assert list((tmp_path / "kept").glob("**/*.xplane.pb"))


@pytest.mark.slow
def test_divergence_raises_a_clear_error():
    with pytest.raises(FedraxError, match="diverges"):
        run(fedrax.FedAvg(local=fedrax.LocalSGD(lr=1e38, steps=STEPS)), TwoNN())


def test_limits_of_the_machine_are_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    made = machine_limits.measure(execution_plan.make_mesh(None), budget=0.05)
    assert 1 < made.gflops < 1e6 and 0.5 < made.gigabytes < 1e5


def test_product_limit_has_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    monkeypatch.setattr(machine_limits, "measure", lambda mesh, dtype, precision: seen.append(precision) or LIMITS)
    run(precision="bfloat16", plan="loop")
    monkeypatch.undo()
    monkeypatch.setattr(machine_limits, "_best_seconds", lambda function, *_, **__: seen.append(function) or 1.0)
    machine_limits.measure(execution_plan.make_mesh(None), precision=seen[0])
    assert seen[0] == "bfloat16" and "reduce_precision" in str(jax.make_jaxpr(seen[1])(jnp.ones((4, 4))))


def test_parameter_metrics_are_timed_with_evaluations():
    method, task, clients, settings = arguments(None, None, (20,), eval_every=4)
    measured = []

    def measures(params: Any) -> dict[str, Any]:
        measured.append(params)
        return {"bias": jnp.abs(params["output"]["bias"]).max()}

    profile(method, dataclasses.replace(task, measures=measures), clients, settings, rounds=1)
    assert measured


def test_evaluations_of_personal_models_are_timed(monkeypatch: pytest.MonkeyPatch):
    calls, whole = [], PersonalEvaluator.__call__
    monkeypatch.setattr(PersonalEvaluator, "__call__", lambda *given: calls.append(1) or whole(*given))
    assert run(finetune=1, plan="loop").evaluation_ms > 0 and len(calls) > 1


# --- Advice on hand-written operations --------------------------------------------------------------------


@pytest.fixture(scope="module")
def setup() -> Setup:
    """The setup of FedAvg on clients of different sizes."""
    algorithm, task, _, settings = arguments(None, None, (20,), devices=1)
    return prepare(algorithm, task, federation(20, sizes=(10, 40, 20)), settings)


def spent(
    ms: float, layer: str = "", what: str = "product", flops: float = 1e3, size: float = 1e3, **more: Any
) -> OperationTime:
    """An operation of gradients that runs ten times per round."""
    given: dict[str, Any] = {"side": 20} | more
    about = OperationDescription(what, layer, "forward", "20×20 · 20×20", **given)
    return OperationTime(0, "gradients", "products" if flops else "memory", ms, 10.0, flops, size, about)


def test_small_operations_of_numbered_layers_are_grouped(setup: Setup):
    blocks = [spent(0.9, f"block_{i}/dense") for i in range(10)]
    rows = heaviest(setup, [spent(50.0, "block_3/conv"), *blocks, spent(1.0, "other")], 100.0, LIMITS)
    assert [row.layer for row in rows] == ["block_3/conv", "block_*/dense"]
    assert math.isclose(rows[1].share, 0.09) and rows[1].executions == 100
    many = [spent(8.0, f"layer {name}") for name in "abcdefghijkl"]
    assert len(heaviest(setup, many, 100.0, LIMITS)) == 10
    (all_of_them,) = heaviest(setup, [spent(8.0, f"layer {i}") for i in range(12)], 100.0, LIMITS)
    assert all_of_them.layer == "layer *" and math.isclose(all_of_them.share, 0.96)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (spent(10.0, flops=0.6e9), "only less arithmetic"),
        (spent(0.1), "larger mini-batch"),
        (spent(0.1, looped=True), "steps of a sequence"),
        (spent(10.0, side=3), "Fewer than 16 channels"),
        (spent(10.0), None),
        (spent(10.0, "block/GroupNorm_0", "reduction", flops=0), "norm reads"),
        (spent(10.0, "pool", "pooling", flops=0), "every entry of every window"),
        (spent(10.0, "conv", "depthwise convolution", flops=0), "Depthwise convolutions have little"),
        (spent(10.0, "embed", "scatter", flops=0), "size of its table"),
        (spent(10.0, "relu", "pass", flops=0), "Far slower than memory"),
        (spent(10.0, "top", "sort", flops=0), "jax.lax.top_k"),
        (spent(10.0, "mixing", "Fourier transform", flops=0), None),
        (spent(10.0, "relu", "pass", flops=0, size=1e9), None),
    ],
)
def test_advice_for_an_operation(setup: Setup, operation: OperationTime, words: str | None):
    (row,) = heaviest(setup, [operation], operation.ms, LIMITS)
    assert row.advice is None if words is None else words in (row.advice or "")
    assert row.unit == ("GFLOP/s" if operation.flops else "GB/s")


@pytest.mark.parametrize(
    ("kinds", "advice"),
    [
        ({"small": 9.0, "host": 1.0}, "larger mini-batch"),
        ({"products": 8.0, "waiting": 2.0}, "different sizes"),
        ({"evaluation": 6.0, "gather": 4.0}, "run.eval_every"),
        ({"exchange": 6.0}, "more clients"),
        ({"memory": 6.0}, None),
    ],
)
def test_advice_for_a_kind_of_time(setup: Setup, kinds: dict[str, float], advice: str | None):
    made = " ".join(advise(setup, kinds, 0.0))
    assert made == "" if advice is None else advice in made
    assert "Compiling takes 9.0 s" in advise(setup, kinds, 9.0)[0]


def test_stored_order_is_advised_if_batches_become_slices(setup: Setup):
    def advice(setup: Setup) -> str:
        return " ".join(advise(setup, {"gather": 9.0, "memory": 1.0}, 0.0))

    def of(width: int, local: fedrax.LocalSGD = LOCAL) -> Setup:
        algorithm, task, _, settings = arguments(fedrax.FedAvg(local=local), None, (width,), devices=1)
        return prepare(algorithm, task, federation(width, sizes=(12, 24, 18)), settings)

    epochs = dataclasses.replace(LOCAL, steps=None, epochs=1)
    assert "not shuffled" in advice(of(300, epochs))
    assert "not shuffled" in advice(of(300, dataclasses.replace(LOCAL, steps=24 // BATCH)))
    assert "stored" not in advice(of(20, epochs)) + advice(setup)
    assert "stored" not in advice(
        of(300, dataclasses.replace(LOCAL, steps=24 // BATCH - 1))
    )  # does not reach the last samples


def test_advice_names_the_keys_of_the_method_inside_a_wrapper():
    _, task, rows, settings = arguments(None, None, (20,), devices=1)
    wrapped = prepare(Upcycled(Upcycled(fedrax.FedAvg(local=LOCAL))), task, rows, settings)
    advice = " ".join(advise(wrapped, {"small": 9.0}, 0.0))
    assert "(algorithm.inner.inner.local.batch_size)" in advice


def test_additional_evaluation_of_the_last_round_is_counted():
    made = run(rounds=3, eval_every=2, plan="loop")
    (evaluate,) = (part.ms for part in made.parts if part.name == "evaluate")
    assert math.isclose(evaluate, 2 / 3 * made.evaluation_ms)
