"""Tasks: the loss of a batch, the metrics, and the initial parameters.

task = classification(MLP(hidden=(200, 200)).build((28, 28), 10), preprocess=rescale(0.1307, 0.3081))
params = task.init(jax.random.key(0))
losses = task.loss(params, Batch(x, y), jax.random.key(1))     # one for each sample
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.config.arguments import checked_arguments
from fedrax.contract.model import Model, Params, Variables
from fedrax.contract.task_checks import check_function
from fedrax.errors import FedraxError
from fedrax.inputs import Inputs, by_key, has_several, map_inputs, map_one
from fedrax.metrics import LabelMean, Labels, Metric, Value, find_metrics

Preprocess = Callable[[Inputs], Inputs]
SampleWeights = Callable[[Inputs, Array], Array]
WholeSetMetric = Callable[[np.ndarray, np.ndarray], Value]


class Batch(NamedTuple):
    """Samples as the data set stores them; the functions of `Task` convert them to inputs of the model.

    Example:
        >>> batch = fedrax.contract.Batch(x=np.zeros((8, 28, 28), np.uint8), y=np.zeros(8, int))
        >>> batch.x.shape
        (8, 28, 28)
    """

    x: Inputs
    """The inputs, an array [B, ...] of any dtype; or a dictionary or tuple of such arrays."""
    y: Array | np.ndarray
    """The labels [B] or, with one label for each position, [B, ...]."""


@dataclass(frozen=True)
class OfOutputs:
    """A metric of the model's outputs, so that all such metrics of a task share one forward pass."""

    outputs: Callable[..., Array]
    """As of `Task`."""
    value: Callable[[Array, Any], Array]
    """(outputs [B, ...], y [B, ...]) -> values [B], or [B, k] with ``finish``."""
    finish: Callable[[np.ndarray], float | None] | None = None
    """The metric from the means [k] of the values; None: the mean of the values."""
    undefined: str = ""
    """When ``finish`` gives None, as the reason in a warning."""
    sample_weights: SampleWeights | None = None
    """As of `Task`."""

    def __call__(self, parameters: Params, batch: Batch) -> Array:
        """The values [B]."""
        return self.of(self.outputs(parameters, batch.x), batch)

    def of(self, outputs: Array, batch: Batch) -> Array:
        """The values [B], given the outputs."""
        return weighted(self.value(outputs, batch.y), self.sample_weights, batch)


def weighted(losses: Array, sample_weights: SampleWeights | None, batch: Batch) -> Array:
    """The losses [B] of a batch times the weights of its samples, if there are any."""
    if sample_weights is None:
        return losses
    weights = jnp.asarray(sample_weights(map_inputs(jnp.asarray, batch.x), jnp.asarray(batch.y)))
    if weights.shape != losses.shape:
        raise FedraxError(f"sample_weights must return one weight for each sample, [B], not an array {weights.shape}")
    return losses * weights.astype(losses.dtype)


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
    """(outputs, y) -> losses [B], without `sample_weights`."""
    sample_weights: SampleWeights | None = None
    """(x as stored [B, ...], y [B, ...]) -> weights [B], by which the losses of `supervised` tasks are multiplied."""
    measures: Callable[[Params], dict[str, Array]] | None = None
    """parameters -> metrics that need no samples, by name; reported with every evaluation."""
    lower_is_better: tuple[str, ...] = ()
    """The metrics of which a smaller value is better, as of a loss; of all others a larger one is."""
    whole_set: Mapping[str, WholeSetMetric] = field(default_factory=dict)
    """Metrics of all samples together, by name: functions of NumPy arrays, the outputs [n, ...] and y [n, ...], to a
    number, to None where it is not defined, or to a dictionary of them by name. They need `outputs`; see
    `fedrax.metrics`."""
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
    frozen: Any = ()
    """The model's frozen parameters, see `Model`."""

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

    @staticmethod
    def _remedy(value: Any) -> str:
        """How to make a task of ``value``; empty if unknown."""
        return "fedrax.classification(model) makes a task of it" if isinstance(value, Model) else ""

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
        return OfOutputs(self.outputs, self.loss_of_outputs, sample_weights=self.sample_weights)


