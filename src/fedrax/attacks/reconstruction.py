"""Reconstruction of samples from messages: candidate data are optimized until their messages match the observed ones.

    observation = as_gradient(task, params, gradient)
    reconstruction = dlg().invert(observation, (1, 28, 28), classes=10)

:func:`dlg` is deep leakage from gradients (Zhu et al. 2019), :func:`gradient_descent` the same by gradient descent, and
:func:`inverting_gradients` the attack of Geiping et al. (2020). iDLG (Zhao et al. 2020) is :func:`dlg` with the labels
of :func:`fedrax.attacks.recover_labels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.attacks.observation import Observation
from fedrax.attacks.optimizers import LBFGS, GradientDescent, Optimizer, SignedAdam
from fedrax.config.arguments import checked_arguments
from fedrax.contract.task import Batch
from fedrax.errors import FedraxError
from fedrax.tree import Tree

Distance = Literal["squared", "relative", "cosine"]
"""Distances between observed and predicted vectors; see `Attack.distance`."""
_TINY = 1e-30
"""Lower limit of divisors."""


class Reconstruction(NamedTuple):
    """Result of an attack.

    Example:
        >>> task = fedrax.classification(fedrax.models.Logistic().build((2,), 2))
        >>> params = task.init(jax.random.key(0))
        >>> view = fedrax.attacks.as_gradient(task, params, jax.tree.map(jnp.ones_like, params))
        >>> fedrax.attacks.dlg(steps=2).invert(view, (1, 2), classes=2).x.shape
        (1, 2)
    """

    x: np.ndarray
    """Reconstructed data [n, ...] on the model's scale, at the step and restart with the smallest distance."""
    y: np.ndarray
    """Labels [n]."""
    distance: float
    """Distance between the observed vectors and those predicted from the data."""
    distances: np.ndarray
    """Distances [steps + 1] of this restart, from the start on."""
    frames: np.ndarray
    """Candidate data [frames, n, ...] of this restart at ``frame_steps``."""
    frame_steps: np.ndarray
    """Steps [frames], evenly spaced from 0 to the last."""


