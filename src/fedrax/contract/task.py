"""Tasks: the loss of a batch, the metrics, and the initial parameters.

task = classification(MLP(hidden=(200, 200)).build((28, 28), 10), preprocess=rescale(0.1307, 0.3081))
params = task.init(jax.random.key(0))
losses = task.loss(params, Batch(x, y), jax.random.key(1))     # one for each sample
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.contract.model import Model, Params, Variables
from fedrax.contract.task_checks import check_function
from fedrax.errors import FedraxError

Preprocess = Callable[[Array], Array]
WholeSetMetric = Callable[[np.ndarray, np.ndarray], float | None]


class Batch(NamedTuple):
    """Samples as the data set stores them; the functions of `Task` convert them to inputs of the model.

    Example:
        >>> batch = fedrax.contract.Batch(x=np.zeros((8, 28, 28), np.uint8), y=np.zeros(8, int))
        >>> batch.x.shape
        (8, 28, 28)
    """

    x: Array | np.ndarray
    """The inputs [B, ...], of any dtype."""
    y: Array | np.ndarray
    """The labels [B] or, with one label for each position, [B, ...]."""


@dataclass(frozen=True)
class OfOutputs:
    """A metric of the model's outputs, so that all such metrics of a task share one forward pass."""

    outputs: Callable[..., Array]
    """As of `Task`."""
    value: Callable[[Array, Any], Array]
    """(outputs [B, ...], y [B, ...]) -> values [B]."""

    def __call__(self, parameters: Params, batch: Batch) -> Array:
        """The values [B]."""
        return self.value(self.outputs(parameters, batch.x), batch.y)


@dataclass(frozen=True)
class OfModel:
    """The `Task.loss_and_statistics` of a model: a loss of its outputs in training."""

    function: Callable[[Variables, Batch, Array], tuple[Array, Any]]

    def __call__(self, variables: Variables, batch: Batch, key: Array) -> tuple[Array, Any]:
        """The losses [B] and the new statistics."""
        return self.function(variables, batch, key)


