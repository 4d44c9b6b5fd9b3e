"""Metrics by scikit-learn's names: of labels that are classes, and of targets that are numbers.

`METRICS` has them by name; ``metrics=["auc", "log_loss"]`` of `fedrax.classification` and of the other tasks, and
``metrics`` in an experiment file, choose from it. Outputs are logits: one per label for labels 0 and 1, or one per
class.

The values are those of scikit-learn, which tests compare. They are computed here because scikit-learn raises for
outputs that are not finite, as those of a diverged run, and takes milliseconds for each client of a per-client
evaluation.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError, unknown

__all__ = [
    "METRICS",
    "LabelMean",
    "Metric",
    "accuracy_per_class",
    "auc",
    "balanced_accuracy",
    "f1",
    "precision",
    "r2",
    "recall",
]
Labels = Literal["classes", "numbers"]
"""What labels are."""
Average = Literal["macro", "micro", "weighted"]
"""How the values of several classes become one, as in scikit-learn."""
Value = float | None | Mapping[str, float | None]
"""A number, None where it is not defined, or several of them by name."""


@dataclass(frozen=True)
class Metric:
    """A metric of all samples together, a function of NumPy arrays: (outputs [n, ...], y [n, ...]) -> value.

    Such metrics are values of ``Task.whole_set``.

    Example:
        >>> fedrax.metrics.METRICS["auc"](np.array([-1.0, 0.5, 0.2, 2.0]), np.array([0, 0, 1, 1]))
        0.75
    """

    function: Callable[..., Value]
    """(outputs, y) -> a number, None where it is not defined, or a dictionary of them by name."""
    labels: Labels
    """The kind of labels."""
    undefined: str = ""
    """When the value is None, as the reason in a warning."""
    lower_is_better: bool = False
    """Whether a smaller value is better."""

    def __call__(self, outputs: np.ndarray, y: np.ndarray) -> Value:
        """The value."""
        return self.function(outputs, y)


@dataclass(frozen=True)
class LabelMean:
    """A metric that is a mean over labels, computed on the devices: (outputs [B, ...], y [B, ...]) -> values [B, ...].

    The labels of a sample are its positions or targets. Without ``finish`` the metric is the mean over samples of the
    mean over a sample's labels, as the loss is; with it, ``finish`` of the mean over all labels.

    Example:
        >>> fedrax.metrics.METRICS["mean_absolute_error"](np.array([1.0, 2.0]), np.array([1.0, 4.0]))
        1.0
    """

    values: Callable[[Array, Array], Array]
    """(outputs, y) -> a value for each label."""
    labels: Labels
    """The kind of labels."""
    finish: Callable[[float], float | None] | None = None
    """From the mean over all labels to the metric, None where it is not defined."""
    undefined: str = "all labels are padding, or it exceeds the largest number"
    """When the value is None, as the reason in a warning."""
    lower_is_better: bool = False
    """Whether a smaller value is better."""

    def __call__(self, outputs: np.ndarray, y: np.ndarray) -> float | None:
        """The metric of some samples."""
        mean = np.asarray(self.values(jnp.asarray(outputs), jnp.asarray(y)), float).mean()
        return float(mean) if self.finish is None else self.finish(mean)


# -- of classes ----------------------------------------------------------------------------------------------------


@checked_arguments
def auc(outputs: np.ndarray, y: np.ndarray) -> float | None:
    """Area under the ROC curve: the fraction of (positive, negative) pairs ranked correctly, ties counting half.

    For more than two classes it is the mean over the classes in ``y`` of each class against the rest, ranked by the
    log-probability of the class.

    Args:
        outputs: Logits [n], [n, 1] or [n, 2] for two classes, [n, C] for C classes.
        y: Labels [n].

    Returns:
        A number from 0 to 1, or None where ``y`` holds one class only.

    Raises:
        FedraxError: The shapes are not those of a classification.

    Example:
        >>> fedrax.metrics.auc(np.array([-1.0, 0.5, 0.2, 2.0]), np.array([0, 0, 1, 1]))
        0.75
    """
    scores, y = _scores(outputs, y, "auc")
    if scores.ndim == 1:
        return _auc(scores, y > 0)
    shifted = scores - scores.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    per_class = [_auc(logs[:, label], y == label) for label in np.unique(y)]
    return None if None in per_class else float(np.mean(per_class))  # type: ignore[arg-type]


def _auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Mann-Whitney form of the area under the curve, by ranks."""
    from scipy.stats import rankdata

    count = int(positive.sum())
    negatives = len(positive) - count
    if not count or not negatives:
        return None
    return float((rankdata(scores)[positive].sum() - count * (count + 1) / 2) / (count * negatives))


