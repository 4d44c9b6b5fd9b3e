"""Tasks by name: the table ``[task]`` of an experiment.

    [task]
    name = "binary"
    metrics = ["auc", "f1"]

``auto``, the default, is a classification for labels that are classes and a regression for labels that are numbers. A
user's task is a function with the parameter ``model`` and, optionally, ``preprocess``, ``padding`` and ``num_classes``,
that returns a Task; its other parameters are keys of the table.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedrax.contract import task as tasks
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.experiments import serialization
from fedrax.experiments.serialization import ClassChoice
from fedrax.metrics import check_names
from fedrax.models import Model

Metrics = tuple[str, ...]
"""Names of `fedrax.metrics.METRICS`."""
GIVEN = ("model", "preprocess", "padding", "num_classes")
"""Parameters of a user's task function that are not keys of the table."""


@dataclass(frozen=True)
class _Options:
    """Options of all tasks."""

    metrics: Metrics = ()
    """Further metrics by scikit-learn's names. Of classes: auc, f1, precision, recall, balanced_accuracy,
    accuracy_per_class, top_5_accuracy, log_loss, perplexity; of numbers: r2, mean_absolute_error,
    root_mean_squared_error."""

    def __post_init__(self) -> None:
        check_names(self.metrics)


@dataclass(frozen=True)
class _ClassificationOptions(_Options):
    """Options of tasks whose labels are classes."""

    positive: str | None = None
    """Name of the positive class of f1, precision and recall. By default the second of two classes in sorted order; for
    more classes they are the mean over classes."""
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None
    """Weights of the classes in the loss, in sorted order; "balanced": inversely proportional to their numbers of
    training labels."""

    def of(self, federation: Federation) -> dict[str, Any]:
        """The options as arguments of `fedrax.classification`."""
        names = federation.class_names or tuple(map(str, range(federation.num_classes or 0)))
        weights = balanced_weights(federation) if self.class_weights == "balanced" else self.class_weights
        return {"metrics": self.metrics, "positive": self.positive, "class_names": names, "class_weights": weights}


def balanced_weights(federation: Federation) -> np.ndarray:
    """Weights by which all classes have the same total weight in the training data, and a label 1 on average."""
    labels, classes = federation.train.y, federation.num_classes or 0
    counts = np.bincount(labels[(labels >= 0) & (labels < classes)].ravel(), minlength=classes)
    return np.where(counts > 0, counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)), 1.0)


@dataclass(frozen=True)
class Classification(_ClassificationOptions):
    """Cross entropy of a logit for each class; metric: accuracy."""

    def outputs(self, federation: Federation) -> int:
        """The number of classes."""
        if federation.num_classes is None:
            raise FedraxError(f"a classification needs classes: the labels of {federation.name!r} are numbers")
        if federation.num_classes == 1:
            named = f", {federation.class_names[0]!r}" if federation.class_names else ""
            raise FedraxError(
                f"a classification needs several classes: all labels of {federation.name!r} are one class{named}"
            )
        return federation.num_classes

    def build(self, model: Model, federation: Federation, preprocess: Any) -> Task:
        """The task."""
        return tasks.classification(model, preprocess, federation.padding, **self.of(federation))


@dataclass(frozen=True)
class Binary(_ClassificationOptions):
    """Logistic loss of one logit for two classes; metric: accuracy."""

    def outputs(self, federation: Federation) -> int:
        """One logit for each label of a sample."""
        if federation.num_classes != 2:
            found = "numbers" if federation.num_classes is None else f"{federation.num_classes} classes"
            raise FedraxError(f"the task binary needs two classes: the labels of {federation.name!r} are {found}")
        labels = federation.train.y.shape[1:]
        return labels[-1] if labels else 1

    def build(self, model: Model, federation: Federation, preprocess: Any) -> Task:
        """The task."""
        return tasks.binary_classification(model, preprocess, **self.of(federation))


@dataclass(frozen=True)
class Regression(_Options):
    """Squared error; metric: mse."""

    def outputs(self, federation: Federation) -> int:
        """The number of targets."""
        if federation.num_classes is not None:
            raise FedraxError(
                f"a regression needs numbers: the labels of {federation.name!r} are classes (of a CSV file,"
                ' labels = "numbers" reads them as numbers)'
            )
        targets = federation.train.y.shape[1:]
        return targets[-1] if targets else 1

    def build(self, model: Model, federation: Federation, preprocess: Any) -> Task:
        """The task."""
        return tasks.regression(model, preprocess, federation.truth, metrics=self.metrics)


@dataclass(frozen=True)
class Auto(_ClassificationOptions):
    """A classification for classes, a regression for numbers; or the loss that the model prescribes."""

    def outputs(self, federation: Federation) -> int:
        """The number of classes or targets."""
        return self._task(federation).outputs(federation)

    def build(self, model: Model, federation: Federation, preprocess: Any) -> Task:
        """The task."""
        if model.loss == "value":
            if self != Auto():
                raise FedraxError("the loss of this model is its output, which has no other metrics: leave [task] out")
            return tasks.objective(model, preprocess, federation.truth)
        if model.loss == "hinge" and federation.num_classes is not None:
            return tasks.margin(model, preprocess, **self.of(federation))
        return self._task(federation).build(model, federation, preprocess)

    def _task(self, federation: Federation) -> Classification | Regression:
        """The task for the kind of labels."""
        if federation.num_classes is not None:
            return Classification(self.metrics, self.positive, self.class_weights)
        for key in ("positive", "class_weights"):
            if getattr(self, key) is not None:
                found = f"and the labels of {federation.name!r} are numbers"
                raise FedraxError(f"{key} applies to class labels only, {found}")
        return Regression(self.metrics)


def user_task(found: Any) -> type:
    """A class of the options of a user's function that returns a Task."""
    if not inspect.isfunction(found):
        raise FedraxError(f"{found!r} is not a function that returns a fedrax.Task.")
    options = serialization.options_class(found, GIVEN, "call")

    def build(self: Any, model: Model, federation: Federation, preprocess: Any) -> Task:
        given = (model, preprocess, federation.padding, federation.num_classes)
        made = self.call(**dict(zip(GIVEN, given, strict=True)))
        if not isinstance(made, Task):
            raise FedraxError(f"{found.__name__} returned {type(made).__name__}, not a fedrax.Task.")
        return made

    def outputs(self: Any, federation: Federation) -> int:
        return Auto().outputs(federation)

    options.build, options.outputs = build, outputs  # type: ignore[attr-defined]
    return options


TASKS = {"auto": Auto, "binary": Binary, "classification": Classification, "regression": Regression}
TASK = ClassChoice("task", lambda: TASKS, user_task)
