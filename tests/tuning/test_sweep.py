"""Grids and seeds in one program against the same runs one after another."""

import dataclasses
import importlib
import pickle
from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax.data import Federation, hold_out, load
from fedrax.data.partition import Shards
from fedrax.models import MLP, Logistic, lora
from fedrax.participation import Poisson
from fedrax.simulation import NonFiniteError
from fedrax.tuning.sweeps import program_keys
from tests.slow import slow_cases

DATA = load("digits")
FEDERATION = Federation.from_dataset(DATA, Shards(clients=20), seed=0)
TASK = fedrax.classification(Logistic().build(DATA.train.x.shape[1:], 10))
STEP_SIZES = (0.02, 0.1, 0.5)


def grid(cls: type, **local: object) -> list:
    return [cls(local=fedrax.LocalSGD(lr=lr, **local)) for lr in STEP_SIZES]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "algorithms",
    slow_cases([grid(fedrax.Scaffold, epochs=1), grid(fedrax.FedAvg, epochs=1), grid(fedrax.LoSAC, steps=3, blocks=3)]),
    ids=["FedAvg", "Scaffold", "LoSAC"],
)
def test_vectorized_sweep_equals_sequential_one(algorithms: list) -> None:
    settings = fedrax.Settings(rounds=5, cohort_size=6, eval_every=2)
    together = fedrax.sweep(algorithms, TASK, FEDERATION, (0, 3), settings, mode="vectorized")
    in_turn = fedrax.sweep(algorithms, TASK, FEDERATION, (0, 3), settings, mode="sequential")
    assert [len(row) for row in together] == [2, 2, 2]
    for row, other in zip(together, in_turn, strict=True):
        for one, reference in zip(row, other, strict=True):
            assert one.plan.startswith("vectorized: 3 x 2 runs")
            assert [event.keys() for event in one.events] == [event.keys() for event in reference.events]
            for actual, desired in zip(one.events, reference.events, strict=True):
                for key in actual.keys() - {"seconds"}:
                    assert actual[key] == pytest.approx(desired[key], rel=1e-4), key
            np.testing.assert_allclose(
                one.params["output"]["weight"], reference.params["output"]["weight"], rtol=1e-4, atol=1e-6
            )
    weights = [np.asarray(row[0].params["output"]["weight"]) for row in together]
    assert not np.allclose(weights[0], weights[1])
    assert not np.allclose(together[0][0].params["output"]["weight"], together[0][1].params["output"]["weight"])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("mode", ["vectorized", "sequential"])
def test_diverging_run_does_not_affect_others(mode: str) -> None:
    # weight decay times learning rate exceeds 2: weights grow by 10^8 per step until they overflow
    wild = [fedrax.FedAvg(local=fedrax.LocalSGD(lr=lr, weight_decay=1.0)) for lr in (0.1, 1e8)]
    (calm, *_), (lost, *_) = fedrax.sweep(wild, TASK, FEDERATION, rounds=4, eval_every=2, mode=mode)  # type: ignore[arg-type]
    assert calm.stopped == "rounds"
    assert len(calm.events) == 4
    assert np.isfinite(calm.events[-1]["test_loss"])
    assert lost.stopped == "diverged"
    assert len(lost.events) < 4


@pytest.mark.slow
def test_events_before_divergence_are_kept() -> None:
    """In both modes, also if other runs continue for several blocks of rounds."""
    wild = [fedrax.Scaffold(local=fedrax.LocalSGD(lr=lr, weight_decay=1.0, steps=1)) for lr in (0.1, 1e8)]
    options: dict[str, Any] = {"rounds": 9, "cohort_size": 6, "eval_every": 2, "devices": 1}
    ends = [fedrax.sweep(wild, TASK, FEDERATION, mode=mode, **options)[1][0] for mode in ("vectorized", "sequential")]
    together, in_turn = ends
    sound = len(in_turn.events)
    assert 1 < sound < 7 and [event["round"] for event in together.events] == list(range(1, sound + 1))
    for actual, desired in zip(together.events, in_turn.events, strict=True):
        assert actual.keys() == desired.keys()
        for key in actual.keys() - {"seconds"}:
            assert actual[key] == pytest.approx(desired[key], rel=1e-4), key
    for end in ends:
        assert end.stopped == "diverged" and np.isfinite(end.params["output"]["weight"]).all()
        with pytest.raises(fedrax.FedraxError, match="the run diverged"):
            end.client_state(0)
    np.testing.assert_allclose(together.params["output"]["weight"], in_turn.params["output"]["weight"], rtol=1e-4)
    with pytest.raises(NonFiniteError) as caught:
        fedrax.simulate(wild[1], TASK, FEDERATION, **options)
    assert caught.value.result is not None and len(caught.value.result.events) == sound
    assert pickle.loads(pickle.dumps(caught.value)).result is None