@dataclass(frozen=True)
class LossesAlone:
    """A `Task.loss` that is computed by `Task.loss_and_statistics`."""

    function: Callable[[Variables, Batch, Array], tuple[Array, Any]]

    def __call__(self, variables: Variables, batch: Batch, key: Array) -> Array:
        """The losses [B]."""
        return self.function(variables, batch, key)[0]


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """A learning problem as pure functions. Compared and hashed by identity: a static argument of `jit`.

    Everywhere "parameters" are the tree that `init` gives: parameters alone or, where the network keeps running
    statistics, `Variables`. Without a key a function runs in evaluation mode, with one in training mode.

    ``features`` and the fields after ``name`` are None where a task does not provide them.

    Example:
        >>> def loss(w, batch, key):
        ...     return (batch.x @ w - batch.y) ** 2
        >>> task = fedrax.contract.Task(init=lambda key: jnp.zeros(3), loss=loss)
        >>> task.loss(task.init(None), fedrax.contract.Batch(jnp.ones((2, 3)), jnp.ones(2)), None).tolist()
        [1.0, 1.0]
    """

    init: Callable[[Array], Params]
    """key -> parameters."""
    loss: Callable[[Params, Batch, Array], Array]
    """(parameters, batch, key) -> losses [B], one for each sample, in training mode; the key feeds dropout. Running
    statistics are not updated."""
    metrics: Mapping[str, Callable[[Params, Batch], Array]] = field(default_factory=dict)
    """name -> function (parameters, batch) -> values [B] in evaluation mode; the simulator averages them."""
    features: Callable[..., Array] | None = None
    """(parameters, x [B, ...], key=None) -> penultimate features [B, F], for methods that compare them."""
    name: str = "task"
    """The name of the task in reports and messages."""
    loss_and_statistics: Callable[[Variables, Batch, Array], tuple[Array, Any]] | None = None
    """(Variables, batch, key) -> (losses [B], the new statistics)."""
    outputs: Callable[..., Array] | None = None
    """(parameters, x [B, ...]) -> the model's outputs [B, ...] in evaluation mode."""
    blocks: tuple[Callable[..., Array], ...] | None = None
    """Functions (parameters, x, key=None) -> x. Applied one after the other to the samples as they are stored, all with
    one key, they give the outputs: for methods that put networks together."""
    loss_of_outputs: Callable[..., Array] | None = None
    """(outputs, y) -> losses [B]."""
    measures: Callable[[Params], dict[str, Array]] | None = None
    """parameters -> metrics that need no samples, by name; reported with every evaluation."""
    lower_is_better: tuple[str, ...] = ()
    """The metrics of which a smaller value is better, as of a loss; of all others a larger one is."""
    whole_set: Mapping[str, WholeSetMetric] = field(default_factory=dict)
    """Metrics of all samples together, by name: functions of NumPy arrays, the outputs [n, ...] and y [n, ...], to a
    number, or None where it is not defined. They need `outputs`; see `fedrax.metrics`."""
    one_output_a_class: bool = False
    """Whether the outputs [B, ..., classes] have a number for each class, so that there must be as many as classes."""
    labels_within: tuple[float, float] | None = None
    """The least and the largest label that the loss is meant for."""
    as_stored: bool = False
    """Whether the model receives the samples as they are stored, without preprocessing."""
    reads_amounts: bool = False
    """Whether a model that reads integers as amounts receives the stored samples, see `Model`."""
    words: int | None = None
    """The size of the model's vocabulary, see `Model`."""
    notes: tuple[str, ...] = ()
    """Notes on the metrics, which commands print."""

    def __post_init__(self) -> None:
        both = self.loss_and_statistics
        if both is not None and isinstance(self.loss, LossesAlone):
            object.__setattr__(self, "loss", LossesAlone(both))  # of a replaced one
        elif isinstance(both, OfModel):
            raise FedraxError(
                "the loss of a model with running statistics, such as batch norm's, is trained as the task's"
                " loss_and_statistics, (variables, batch, key) -> losses, statistics: replace that one instead"
            )
        check_function("init", self.init, "key")
        check_function("loss", self.loss, "parameters, batch, key")
        for name, metric in self.metrics.items():
            check_function(f"metric {name!r}", metric, "parameters, batch")
        for name, metric in self.whole_set.items():
            check_function(f"metric {name!r} of a whole set", metric, "outputs, y")

    def __repr__(self) -> str:
        """Its name and its metrics."""
        named = ", ".join(["loss", *self.metrics, *self.whole_set])
        return f"Task {self.name!r}: {named}"

    @property
    def evaluation_loss(self) -> Callable[[Params, Batch], Array]:
        """(parameters, batch) -> losses [B] in evaluation mode.

        A task without `outputs` falls back to `loss` with a fixed key.
        """
        if self.outputs is None or self.loss_of_outputs is None:
            return lambda params, batch: self.loss(params, batch, jax.random.key(0))
        return OfOutputs(self.outputs, self.loss_of_outputs)


def rescale(mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0) -> Preprocess:
    """Convert images of bytes to floats: x / 255, then (x - mean) / std for each channel. Floats pass unchanged.

    It runs inside the compiled step, so that the data set can stay in bytes on the device.

    Args:
        mean: one number, or one for each channel (the last axis).
        std: likewise; positive.

    Returns:
        The function from stored samples to inputs of the model.

    Example:
        >>> fedrax.contract.rescale(0.5, 0.5)(jnp.full((1, 1), 255, jnp.uint8)).item()
        1.0
    """
    mean, std = tuple(np.ravel(v).tolist() for v in (mean, std))
    if not all(s > 0 for s in std):
        raise FedraxError(f"the standard deviations of `scale` must be positive, not {std}.")

    def preprocess(x: Array) -> Array:
        if x.dtype != jnp.uint8:
            return x
        channels = max(len(mean), len(std))
        if channels > 1 and x.shape[-1] != channels:
            raise FedraxError(f"`scale` has {channels} channels, but the images have shape {x.shape[1:]}.")
        gain = jnp.array([1 / (255 * s) for s in std])  # one multiplication and one subtraction a pixel
        return x.astype(gain.dtype) * gain - jnp.array(mean) / jnp.array(std)

    return preprocess


