"""What the clients optimise: a loss on a batch, the metrics to watch, and where the parameters start.

task = classification(MLP(hidden=(200, 200)).build((28, 28), 10), preprocess=scale(0.1307, 0.3081))
params = task.init(jax.random.key(0))
losses = task.loss(params, Batch(x, y), jax.random.key(1))     # one for each sample
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.errors import FedraxError
from fedrax.models.model import Model

Params = Any  # a pytree of arrays
Preprocess = Callable[[Array], Array]


class Variables(NamedTuple):
    """Parameters and running statistics of a model that has both; a model without statistics has parameters alone."""

    params: Params
    statistics: Any


class Batch(NamedTuple):
    """Samples as the data set stores them; `Task` turns them into what the model reads."""

    x: Array | np.ndarray  # [B, ...], any dtype
    y: Array | np.ndarray  # [B]


@dataclass(frozen=True, eq=False)
class Task:
    """A learning problem as pure functions. Compared and hashed by identity: a static argument of `jit`.

    init:     key -> parameters.
    loss:     (parameters, batch, key) -> losses [B], one for each sample; the key feeds dropout.
    metrics:  name -> function (parameters, batch) -> values [B]; the simulator averages them.
    features: (parameters, x [B, ...]) -> penultimate features [B, F], for methods that compare them.
    """

    init: Callable[[Array], Params]
    loss: Callable[[Params, Batch, Array], Array]
    metrics: Mapping[str, Callable[[Params, Batch], Array]] = field(default_factory=dict)
    features: Callable[[Params, Array], Array] | None = None
    name: str = "task"


def scale(mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0) -> Preprocess:
    """Images of bytes to floats: x / 255, then (x - mean) / std for each channel. Floats pass unchanged.

    mean and std are one number, or one for each channel (the last axis of x). It is meant to run inside
    the compiled step, so that the data set can stay in bytes on the device.
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


def classification(model: Model, preprocess: Preprocess | None = None) -> Task:
    """Cross entropy of the model's logits [B, classes] against integer labels [B]; metric: accuracy.

    Without `preprocess`, bytes are divided by 255 and other inputs are left as they are.
    """

    def loss(logits: Array, labels: Array) -> Array:
        # log-sum-exp by hand: jax.nn.logsumexp also guards against infinite logits, which costs small models
        # an eighth of a step; a run that diverges is stopped elsewhere.
        shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        return jnp.log(jnp.exp(shifted).sum(-1)) - _pick(shifted, labels)

    def accuracy(logits: Array, labels: Array) -> Array:
        return (logits.argmax(-1) == labels).astype(logits.dtype)

    return _supervised(model, preprocess, loss, {"accuracy": accuracy}, "classification")


def binary(model: Model, preprocess: Preprocess | None = None) -> Task:
    """Logistic loss of one logit a sample ([B] or [B, 1]) against labels 0 and 1; metric: accuracy."""

    def loss(logit: Array, labels: Array) -> Array:
        logit = _one_a_sample(logit)
        return jax.nn.softplus(logit) - logit * labels.astype(logit.dtype)

    def accuracy(logit: Array, labels: Array) -> Array:
        return ((_one_a_sample(logit) > 0) == (labels > 0)).astype(logit.dtype)

    return _supervised(model, preprocess, loss, {"accuracy": accuracy}, "binary")


def regression(model: Model, preprocess: Preprocess | None = None) -> Task:
    """Squared error (output - y)² of one output a sample ([B] or [B, 1]); metric: mse."""

    def squared_error(output: Array, y: Array) -> Array:
        output = _one_a_sample(output)
        return (output - y.astype(output.dtype)) ** 2

    return _supervised(model, preprocess, squared_error, {"mse": squared_error}, "regression")


def _supervised(model: Model, preprocess: Preprocess | None, loss, metrics: Mapping, kind: str) -> Task:
    """A task from a model and functions (outputs, y) -> one value a sample."""
    preprocess = scale() if preprocess is None else preprocess

    def inputs(params: Params, x: Array | np.ndarray) -> Array:
        x = preprocess(jnp.asarray(x))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x  # tokens, indices: the model knows what they are
        return x.astype(jnp.result_type(*jax.tree.leaves(params)))

    def of_outputs(value):
        return lambda params, batch: value(model.apply(params, inputs(params, batch.x)), batch.y)

    def features_of(features):
        return lambda params, x: features(params, inputs(params, x))

    return Task(
        init=model.init,
        loss=lambda params, batch, key: loss(model.apply(params, inputs(params, batch.x), key), batch.y),
        metrics={name: of_outputs(value) for name, value in metrics.items()},
        features=None if model.features is None else features_of(model.features),
        name=f"{kind}/{model.name}",
    )


def _pick(logits: Array, labels: Array) -> Array:
    """logits[i, labels[i]], by a mask: the gradient of a gather is a scatter, slow inside compiled loops."""
    return jnp.where(labels[:, None] == jnp.arange(logits.shape[-1]), logits, 0).sum(-1)


def _one_a_sample(output: Array) -> Array:
    if output.ndim == 2 and output.shape[1] == 1:
        return output[:, 0]
    if output.ndim != 1:
        raise FedraxError(f"this task needs a model with one output a sample, not outputs of shape {output.shape}.")
    return output


_QUICK: dict[str, Any] = {"compiler_options": {"xla_backend_optimization_level": 1}}
"""Random numbers take long to compile and are drawn once; what is drawn does not depend on the level."""


def starting_parameters(task: Task, key: Array, given: Params | None) -> Params:
    """The task's own starting parameters, or those given if they have the same names and shapes."""
    try:
        own = jax.jit(task.init, **_QUICK)(key) if given is None else jax.eval_shape(task.init, key)
    except jax.errors.JAXTypeError:  # a user's init may look at the key's value
        own = task.init(key)
    if given is None:
        return own
    need, have = (dict(zip(tree.leaf_names(t), map(jnp.shape, jax.tree.leaves(t)), strict=True)) for t in (own, given))
    for name in [*need, *have]:
        if need.get(name) != have.get(name):
            wanted, found = (f"of shape {shapes[name]}" if name in shapes else "not there" for shapes in (need, have))
            raise FedraxError(f"the starting parameters do not fit the model: {name} is {found}, should be {wanted}")
    return given