@checked_arguments
def f1(outputs: np.ndarray, y: np.ndarray, positive: int | None = None, average: Average | None = None) -> float | None:
    """F1 score, 2 TP / (2 TP + FP + FN), of a class or averaged over the classes that are in ``y`` or predicted.

    Args:
        outputs: Logits [n], [n, 1] or [n, 2] for two classes, [n, C] for C classes.
        y: Labels [n].
        positive: The class; by default class 1 of two.
        average: ``"macro"``: the mean over classes, the default for more than two; ``"weighted"``: weighted by the
            classes' numbers of labels; ``"micro"``: of the counts of all classes together.

    Returns:
        A number from 0 to 1, or None where the class is neither in ``y`` nor predicted.

    Raises:
        FedraxError: The shapes are not those of a classification.

    Example:
        >>> fedrax.metrics.f1(np.array([-1.0, 0.5, 0.2, 2.0]), np.array([0, 0, 1, 1]))
        0.8
    """
    return _score("f1", outputs, y, positive, average, lambda hits, given, actual: (2 * hits, given + actual))


@checked_arguments
def precision(
    outputs: np.ndarray, y: np.ndarray, positive: int | None = None, average: Average | None = None
) -> float | None:
    """Precision, TP / (TP + FP), of a class or averaged over the classes that are in ``y`` or predicted.

    Args:
        outputs: Logits [n], [n, 1] or [n, 2] for two classes, [n, C] for C classes.
        y: Labels [n].
        positive: As of :func:`f1`.
        average: As of :func:`f1`.

    Returns:
        A number from 0 to 1, or None where the class is never predicted.

    Raises:
        FedraxError: The shapes are not those of a classification.

    Example:
        >>> round(fedrax.metrics.precision(np.array([-1.0, 0.5, 0.2, 2.0]), np.array([0, 0, 1, 1])), 3)
        0.667
    """
    return _score("precision", outputs, y, positive, average, lambda hits, given, actual: (hits, given))


@checked_arguments
def recall(
    outputs: np.ndarray, y: np.ndarray, positive: int | None = None, average: Average | None = None
) -> float | None:
    """Recall, TP / (TP + FN), of a class or averaged over the classes that are in ``y`` or predicted.

    Args:
        outputs: Logits [n], [n, 1] or [n, 2] for two classes, [n, C] for C classes.
        y: Labels [n].
        positive: As of :func:`f1`.
        average: As of :func:`f1`.

    Returns:
        A number from 0 to 1, or None where no label is of the class.

    Raises:
        FedraxError: The shapes are not those of a classification.

    Example:
        >>> fedrax.metrics.recall(np.array([-1.0, 0.5, 0.2, 2.0]), np.array([0, 0, 1, 1]))
        1.0
    """
    return _score("recall", outputs, y, positive, average, lambda hits, given, actual: (hits, actual))


@checked_arguments
def balanced_accuracy(outputs: np.ndarray, y: np.ndarray) -> float:
    """The mean of the accuracies of the classes in ``y``.

    Args:
        outputs: Logits [n], [n, 1] or [n, 2] for two classes, [n, C] for C classes.
        y: Labels [n].

    Returns:
        A number from 0 to 1.

    Raises:
        FedraxError: The shapes are not those of a classification.

    Example:
        >>> fedrax.metrics.balanced_accuracy(np.array([-1.0, 0.5, 0.2, 2.0]), np.array([0, 0, 1, 1]))
        0.75
    """
    found = _count("balanced_accuracy", outputs, y)
    there = found.actual > 0
    return float((found.hits[there] / found.actual[there]).mean())