def classification(model: Model, preprocess: Preprocess | None = None, padding: int | None = None) -> Task:
    """Create a task with cross entropy of logits [B, ..., classes] and integer labels [B, ...]; metric: accuracy.

    Loss and accuracy of a sample with several labels (tokens, pixels) are means over its positions.

    Args:
        model: the model.
        preprocess: maps the stored samples to the model's inputs; None: as stored.
        padding: label of positions to ignore; a sample with no other has the loss 0.

    Returns:
        The task.

    Raises:
        FedraxError: if ``padding`` is not a 32-bit integer. The task's loss and metrics raise it if the logits and the
            labels do not match: one vector of logits for each label, integer labels, and at least two classes.

    Example:
        >>> model = fedrax.models.Logistic().build((4,), 3)
        >>> fedrax.classification(model).name.split('/')[0]
        'classification'
    """
    if padding is not None and not -(2**31) <= padding < 2**31:
        raise FedraxError(f"the padding label must be a 32-bit integer, not {padding}.")

    def over_positions(values: Array, labels: Array) -> Array:
        if padding is None:
            return _over_positions(values)
        kept, positions = labels != padding, tuple(range(1, labels.ndim))
        return jnp.where(kept, values, 0).sum(positions) / jnp.maximum(kept.sum(positions), 1)

    def loss(logits: Array, labels: Array) -> Array:
        labels = _labels_of(logits, labels)
        # log-sum-exp by hand: jax.nn.logsumexp also guards against infinite logits, which costs small models
        # an eighth of a step; a run that diverges is stopped elsewhere.
        shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        return over_positions(jnp.log(jnp.exp(shifted).sum(-1)) - _pick(shifted, labels), labels)

    def accuracy(logits: Array, labels: Array) -> Array:
        labels = _labels_of(logits, labels)
        return over_positions((logits.argmax(-1) == labels).astype(logits.dtype), labels)

    made = supervised(model, loss, {"accuracy": accuracy}, preprocess=preprocess, name="classification")
    return replace(made, one_output_a_class=True)


def margin(model: Model, preprocess: Preprocess | None = None) -> Task:
    """Create a task with the multiclass hinge loss of scores [B, classes] and labels [B]; metric: accuracy.

    The labels are integers. The loss is the sum over the other classes j of max(0, 1 - score_y + score_j), divided by
    the number of classes (PyTorch's multi-margin loss).

    Args:
        model: the model.
        preprocess: maps the stored samples to the model's inputs; None: as stored.

    Returns:
        The task. Its loss and metrics raise FedraxError if the scores and the labels do not match.

    Example:
        >>> task = fedrax.contract.margin(fedrax.models.Logistic().build((4,), 3))
        >>> list(task.metrics)
        ['accuracy']
    """

    def loss(scores: Array, labels: Array) -> Array:
        labels = _labels_of(scores, labels)
        short = jax.nn.relu(1 + scores - _pick(scores, labels)[..., None])
        others = labels[..., None] != jnp.arange(scores.shape[-1])
        return _over_positions(jnp.where(others, short, 0).sum(-1) / scores.shape[-1])

    def accuracy(scores: Array, labels: Array) -> Array:
        return _over_positions((scores.argmax(-1) == _labels_of(scores, labels)).astype(scores.dtype))

    made = supervised(model, loss, {"accuracy": accuracy}, preprocess=preprocess, name="margin")
    return replace(made, one_output_a_class=True)


def binary_classification(model: Model, preprocess: Preprocess | None = None) -> Task:
    """Create a task with the logistic loss of one logit for each label, 0 or 1; metric: accuracy.

    The logits have the shape of the labels, [B] (or [B, 1]) or [B, ...]. Loss and accuracy of a sample with several
    labels are means over them.

    Args:
        model: the model.
        preprocess: maps the stored samples to the model's inputs; None: as stored.

    Returns:
        The task.

    Example:
        >>> task = fedrax.contract.binary_classification(fedrax.models.Logistic().build((4,), 1))
        >>> task.labels_within
        (0, 1)
    """

    def loss(logit: Array, labels: Array) -> Array:
        logit = _match_targets(logit, labels)
        return _over_positions(jax.nn.softplus(logit) - logit * labels.astype(logit.dtype))

    def accuracy(logit: Array, labels: Array) -> Array:
        logit = _match_targets(logit, labels)
        return _over_positions(((logit > 0) == (labels > 0)).astype(logit.dtype))

    made = supervised(model, loss, {"accuracy": accuracy}, preprocess=preprocess, name="binary")
    return replace(made, labels_within=(0, 1))


