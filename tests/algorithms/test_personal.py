"""pFedMe's personal models fit clients with contradicting labels better than the global model."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from fedrax import (
    FedAvg,
    Federation,
    FedraxError,
    FedraxWarning,
    LocalSGD,
    Result,
    classification,
    simulate,
    sweep,
    tune,
)
from fedrax.algorithms import PFedMe
from fedrax.config.hyperparameters import check
from fedrax.contract import Batch
from fedrax.data import hold_out
from fedrax.models import Logistic
from fedrax.simulation import Script, client_evaluation, client_metrics

CLIENTS, CLASSES = 6, 3
LOCAL = LocalSGD(lr=0.02, epochs=2, batch_size=10)


def federation() -> Federation:
    """Half of the clients shift every label by one class."""
    rng = np.random.default_rng(4)
    x, weight = rng.normal(size=(600, 8)).astype(np.float32), rng.normal(size=(8, CLASSES))
    owner = np.arange(len(x)) % CLIENTS
    y = ((x @ weight).argmax(1) + owner % 2) % CLASSES
    train, test = slice(0, 360), slice(360, None)
    return Federation.from_arrays(
        x[train], y[train], owner[train], test=(x[test], y[test]), test_client_ids=owner[test], num_classes=CLASSES
    )


FEDERATION = federation()
TASK = classification(Logistic().build((8,), CLASSES))


def run(algorithm: PFedMe | FedAvg, **settings: Any) -> Result:
    """Run with half of the clients in each round."""
    return simulate(algorithm, TASK, FEDERATION, **({"rounds": 20, "cohort_size": 3, "eval_every": 20} | settings))


@pytest.mark.parametrize("restart", [False, True])
def test_personal_models_beat_the_global_model_on_contradicting_clients(restart: bool):
    """A single model is right on about half of the labels at most. With lambda = 0.1 the personal models may move to
    what their 60 samples require.
    """
    local = LocalSGD(lr=0.5, steps=4, batch_size="full")
    result = run(PFedMe(local, lam=0.1, inner_lr=0.3, inner_steps=20, restart=restart))
    last = result.events[-1]
    assert last["test_accuracy"] < 0.6
    assert last["test_personal_accuracy"] > last["test_accuracy"] + 0.2
    for client in range(CLIENTS):
        own = result.client_state(client).personal
        differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), own, result.params)
        assert max(jax.tree.leaves(differences)) > 0.1


def test_personal_evaluation_pads_to_the_largest_client_only(monkeypatch: pytest.MonkeyPatch):
    """More padding would dominate the evaluation of many clients with few samples."""
    rows, evaluate = set(), client_evaluation.evaluate_samples
    monkeypatch.setattr(
        client_evaluation, "evaluate_samples", lambda t, p, s: [rows.add(len(s.y)), evaluate(t, p, s)][1]
    )
    run(PFedMe(local=LOCAL, lam=1.0), rounds=1)
    assert FEDERATION.test_offsets is not None
    assert rows == {int(np.diff(FEDERATION.test_offsets).max())}


def test_personal_model_of_a_client_that_never_took_part_is_the_initial_one():
    result = run(PFedMe(LOCAL), rounds=2, script=Script(cohorts=[[0, 1, 2]] * 2))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(result.client_state(5)))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(result.client_state(0)))


@pytest.mark.parametrize("mode", ["vectorized", "sequential"])
def test_client_metrics_contain_the_metrics_of_each_personal_model(mode: Any):
    method, options = PFedMe(LOCAL), {"rounds": 4, "cohort_size": 3, "finetune": 1, "per_client": True}
    ((result,), _) = sweep([method, PFedMe(LOCAL, lam=5.0)], TASK, FEDERATION, mode=mode, eval_every=4, **options)
    table, last = client_metrics(result, TASK, FEDERATION), result.events[-1]
    for kind in ("personal", "finetuned"):
        worst = table[f"{kind}_accuracy"].min()
        assert last[f"test_{kind}_accuracy_worst_client"] == pytest.approx(worst)
    x, y = FEDERATION.test
    for client in range(CLIENTS):
        start, end = FEDERATION.test_offsets[client : client + 2]
        own = method.personal(result.params, result.client_state(client))
        hits = TASK.metrics["accuracy"](own, Batch(x[start:end], y[start:end]))
        assert table["personal_accuracy"][client] == pytest.approx(float(hits.mean()))
    other = Federation.from_arrays(*FEDERATION.train, np.arange(360) % 4, num_classes=CLASSES)
    with pytest.warns(FedraxWarning, match="of each client is not known"):
        assert "personal_accuracy" not in client_metrics(result, TASK, other).columns


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("inner_steps", [1, 4])
def test_gradients_of_inner_steps_are_counted(inner_steps: int):
    counts = [run(m, rounds=2).events[-1]["gradients"] for m in (PFedMe(LOCAL, inner_steps=inner_steps), FedAvg(LOCAL))]
    assert counts[0] == inner_steps * counts[1]


@pytest.mark.parametrize(("lam", "warned"), [(49.0, False), (50.0, True), (80.0, True)])
def test_steps_that_replace_w_are_warned_of(lam: float, warned: bool):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(PFedMe(LOCAL, lam=lam))
    assert [w.category for w in caught] == [FedraxWarning] * warned
    product = f"{LOCAL.lr:g} * {lam:g} = {LOCAL.lr * lam:g}: with 1 every step replaces w"
    assert all(product in str(w.message) for w in caught)


def test_step_of_one_over_lambda_makes_w_the_personal_model():
    """With eta lambda = 1, x after the last step of the only client is its theta."""
    local = LocalSGD(lr=0.5, steps=3, batch_size=10)
    with pytest.warns(UserWarning, match="replaces w"):
        result = run(PFedMe(local, lam=2.0, inner_lr=0.1), rounds=1, cohort_size=1, script=Script(cohorts=[[4]]))
    own = result.client_state(4).personal
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), own, result.params)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("room", "rows"), [(1 << 20, 229), (4000, 169), (1, 129)])
def test_streamed_samples_are_evaluated_in_groups_of_clients(room: int, rows: int, monkeypatch: pytest.MonkeyPatch):
    """Each of two devices gets four, two or one of the seven clients at a time; the metrics are equal."""
    monkeypatch.setattr(client_evaluation, "_AT_ONCE_BYTES", room)
    x, y = FEDERATION.train
    offsets = np.array([0, 3, 120, 130, 131, 260, 300, 360])
    own = Federation.from_arrays(x, y, offsets=offsets, num_classes=CLASSES, shuffle=False)
    settings: dict[str, Any] = {"rounds": 2, "cohort_size": 3, "eval_every": 1, "per_client": True}
    method, most, placed = PFedMe(LOCAL), [], client_evaluation.PersonalEvaluator._placed

    def record_rows(self: client_evaluation.PersonalEvaluator, clients: np.ndarray) -> Any:
        starts, samples = placed(self, clients)
        most.append(len(samples.y) // self.engine.devices)
        return starts, samples

    expected = simulate(method, TASK, own, **settings).events
    monkeypatch.setattr(client_evaluation.PersonalEvaluator, "_placed", record_rows)
    actual = simulate(method, TASK, own, samples="streamed", **settings).events
    names = [name for name in expected[-1] if "personal" in name]
    assert len(names) > 8 and [[event[name] for name in names] for event in actual] == [
        [event[name] for name in names] for event in expected
    ]
    assert set(most) == {rows}


def test_a_search_selects_by_personal_models():
    """Of a method without any, by the global model."""
    held_out = hold_out(FEDERATION, 0.25)
    grid, options = {"local.lr": [1e-6, 0.02]}, {"rounds": 3, "cohort_size": CLIENTS}
    for method, key in ((PFedMe(LOCAL), "test_personal_accuracy"), (FedAvg(LOCAL), "test_accuracy")):
        found = tune(method, TASK, FEDERATION, grid, metric="personal_accuracy", validation=0.25, **options)
        runs = [
            simulate(replace(method, local=replace(LOCAL, lr=lr)), TASK, held_out, **options) for lr in (1e-6, 0.02)
        ]
        assert [trial.value for trial in found.trials] == pytest.approx([run.events[-1][key] for run in runs])
    with pytest.raises(FedraxError, match="did you mean 'personal_accuracy'"):
        tune(PFedMe(LOCAL), TASK, FEDERATION, grid, metric="personal_acuracy", **options)
