"""Checks of the functions of a task on the samples of a federation, by tracing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import use_abstract_mesh

from fedrax import tree, xla
from fedrax.config.user_errors import innermost_user_frame, tracing_message
from fedrax.errors import FedraxError, warn
from fedrax.inputs import arrays_of, by_key, describe_inputs, has_several, map_inputs, named_inputs

MANY = 16 * xla.TRACE_BATCH
"""Batch size of the second attempt, for models that need a multiple of two, four, eight or sixteen samples."""


def check_function(what: str, function: Any, arguments: str) -> None:
    """Raise FedraxError unless ``function`` can be called with ``arguments``, such as "parameters, batch, key"."""
    if not callable(function):
        raise FedraxError(f"the task's {what} must be a function ({arguments}), not {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function that is not written in Python
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        raise FedraxError(f"the task's {what} is a function {signature}, and is called with ({arguments})") from None


def check_task(task: Any, variables: Any, samples: Any, federation: Any) -> None:
    """Trace loss and metrics with a batch like ``samples`` (x [n, ...], y [n, ...]) without computing anything.

    Raises:
        FedraxError: if the model does not accept the samples, labels are outside the range of the loss, or a result is
            not one number for each sample.
    """
    check_values(task, samples, federation)
    try:
        _check_of(xla.TRACE_BATCH, task, variables, samples, federation)
    except FedraxError as error:
        if not isinstance(error.__cause__, TypeError | ValueError):
            raise
        try:
            _check_of(MANY, task, variables, samples, federation)
        except FedraxError:
            raise error from error.__cause__


def check_values(task: Any, samples: Any, federation: Any) -> None:
    """Raise FedraxError for tokens and labels that the task cannot take; shapes are not checked."""
    check_words(task, federation)
    _warn_of_bytes(task, federation)
    _within(task, samples.y)


def _check_of(rows: int, task: Any, variables: Any, samples: Any, federation: Any) -> None:
    """:func:`check_task` with ``rows`` samples."""
    batch = jax.tree.map(lambda a: shape_of_batch(a, rows), samples)
    about = f"{describe_inputs(batch.x)}, y {batch.y.dtype} {list(batch.y.shape[1:])}"
    real = {a.dtype for a in jax.tree.leaves((variables, batch.x)) if jnp.issubdtype(a.dtype, jnp.floating)}
    others = real - {a.dtype for a in arrays_of(batch.x)}
    about += f", and parameters {min(map(str, others))}" if len(real) > 1 and others else ""
    losses = traced("loss", about, task.loss, variables, batch, jax.random.key(0))
    _check_per_sample("loss", losses, rows)
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise FedraxError(f"the task's loss must be floating-point numbers, not {losses.dtype}, which have no gradient")
    metrics, counted = dict(task.metrics), task.one_output_a_class and task.outputs is not None
    if task.outputs is not None and any(jnp.issubdtype(a.dtype, jnp.integer) for a in arrays_of(batch.x)):
        closed = traced("model", about, task.outputs, variables, batch.x, how=_jaxpr_of)
        check_lookups(task, closed, federation)
        outputs: Any = closed.out_avals[0]
    elif counted and task.outputs is not None:
        outputs = traced("model", about, task.outputs, variables, batch.x)
    if counted:
        _enough_outputs(outputs.shape[-1:], federation.num_classes)
        metrics.pop("accuracy", None)  # built in
    for name, metric in metrics.items():
        values = traced(f"metric {name!r}", about, metric, variables, batch)
        if getattr(metric, "finish", None) is None:
            _check_per_sample(f"metric {name!r}", values, rows)


def shape_of_batch(array: Any, rows: int) -> jax.ShapeDtypeStruct:
    """The shape of ``rows`` rows of an array, with the dtype that JAX computes in."""
    return jax.ShapeDtypeStruct((rows, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype))


def check_words(task: Any, federation: Any) -> None:
    """Raise FedraxError for token indices that the model would read as amounts, or that its vocabulary lacks."""
    if has_several(federation.train.x):  # of these only the model knows which are tokens
        return
    x = federation.train.x
    if federation.vocabulary and task.reads_amounts and x.dtype.kind in "iu":  # floats are counts or frequencies
        fitting = "sentence_pairs" if x.ndim > 2 else "tweets"
        raise FedraxError(
            f"the samples of {federation.name!r} are token indices, which the model {task.name.rpartition('/')[2]}"
            f" would read as amounts: choose a model with an embedding, such as {fitting}"
        )
    if task.words is None:
        return
    for part in filter(None, (federation.train, federation.test)):
        if part.x.dtype.kind in "iu" and part.x.size:
            least, largest = int(part.x.min()), int(part.x.max())
            if least < 0 or largest >= task.words:  # indexing would clip to the last embedding
                raise FedraxError(
                    f"the samples of {federation.name!r} are token indices from {least} to {largest}, and the model"
                    f" {task.name.rpartition('/')[2]} has embeddings for 0 (padding) to {task.words - 1}"
                )


def check_lookups(task: Any, closed: ClosedJaxpr, federation: Any) -> None:
    """Raise FedraxError for tokens and positions that a traced model looks up outside of its tables."""
    arrays, model = named_inputs(federation.train.x), task.name.rpartition("/")[2]
    for lookup in xla.find_lookups(closed, closed.jaxpr.invars[-len(arrays) :]):
        if lookup.largest is not None and lookup.largest >= lookup.size:
            raise FedraxError(
                f"the model {model} has {lookup.size} positions, and looks up {lookup.largest + 1} for the samples of"
                f" {federation.name!r} ({describe_inputs(federation.train.x)}): shorten them to {lookup.size}"
            )
        if lookup.input is None:
            continue
        name, _ = arrays[lookup.input]
        for part in (federation.train, federation.test):
            found = _index_outside(arrays_of(part.x)[lookup.input], lookup.size)
            if found is not None:
                raise FedraxError(
                    f"{name} of {federation.name!r} holds integers from {found[0]} to {found[1]}, by which the model"
                    f" {model} looks up rows of a table of {lookup.size}: encode texts by the model's own tokenizer, or"
                    " enlarge its embedding"
                )


def _index_outside(array: np.ndarray, size: int) -> tuple[int, int] | None:
    """The least and the largest index in an array if one is outside of a table of ``size`` rows; None otherwise."""
    least, largest = (int(array.min()), int(array.max())) if array.size else (0, 0)
    return (least, largest) if least < -size or largest >= size else None


def _jaxpr_of(function: Callable, *arguments: Any) -> ClosedJaxpr:
    """The jaxpr of a function of arguments of these shapes."""
    return jax.make_jaxpr(function)(*arguments)


def _warn_of_bytes(task: Any, federation: Any) -> None:
    """Warn of image bytes that the model reads as numbers from 0 to 255."""
    x = by_key(federation.train.x).get(federation.pixels, federation.train.x)
    if has_several(x):
        return
    if x.dtype != np.uint8 or not ((federation.pixels and task.as_stored) or (task.reads_amounts and x.ndim > 2)):
        return
    remedy = "give the task federation.preprocess(), or a preprocessing of your own"
    if not federation.pixels:
        remedy = f"if they are images, set pixels=True where they are read, and {remedy}"
    warn(
        f"the samples of {federation.name!r} are bytes, which the task passes to its model as numbers from 0 to 255:"
        f" {remedy}"
    )


def constant_statistic(task: Any, variables: Any, samples: Any) -> str | None:
    """The running statistic that a batch of one sample leaves without information; None if there is none.

    It is the variance of a batch norm with one value for each feature, which is zero whatever the sample. That is found
    by numbers, so for a module of any library: the statistic is the same after one random sample as after another, but
    not the same after several copies of both as after as many of one.

    Args:
        task: the task of a model with running statistics.
        variables: the parameters and running statistics.
        samples: (x [n, ...], y [n, ...]) or their shapes.

    Returns:
        The name of the statistic.
    """
    rng = np.random.default_rng(0)

    def drawn(a: Any) -> np.ndarray:
        real = jnp.issubdtype(a.dtype, jnp.floating)
        values = rng.normal(size=(2, *a.shape[1:])) if real else rng.integers(0, 100, (2, *a.shape[1:]))
        return np.asarray(values).astype(jax.dtypes.canonicalize_dtype(a.dtype))

    x = map_inputs(drawn, samples[0])
    y = np.zeros((2, *samples[1].shape[1:]), jax.dtypes.canonicalize_dtype(samples[1].dtype))
    after = jax.jit(lambda variables, batch: task.loss_and_statistics(variables, batch, jax.random.key(0))[1])

    def repeated(rows: list[int]) -> Any:
        return type(samples)(*jax.tree.map(lambda a: a[np.array(rows)], (x, y)))

    batches = [repeated(rows) for rows in ([0], [1], [0] * 8, [0, 1] * 4)]  # several, because dropout hides some
    try:
        found = [jax.tree.leaves(after(variables, batch)) for batch in batches]
    except Exception:  # raised by user code: some models accept only some batch sizes
        return None
    apart = lambda a, b: float(np.max(np.abs(np.asarray(a, float) - np.asarray(b, float)), initial=0))  # noqa: E731
    for name, one, other, same, both in zip(tree.leaf_names(variables.statistics), *found, strict=True):
        if apart(one, other) < 1e-3 * apart(same, both):
            return name
    return None


def _within(task: Any, labels: Any) -> None:
    """Raise FedraxError for labels outside the range of the loss, which would give wrong losses."""
    if task.labels_within is None or not np.size(labels):
        return
    low, high = task.labels_within
    least, largest = np.min(labels), np.max(labels)
    if not low <= least <= largest <= high:
        raise FedraxError(
            f"the task {task.name} takes labels from {low} to {high}, and these are from {least} to {largest}"
        )


def _enough_outputs(found: tuple[int, ...], num_classes: int | None) -> None:
    """Raise FedraxError if the model has fewer outputs than classes, which would give wrong losses."""
    if num_classes is not None and found < (num_classes,):
        had = found[0] if found else "no"
        raise FedraxError(
            f"the model has {had} outputs per sample for {num_classes} classes: it needs one for each class"
        )


def traced(what: str, about: str, function: Callable, *arguments: Any, how: Callable = jax.eval_shape) -> Any:
    """The shapes of what ``function`` returns; FedraxError that mentions ``about`` if it cannot be traced.

    how: what traces a function with its arguments.
    """
    try:
        with use_abstract_mesh(xla.NO_MESH):  # the trace is cached and reused for the gradients
            return how(function, *arguments)
    except FedraxError:
        raise
    except (TypeError, ValueError) as error:  # what JAX raises for shapes and dtypes that do not match
        words = tracing_message(error)
        if words is not None:
            raise FedraxError(f"the task's {what}{_place(error)} {words}") from error
        notes = [note.removeprefix("fedrax: ") for note in getattr(error, "__notes__", ()) if note.startswith("fedrax")]
        said = "; ".join([f"{type(error).__name__}: {_said(error)}".rstrip(" :"), *notes])
        raise FedraxError(
            f"the task's {what} cannot be computed{_place(error)} for a batch of {xla.TRACE_BATCH} samples with"
            f" {about}: {said}"
        ) from error


def _said(error: BaseException) -> str:
    """The first line of an error, with the second one if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    announced = lines[1].removeprefix("* ") if lines[0].endswith(":") and len(lines) > 1 else ""
    return f"{lines[0]} {announced}".strip().rstrip(".")


def _place(error: BaseException) -> str:
    """' (in apply, file.py, line 12)' for the last frame in user code, or an empty string."""
    frame = innermost_user_frame(error)
    return "" if frame is None else f" (in {frame.name}, {Path(frame.filename).name}, line {frame.lineno})"


def _check_per_sample(what: str, found: Any, rows: int) -> None:
    if getattr(found, "shape", None) == (rows,):
        return
    if getattr(found, "shape", None) == ():
        raise FedraxError(f"the task's {what} must be one number for each sample, [B], not their mean")
    shape = [("B" if n == rows else str(n)) for n in found.shape] if hasattr(found, "shape") else None
    had = f"[{', '.join(shape)}]" if shape is not None else f"a {type(found).__name__}"
    raise FedraxError(f"the task's {what} must be one number for each sample, [B], not {had}")