@checked_arguments
def accuracy_per_class(
    outputs: np.ndarray, y: np.ndarray, names: tuple[str, ...] | None = None
) -> dict[str, float | None]:
    """The accuracy of the samples of each class, which is its recall.

    Args:
        outputs: Logits [n], [n, 1] or [n, 2] for two classes, [n, C] for C classes.
        y: Labels [n].
        names: The classes' names; by default their numbers.

    Returns:
        A number from 0 to 1 for each class, or None where ``y`` does not have it.

    Raises:
        FedraxError: The shapes are not those of a classification.

    Example:
        >>> fedrax.metrics.accuracy_per_class(np.array([-1.0, 0.5, 0.2, 2.0]), np.array([0, 0, 1, 1]))
        {'0': 0.5, '1': 1.0}
    """
    found = _count("accuracy_per_class", outputs, y)
    per_class = {int(c): (hits, n) for c, hits, n in zip(found.classes, found.hits, found.actual, strict=True) if n}
    names = names or tuple(map(str, range(found.outputs)))
    shares = ((name, per_class.get(label)) for label, name in enumerate(names))
    return {name: None if share is None else float(share[0] / share[1]) for name, share in shares}


class _Counts(NamedTuple):
    """Predictions and labels, counted for each class that occurs among them."""

    classes: np.ndarray
    hits: np.ndarray
    """Predicted correctly."""
    predicted: np.ndarray
    actual: np.ndarray
    outputs: int
    """C, the number of classes of the outputs."""


def _count(name: str, outputs: np.ndarray, y: np.ndarray) -> _Counts:
    """The counts of predictions by the largest logit."""
    scores, y = _scores(outputs, y, name)
    two = scores.ndim == 1
    predicted = (scores > 0).astype(int) if two else scores.argmax(1)
    classes, positions = np.unique(np.concatenate([y, predicted]), return_inverse=True)
    actual, given = positions[: len(y)], positions[len(y) :]
    parts = (np.bincount(part, minlength=len(classes)) for part in (actual[actual == given], given, actual))
    return _Counts(classes, *parts, outputs=2 if two else scores.shape[1])