@checked_arguments
def rescale(
    mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0, of: str | None = None
) -> Preprocess:
    """Convert images of bytes to floats: x / 255, then (x - mean) / std for each channel. Floats pass unchanged.

    It runs inside the compiled step, so that the data set can stay in bytes on the device.

    Args:
        mean: one number, or one for each channel (the last axis).
        std: likewise; positive.
        of: name of the images among several inputs, of a tuple the number, such as "0"; others pass unchanged.

    Returns:
        The function from stored samples to inputs of the model.

    Example:
        >>> fedrax.contract.rescale(0.5, 0.5)(jnp.full((1, 1), 255, jnp.uint8)).item()
        1.0
    """
    mean, std = tuple(np.ravel(v).tolist() for v in (mean, std))
    if not all(s > 0 for s in std):
        raise FedraxError(f"the standard deviations of `scale` must be positive, not {std}.")

    def preprocess(x: Inputs) -> Inputs:
        if of is None and not has_several(x):
            return scaled(x)
        if of is None or of not in by_key(x):
            names = " or ".join(map(repr, by_key(x))) or "None"
            raise FedraxError(f"`scale` needs the name of the images among the inputs, of={names}, not {of!r}.")
        return map_one(scaled, x, of)

    def scaled(x: Array) -> Array:
        if x.dtype != jnp.uint8:
            return x
        channels = max(len(mean), len(std))
        if channels > 1 and x.shape[-1] != channels:
            raise FedraxError(f"`scale` has {channels} channels, but the images have shape {x.shape[1:]}.")
        gain = jnp.array([1 / (255 * s) for s in std])  # one multiplication and one subtraction a pixel
        return x.astype(gain.dtype) * gain - jnp.array(mean) / jnp.array(std)

    return preprocess


@checked_arguments
def classification(
    model: Model,
    preprocess: Preprocess | None = None,
    padding: int | None = None,
    *,
    metrics: Sequence[str] = (),
    positive: int | str | None = None,
    class_names: Sequence[str] | None = None,
    class_weights: Sequence[float] | np.ndarray | None = None,
    sample_weights: SampleWeights | None = None,
) -> Task:
    """Create a task with cross entropy of logits [B, ..., classes] and integer labels [B, ...]; metric: accuracy.

    Loss and accuracy of a sample with several labels (tokens, pixels) are means over its positions.

    Args:
        model: the model.
        preprocess: maps the stored samples to the model's inputs; None: as stored.
        padding: label of positions to ignore; a sample with no other has the loss 0.
        metrics: names of further metrics, see `fedrax.metrics`: ``"auc"``, ``"f1"``, ``"precision"``, ``"recall"`` (of
            class 1 of two, of more classes the mean over them; with the ending ``_macro``, ``_micro`` or ``_weighted``
            averaged like this), ``"balanced_accuracy"``, ``"accuracy_per_class"``, ``"top_5_accuracy"`` (any number),
            ``"log_loss"``, ``"perplexity"``.
        positive: number or name of the class that ``"f1"``, ``"precision"`` and ``"recall"`` are of.
        class_names: names of the classes for ``positive`` and ``"accuracy_per_class"``.
        class_weights: a weight for each class, by which the losses of its labels are multiplied, in training and in
            evaluation (the metric ``"log_loss"`` has no weights). They are not divided by their sum over a batch.
        sample_weights: function (x as stored [B, ...], y [B, ...]) -> weights [B], by which losses are multiplied.

    Returns:
        The task.

    Raises:
        FedraxError: if ``padding`` is not a 32-bit integer, and for unknown metrics and invalid weights. The task's
            loss and metrics raise it if the logits and the labels do not match: one vector of logits for each label,
            integer labels, and at least two classes.

    Example:
        >>> model = fedrax.models.Logistic().build((4,), 3)
        >>> fedrax.classification(model, metrics=["auc", "log_loss"], class_weights=[1, 1, 5])
        Task 'weighted_classification/logistic': loss, accuracy, log_loss, auc
    """
    weights = _checked_weights(class_weights)

    def loss(logits: Array, labels: Array) -> Array:
        labels = _labels_of(logits, labels)
        # log-sum-exp by hand: jax.nn.logsumexp also guards against infinite logits, which costs small models
        # an eighth of a step; a run that diverges is stopped elsewhere.
        shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        losses = jnp.log(jnp.exp(shifted).sum(-1)) - _pick(shifted, labels)
        return _over_positions(_class_weighted(losses, logits, labels, weights), labels, padding)

    def accuracy(logits: Array, labels: Array) -> Array:
        labels = _labels_of(logits, labels)
        return _over_positions((logits.argmax(-1) == labels).astype(logits.dtype), labels, padding)

    made = supervised(
        model, loss, {"accuracy": accuracy}, preprocess=preprocess, sample_weights=sample_weights,
        name=_task_name("classification", weights, sample_weights),
    )  # fmt: skip
    return _with_metrics(replace(made, one_output_a_class=True), metrics, "classes", positive, class_names, padding)