def regression(model: Model, preprocess: Preprocess | None = None, truth: Any = None) -> Task:
    """Create a task with the squared error (output - y)^2, averaged over the targets of a sample; metric: mse.

    Args:
        model: the model.
        preprocess: maps the stored samples to the model's inputs; None: as stored.
        truth: what generated the data, for models that measure their distance from it.

    Returns:
        The task.

    Example:
        >>> model = fedrax.models.Logistic().build((4,), 1)
        >>> list(fedrax.regression(model).metrics)
        ['mse']
    """

    def squared_error(output: Array, y: Array) -> Array:
        output = _match_targets(output, y)
        return _over_positions((output - y.astype(output.dtype)) ** 2)

    falling = ("mse", "frobenius_error")
    return supervised(
        model, squared_error, {"mse": squared_error}, preprocess=preprocess, name="regression", lower_is_better=falling,
        truth=truth,
    )  # fmt: skip


def objective(model: Model, preprocess: Preprocess | None = None, truth: Any = None) -> Task:
    """Create a task whose loss is the model's output itself, [B] or [B, 1]; labels are ignored.

    Args:
        model: the model, with one output for each sample.
        preprocess: maps the stored samples to the model's inputs; None: as stored.
        truth: what generated the data, for models that measure their distance from it.

    Returns:
        The task.

    Example:
        >>> def squared_distance(w, x, key=None):
        ...     return jnp.sum((x - w) ** 2, -1)
        >>> model = fedrax.contract.Model(lambda key: jnp.zeros(2), squared_distance)
        >>> fedrax.contract.objective(model).name
        'objective/model'
    """

    def value(output: Array, y: Array) -> Array:
        if output.shape not in ((len(y),), (len(y), 1)):
            raise FedraxError(
                f"an objective needs a model with one output per sample, not outputs of shape {output.shape}."
            )
        return output.reshape(len(y))

    return supervised(model, value, preprocess=preprocess, name="objective", truth=truth)


def supervised(
    model: Model,
    loss: Callable[[Array, Any], Array],
    metrics: Mapping[str, Callable[[Array, Any], Array]] | None = None,
    *,
    preprocess: Preprocess | None = None,
    name: str = "supervised",
    lower_is_better: tuple[str, ...] = (),
    whole_set: Mapping[str, WholeSetMetric] | None = None,
    truth: Any = None,
) -> Task:
    """Create a task from a model, a loss of its outputs and metrics of its outputs.

    Args:
        model: the model.
        loss: (outputs [B, ...], y [B, ...]) -> losses [B], one for each sample; JAX arrays.
        metrics: functions (outputs [B, ...], y [B, ...]) -> values [B], by name; JAX arrays.
        preprocess: maps the stored samples to the model's inputs; None: as stored.
        name: the first part of the task's name; the second one is the model's.
        lower_is_better: names of the metrics of which a smaller value is better.
        whole_set: metrics of all samples together, by name: functions (outputs [n, ...], y [n, ...]) of NumPy arrays to
            a number, or None where it is not defined.
        truth: what generated the data, for models that measure their distance from it.

    Returns:
        The task.

    Example:
        >>> def absolute_error(outputs, y):
        ...     return jnp.abs(outputs[:, 0] - y)
        >>> model = fedrax.models.Logistic().build((4,), 1)
        >>> list(fedrax.contract.supervised(model, absolute_error, {"mae": absolute_error}).metrics)
        ['mae']
    """

    def inputs(params: Params, x: Array | np.ndarray) -> Array:
        if model.train is not None and not isinstance(params, Variables):
            raise FedraxError(
                f"the model {model.name} has running statistics: pass fedrax.contract.Variables(params, statistics),"
                " such as result.variables, in place of the parameters"
            )
        x = jnp.asarray(x) if preprocess is None else preprocess(jnp.asarray(x))
        if jnp.issubdtype(x.dtype, jnp.integer):
            return x  # tokens, counts, indices: the model knows what they are
        trained = params.params if isinstance(params, Variables) else params
        return x.astype(jnp.result_type(*jax.tree.leaves(trained)))

    def on_inputs(function):
        return lambda params, x, key=None: function(params, inputs(params, x), key)

    def apply(params: Params, x: Array | np.ndarray, *key: Array) -> Array:
        return _at_least_float32(model.apply(params, inputs(params, x), *key))

    def loss_of_outputs(outputs: Array, y: Any) -> Array:
        return loss(_at_least_float32(outputs), y)

    def training_loss(params: Params, batch: Batch, key: Array) -> Array:
        return loss(apply(params, batch.x, key), batch.y)

    def loss_and_statistics(variables: Variables, batch: Batch, key: Array) -> tuple[Array, Any]:
        assert model.train is not None
        outputs, statistics = model.train(variables, inputs(variables, batch.x), key)
        return loss_of_outputs(outputs, batch.y), statistics

    measures, moving = model.measures, None if model.train is None else OfModel(loss_and_statistics)
    return Task(
        init=model.init,
        loss=training_loss if moving is None else LossesAlone(moving),
        metrics={metric: OfOutputs(apply, value) for metric, value in (metrics or {}).items()},
        features=None if model.features is None else on_inputs(model.features),
        name=f"{name}/{model.name}",
        loss_and_statistics=moving,
        outputs=apply,
        blocks=(on_inputs(model.blocks[0]), *model.blocks[1:]) if model.blocks else None,
        loss_of_outputs=loss_of_outputs,
        measures=None if measures is None else lambda params: measures(params, truth),
        lower_is_better=lower_is_better,
        whole_set=dict(whole_set or {}),
        as_stored=preprocess is None,
        reads_amounts=model.reads_amounts and preprocess is None,
        words=model.words if preprocess is None else None,
    )


