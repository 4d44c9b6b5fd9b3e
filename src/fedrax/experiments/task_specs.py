"""What a model is trained for, by name: the table ``[task]`` of an experiment.

    [task]
    name = "binary"
    metrics = ["auc", "f1"]

``auto``, the default, is a classification where labels are classes and a regression where they are numbers. A task of
the user's own is a function that gets ``model`` and, where it takes them, ``preprocess``, ``padding`` and
``num_classes``, and returns a Task; its further parameters are keys of the table.
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
GIVEN = ("model", "preprocess", "padding", "num_classes")


@dataclass(frozen=True)
class _OfClasses:
    """Options of labels that are classes."""

    metrics: Metrics = ()
    """Metrics of all samples together besides: auc, f1."""
    positive: str | None = None
    """Name of the class that f1 is of. By default the second of two classes, whose names are in sorted order; of more
    classes f1 is the mean over them."""


@dataclass(frozen=True)
class Classification(_OfClasses):
    """Cross entropy of a logit for each class; metric: accuracy."""

    def outputs(self, federation: Federation) -> int:
        """A logit for each class."""
        if federation.num_classes is None:
            raise FedraxError(f"a classification needs classes: the labels of {federation.name!r} are numbers")
        if federation.num_classes == 1:
            named = f", {federation.class_names[0]!r}" if federation.class_names else ""
            raise FedraxError(f"there is nothing to tell apart: all labels of {federation.name!r} are one class{named}")
        return federation.num_classes

    def build(self, model: Model, federation: Federation, preprocess: Any) -> Task:
        """The task."""
        return _with(tasks.classification(model, preprocess, federation.padding), self, federation)


@dataclass(frozen=True)
class Binary(_OfClasses):
    """Logistic loss of one logit against two classes; metric: accuracy."""

    def outputs(self, federation: Federation) -> int:
        """A logit for each label."""
        if federation.num_classes != 2:
            found = "numbers" if federation.num_classes is None else f"{federation.num_classes} classes"
            raise FedraxError(f"the task binary needs two classes: the labels of {federation.name!r} are {found}")
        labels = federation.train.y.shape[1:]
        return labels[-1] if labels else 1

    def build(self, model: Model, federation: Federation, preprocess: Any) -> Task:
        """The task."""
        return _with(tasks.binary_classification(model, preprocess), self, federation)


@dataclass(frozen=True)
class Regression:
    """Squared error; metric: mse."""

    metrics: Metrics = ()
    """Metrics of all samples together besides: r2."""

    def outputs(self, federation: Federation) -> int:
        """A number for each target."""
        if federation.num_classes is not None:
            raise FedraxError(
                f"a regression needs numbers: the labels of {federation.name!r} are classes (of a CSV file,"
                ' labels = "numbers" reads them as numbers)'
            )
        targets = federation.train.y.shape[1:]
        return targets[-1] if targets else 1

    def build(self, model: Model, federation: Federation, preprocess: Any) -> Task:
        """The task."""
        return _with(tasks.regression(model, preprocess, federation.truth), self, federation)


@dataclass(frozen=True)
class Auto(_OfClasses):
    """A classification where labels are classes, a regression where they are numbers; or the model's own loss."""

    metrics: Metrics = ()
    """Metrics of all samples together besides: auc, f1 of classes, r2 of numbers."""

    def outputs(self, federation: Federation) -> int:
        """As the labels ask."""
        return self._meant(federation).outputs(federation)

    def build(self, model: Model, federation: Federation, preprocess: Any) -> Task:
        """The task; of a model that says which loss it wants, with that."""
        if model.loss == "value":
            return _with(tasks.objective(model, preprocess, federation.truth), self, federation)
        if model.loss == "hinge" and federation.num_classes is not None:
            return _with(tasks.margin(model, preprocess), self, federation)
        return self._meant(federation).build(model, federation, preprocess)

    def _meant(self, federation: Federation) -> Classification | Regression:
        if federation.num_classes is not None:
            return Classification(self.metrics, self.positive)
        if self.positive is not None:
            raise FedraxError(f"positive names a class, and the labels of {federation.name!r} are numbers")
        return Regression(self.metrics)


_OF_NUMBERS = {"r2"}
"""The metrics of targets; all others are of classes."""


def _with(task: Task, spec: Classification | Binary | Regression | Auto, federation: Federation) -> Task:
    """The task with the metrics of all samples together, which must be of what the labels are."""
    classes = federation.num_classes is not None
    odd = next((name for name in spec.metrics if (name in _OF_NUMBERS) == classes), None)
    if odd is not None:
        found = "classes" if classes else "numbers"
        raise FedraxError(f"the labels of {federation.name!r} are {found}, of which {odd} is no metric")
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
        meant = names[1] if positive is None and len(names) == 2 else positive
        notes = (
            f"f1 is {'the mean over the classes' if meant is None else f'of the class {meant!r}'} (task.positive)",
        )
    return dataclasses.replace(task, whole_set=whole_set, notes=notes)


def own_task(found: Any) -> type:
    """What ``file.py:function`` must be to serve as a task."""
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
TASK = ClassChoice("task", lambda: TASKS, own_task)