@checked_arguments
def margin(
    model: Model,
    preprocess: Preprocess | None = None,
    *,
    metrics: Sequence[str] = (),
    positive: int | str | None = None,
    class_names: Sequence[str] | None = None,
    class_weights: Sequence[float] | np.ndarray | None = None,
    sample_weights: SampleWeights | None = None,
) -> Task:
    """Create a task with the multiclass hinge loss of scores [B, classes] and labels [B]; metric: accuracy.

    The labels are integers. The loss is the sum over the other classes j of max(0, 1 - score_y + score_j), divided by
    the number of classes (PyTorch's multi-margin loss).

    Args:
        model: the model.
        preprocess: maps the stored samples to the model's inputs; None: as stored.
        metrics: as of `fedrax.classification`, but for ``"log_loss"`` and ``"perplexity"``.
        positive: as of `fedrax.classification`.
        class_names: as of `fedrax.classification`.
        class_weights: as of `fedrax.classification`.
        sample_weights: as of `fedrax.classification`.

    Returns:
        The task. Its loss and metrics raise FedraxError if the scores and the labels do not match.

    Raises:
        FedraxError: for unknown metrics and invalid weights.

    Example:
        >>> task = fedrax.contract.margin(fedrax.models.Logistic().build((4,), 3))
        >>> list(task.metrics)
        ['accuracy']
    """
    weights = _checked_weights(class_weights)

    def loss(scores: Array, labels: Array) -> Array:
        labels = _labels_of(scores, labels)
        short = jax.nn.relu(1 + scores - _pick(scores, labels)[..., None])
        others = labels[..., None] != jnp.arange(scores.shape[-1])
        losses = jnp.where(others, short, 0).sum(-1) / scores.shape[-1]
        return _over_positions(_class_weighted(losses, scores, labels, weights))

    def accuracy(scores: Array, labels: Array) -> Array:
        return _over_positions((scores.argmax(-1) == _labels_of(scores, labels)).astype(scores.dtype))

    made = supervised(
        model, loss, {"accuracy": accuracy}, preprocess=preprocess, sample_weights=sample_weights,
        name=_task_name("margin", weights, sample_weights),
    )  # fmt: skip
    made = _with_metrics(replace(made, one_output_a_class=True), metrics, "classes", positive, class_names)
    for name in ("log_loss", "perplexity"):
        if name in made.metrics:
            raise FedraxError(f"{name} needs probabilities, and the outputs of a hinge loss are scores: leave it out")
    return made


