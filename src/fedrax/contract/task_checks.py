"""Whether a task's functions take what they are given and give what they must, and a sentence where they do not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import use_abstract_mesh

from fedrax import xla
from fedrax.config.user_errors import in_words, own_frame
from fedrax.errors import FedraxError

MANY = 16 * xla.TRACE_BATCH
"""Samples for models that take them in groups of two, four, eight or sixteen only."""


def check_function(what: str, function: Any, arguments: str) -> None:
    """Refuse what is no function of so many arguments; ``arguments`` names them, "parameters, batch, key"."""
    if not callable(function):
        raise FedraxError(f"the task's {what} must be a function ({arguments}), not {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one of another language's
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        raise FedraxError(f"the task's {what} is a function {signature}, and is called with ({arguments})") from None


def check_task(task: Any, variables: Any, samples: Any, federation: Any) -> None:
    """Trace loss and metrics with batches such as ``samples`` (x [n, ...], y [n, ...]); nothing is computed.

    FedraxError where the model does not take such samples, for labels that the loss is not meant for, and for other
    results than one number a sample.
    """
    check_words(task, federation)
    _within(task, samples.y)
    try:
        _check_of(xla.TRACE_BATCH, task, variables, samples, federation)
    except FedraxError as error:
        if not isinstance(error.__cause__, TypeError | ValueError):
            raise
        try:
            _check_of(MANY, task, variables, samples, federation)
        except FedraxError:
            raise error from error.__cause__


def _check_of(rows: int, task: Any, variables: Any, samples: Any, federation: Any) -> None:
    """Of so many samples."""
    shapes = [jax.ShapeDtypeStruct((rows, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype)) for a in samples]
    batch = type(samples)(*shapes)
    about = ", ".join(f"{name} {a.dtype} {list(a.shape[1:])}" for name, a in zip("xy", shapes, strict=True))
    real = {a.dtype for a in jax.tree.leaves((variables, shapes[0])) if jnp.issubdtype(a.dtype, jnp.floating)}
    about += f", and parameters {min(map(str, real - {shapes[0].dtype}))}" if len(real) > 1 else ""
    losses = traced("loss", about, task.loss, variables, batch, jax.random.key(0))
    _one_a_sample("loss", losses, rows)
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise FedraxError(f"the task's loss must be floating numbers, not {losses.dtype}: others have no gradient")
    if task.one_output_a_class and task.outputs is not None:  # the metric is ours
        _enough_outputs(traced("model", about, task.outputs, variables, batch.x).shape[-1:], federation.num_classes)
        return
    for name, metric in task.metrics.items():
        _one_a_sample(f"metric {name!r}", traced(f"metric {name!r}", about, metric, variables, batch), rows)


def check_words(task: Any, federation: Any) -> None:
    """Refuse samples that are numbers of words where the task's model takes them for amounts, or has no such words."""
    x = federation.train.x
    if federation.vocabulary and task.reads_amounts and x.dtype.kind in "iu":  # floats are counts, or shares
        fitting = "sentence_pairs" if x.ndim > 2 else "tweets"
        raise FedraxError(
            f"the samples of {federation.name!r} are numbers of words, which the model {task.name.rpartition('/')[2]}"
            f" would take for amounts: choose a model that learns a vector for each word, such as {fitting}"
        )
    if task.words is None:
        return
    for part in filter(None, (federation.train, federation.test)):
        if part.x.dtype.kind in "iu" and part.x.size:
            least, largest = int(part.x.min()), int(part.x.max())
            if least < 0 or largest >= task.words:  # of which the last vector would be taken
                raise FedraxError(
                    f"the samples of {federation.name!r} are numbers from {least} to {largest}, and the model"
                    f" {task.name.rpartition('/')[2]} has words for 0, which is padding, to {task.words - 1}"
                )


def _within(task: Any, labels: Any) -> None:
    """Refuse labels of which the loss makes numbers, and wrong ones."""
    if task.labels_within is None or not np.size(labels):
        return
    low, high = task.labels_within
    least, largest = np.min(labels), np.max(labels)
    if not low <= least <= largest <= high:
        raise FedraxError(
            f"the task {task.name} takes labels from {low} to {high}, and these are from {least} to {largest}"
        )


def _enough_outputs(found: tuple[int, ...], num_classes: int | None) -> None:
    """Refuse a model that has no output for some of the classes: their losses would be numbers, and wrong."""
    if num_classes is not None and found < (num_classes,):
        had = found[0] if found else "no"
        raise FedraxError(f"the model has {had} outputs a sample for {num_classes} classes: it needs one for each")


def traced(what: str, about: str, function: Callable, *arguments: Any) -> Any:
    """What the task's ``what`` gives, in shapes; FedraxError, with ``about``, where it cannot be computed."""
    try:
        with use_abstract_mesh(xla.NO_MESH):  # so that the trace is found again when gradients are laid out
            return jax.eval_shape(function, *arguments)
    except FedraxError:
        raise
    except (TypeError, ValueError) as error:  # what shapes and types that do not fit are to JAX
        words = in_words(error)
        if words is not None:
            raise FedraxError(f"the task's {what}{_place(error)} {words}") from error
        notes = [note.removeprefix("fedrax: ") for note in getattr(error, "__notes__", ()) if note.startswith("fedrax")]
        said = "; ".join([f"{type(error).__name__}: {_said(error)}".rstrip(" :"), *notes])
        raise FedraxError(
            f"the task's {what} cannot be computed{_place(error)} of {xla.TRACE_BATCH} samples, as of any other number,"
            f" with {about}: {said}"
        ) from error


def _said(error: BaseException) -> str:
    """An error's first line, with the next where that is what it announces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    announced = lines[1].removeprefix("* ") if lines[0].endswith(":") and len(lines) > 1 else ""
    return f"{lines[0]} {announced}".strip().rstrip(".")


def _place(error: BaseException) -> str:
    """' (in apply, file.py, line 12)', of the last frame in a user's own code, or nothing."""
    frame = own_frame(error)
    return "" if frame is None else f" (in {frame.name}, {Path(frame.filename).name}, line {frame.lineno})"


def _one_a_sample(what: str, found: Any, rows: int) -> None:
    if getattr(found, "shape", None) == (rows,):
        return
    if getattr(found, "shape", None) == ():
        raise FedraxError(f"the task's {what} must be one number a sample, [B], not one for all: leave the mean out")
    shape = [("B" if n == rows else str(n)) for n in found.shape] if hasattr(found, "shape") else None
    had = f"[{', '.join(shape)}]" if shape is not None else f"a {type(found).__name__}"
    raise FedraxError(f"the task's {what} must be one number a sample, [B], not {had}")