def test_blocks_of_rounds_share_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    module, traced = importlib.import_module("fedrax.tuning.sweeps"), []
    block = module.run_block
    monkeypatch.setattr(module, "run_block", lambda *a, **k: [traced.append(1), block(*a, **k)][1])
    fedrax.sweep(grid(fedrax.FedAvg, steps=1)[:2], TASK, FEDERATION, rounds=3, eval_every=1, mode="vectorized")
    assert len(traced) == 1


def test_program_of_a_search_does_not_depend_on_floats() -> None:
    """A grid may grow at any end: see `fedrax.experiments.search.trials`."""
    method = lambda **local: fedrax.Scaffold(fedrax.LocalSGD(**local))  # noqa: E731
    keys = [
        program_keys(method(**local), TASK, FEDERATION, fedrax.Settings(rounds=2, cohort_size=2))
        for local in (
            {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.001, "momentum": 0.5},
            {"lr": 0.1, "momentum": 0.9, "steps": 2},
        )
    ]
    assert keys[0] == keys[1] != keys[2]


def test_runs_that_cannot_be_vectorized_are_rejected() -> None:
    mixed = [fedrax.FedAvg(), fedrax.FedAvg(local=fedrax.LocalSGD(steps=3))]
    with pytest.raises(fedrax.FedraxError, match="differ in float hyper-parameters only"):
        fedrax.sweep(mixed, TASK, FEDERATION, rounds=2, mode="vectorized")
    with pytest.raises(fedrax.FedraxError, match="at least one algorithm"):
        fedrax.sweep([], TASK, FEDERATION)
    with pytest.raises(fedrax.FedraxError, match="cannot stop at a target"):
        fedrax.sweep(mixed[:1], TASK, FEDERATION, target=0.5, mode="vectorized")
    assert len(fedrax.sweep(mixed, TASK, FEDERATION, rounds=1)) == 2  # mode auto is then sequential
    with pytest.raises(fedrax.FedraxError, match=r"mode must be one of .*, not 'parallel'"):
        fedrax.sweep(mixed, TASK, FEDERATION, rounds=1, mode="parallel")  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", slow_cases(["loop", "debug"]))
def test_plans_with_several_programs_are_sequential(plan: str) -> None:
    methods = grid(fedrax.FedAvg, steps=1)[:2]
    for (result,) in fedrax.sweep(methods, TASK, FEDERATION, rounds=1, cohort_size=2, plan=plan, devices=1):
        assert result.plan.startswith(f"{plan}: ") and "one CPU core" in result.plan
    with pytest.raises(fedrax.FedraxError, match=f"one compiled program, and plan {plan} is not: leave the plan out"):
        fedrax.sweep(methods, TASK, FEDERATION, rounds=1, plan=plan, mode="vectorized")


def test_sweep_uses_the_requested_devices() -> None:
    methods = grid(fedrax.FedAvg, steps=1)[:2]
    for devices, printed in ((None, "on 2 devices"), (1, "on 1 device"), (2, "on 2 devices")):
        for (result,) in fedrax.sweep(methods, TASK, FEDERATION, rounds=1, devices=devices, mode="vectorized"):
            assert result.plan.endswith(printed)
            assert len(jax.tree.leaves(result.params)) == 2
    for mode in ("auto", "vectorized", "sequential"):
        with pytest.raises(fedrax.FedraxError, match="99 devices are asked for"):
            fedrax.sweep(methods, TASK, FEDERATION, rounds=1, devices=99, mode=mode)


def test_traces_are_shared_between_numbers_of_devices() -> None:
    """The trace of a client is shared by programs of one and of two devices, including the lengths of its updates."""
    private = [fedrax.privacy.ClientDP(inner=method) for method in grid(fedrax.FedAvg, steps=1)]
    for count in (2, 1):
        (result,), *_ = fedrax.sweep(private[:count], TASK, FEDERATION, rounds=1, cohort_size=3, mode="vectorized")
        assert result.stopped == "rounds"