@checked_arguments
def binary_classification(
    model: Model,
    preprocess: Preprocess | None = None,
    *,
    metrics: Sequence[str] = (),
    positive: int | str | None = None,
    class_names: Sequence[str] | None = None,
    class_weights: Sequence[float] | np.ndarray | None = None,
    sample_weights: SampleWeights | None = None,
) -> Task:
    """Create a task with the logistic loss of one logit for each label, 0 or 1; metric: accuracy.

    The logits have the shape of the labels, [B] (or [B, 1]) or [B, ...]. Loss and accuracy of a sample with several
    labels are means over them.

    Args:
        model: the model.
        preprocess: maps the stored samples to the model's inputs; None: as stored.
        metrics: as of `fedrax.classification`.
        positive: as of `fedrax.classification`.
        class_names: as of `fedrax.classification`.
        class_weights: as of `fedrax.classification`, of class 0 and of class 1.
        sample_weights: as of `fedrax.classification`.

    Returns:
        The task.

    Raises:
        FedraxError: for unknown metrics and invalid weights.

    Example:
        >>> task = fedrax.contract.binary_classification(fedrax.models.Logistic().build((4,), 1))
        >>> task.labels_within
        (0, 1)
    """
    weights = _checked_weights(class_weights, 2)

    def loss(logit: Array, labels: Array) -> Array:
        logit = _match_targets(logit, labels)
        losses = jax.nn.softplus(logit) - logit * labels.astype(logit.dtype)
        if weights is not None:
            losses *= jnp.where(labels > 0, weights[1], weights[0]).astype(losses.dtype)
        return _over_positions(losses)

    def accuracy(logit: Array, labels: Array) -> Array:
        logit = _match_targets(logit, labels)
        return _over_positions(((logit > 0) == (labels > 0)).astype(logit.dtype))

    made = supervised(
        model, loss, {"accuracy": accuracy}, preprocess=preprocess, sample_weights=sample_weights,
        name=_task_name("binary", weights, sample_weights),
    )  # fmt: skip
    return _with_metrics(replace(made, labels_within=(0, 1)), metrics, "classes", positive, class_names)


@checked_arguments
def regression(
    model: Model,
    preprocess: Preprocess | None = None,
    truth: Any = None,
    *,
    metrics: Sequence[str] = (),
    sample_weights: SampleWeights | None = None,
) -> Task:
    """Create a task with the squared error (output - y)^2, averaged over the targets of a sample; metric: mse.

    Args:
        model: the model.
        preprocess: maps the stored samples to the model's inputs; None: as stored.
        truth: what generated the data, for models that measure their distance from it.
        metrics: names of further metrics, see `fedrax.metrics`: ``"r2"``, ``"mean_absolute_error"`` (or ``"mae"``),
            ``"root_mean_squared_error"``.
        sample_weights: function (x as stored [B, ...], y [B, ...]) -> weights [B], by which losses are multiplied; the
            metrics have no weights.

    Returns:
        The task.

    Raises:
        FedraxError: for unknown metrics.

    Example:
        >>> model = fedrax.models.Logistic().build((4,), 1)
        >>> list(fedrax.regression(model, metrics=["mae"]).metrics)
        ['mse', 'mae']
    """

    def squared_error(output: Array, y: Array) -> Array:
        output = _match_targets(output, y)
        return _over_positions((output - y.astype(output.dtype)) ** 2)

    falling = ("mse", "frobenius_error")
    made = supervised(
        model, squared_error, {"mse": squared_error}, preprocess=preprocess, lower_is_better=falling,
        truth=truth, sample_weights=sample_weights, name=_task_name("regression", None, sample_weights),
    )  # fmt: skip
    return _with_metrics(made, metrics, "numbers")


@checked_arguments
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