def _score(
    name: str,
    outputs: np.ndarray,
    y: np.ndarray,
    positive: int | None,
    average: Average | None,
    ratio: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> float | None:
    """A ratio of (hits, predicted, actual): of a class, or averaged; in averages that of a class without both is 0."""
    found = _count(name, outputs, y)
    if average is None and positive is None and found.outputs == 2:
        positive = 1
    if positive is not None:
        above, below = ratio(*(part[found.classes == positive].sum() for part in found[1:4]))
        return float(above / below) if below else None
    if average == "micro":
        above, below = ratio(*(part.sum() for part in found[1:4]))
        return float(above / below)
    above, below = ratio(*found[1:4])
    each = np.where(below > 0, above / np.maximum(below, 1), 0.0)
    return float(np.average(each, weights=found.actual if average == "weighted" else None))


def _scores(outputs: np.ndarray, y: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(scores of the positive class [n], or of each of several classes [n, C], labels [n]), of all positions."""
    outputs, y = np.asarray(outputs), np.asarray(y)
    if outputs.ndim not in (y.ndim, y.ndim + 1) or outputs.shape[: y.ndim] != y.shape or outputs.ndim == y.ndim > 1:
        raise FedraxError(
            f"{name} needs one label and one vector of outputs per sample, or per position, not labels {y.shape} and"
            f" outputs {outputs.shape}"
        )
    outputs, y = outputs.reshape(y.size, -1), y.reshape(-1)
    if outputs.shape[1] == 1:
        return outputs[:, 0], y
    return (outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs), y


def _log_loss(outputs: Array, y: Array) -> Array:
    """Minus the log-probability of each label."""
    if outputs.shape in (y.shape, (*y.shape, 1)):
        outputs = outputs.reshape(y.shape)
        return jax.nn.softplus(outputs) - outputs * (y > 0)
    logs = jax.nn.log_softmax(outputs)
    return -jnp.where(y[..., None] == jnp.arange(outputs.shape[-1]), logs, 0).sum(-1)


def _exp(value: float) -> float | None:
    """The exponential, None where it exceeds the largest float."""
    return None if value > np.log(np.finfo(float).max) else float(np.exp(value))


def _among_largest(outputs: Array, y: Array, k: int) -> Array:
    """Whether a label is among the classes of the k largest logits; of equal logits the later classes come first."""
    classes = 1 if outputs.shape == y.shape else outputs.shape[-1]
    if classes <= k:
        raise FedraxError(f"top_{k}_accuracy needs more than {k} outputs per label, one for each class, not {classes}")
    own = jnp.where(y[..., None] == jnp.arange(outputs.shape[-1]), outputs, 0).sum(-1, keepdims=True)
    later = jnp.arange(outputs.shape[-1]) > y[..., None]
    return ((outputs > own) | ((outputs == own) & later)).sum(-1) < k


# -- of numbers ----------------------------------------------------------------------------------------------------


@checked_arguments
def r2(outputs: np.ndarray, y: np.ndarray) -> float | None:
    """Coefficient of determination, 1 - sum (y - output)² / sum (y - mean y)², summed over all targets.

    Args:
        outputs: One output per target.
        y: Targets [n] or [n, k].

    Returns:
        A number of at most 1, or None where the targets do not vary.

    Raises:
        FedraxError: The numbers of outputs and targets differ.

    Example:
        >>> fedrax.metrics.r2(np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 3.0]))
        0.5
    """
    if outputs.size != y.size:
        raise FedraxError(f"r2 needs one output per target, not outputs {outputs.shape} for targets {y.shape}")
    variation = ((y - y.mean(0)) ** 2).sum()
    return float(1 - ((outputs.reshape(y.shape) - y) ** 2).sum() / variation) if variation else None


def _absolute_error(outputs: Array, y: Array) -> Array:
    return jnp.abs(outputs.reshape(y.shape) - y)


def _squared_error(outputs: Array, y: Array) -> Array:
    return (outputs.reshape(y.shape) - y) ** 2


# -- by name -------------------------------------------------------------------------------------------------------

_NO_CLASS = {
    "f1": "the class is neither among the labels nor predicted",
    "precision": "the class is never predicted",
    "recall": "no label is of the class",
}
_OF_CLASSES = {"f1": f1, "precision": precision, "recall": recall}
_AVERAGES: tuple[Average, ...] = ("macro", "micro", "weighted")
_AUC = Metric(auc, "classes", "all labels are of one class")
_MAE = LabelMean(_absolute_error, "numbers", lower_is_better=True)
_MSE = LabelMean(_squared_error, "numbers", lower_is_better=True)
_RMSE = LabelMean(_squared_error, "numbers", finish=math.sqrt, lower_is_better=True)

METRICS: dict[str, Metric | LabelMean] = {
    "auc": _AUC,
    "roc_auc": _AUC,
    **{name: Metric(function, "classes", _NO_CLASS[name]) for name, function in _OF_CLASSES.items()},
    **{
        f"{name}_{average}": Metric(partial(function, average=average), "classes")
        for name, function in _OF_CLASSES.items()
        for average in _AVERAGES
    },
    "balanced_accuracy": Metric(balanced_accuracy, "classes"),
    "accuracy_per_class": Metric(accuracy_per_class, "classes", "no label is of the class"),
    "log_loss": LabelMean(_log_loss, "classes", lower_is_better=True),
    "perplexity": LabelMean(_log_loss, "classes", finish=_exp, lower_is_better=True),
    "r2": Metric(r2, "numbers", "all targets are equal"),
    "mae": _MAE,
    "mean_absolute_error": _MAE,
    "mse": _MSE,
    "mean_squared_error": _MSE,
    "rmse": _RMSE,
    "root_mean_squared_error": _RMSE,
}
"""Metrics by name. ``top_k_accuracy`` is there for every k, as ``top_5_accuracy``."""


def better(name: str) -> Literal["higher", "lower"] | None:
    """Which values of a metric are better, by its name; None for one that is not known."""
    last = name.rpartition("_")[2]
    if (metric := METRICS.get(name, METRICS.get(last))) is not None:
        return "lower" if metric.lower_is_better else "higher"
    if last == "accuracy" or name.startswith("accuracy_per_class_"):
        return "higher"
    return "lower" if last == "loss" else None


def is_share(name: str) -> bool:
    """Whether a metric is known by its name to be a number from 0 to 1."""
    last = name.rpartition("_")[2]
    metric = METRICS.get(name, METRICS.get(last))
    of_classes = isinstance(metric, Metric) and metric.labels == "classes"
    return of_classes or last == "accuracy" or name.startswith("accuracy_per_class_")


def check_names(names: Any) -> None:
    """Raise FedraxError unless ``names`` is a list of names of metrics."""
    if isinstance(names, str | Mapping) or not isinstance(names, Iterable):
        raise FedraxError(f"metrics must be a list of names such as ['auc'], not {names!r:.100}")
    for name in names:
        if name not in ("accuracy", "mse") and _by_name(name) is None:
            raise unknown("metric", name, [*METRICS, "accuracy", "top_5_accuracy"])


def _by_name(name: Any) -> Metric | LabelMean | None:
    """The metric of a name, None if there is none."""
    top = re.fullmatch(r"top_([1-9]\d{0,5})_accuracy", name) if isinstance(name, str) else None
    if top:
        return LabelMean(partial(_among_largest, k=int(top[1])), "classes")
    return METRICS.get(name) if isinstance(name, str) else None


def find_metrics(
    names: Iterable[str],
    labels: Labels | None,
    known: Iterable[str] = (),
    positive: int | str | None = None,
    class_names: Sequence[str] | None = None,
) -> tuple[dict[str, Metric | LabelMean], tuple[str, ...]]:
    """The metrics of some names, and notes on what they are of.

    Args:
        names: the names; those in ``known``, which the task has already, are left out.
        labels: the kind of labels; None for any.
        known: names of the metrics that the task has.
        positive: number or name of the class that f1, precision and recall are of.
        class_names: names of the classes.

    Raises:
        FedraxError: for an unknown name or class, for a metric of other labels, and for a class without effect.
    """
    check_names(names := tuple(names) if isinstance(names, Iterator) else names)
    made = {name: metric for name in names if name not in known and (metric := _by_name(name)) is not None}
    for name in names:
        if name not in known and (name not in made or labels not in (made[name].labels, None)):
            raise FedraxError(f"{name} is not a metric of {labels or 'this task'}")
    if "accuracy_per_class" in made and class_names is not None:
        named = partial(accuracy_per_class, names=tuple(class_names))
        made["accuracy_per_class"] = dataclasses.replace(made["accuracy_per_class"], function=named)  # type: ignore[call-arg]
    of_class, number = [name for name in made if name in _OF_CLASSES], _class_number(positive, class_names)
    if number is not None and not of_class:
        raise FedraxError(
            f"positive = {positive!r} has no effect without the metric f1, precision or recall: leave it out, or add"
            " one of them"
        )
    if not of_class:
        return made, ()
    if number is not None:
        for name in of_class:
            made[name] = dataclasses.replace(made[name], function=partial(_OF_CLASSES[name], positive=number))  # type: ignore[call-arg]
    two = class_names is not None and len(class_names) == 2
    if number is not None or two:
        what = f"of the class {class_names[1 if number is None else number] if class_names else number!r}"
    elif class_names is not None:
        what = "the mean over the classes (macro)"
    else:
        what = "of class 1 where there are two classes, otherwise the mean over the classes (macro)"
    return made, (
        f"{', '.join(of_class)}: {what}; positive= chooses another class, {of_class[0]}_weighted another mean",
    )


def _class_number(positive: int | str | None, class_names: Sequence[str] | None) -> int | None:
    """The number of the class called ``positive``; raises FedraxError if there is none."""
    if positive is None:
        return None
    if isinstance(positive, str):
        if class_names is None:
            raise FedraxError(f"positive = {positive!r} is the name of a class: give class_names, too, or its number")
        if positive not in class_names:
            raise unknown("class", positive, class_names)
        return list(class_names).index(positive)
    known = class_names is None or positive in range(len(class_names))
    if not isinstance(positive, int | np.integer) or isinstance(positive, bool) or positive < 0 or not known:
        raise FedraxError(f"positive must be the number or the name of a class, not {positive!r}")
    return int(positive)
