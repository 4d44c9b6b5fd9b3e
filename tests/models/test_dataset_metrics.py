"""Metrics of a whole dataset against scikit-learn's, and user-defined tasks."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import f1_score, r2_score, roc_auc_score

import fedrax
from fedrax.experiments import experiment
from fedrax.metrics import METRICS, auc, f1, r2
from fedrax.models import Linear

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 200)
LOGITS = np.round(RNG.normal(size=(200, 4)) + 0.8 * np.eye(4)[LABELS], 1)  # rounded: with ties


def test_of_two_classes() -> None:
    y, score = LABELS > 1, LOGITS[:, 2]
    for outputs in (score, score[:, None], np.stack([np.zeros(200), score], 1)):
        assert auc(outputs, y.astype(int)) == pytest.approx(roc_auc_score(y, score))
        assert f1(outputs, y.astype(int)) == pytest.approx(f1_score(y, score > 0))
    assert auc(score, np.ones(200)) is None


def test_of_several_classes() -> None:
    logits = RNG.normal(size=(200, 4)) + 0.8 * np.eye(4)[LABELS]  # no ties: after a softmax rounding decides them
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert auc(logits, LABELS) == pytest.approx(roc_auc_score(LABELS, probabilities, multi_class="ovr"))
    assert f1(LOGITS, LABELS) == pytest.approx(f1_score(LABELS, LOGITS.argmax(1), average="macro"))


def test_of_targets() -> None:
    y, output = RNG.normal(size=50), RNG.normal(size=50)
    assert r2(output[:, None], y) == pytest.approx(r2_score(y, output))
    assert r2(output, np.ones(50)) is None
    with pytest.raises(fedrax.FedraxError, match="one output per target"):
        r2(LOGITS, LABELS)


def test_metrics_of_all_samples_in_a_run_with_a_user_loss() -> None:
    """The run's numbers are those of its last parameters, computed by hand; odd rows, so that chunks overlap."""
    x = RNG.normal(size=(330, 3)).astype(np.float32)
    y = (x[:, 0] + RNG.normal(size=330) > 0).astype(np.int32)
    federation = fedrax.Federation.from_arrays(x[:200], y[:200], np.arange(200) % 4, test=(x[200:], y[200:]))

    def hinge(outputs, labels):
        return jnp.maximum(0.0, 1 - (2 * labels - 1) * outputs[:, 0])

    def margin(outputs, labels):
        return (2 * labels - 1) * outputs[:, 0]

    task = fedrax.contract.supervised(
        Linear().build((3,), 1), hinge, {"margin": margin}, whole_set={"auc": METRICS["auc"]}
    )
    result = fedrax.simulate(fedrax.FedAvg(), task, federation, rounds=2, cohort_size=2)
    weight, bias = (np.asarray(result.params["output"][name]) for name in ("weight", "bias"))
    outputs = x[200:] @ weight.T + bias
    last = result.events[-1]
    assert last["test_auc"] == pytest.approx(roc_auc_score(y[200:], outputs[:, 0]), abs=1e-6)
    assert last["test_margin"] == pytest.approx(((2 * y[200:] - 1) * outputs[:, 0]).mean(), rel=1e-4)
    assert last["test_loss"] == pytest.approx(np.maximum(0, 1 - (2 * y[200:] - 1) * outputs[:, 0]).mean(), rel=1e-4)
    train, labels = federation.train
    at_clients = fedrax.simulation.client_metrics(result, task, federation)["auc"]
    for found, start, end in zip(at_clients, federation.offsets[:-1], federation.offsets[1:], strict=True):
        assert found == pytest.approx(roc_auc_score(labels[start:end], (train[start:end] @ weight.T + bias)[:, 0]))
    run = {"rounds": 2, "cohort_size": 2}
    tuned = fedrax.tune(fedrax.FedAvg(), task, federation, {"local.lr": (0.01, 0.1)}, metric="auc", **run)
    assert tuned.algorithm.local.lr == tuned.best.point["local.lr"] and "Tuned by validation auc" in repr(tuned)
    with pytest.raises(fedrax.FedraxError, match="did you mean 'local'"):
        fedrax.tune(fedrax.FedAvg(), task, federation, {"locl.lr": (0.01, 0.1)})


def test_the_class_that_f1_is_of() -> None:
    """The one that is named; what it is of is said in any case."""
    y, score = LABELS > 1, LOGITS[:, 2]
    assert f1(score, y.astype(int), positive=0) == pytest.approx(f1_score(y, score > 0, pos_label=False))
    assert f1(LOGITS, LABELS, positive=2) == pytest.approx(f1_score(LABELS == 2, LOGITS.argmax(1) == 2))
    federation = fedrax.Federation.from_arrays(LOGITS, y.astype(int), LABELS, class_names=("case", "control"))
    for options, value, says in (
        ({}, f1(score, y), "of the class 'control'"),
        ({"positive": "case"}, f1(score, y, positive=0), "of the class 'case'"),
    ):
        spec = experiment.from_table({"task": {"name": "binary", "metrics": ["f1"], **options}}, "made")
        task = experiment.make_task(spec, federation)
        assert task.whole_set["f1"](score, y) == value and f"f1 is {says} (task.positive)" in task.notes
    for options, says in (
        ({"metrics": ["f1"], "positive": "cse"}, "did you mean 'case'"),
        ({"positive": "case"}, "no effect without the metric f1"),
        ({"metrics": ["r2"]}, "are classes: r2 is not a metric of classes"),
    ):
        with pytest.raises(fedrax.FedraxError, match=says):
            experiment.make_task(experiment.from_table({"task": {"name": "auto", **options}}, "made"), federation)
    numbers = fedrax.Federation.from_arrays(LOGITS, score, LABELS)
    for options, says in (
        ({"metrics": ["f1"]}, "are numbers: f1 is not a metric of numbers"),
        ({"metrics": ["r2"], "positive": "case"}, "positive names a class"),
    ):
        with pytest.raises(fedrax.FedraxError, match=says):
            experiment.make_task(experiment.from_table({"task": {"name": "auto", **options}}, "made"), numbers)


def test_a_metric_that_is_no_number_raises_a_clear_error() -> None:
    federation = fedrax.Federation.from_arrays(LOGITS, LABELS, LABELS)
    model = Linear().build((LOGITS.shape[1],), LOGITS.shape[1])
    made = fedrax.classification(model)
    task = dataclasses.replace(made, whole_set={"confusion": lambda outputs, y: np.eye(3)})
    with pytest.raises(fedrax.FedraxError, match=r"'confusion' of a whole set returns an array of shape \(3, 3\)"):
        fedrax.simulate(fedrax.FedAvg(), task, federation, rounds=1, cohort_size=2, eval_train=True)
