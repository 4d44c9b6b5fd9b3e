"""Evaluation before the first round, alone or with the rounds that follow."""

from pathlib import Path

import numpy as np
import pytest

import fedrax
from fedrax import FedAvg
from tests.reported.problems import FEDERATION, LOCAL, START, TASK, X, Y, loss, run
from tests.simulation.problems import without_times


def test_the_initial_parameters_are_evaluated_in_round_0(tmp_path: Path):
    method, options = FedAvg(local=LOCAL), {"rounds": 4, "eval_every": 2}
    seen: list[int] = []
    first = run(method, **options, eval_first=True, callbacks=[lambda snapshot: seen.append(snapshot.event["round"])])
    none = {"clients": 0, "bytes_down": 0, "bytes_up": 0, "gradients": 0}
    assert first.events[0].items() >= ({"round": 0} | none).items() and "train_loss" not in first.events[0]
    assert first.events[0]["test_loss"] == pytest.approx(loss(START, X[10:], Y[10:]).mean(), rel=1e-12)
    assert seen == [round for round, _ in first.metric("test_loss")] == [0, 2, 4]
    assert without_times(first.events[1:]) == without_times(run(method, **options).events)
    assert "Result: 4 rounds" in repr(first)
    part = options | {"rounds": 2, "directory": tmp_path / "a"}
    run(method, **part, eval_first=True)
    resumed = run(method, **part | {"rounds": 4}, eval_first=True, resume=True)
    assert without_times(resumed.events) == without_times(first.events)
    assert without_times(fedrax.simulation.read_events(tmp_path / "a")) == without_times(first.events)
    together, apart = (
        fedrax.sweep(
            [method], TASK, FEDERATION, [0, 1], mode=mode, rounds=2, cohort_size=2, eval_every=1, eval_first=True
        )
        for mode in ("vectorized", "sequential")
    )
    for one, other in zip(together[0], apart[0], strict=True):
        assert [e["round"] for e in one.events] == [e["round"] for e in other.events] == [0, 1, 2]
        assert one.events[0]["test_loss"] == pytest.approx(other.events[0]["test_loss"])


def test_zero_rounds_only_evaluate(tmp_path: Path):
    method, options = FedAvg(local=LOCAL), {"eval_every": 2}
    alone = run(method, rounds=0, directory=tmp_path, **options)
    assert [event["round"] for event in alone.events] == [0] and alone.stopped == "rounds"
    np.testing.assert_array_equal(alone.params, START)
    assert alone.events[0]["test_loss"] == pytest.approx(loss(START, X[10:], Y[10:]).mean(), rel=1e-12)
    more = run(method, rounds=2, directory=tmp_path, resume=True, **options)
    assert without_times(more.events) == without_times(run(method, rounds=2, eval_first=True, **options).events)