def test_seed_argument_is_the_seed() -> None:
    """In the settings or by name, unless seeds are given."""
    method = fedrax.FedAvg(local=fedrax.LocalSGD(lr=0.1, steps=1))
    options: dict[str, Any] = {"rounds": 1, "cohort_size": 3}
    expected = fedrax.simulate(method, TASK, FEDERATION, seed=7, **options).events[0]["train_loss"]
    for mode in ("vectorized", "sequential"):
        named = fedrax.sweep([method], TASK, FEDERATION, seed=7, mode=mode, **options)
        set_so = fedrax.sweep([method], TASK, FEDERATION, None, fedrax.Settings(seed=7), mode=mode, **options)
        for ((result,),) in (named, set_so):
            assert result.events[0]["train_loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(fedrax.FedraxError, match="seeds and seed are both given"):
        fedrax.sweep([method], TASK, FEDERATION, seeds=(1, 2), seed=7)
    with pytest.raises(fedrax.FedraxError, match="seeds and seed are both given"):
        fedrax.tune(method, TASK, FEDERATION, {"local.lr": [0.1]}, seeds=(1, 2), seed=7)


NON_DEFAULT_SETTINGS = {
    "rounds": 3,
    "cohort_size": 4,
    "seed": 3,
    "weights": "samples",
    "participation": Poisson(),
    "stragglers": 0.5,
    "eval_every": 1,
    "eval_first": True,
    "eval_train": True,
    "per_client": True,
    "finetune": 1,
    "delta": 1e-3,
    "amplification": "none",
    "plan": "vmap",
    "samples": "resident",
    "states": "resident",
    "devices": 1,
    "chunk": 2,
    "dtype": "float64",
    "precision": "bfloat16",
    "target": 0.01,
    "epsilon_budget": 1e6,
    "checkpoint_every": 1,
}
"""A value other than the default for every field of the settings."""


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", NON_DEFAULT_SETTINGS)
def test_settings_have_the_same_effect_in_sweeps(name: str) -> None:
    """A sweep equals separate runs of ``simulate``, or rejects the setting."""
    assert NON_DEFAULT_SETTINGS.keys() == {field.name for field in dataclasses.fields(fedrax.Settings)}
    methods: list = grid(fedrax.FedAvg, steps=2)[:2]
    if name in ("participation", "delta", "amplification", "epsilon_budget"):
        methods = [fedrax.privacy.ClientDP(inner=method) for method in methods]
    options: dict[str, Any] = {"rounds": 2, "cohort_size": 3} | {name: NON_DEFAULT_SETTINGS[name]}
    for method, (result,) in zip(methods, fedrax.sweep(methods, TASK, FEDERATION, **options), strict=True):
        alone = fedrax.simulate(method, TASK, FEDERATION, **options)
        assert [event.keys() for event in result.events] == [event.keys() for event in alone.events]
        for actual, desired in zip(result.events, alone.events, strict=True):
            for key in actual.keys() - {"seconds"}:
                assert actual[key] == pytest.approx(desired[key], rel=1e-4, abs=1e-6), key
        assert result.stopped == alone.stopped and result.spent == alone.spent
        assert result.params["output"]["weight"].dtype == alone.params["output"]["weight"].dtype


def test_a_search_over_the_models_structure_and_a_learning_rate() -> None:
    """Every point is the run that its task and algorithm give by hand, also where both have settings."""
    model = MLP(hidden=(8,)).build(DATA.train.x.shape[1:], 10)
    base = model.init(jax.random.key(1))
    made = []

    def adapted(rank: int, alpha: float = 4.0) -> fedrax.Task:
        made.append(rank)
        tuned = lora(model, base, DATA.train.x[:1], rank=rank, alpha=alpha, trainable="output/*")
        return fedrax.classification(tuned)

    method = fedrax.FedAvg(local=fedrax.LocalSGD(steps=2))
    grid = {"rank": (1, 4), "local.lr": (0.05, 0.2)}
    run: Any = dict(rounds=2, cohort_size=5)
    found = fedrax.tune(method, adapted, FEDERATION, grid, metric="loss", **run)
    assert made == [1, 4] and [trial.point for trial in found.trials] == [
        {"rank": rank, "local.lr": lr} for rank in (1, 4) for lr in (0.05, 0.2)
    ]
    held = hold_out(FEDERATION, 0.2)
    for trial in found.trials:
        local = dataclasses.replace(method.local, lr=trial.point["local.lr"])
        by_hand = fedrax.simulate(fedrax.FedAvg(local=local), adapted(trial.point["rank"]), held, **run)
        assert trial.value == pytest.approx(by_hand.events[-1]["test_loss"], rel=1e-4)
    assert found.algorithm.local.lr == found.best.point["local.lr"]  # type: ignore[attr-defined]
    a = jax.tree.leaves(found.task.init(jax.random.key(0))["lora"])[0]
    assert a.shape[1] == found.best.point["rank"]
    for function, points, words in (
        (adapted, {"local.lr": (0.1,)}, "the grid has no values for rank, which the function task needs"),
        (lambda rank: rank, {"rank": (1,)}, "the function task must return a Task, not 1"),
        (adapted, {"rank": (1,), "locl.lr": (0.1,)}, "unknown setting of FedAvg in the grid's locl.lr"),
    ):
        with pytest.raises(fedrax.FedraxError, match=words):
            fedrax.tune(method, function, FEDERATION, points, **run)
