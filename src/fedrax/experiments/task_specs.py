"""Tasks by name: the table ``[task]`` of an experiment.

    [task]
    name = "binary"
    metrics = ["auc", "f1"]

``auto``, the default, is a classification for labels that are classes and a regression for labels that are numbers. A
user's task is a function with the parameter ``model`` and, optionally, ``preprocess``, ``padding`` and ``num_classes``,
that returns a Task; its other parameters are keys of the table.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fedrax.contract import task as tasks
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.errors import FedraxError, unknown
from fedrax.experiments import serialization
from fedrax.experiments.serialization import ClassChoice
from fedrax.metrics import METRICS, f1
from fedrax.models import Model

Metrics = tuple[Literal["auc", "f1", "r2"], ...]
"""Names of whole-set metrics."""
GIVEN = ("model", "preprocess", "padding", "num_classes")
"""Parameters of a user's task function that are not keys of the table."""


@dataclass(frozen=True)
class _ClassificationOptions:
    """Options of tasks whose labels are classes."""

    metrics: Metrics = ()
    """Additional whole-set metrics: auc, f1."""
    positive: str | None = None
    """Name of the positive class of f1. By default the second of two classes in sorted order; for more classes f1 is
    the mean over classes."""


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
        return _with_metrics(tasks.classification(model, preprocess, federation.padding), self, federation)


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
        return _with_metrics(tasks.binary_classification(model, preprocess), self, federation)


@dataclass(frozen=True)
class Regression:
    """Squared error; metric: mse."""

    metrics: Metrics = ()
    """Additional whole-set metrics: r2."""

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
        return _with_metrics(tasks.regression(model, preprocess, federation.truth), self, federation)


@dataclass(frozen=True)
class Auto(_ClassificationOptions):
    """A classification for classes, a regression for numbers; or the loss that the model prescribes."""

    metrics: Metrics = ()
    """Additional whole-set metrics: auc, f1 for classes, r2 for numbers."""

    def outputs(self, federation: Federation) -> int:
        """The number of classes or targets."""
        return self._task(federation).outputs(federation)

    def build(self, model: Model, federation: Federation, preprocess: Any) -> Task:
        """The task."""
        if model.loss == "value":
            return _with_metrics(tasks.objective(model, preprocess, federation.truth), self, federation)
        if model.loss == "hinge" and federation.num_classes is not None:
            return _with_metrics(tasks.margin(model, preprocess), self, federation)
        return self._task(federation).build(model, federation, preprocess)

    def _task(self, federation: Federation) -> Classification | Regression:
        """The task for the kind of labels."""
        if federation.num_classes is not None:
            return Classification(self.metrics, self.positive)
        if self.positive is not None:
            raise FedraxError(f"positive names a class, and the labels of {federation.name!r} are numbers")
        return Regression(self.metrics)


_REGRESSION_METRICS = {"r2"}
"""Metrics of numbers; all others are of classes."""


def _with_metrics(task: Task, spec: Classification | Binary | Regression | Auto, federation: Federation) -> Task:
    """The task with whole-set metrics; raises FedraxError for those that do not fit the labels."""
    classes = federation.num_classes is not None
    odd = next((name for name in spec.metrics if (name in _REGRESSION_METRICS) == classes), None)
    if odd is not None:
        found = "classes" if classes else "numbers"
        raise FedraxError(f"the labels of {federation.name!r} are {found}: {odd} is not a metric of {found}")
    whole_set, notes = {name: METRICS[name] for name in spec.metrics}, ()
    positive = None if isinstance(spec, Regression) else spec.positive
    if positive is not None and "f1" not in whole_set:
        raise FedraxError(f"positive = {positive!r} has no effect without the metric f1: leave it out, or add f1")
    if "f1" in whole_set:
        names = federation.class_names or tuple(map(str, range(federation.num_classes or 0)))
        if positive is not None and positive not in names:
            raise unknown(f"class of {federation.name}", positive, names)
        if positive is not None:
            whole_set["f1"] = partial(f1, positive=names.index(positive))
        chosen = names[1] if positive is None and len(names) == 2 else positive
        notes = (
            f"f1 is {'the mean over the classes' if chosen is None else f'of the class {chosen!r}'} (task.positive)",
        )
    return dataclasses.replace(task, whole_set=whole_set, notes=notes)


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