@dataclass(frozen=True)
class Attack:
    """Reconstruction attack: an optimizer, a distance and constraints on candidate data.

    :func:`dlg`, :func:`gradient_descent` and :func:`inverting_gradients` are the attacks of the literature.

    Example:
        >>> fedrax.attacks.Attack(fedrax.attacks.gradient_descent(0.1).optimizer, steps=5, distance="cosine").restarts
        1
    """

    optimizer: Optimizer
    """Optimizer of the candidate data."""
    steps: int
    """Optimizer steps, each with one evaluation of the distance and its gradient."""
    distance: Distance
    """Distance of predicted vectors a from observed ones b: "squared" is the sum of |a - b|² over vectors, "relative"
    the mean of |a - b|²/|b|², "cosine" the mean of 1 - cos(a, b)."""
    total_variation: float = 0.0
    """Weight of the mean absolute difference of neighboring pixels (images [n, H, W] or [n, H, W, C] only)."""
    box: tuple[float, float] | None = None
    """Lower and upper limit of the candidate data; None for no limits."""
    restarts: int = 1
    """Number of starts; the result with the smallest distance is returned."""

    def invert(
        self,
        view: Observation,
        shape: Sequence[int],
        classes: int | None = None,
        *,
        y: Any = None,
        start: Any = None,
        seed: int = 0,
        frames: int = 0,
    ) -> Reconstruction:
        """Search for the data behind an observation.

        Args:
            view: The observation to reproduce.
            shape: Shape [n, ...] of the data, on the model's scale.
            classes: Number C of classes, to optimize unknown labels as probabilities.
            y: The labels [n], if known.
            start: Initial candidate data; by default standard normal noise, or uniform noise within ``box``.
            seed: Seed of the random starts.
            frames: Number of intermediate candidates to return.

        Returns:
            The candidate with the smallest distance.

        Raises:
            FedraxError: The client of the method cannot be differentiated, or the arguments do not fit the attack.
        """
        shape = tuple(shape)
        self._check(shape, classes, y)
        best: Reconstruction | None = None
        for k in range(self.restarts):
            key = jax.random.fold_in(jax.random.key(seed), k)
            candidate = self._start(key, shape, None if y is not None else classes, start if k == 0 else None)
            result = self._from_start(view, candidate, y, frames)
            if best is None or result.distance < best.distance or np.isnan(best.distance):
                best = result
        assert best is not None
        return best

    def _check(self, shape: tuple[int, ...], classes: int | None, y: Any) -> None:
        """Raise FedraxError for arguments that do not fit the attack."""
        if (classes is None) == (y is None):
            raise FedraxError("give either the labels y or, to reconstruct them, the number of classes")
        if y is not None and np.shape(y)[:1] != shape[:1]:
            raise FedraxError(f"y must have one label for each of {shape[0]} samples, not shape {np.shape(y)}")
        if self.total_variation and len(shape) not in (3, 4):
            raise FedraxError(f"total_variation needs images [n, H, W] or [n, H, W, C], not {list(shape)}: set it to 0")
        if self.box is not None and isinstance(self.optimizer, LBFGS):
            raise FedraxError("L-BFGS does not support box: set it to None, or use another optimizer")
        if self.steps < 1 or self.restarts < 1:
            raise FedraxError("steps and restarts must be at least 1")

    def _start(self, key: Array, shape: tuple[int, ...], classes: int | None, given: Any) -> dict[str, Array]:
        """Initial candidate: data x and, with ``classes``, logits of the labels."""
        of_x, of_y = jax.random.split(key)
        if given is not None:
            x = jnp.asarray(given, float).reshape(shape)
        elif self.box is not None:
            x = jax.random.uniform(of_x, shape, minval=self.box[0], maxval=self.box[1])
        else:
            x = jax.random.normal(of_x, shape)
        return {"x": x} if classes is None else {"x": x, "labels": jax.random.normal(of_y, (shape[0], classes))}

    def _from_start(self, view: Observation, candidate: dict[str, Array], y: Any, frames: int) -> Reconstruction:
        """The result from one initial candidate."""
        known = None if y is None else jnp.asarray(y)
        at = np.unique(np.linspace(0, self.steps, frames).round().astype(int)) if frames else np.zeros(0, int)
        attack = replace(self, restarts=1)  # restarts are not part of the compilation cache key
        try:
            with jax.default_matmul_precision("highest"):  # the precision of the recorded run, also on accelerators
                result = _descend(attack, view.predict, tuple(at.tolist()), view.known, view.target, candidate, known)
        except ValueError as error:
            if "Reverse-mode differentiation" not in str(error):
                raise
            raise FedraxError(
                "the client of this method has a loop that cannot be differentiated: give as_client_program the method"
                " inside it as program, or use as_gradient"
            ) from error
        best, distances, candidates = jax.tree.map(np.asarray, result)
        labels = np.asarray(y) if y is not None else best["labels"].argmax(1)
        smallest = float(np.min(distances, initial=np.inf, where=~np.isnan(distances)))
        return Reconstruction(best["x"], labels, smallest, distances, candidates, at)


@checked_arguments
def dlg(steps: int = 300, restarts: int = 1, distance: Distance = "relative") -> Attack:
    """Deep leakage from gradients (Zhu et al. 2019): L-BFGS on the squared distance, for data and labels jointly.

    By default the distance of each vector is relative to its observed norm, so that all vectors have equal weight.

    Args:
        steps: Steps of the optimizer.
        restarts: Number of random starts; the best result is returned.
        distance: Distance between observed and predicted vectors.

    Returns:
        The attack.

    Example:
        >>> fedrax.attacks.dlg(steps=50).distance
        'relative'
    """
    return Attack(LBFGS(), steps, distance, restarts=restarts)


@checked_arguments
def gradient_descent(lr: float, steps: int = 100) -> Attack:
    """DLG by plain gradient descent on the squared distance, as in Section 5.4 of the LoSAC paper.

    Args:
        lr: Learning rate.
        steps: Steps of gradient descent.

    Returns:
        The attack.

    Example:
        >>> fedrax.attacks.gradient_descent(lr=0.1).distance
        'squared'
    """
    return Attack(GradientDescent(lr), steps, "squared")