def _at_least_float32(outputs: Any) -> Array:
    """The outputs of a model in float32 at least, because losses and metrics are sums."""
    if not hasattr(outputs, "shape"):
        raise FedraxError(f"a model's outputs are an array, not {type(outputs).__name__}.")
    short = jnp.issubdtype(outputs.dtype, jnp.floating) and jnp.finfo(outputs.dtype).bits < 32
    return outputs.astype(jnp.float32) if short else outputs


def _pick(logits: Array, labels: Array) -> Array:
    """logits[..., labels[...]], by a mask: the gradient of a gather is a scatter, slow inside compiled loops."""
    return jnp.where(labels[..., None] == jnp.arange(logits.shape[-1]), logits, 0).sum(-1)


def _over_positions(values: Array) -> Array:
    """Means [B] of values [B, ...] over all positions of a sample; values [B] as they are."""
    return values if values.ndim == 1 else values.reshape(len(values), -1).mean(-1)


def _labels_of(logits: Array, labels: Array | np.ndarray) -> Array:
    """The labels as signed integers, one for each vector of logits."""
    if logits.shape[:-1] != labels.shape or not jnp.issubdtype(labels.dtype, jnp.integer):
        hint = ""
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            hint = "; where classes are meant, y.astype(int) numbers them"
        elif labels.shape in (logits.shape, (*logits.shape[:-1], 1)):
            hint = "; y[:, 0] has one label a row, and of one-hot labels y.argmax(1)"
        raise FedraxError(
            "a classification needs outputs [B, ..., classes] for integer labels [B, ...], not outputs of shape"
            f" {logits.shape} for {labels.dtype} labels of shape {labels.shape}{hint}."
        )
    if logits.shape[-1] == 1:
        raise FedraxError("classification needs one output per class, not one: use binary_classification(model)")
    labels = jnp.asarray(labels)
    return labels if jnp.issubdtype(labels.dtype, jnp.signedinteger) else labels.astype(int)


def _match_targets(output: Array, y: Array | np.ndarray) -> Array:
    """The outputs in the shape of ``y``, up to a unit axis."""
    if output.shape != y.shape and {output.shape, y.shape} != {(len(y),), (len(y), 1)}:
        wanted = "one output per sample" if y.ndim == 1 else f"outputs of shape {y.shape[1:]} per sample"
        raise FedraxError(f"this task needs a model with {wanted}, not outputs of shape {output.shape}.")
    return output.reshape(y.shape)