@checked_arguments
def supervised(
    model: Model,
    loss: Callable[[Array, Any], Array],
    metrics: Mapping[str, Callable[[Array, Any], Array]] | Sequence[str] | None = None,
    *,
    preprocess: Preprocess | None = None,
    name: str = "supervised",
    lower_is_better: tuple[str, ...] = (),
    whole_set: Mapping[str, WholeSetMetric] | None = None,
    truth: Any = None,
    sample_weights: SampleWeights | None = None,
) -> Task:
    """Create a task from a model, a loss of its outputs and metrics of its outputs.

    Args:
        model: the model.
        loss: (outputs [B, ...], y [B, ...]) -> losses [B], one for each sample; JAX arrays.
        metrics: functions (outputs [B, ...], y [B, ...]) -> values [B], by name; JAX arrays. Or a list of names of
            `fedrax.metrics.METRICS`, for outputs that are logits or predictions.
        preprocess: maps the stored samples to the model's inputs; None: as stored.
        name: the first part of the task's name; the second one is the model's.
        lower_is_better: names of the metrics of which a smaller value is better.
        whole_set: metrics of all samples together, by name: functions (outputs [n, ...], y [n, ...]) of NumPy arrays to
            a number, to None where it is not defined, or to a dictionary of them by name, such as those of
            `fedrax.metrics.METRICS`.
        truth: what generated the data, for models that measure their distance from it.
        sample_weights: function (x as stored [B, ...], y [B, ...]) -> weights [B], by which the losses are multiplied.

    Returns:
        The task.

    Example:
        >>> def absolute_error(outputs, y):
        ...     return jnp.abs(outputs[:, 0] - y)
        >>> model = fedrax.models.Logistic().build((4,), 1)
        >>> list(fedrax.contract.supervised(model, absolute_error, {"mae": absolute_error}).metrics)
        ['mae']
    """

    def inputs(params: Params, x: Inputs) -> Inputs:
        if model.train is not None and not isinstance(params, Variables):
            raise FedraxError(
                f"the model {model.name} has running statistics: pass fedrax.contract.Variables(params, statistics),"
                " such as result.model, in place of the parameters"
            )
        x = map_inputs(jnp.asarray, x)
        x = x if preprocess is None else preprocess(x)
        trained = params.params if isinstance(params, Variables) else params
        # tokens, counts, indices: the model knows what they are; Booleans beside other inputs are masks
        kept = (jnp.integer, jnp.bool_) if has_several(x) else (jnp.integer,)

        def read(a: Array) -> Array:
            if any(jnp.issubdtype(a.dtype, kind) for kind in kept):
                return a
            return a.astype(jnp.result_type(*jax.tree.leaves(trained)))

        return map_inputs(read, x)

    def on_inputs(function):
        return lambda params, x, key=None: function(params, inputs(params, x), key)

    def apply(params: Params, x: Inputs, *key: Array) -> Array:
        return _at_least_float32(model.apply(params, inputs(params, x), *key))

    def loss_of_outputs(outputs: Array, y: Any) -> Array:
        return loss(_at_least_float32(outputs), y)

    def training_loss(params: Params, batch: Batch, key: Array) -> Array:
        return weighted(loss(apply(params, batch.x, key), batch.y), sample_weights, batch)

    def loss_and_statistics(variables: Variables, batch: Batch, key: Array) -> tuple[Array, Any]:
        assert model.train is not None
        outputs, statistics = model.train(variables, inputs(variables, batch.x), key)
        return weighted(loss_of_outputs(outputs, batch.y), sample_weights, batch), statistics

    functions, names = (metrics, ()) if metrics is None or isinstance(metrics, Mapping) else ({}, metrics)
    measures, moving = model.measures, None if model.train is None else OfModel(loss_and_statistics)
    made = Task(
        init=model.init,
        loss=training_loss if moving is None else LossesAlone(moving),
        metrics={metric: OfOutputs(apply, value) for metric, value in (functions or {}).items()},
        features=None if model.features is None else on_inputs(model.features),
        name=f"{name}/{model.name}",
        loss_and_statistics=moving,
        outputs=apply,
        blocks=(on_inputs(model.blocks[0]), *model.blocks[1:]) if model.blocks else None,
        loss_of_outputs=loss_of_outputs,
        sample_weights=sample_weights,
        measures=None if measures is None else lambda params: measures(params, truth),
        lower_is_better=lower_is_better,
        whole_set=dict(whole_set or {}),
        as_stored=preprocess is None,
        reads_amounts=model.reads_amounts and preprocess is None,
        words=model.words if preprocess is None else None,
        frozen=model.frozen,
    )
    return _with_metrics(made, names, None) if names else made


def _task_name(name: str, class_weights: np.ndarray | None, sample_weights: SampleWeights | None) -> str:
    """The first part of the name: a weighted loss is another task, for which bounds of gradients may not hold."""
    return name if class_weights is None and sample_weights is None else f"weighted_{name}"