@checked_arguments
def inverting_gradients(
    steps: int = 1000,
    lr: float = 0.1,
    total_variation: float = 1e-2,
    box: tuple[float, float] | None = (0.0, 1.0),
    restarts: int = 1,
) -> Attack:
    """Inverting gradients (Geiping et al. 2020): cosine distance and total variation, Adam on the gradient's sign.

    The learning rate is divided by 10 after 3/8, 5/8 and 7/8 of the steps, as in their implementation.

    Args:
        steps: Steps of Adam.
        lr: Initial learning rate.
        total_variation: Weight of total variation; must be 0 unless the data are images.
        box: Lowest and highest value of a pixel; None for no limits.
        restarts: Number of random starts; the best result is returned.

    Returns:
        The attack.

    Example:
        >>> fedrax.attacks.inverting_gradients(steps=100).distance
        'cosine'
    """
    return Attack(SignedAdam(lr), steps, "cosine", total_variation, box, restarts)


# -- optimization -----------------------------------------------------------------------------------------------------


def distance_between(kind: Distance, made: tuple[Tree, ...], seen: tuple[Tree, ...]) -> Array:
    """Distance between predicted and observed vectors; observed vectors that are zero are ignored."""

    def dot(a: Tree, b: Tree) -> Any:
        return sum(jnp.vdot(u, v) for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    total, count = jnp.zeros(()), jnp.zeros(())
    for a, b in zip(made, seen, strict=True):
        size = dot(b, b)
        apart = jax.tree.map(jnp.subtract, a, b)
        if kind == "cosine":
            value = 1 - dot(a, b) / jnp.sqrt(jnp.maximum(dot(a, a) * size, _TINY))
        else:
            value = dot(apart, apart) / (1 if kind == "squared" else jnp.maximum(size, _TINY))
        total, count = total + jnp.where(size > 0, value, 0), count + (size > 0)
    return total if kind == "squared" else total / jnp.maximum(count, 1)


def total_variation_of(x: Array) -> Array:
    """Mean absolute difference of vertically and of horizontally adjacent pixels."""
    return jnp.abs(jnp.diff(x, axis=1)).mean() + jnp.abs(jnp.diff(x, axis=2)).mean()


@partial(jax.jit, static_argnums=(0, 1, 2))
def _descend(
    attack: Attack, predict: Any, frames: tuple[int, ...], known: Any, target: tuple, start: dict, y: Array | None
) -> tuple[dict, Array, Array]:
    """(best candidate, distances [steps + 1], candidate data at the steps in ``frames``)."""
    classes = start["labels"].shape[1] if "labels" in start else None

    def objective(candidate: dict) -> tuple[Array, Array]:
        labels: Any = y if classes is None else jax.nn.softmax(candidate["labels"])
        apart = distance_between(attack.distance, predict(known, Batch(candidate["x"], labels), classes), target)
        smooth = attack.total_variation * total_variation_of(candidate["x"]) if attack.total_variation else 0.0
        return apart + smooth, apart

    def step(k: Array, carry: tuple) -> tuple:
        candidate, state, best, least, distances, kept = carry
        (value, apart), gradient = jax.value_and_grad(objective, has_aux=True)(candidate)
        nearer = apart < least
        best = jax.tree.map(lambda new, old: jnp.where(nearer, new, old), candidate, best)
        if frames:
            place = jnp.asarray(frames) == k
            kept = jnp.where(place.reshape(-1, *[1] * candidate["x"].ndim), candidate["x"], kept)
        candidate, state = attack.optimizer.propose(candidate, value, gradient, state, attack.steps)
        if attack.box is not None:
            candidate = candidate | {"x": jnp.clip(candidate["x"], *attack.box)}
        return candidate, state, best, jnp.where(nearer, apart, least), distances.at[k].set(apart), kept

    distances = jnp.zeros(attack.steps + 1, start["x"].dtype)
    kept = jnp.broadcast_to(start["x"], (len(frames), *start["x"].shape))
    least = jnp.full((), jnp.inf, distances.dtype)
    carry = (start, attack.optimizer.init(start, attack.steps), start, least, distances, kept)
    _, _, best, _, distances, kept = jax.lax.fori_loop(0, attack.steps + 1, step, carry)
    return best, distances, kept
