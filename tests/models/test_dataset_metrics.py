"""Metrics of a whole dataset against scikit-learn, and user-defined tasks."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk
from scipy.special import softmax
from sklearn.utils.class_weight import compute_sample_weight

import fedrax
from fedrax.contract import Batch, Model, binary_classification
from fedrax.experiments import experiment
from fedrax.metrics import METRICS, accuracy_per_class, auc, f1, find_metrics, precision, r2, recall
from fedrax.models import Linear
from fedrax.personalization import Ditto
from fedrax.report.comparison_table import cells
from fedrax.report.runs import MethodRuns, SavedRun, summarize
from fedrax.simulation import client_metrics, read_events

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 200)
LOGITS = np.round(RNG.normal(size=(200, 4)) + 0.8 * np.eye(4)[LABELS], 1)  # rounded, to have ties


def expected(y: np.ndarray, probabilities: np.ndarray) -> dict[str, Any]:
    """Values of scikit-learn by the names of ``METRICS``."""
    predicted, two = probabilities.argmax(1), probabilities.shape[1] == 2
    scores = {"precision": sk.precision_score, "recall": sk.recall_score, "f1": sk.f1_score}
    default = {"average": "binary" if two else "macro", "zero_division": 0}
    auc = sk.roc_auc_score(y, probabilities[:, 1] if two else probabilities, multi_class="ovr")
    per_class = sk.recall_score(y, predicted, average=None)
    return {
        "auc": auc,
        "roc_auc": auc,
        **{name: function(y, predicted, **default) for name, function in scores.items()},
        **{
            f"{name}_{average}": function(y, predicted, average=average, zero_division=0)
            for name, function in scores.items()
            for average in ("macro", "micro", "weighted")
        },
        "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
        "accuracy_per_class": {str(label): share for label, share in enumerate(per_class)},
        "log_loss": sk.log_loss(y, probabilities),
        "perplexity": np.exp(sk.log_loss(y, probabilities)),
    }


def regression_metrics(y: np.ndarray, output: np.ndarray) -> dict[str, float]:
    errors = {"mae": sk.mean_absolute_error(y, output), "mse": sk.mean_squared_error(y, output)}
    named = {"mean_absolute_error": errors["mae"], "mean_squared_error": errors["mse"], "r2": sk.r2_score(y, output)}
    root = sk.root_mean_squared_error(y, output)
    return errors | named | {"rmse": root, "root_mean_squared_error": root}


def test_values_agree_with_scikit_learn() -> None:
    """Two classes with one logit and with two, several classes, and several of which one is never predicted."""
    several = (
        RNG.normal(size=(200, 4)) + 0.8 * np.eye(4)[LABELS]
    )  # no ties, because rounding of a softmax would decide them
    two, binary = several[:, :2], (LABELS > 1).astype(int)
    cases = [
        (two[:, 1] - two[:, 0], binary, two),
        ((two[:, 1] - two[:, 0])[:, None], binary, two),
        (two, binary, two),
        (several, LABELS, several),
        (several - [0, 0, 0, 9], LABELS, several - [0, 0, 0, 9]),
    ]
    for outputs, y, logits in cases:
        desired = expected(y, softmax(logits, 1))
        for name, value in desired.items():
            assert METRICS[name](outputs, y) == pytest.approx(value, rel=1e-5), name
    y = RNG.normal(size=(50, 2))
    output = RNG.normal(size=(50, 2))
    for targets, outputs in ((y, output), (y[:, 0], output[:, :1])):
        numbers = regression_metrics(targets.ravel(), outputs.ravel())
        numbers["r2"] = METRICS["r2"](outputs, targets)
        assert {name: METRICS[name](outputs, targets) for name in numbers} == pytest.approx(numbers, rel=1e-5)
    assert set(METRICS) == {*desired, *numbers}


def test_top_k_accuracy_treats_ties_as_scikit_learn() -> None:
    for k in (1, 2, 3):
        (metric,) = find_metrics([f"top_{k}_accuracy"], "classes")[0].values()
        assert metric(LOGITS, LABELS) == pytest.approx(sk.top_k_accuracy_score(LABELS, LOGITS, k=k))
    with pytest.raises(fedrax.FedraxError, match="top_4_accuracy needs more than 4 outputs per label"):
        find_metrics(["top_4_accuracy"], "classes")[0]["top_4_accuracy"](LOGITS, LABELS)


def test_ties_count_half_in_auc() -> None:
    y, score = LABELS > 1, LOGITS[:, 2]
    assert auc(score, y.astype(int)) == pytest.approx(sk.roc_auc_score(y, score))


def test_metrics_of_real_targets() -> None:
    y, output = RNG.normal(size=50), RNG.normal(size=50)
    assert r2(output[:, None], y) == pytest.approx(sk.r2_score(y, output))
    with pytest.raises(fedrax.FedraxError, match="one output per target"):
        r2(LOGITS, LABELS)


def test_undefined_metrics_are_none() -> None:
    score, ones, zeros = LOGITS[:, 2], np.ones(200, int), np.zeros(200, int)
    assert auc(score, ones) is None and auc(LOGITS, ones) is None
    assert precision(-np.ones(200), ones) is None and precision(LOGITS, LABELS, positive=9) is None
    assert recall(score, zeros) is None and f1(-np.ones(200), zeros) is None
    assert r2(score, ones) is None and METRICS["perplexity"](np.full((2, 2), [0, 1e4]), np.zeros(2, int)) is None
    assert accuracy_per_class(LOGITS, np.minimum(LABELS, 2))["3"] is None


def test_dataset_metrics_in_a_run_with_a_user_defined_loss() -> None:
    """Values are those of the final parameters in NumPy; the number of rows is odd, so that chunks are padded."""
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
    assert last["test_auc"] == pytest.approx(sk.roc_auc_score(y[200:], outputs[:, 0]), abs=1e-6)
    assert last["test_margin"] == pytest.approx(((2 * y[200:] - 1) * outputs[:, 0]).mean(), rel=1e-4)
    assert last["test_loss"] == pytest.approx(np.maximum(0, 1 - (2 * y[200:] - 1) * outputs[:, 0]).mean(), rel=1e-4)
    train, labels = federation.train
    at_clients = fedrax.simulation.client_metrics(result, task, federation)["auc"]
    for found, start, end in zip(at_clients, federation.offsets[:-1], federation.offsets[1:], strict=True):
        assert found == pytest.approx(sk.roc_auc_score(labels[start:end], (train[start:end] @ weight.T + bias)[:, 0]))
    run = {"rounds": 2, "cohort_size": 2}
    tuned = fedrax.tune(fedrax.FedAvg(), task, federation, {"local.lr": (0.01, 0.1)}, metric="auc", **run)
    assert tuned.algorithm.local.lr == tuned.best.point["local.lr"] and "Tuned by validation auc" in repr(tuned)
    with pytest.raises(fedrax.FedraxError, match="did you mean 'local'"):
        fedrax.tune(fedrax.FedAvg(), task, federation, {"locl.lr": (0.01, 0.1)})


def test_positive_class_of_f1() -> None:
    """The given class; messages and names mention it."""
    y, score = LABELS > 1, LOGITS[:, 2]
    assert f1(score, y.astype(int), positive=0) == pytest.approx(sk.f1_score(y, score > 0, pos_label=False))
    assert f1(LOGITS, LABELS, positive=2) == pytest.approx(sk.f1_score(LABELS == 2, LOGITS.argmax(1) == 2))
    federation = fedrax.Federation.from_arrays(LOGITS, y.astype(int), LABELS, class_names=("case", "control"))
    for options, value, message in (
        ({}, f1(score, y), "of the class 'control'"),
        ({"positive": "case"}, f1(score, y, positive=0), "of the class 'case'"),
    ):
        spec = experiment.from_table({"task": {"name": "binary", "metrics": ["f1"], **options}}, "made")
        task = experiment.make_task(spec, federation)
        assert task.whole_set["f1"](score, y) == value and task.notes[0].startswith(f"f1: {message}; positive=")
    for options, message in (
        ({"metrics": ["f1"], "positive": "cse"}, "did you mean 'case'"),
        ({"positive": "case"}, "no effect without the metric f1"),
        ({"metrics": ["r2"]}, "r2 is not a metric of classes"),
    ):
        with pytest.raises(fedrax.FedraxError, match=message):
            experiment.make_task(experiment.from_table({"task": {"name": "auto", **options}}, "made"), federation)
    numbers = fedrax.Federation.from_arrays(LOGITS, score, LABELS)
    for options, message in (
        ({"metrics": ["f1"]}, "f1 is not a metric of numbers"),
        ({"metrics": ["r2"], "positive": "case"}, "positive applies to class labels"),
    ):
        with pytest.raises(fedrax.FedraxError, match=message):
            experiment.make_task(experiment.from_table({"task": {"name": "auto", **options}}, "made"), numbers)


def test_metric_without_a_number_raises_a_clear_error() -> None:
    federation = fedrax.Federation.from_arrays(LOGITS, LABELS, LABELS)
    model = Linear().build((LOGITS.shape[1],), LOGITS.shape[1])
    made = fedrax.classification(model)
    task = dataclasses.replace(made, whole_set={"confusion": lambda outputs, y: np.eye(3)})
    with pytest.raises(fedrax.FedraxError, match=r"'confusion' of a whole set returns an array of shape \(3, 3\)"):
        fedrax.simulate(fedrax.FedAvg(), task, federation, rounds=1, cohort_size=2, eval_train=True)


OWNER = np.repeat([0, 1, 2], [5, 3, 4])
X = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)
Y = np.array([0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0])  # client 1 has samples of one class
RUN: dict[str, Any] = {"rounds": 2, "cohort_size": 3, "eval_every": 1}


def with_client_tests(test_y: np.ndarray) -> fedrax.Federation:
    """Three clients whose test samples are their training samples with other labels."""
    return fedrax.Federation.from_arrays(X, Y, OWNER, test=(X, test_y), test_client_ids=OWNER, shuffle=False)


def test_undefined_metric_of_a_run_is_null_with_its_reason(tmp_path: Path) -> None:
    federation = with_client_tests(np.ones(12, int))
    task = binary_classification(Linear().build((3,), 1), metrics=["auc", "recall", "accuracy_per_class"])
    with pytest.warns(fedrax.FedraxWarning) as printed:
        result = fedrax.simulate(fedrax.FedAvg(), task, federation, directory=tmp_path, **RUN)
    assert sorted(str(one.message) for one in printed) == [  # once for two evaluations
        "test_accuracy_per_class_0 is undefined (null): no label is of the class",
        "test_auc is undefined (null): all labels are of one class",
    ]
    last = result.events[-1]
    assert last["test_auc"] is None and last["test_accuracy_per_class_0"] is None
    assert last["test_recall"] == last["test_accuracy_per_class_1"] == last["test_accuracy"]
    with pytest.warns(fedrax.FedraxWarning, match="test_auc is undefined"):
        assert result.metric("test_auc") == []
    assert "test auc: undefined" in repr(result) and "recall: of class 1" in repr(result)
    assert result.to_polars()["test_auc"].is_null().all()
    assert read_events(tmp_path) == result.events
    row = summarize(MethodRuns("m", [SavedRun(tmp_path, {}, result.events, "x")]), None)
    table = cells([row], None)
    assert table.rows[0][table.headings.index("test auc")][0] == "undefined"
    assert table.rows[0][table.headings.index("test recall")][0] == f"{last['test_recall']:.4f}"
    with pytest.warns(fedrax.FedraxWarning):
        more = fedrax.simulate(
            fedrax.FedAvg(), task, federation, directory=tmp_path, resume=True, **RUN | {"rounds": 3}
        )
    assert [event["test_auc"] for event in more.events] == [None] * 3
    with pytest.raises(fedrax.FedraxError, match=r"auc is undefined .*, and it is the metric of the search"):
        fedrax.tune(
            fedrax.FedAvg(), task, with_client_tests(np.ones(12, int)), {"local.lr": (0.1,)}, metric="auc", **RUN
        )


def test_undefined_metrics_of_clients_and_personal_models_are_null_with_the_reason() -> None:
    federation = with_client_tests(Y)
    task = binary_classification(Linear().build((3,), 1), metrics=["auc", "log_loss"])
    with pytest.warns(fedrax.FedraxWarning) as printed:
        result = fedrax.simulate(Ditto(fedrax.FedAvg()), task, federation, per_client=True, **RUN)
    reason = "is undefined (null) for 1 of 3 clients: all labels are of one class"
    assert {str(one.message) for one in printed} == {f"auc {reason}", f"personal_auc {reason}"}
    outputs = {client: result.predict(X, client=client)[:, 0] for client in range(3)}
    own = np.concatenate([outputs[client][client == OWNER] for client in range(3)])
    last = result.events[-1]
    assert last["test_personal_auc"] == pytest.approx(sk.roc_auc_score(Y, own))
    assert last["test_personal_log_loss"] == pytest.approx(sk.log_loss(Y, 1 / (1 + np.exp(-own))), rel=1e-5)
    with pytest.warns(fedrax.FedraxWarning, match="for 1 of 3 clients"):
        table = client_metrics(result, task, federation)
    areas = [sk.roc_auc_score(Y[c == OWNER], outputs[c][c == OWNER]) for c in (0, 2)]
    assert table["personal_auc"].to_list() == [pytest.approx(areas[0]), None, pytest.approx(areas[1])]
    assert table["auc"][1] is None and table["log_loss"].null_count() == 0
    assert last["test_personal_auc_worst_client"] == pytest.approx(min(areas))
    assert last["test_personal_auc_client_mean"] == pytest.approx(np.mean(areas))
    worst = table["log_loss"].arg_max()
    assert worst is not None and last["test_log_loss_worst_client"] == pytest.approx(table["log_loss"][worst])


def test_undefined_user_defined_metric_is_null() -> None:
    task = dataclasses.replace(
        fedrax.classification(Linear().build((3,), 2)), whole_set={"share": lambda outputs, y: {"a": None, "b": 0.5}}
    )
    with pytest.warns(fedrax.FedraxWarning, match="test_share_a is undefined .*: its function returned None"):
        last = fedrax.simulate(fedrax.FedAvg(), task, with_client_tests(Y), **RUN).events[-1]
    assert last["test_share_a"] is None and last["test_share_b"] == 0.5


def test_perplexity_is_over_all_labels_except_padding() -> None:
    """Sequences have 1 to 4 labels, so that the mean over labels is not the mean over samples."""
    labels = np.where(np.arange(4) <= np.arange(12)[:, None] % 4, np.arange(48).reshape(12, 4) % 3, -1)
    weights = np.random.default_rng(2).normal(size=(3, 12)).astype(np.float32)
    model = Model(lambda key: jnp.asarray(weights), lambda w, x, key=None: (x @ w).reshape(len(x), 4, 3))
    task = fedrax.classification(model, padding=-1, metrics=["perplexity", "log_loss", "top_2_accuracy", "f1_macro"])
    still = fedrax.FedAvg(local=fedrax.LocalSGD(lr=1e-20))
    federation = fedrax.Federation.from_arrays(
        X, labels, OWNER, test=(X, labels), test_client_ids=OWNER, shuffle=False, num_classes=3, padding=-1
    )
    last = fedrax.simulate(still, task, federation, per_client=True, **RUN).events[-1]
    logits, real = (X @ weights).reshape(12, 4, 3), labels >= 0
    losses = np.where(
        real, -np.log(np.take_along_axis(softmax(logits, 2), labels[..., None] * real[..., None], 2))[..., 0], 0
    )
    assert last["test_perplexity"] == pytest.approx(np.exp(losses.sum() / real.sum()), rel=1e-5)
    assert last["test_log_loss"] == pytest.approx((losses.sum(1) / real.sum(1)).mean(), rel=1e-5)
    assert last["test_log_loss"] == pytest.approx(last["test_loss"], rel=1e-5)
    assert last["test_f1_macro"] == pytest.approx(sk.f1_score(labels[real], logits.argmax(2)[real], average="macro"))
    hits = (np.argsort(-logits, 2)[..., :2] == labels[..., None]).any(2)
    assert last["test_top_2_accuracy"] == pytest.approx(((hits & real).sum(1) / real.sum(1)).mean())
    worst = max(np.exp(losses[c == OWNER].sum() / real[c == OWNER].sum()) for c in range(3))
    assert last["test_perplexity_worst_client"] == pytest.approx(worst, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: fedrax.classification(model, metrics="auc"), "metrics must be a list, not 'auc': put brackets"),
        (lambda model: fedrax.classification(model, metrics=["auk"]), "unknown metric 'auk'; did you mean 'auc'"),
        (lambda model: fedrax.classification(model, metrics=[3]), "unknown metric"),
        (lambda model: fedrax.classification(model, metrics=["r2"]), "r2 is not a metric of classes"),
        (lambda model: fedrax.regression(model, metrics=["accuracy"]), "accuracy is not a metric of numbers"),
        (
            lambda model: fedrax.contract.supervised(model, lambda o, y: y, "auc"),
            "metrics must be a dictionary or a list or None, not",
        ),
        (lambda model: fedrax.contract.margin(model, metrics=["log_loss"]), "log_loss needs probabilities"),
        (lambda model: fedrax.classification(model, metrics=["f1"], positive="a"), "give class_names"),
        (
            lambda model: fedrax.classification(model, metrics=["f1"], positive=1.5),
            "positive must be a whole number or a string or None",
        ),
        (lambda model: fedrax.classification(model, class_weights=[1, -1]), "class_weights must be a list"),
        (lambda model: fedrax.classification(model, class_weights={"a": 1}), "class_weights must be a list"),
        (lambda model: binary_classification(model, class_weights=[1, 2, 3]), "3 weights for 2 classes"),
    ],
)
def test_invalid_metrics_and_weights_are_explained(make: Any, message: str) -> None:
    with pytest.raises(fedrax.FedraxError, match=message):
        make(Linear().build((3,), 3))


def test_class_and_sample_weights_apply_to_losses_only() -> None:
    """Training, evaluation and gradients against NumPy; metrics are unweighted."""
    weights, w = np.array([1.0, 5.0, 0.0]), RNG.normal(size=(3, 3)).astype(np.float32)
    model = Model(lambda key: jnp.asarray(w), lambda w, x, key=None: x @ w)
    batch = Batch(X, Y + (X[:, 1] > 0.5))
    losses = -np.log(softmax(X @ w, 1)[np.arange(12), batch.y])
    samples = np.abs(X[:, 0])
    whole = fedrax.Federation.from_arrays(X, batch.y, np.zeros(12, int), test=batch, num_classes=3)
    of_sample = lambda x, y: jnp.abs(x[:, 0])  # noqa: E731
    for options, factor in (
        ({"class_weights": weights}, weights[batch.y]),
        ({"sample_weights": of_sample}, samples),
        ({"class_weights": list(weights), "sample_weights": of_sample}, weights[batch.y] * samples),
    ):
        task = fedrax.classification(model, metrics=["log_loss"], **options)
        params = task.init(jax.random.key(0))
        for found in (task.loss(params, batch, jax.random.key(0)), task.evaluation_loss(params, batch)):
            np.testing.assert_allclose(found, losses * factor, rtol=1e-4)
        np.testing.assert_allclose(task.metrics["log_loss"](params, batch), losses, rtol=1e-4)
        result = fedrax.simulate(
            fedrax.FedAvg(local=fedrax.LocalSGD(lr=1.0, steps=1, batch_size="full")),
            task,
            whole,
            rounds=1,
            cohort_size=1,
        )
        gradient = X.T @ ((softmax(X @ w, 1) - np.eye(3)[batch.y]) * factor[:, None]) / 12
        np.testing.assert_allclose(result.params, w - gradient, rtol=1e-4, atol=1e-5)
    with pytest.raises(fedrax.FedraxError, match="2 weights for a model with 3 outputs"):
        fedrax.classification(model, class_weights=[1, 2]).loss(w, batch, jax.random.key(0))
    with pytest.raises(fedrax.FedraxError, match="one weight for each sample"):
        fedrax.classification(model, sample_weights=lambda x, y: x).loss(w, batch, jax.random.key(0))


def test_balanced_class_weights_agree_with_scikit_learn() -> None:
    federation = fedrax.Federation.from_arrays(LOGITS, np.minimum(LABELS, 2), LABELS)
    spec = experiment.from_table({"task": {"name": "auto", "class_weights": "balanced"}}, "made")
    task = experiment.make_task(spec, federation)
    batch = Batch(*federation.train)
    params = task.init(jax.random.key(0))
    plain = experiment.make_task(experiment.from_table({}, "made"), federation)
    expected = compute_sample_weight("balanced", batch.y)
    found = task.evaluation_loss(params, batch) / plain.evaluation_loss(params, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    given = experiment.from_table({"task": {"name": "auto", "class_weights": [1, 2, 0.5], "metrics": ["mae"]}}, "made")
    assert experiment.from_table(experiment.to_table(given), "again") == given
    with pytest.raises(fedrax.FedraxError, match="mae is not a metric of classes"):
        experiment.make_task(given, federation)
