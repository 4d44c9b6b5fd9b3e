"""Grids and seeds in one program against the same runs one after another."""

import importlib

import numpy as np
import pytest

import fedrax
from fedrax.data import Federation, load
from fedrax.data.partition import Shards
from fedrax.models import Logistic
from tests.thinning import thinned

DATA = load("digits")
FEDERATION = Federation.from_dataset(DATA, Shards(clients=20), seed=0)
TASK = fedrax.classification(Logistic().build(DATA.train.x.shape[1:], 10))
STEP_SIZES = (0.02, 0.1, 0.5)


def grid(cls: type, **local: object) -> list:
    return [cls(local=fedrax.LocalSGD(lr=lr, **local)) for lr in STEP_SIZES]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "algorithms",
    thinned([grid(fedrax.Scaffold, epochs=1), grid(fedrax.FedAvg, epochs=1), grid(fedrax.LoSAC, steps=3, blocks=3)]),
    ids=["FedAvg", "Scaffold", "LoSAC"],
)
def test_together_equals_in_turn(algorithms: list) -> None:
    settings = fedrax.Settings(rounds=5, cohort_size=6, eval_every=2)
    together = fedrax.sweep(algorithms, TASK, FEDERATION, (0, 3), settings, mode="together")
    in_turn = fedrax.sweep(algorithms, TASK, FEDERATION, (0, 3), settings, mode="in turn")
    assert [len(row) for row in together] == [2, 2, 2]
    for row, other in zip(together, in_turn, strict=True):
        for one, reference in zip(row, other, strict=True):
            assert one.plan.startswith("together: 3 x 2 runs")
            assert [event.keys() for event in one.events] == [event.keys() for event in reference.events]
            for mine, theirs in zip(one.events, reference.events, strict=True):
                for key in mine.keys() - {"seconds"}:
                    assert mine[key] == pytest.approx(theirs[key], rel=1e-4), key
            np.testing.assert_allclose(
                one.params["output"]["weight"], reference.params["output"]["weight"], rtol=1e-4, atol=1e-6
            )
    weights = [np.asarray(row[0].params["output"]["weight"]) for row in together]
    assert not np.allclose(weights[0], weights[1])
    assert not np.allclose(together[0][0].params["output"]["weight"], together[0][1].params["output"]["weight"])


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["together", "in turn"])
def test_a_diverging_run_leaves_the_others_alone(mode: str) -> None:
    # weight decay times step size beyond 2: the weights grow by 10^8 a step until they overflow
    wild = [fedrax.FedAvg(local=fedrax.LocalSGD(lr=lr, weight_decay=1.0)) for lr in (0.1, 1e8)]
    (calm, *_), (lost, *_) = fedrax.sweep(wild, TASK, FEDERATION, rounds=4, eval_every=2, mode=mode)  # type: ignore[arg-type]
    assert calm.stopped == "rounds"
    assert len(calm.events) == 4
    assert np.isfinite(calm.events[-1]["test_loss"])
    assert lost.stopped == "diverged"
    assert len(lost.events) < 4


def test_all_blocks_of_rounds_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    module, traced = importlib.import_module("fedrax.simulation.sweep"), []
    block = module.run_block
    monkeypatch.setattr(module, "run_block", lambda *a, **k: [traced.append(1), block(*a, **k)][1])
    fedrax.sweep(grid(fedrax.FedAvg, steps=1)[:2], TASK, FEDERATION, rounds=3, eval_every=1, mode="together")
    assert len(traced) == 1


def test_what_cannot_run_together_is_refused() -> None:
    mixed = [fedrax.FedAvg(), fedrax.FedAvg(local=fedrax.LocalSGD(steps=3))]
    with pytest.raises(fedrax.FedraxError, match="differ in float hyper-parameters only"):
        fedrax.sweep(mixed, TASK, FEDERATION, rounds=2, mode="together")
    with pytest.raises(fedrax.FedraxError, match="at least one algorithm"):
        fedrax.sweep([], TASK, FEDERATION)
    with pytest.raises(fedrax.FedraxError, match="cannot stop at a target"):
        fedrax.sweep(mixed[:1], TASK, FEDERATION, target=0.5, mode="together")
    assert len(fedrax.sweep(mixed, TASK, FEDERATION, rounds=1)) == 2  # auto: in turn