def _with_metrics(
    task: Task,
    names: Sequence[str],
    labels: Labels | None,
    positive: int | str | None = None,
    class_names: Sequence[str] | None = None,
    padding: int | None = None,
) -> Task:
    """The task with further metrics by name."""
    assert task.outputs is not None
    found, notes = find_metrics(names, labels, task.metrics, positive, class_names)
    means, whole_set = dict(task.metrics), dict(task.whole_set)
    for name, metric in found.items():
        if isinstance(metric, LabelMean):
            finish = None if metric.finish is None else partial(_of_ratio, metric.finish)
            means[name] = OfOutputs(task.outputs, partial(_values_of, metric, padding), finish, metric.undefined)
        elif padding is None:
            whole_set[name] = metric
        else:
            whole_set[name] = replace(metric, function=partial(_without_padding, metric, padding))
    falling = tuple(name for name, metric in found.items() if metric.lower_is_better)
    lower = (*task.lower_is_better, *falling)
    return replace(task, metrics=means, whole_set=whole_set, lower_is_better=lower, notes=notes)


def _values_of(metric: LabelMean, padding: int | None, outputs: Array, y: Array) -> Array:
    """The means [B] over the labels of each sample or, for a metric with ``finish``, (sum, number of labels) [B, 2]."""
    values = metric.values(outputs, jnp.asarray(y)).astype(outputs.dtype)
    if metric.finish is None:
        return _over_positions(values, y, padding)
    kept = jnp.ones(y.shape, bool) if padding is None else y != padding
    parts = (jnp.where(kept, values, 0), kept.astype(values.dtype))
    return jnp.stack([part.reshape(len(y), -1).sum(1) for part in parts], -1)


def _of_ratio(finish: Callable[[float], float | None], means: np.ndarray) -> float | None:
    """``finish`` of the mean over all labels, None without labels."""
    return finish(float(means[0] / means[1])) if means[1] else None


def _without_padding(metric: Metric, padding: int, outputs: np.ndarray, y: np.ndarray) -> Value:
    """The metric of the labels that are not padding."""
    kept = y != padding
    return metric(outputs[kept], y[kept]) if kept.any() else None


def _checked_weights(class_weights: Any, classes: int | None = None) -> np.ndarray | None:
    """The weights of classes as an array; raises FedraxError for others than numbers of at least zero."""
    if class_weights is None:
        return None
    try:
        weights = np.asarray(class_weights, float)
    except (TypeError, ValueError):
        weights = np.empty(0)
    if weights.ndim != 1 or not weights.size or not np.isfinite(weights).all() or (weights < 0).any():
        raise FedraxError(
            f"class_weights must be a list of one number for each class, at least 0, not {class_weights!r:.100}: of"
            " labels y, len(y) / (C * np.bincount(y)) gives all classes the same total weight"
        )
    if classes is not None and len(weights) != classes:
        raise FedraxError(f"class_weights has {len(weights)} weights for {classes} classes")
    return weights


def _class_weighted(losses: Array, logits: Array, labels: Array, weights: np.ndarray | None) -> Array:
    """Losses [B, ...] times the weights of the labels' classes."""
    if weights is None:
        return losses
    if len(weights) != logits.shape[-1]:
        raise FedraxError(f"class_weights has {len(weights)} weights for a model with {logits.shape[-1]} outputs")
    return losses * _pick(jnp.asarray(weights, losses.dtype), labels)


def _at_least_float32(outputs: Any) -> Array:
    """The outputs of a model in float32 at least, because losses and metrics are sums."""
    if not hasattr(outputs, "shape"):
        raise FedraxError(f"a model's outputs are an array, not {type(outputs).__name__}.")
    short = jnp.issubdtype(outputs.dtype, jnp.floating) and jnp.finfo(outputs.dtype).bits < 32
    return outputs.astype(jnp.float32) if short else outputs


def _pick(logits: Array, labels: Array) -> Array:
    """logits[..., labels[...]], by a mask: the gradient of a gather is a scatter, slow inside compiled loops."""
    return jnp.where(labels[..., None] == jnp.arange(logits.shape[-1]), logits, 0).sum(-1)


def _over_positions(values: Array, labels: Any = None, padding: int | None = None) -> Array:
    """Means [B] of values [B, ...] over the positions of a sample whose label is not ``padding``."""
    if padding is None:
        return values if values.ndim == 1 else values.reshape(len(values), -1).mean(-1)
    kept, positions = labels != padding, tuple(range(1, labels.ndim))
    return jnp.where(kept, values, 0).sum(positions) / jnp.maximum(kept.sum(positions), 1)


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
