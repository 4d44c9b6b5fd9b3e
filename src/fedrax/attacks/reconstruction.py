"""Reconstruction of samples from messages: candidate data are optimized until their messages match the observed ones.

    view = as_gradient(task, params, gradient)
    found = dlg().invert(view, (1, 28, 28), classes=10)

Deep leakage from gradients (Zhu et al. 2019) is :func:`dlg`, by plain gradient descent :func:`gradient_descent`; iDLG
(Zhao et al. 2020) is the same with the labels that :func:`fedrax.attacks.recover_labels` reads off; inverting gradients
(Geiping et al. 2020) is :func:`inverting_gradients`.
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
from fedrax.attacks.optimizers import LBFGS, Descent, Optimizer, SignedAdam
from fedrax.contract.task import Batch
from fedrax.errors import FedraxError
from fedrax.tree import Tree

Distance = Literal["squared", "relative", "cosine"]
_TINY = 1e-30


class Reconstruction(NamedTuple):
    """What an attack made of a view.

    Example:
        >>> task = fedrax.classification(fedrax.models.Logistic().build((2,), 2))
        >>> params = task.init(jax.random.key(0))
        >>> view = fedrax.attacks.as_gradient(task, params, jax.tree.map(jnp.ones_like, params))
        >>> fedrax.attacks.dlg(steps=2).invert(view, (1, 2), classes=2).x.shape
        (1, 2)
    """

    x: np.ndarray
    """The data [n, ...] in the model's scale: of the step and restart with the smallest distance."""
    y: np.ndarray
    """Their labels [n]."""
    distance: float
    """The smallest distance between what was seen and what the data would have made."""
    distances: np.ndarray
    """[steps + 1]; from the start on, of the same restart."""
    frames: np.ndarray
    """[frames, n, ...]; the data after ``frame_steps``, of the same restart."""
    frame_steps: np.ndarray
    """[frames]; evenly spaced from 0 to the last step."""


@dataclass(frozen=True)
class Attack:
    """An optimizer on candidate data.

    :func:`dlg`, :func:`gradient_descent` and :func:`inverting_gradients` make the attacks of the literature.

    Example:
        >>> fedrax.attacks.Attack(fedrax.attacks.gradient_descent(0.1).optimizer, steps=5, distance="cosine").restarts
        1
    """

    optimizer: Optimizer
    """Moves the candidate data."""
    steps: int
    """Of the optimizer: evaluations of the distance and its gradient, besides the start's."""
    distance: Distance
    """Between seen and made, a mean over vectors: |a - b|² summed up, |a - b|²/|b|², or 1 - cos(a, b)."""
    total_variation: float = 0.0
    """Weight of the mean absolute difference of neighboring pixels (images [n, H, W] or [n, H, W, C] only)."""
    box: tuple[float, float] | None = None
    """Candidates are kept between these."""
    restarts: int = 1
    """Starts, of which the one that ends with the smallest distance counts."""

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
            view: What the attacker saw, and how data would have made it.
            shape: The shape [n, ...] of the data, in the model's scale.
            classes: The number C of classes, where the labels are not known: they are then searched for too, as
                probabilities.
            y: The labels [n], where known.
            start: Candidate data to begin with; by default standard normal noise, or uniform noise within a box.
            seed: Determines the random starts.
            frames: How many of the intermediate candidates to return.

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
            found = self._one(view, candidate, y, frames)
            if best is None or found.distance < best.distance or np.isnan(best.distance):
                best = found
        assert best is not None
        return best

    def _check(self, shape: tuple[int, ...], classes: int | None, y: Any) -> None:
        if (classes is None) == (y is None):
            raise FedraxError("an attack knows the labels, y, or looks for them among a number of classes: give one")
        if y is not None and np.shape(y)[:1] != shape[:1]:
            raise FedraxError(f"{shape[0]} samples have as many labels, not {np.shape(y)}")
        if self.total_variation and len(shape) not in (3, 4):
            raise FedraxError("total variation is one of images: [n, H, W] or [n, H, W, C]")
        if self.box is not None and isinstance(self.optimizer, LBFGS):
            raise FedraxError("L-BFGS does not stop at the walls of a box: leave it out, or take another optimizer")
        if self.steps < 1 or self.restarts < 1:
            raise FedraxError("an attack takes one step and one start at least")

    def _start(self, key: Array, shape: tuple[int, ...], classes: int | None, given: Any) -> dict[str, Array]:
        of_x, of_y = jax.random.split(key)
        if given is not None:
            x = jnp.asarray(given, float).reshape(shape)
        elif self.box is not None:
            x = jax.random.uniform(of_x, shape, minval=self.box[0], maxval=self.box[1])
        else:
            x = jax.random.normal(of_x, shape)
        return {"x": x} if classes is None else {"x": x, "labels": jax.random.normal(of_y, (shape[0], classes))}

    def _one(self, view: Observation, candidate: dict[str, Array], y: Any, frames: int) -> Reconstruction:
        known = None if y is None else jnp.asarray(y)
        at = np.unique(np.linspace(0, self.steps, frames).round().astype(int)) if frames else np.zeros(0, int)
        once = replace(self, restarts=1)
        try:
            with jax.default_matmul_precision("highest"):  # as the messages were made, on accelerators too
                made = _descend(once, view.predict, tuple(at.tolist()), view.known, view.target, candidate, known)
        except ValueError as error:
            if "Reverse-mode differentiation" not in str(error):
                raise
            raise FedraxError(
                "this method's client has a loop that cannot be differentiated: attack the program inside it, or take"
                " its messages for gradients"
            ) from error
        best, distances, kept = jax.tree.map(np.asarray, made)
        labels = np.asarray(y) if y is not None else best["labels"].argmax(1)
        nearest = float(np.min(distances, initial=np.inf, where=~np.isnan(distances)))
        return Reconstruction(best["x"], labels, nearest, distances, kept, at)


def dlg(steps: int = 300, restarts: int = 1, distance: Distance = "relative") -> Attack:
    """Deep leakage from gradients (Zhu et al. 2019): squared distance, L-BFGS, data and labels together.

    The distance is relative to what was seen, so that messages of unlike size count alike.

    Args:
        steps: Steps of the optimizer.
        restarts: Random starts, of which the best result is kept.
        distance: The distance between the seen vectors and those that candidate data make.

    Returns:
        The attack.

    Example:
        >>> fedrax.attacks.dlg(steps=50).distance
        'relative'
    """
    return Attack(LBFGS(), steps, distance, restarts=restarts)


def gradient_descent(lr: float, steps: int = 100) -> Attack:
    """DLG by plain gradient descent on the squared distance, as in Section 5.4 of the LoSAC paper.

    Args:
        lr: The step size.
        steps: Steps of gradient descent.

    Returns:
        The attack.

    Example:
        >>> fedrax.attacks.gradient_descent(lr=0.1).distance
        'squared'
    """
    return Attack(Descent(lr), steps, "squared")


def inverting_gradients(
    steps: int = 1000,
    lr: float = 0.1,
    total_variation: float = 1e-2,
    box: tuple[float, float] | None = (0.0, 1.0),
    restarts: int = 1,
) -> Attack:
    """Inverting gradients (Geiping et al. 2020): cosine distance and total variation, Adam on the gradient's sign.

    The step size falls to a tenth after 3/8, 5/8 and 7/8 of the steps, as theirs does.

    Args:
        steps: Steps of Adam.
        lr: The initial step size.
        total_variation: The weight of total variation; for images only unless 0.
        box: The lowest and the highest value of a pixel; None for no limits.
        restarts: Random starts, of which the best result is kept.

    Returns:
        The attack.

    Example:
        >>> fedrax.attacks.inverting_gradients(steps=100).distance
        'cosine'
    """
    return Attack(SignedAdam(lr), steps, "cosine", total_variation, box, restarts)


# -- inside -----------------------------------------------------------------------------------------------------------


def distance_between(kind: Distance, made: tuple[Tree, ...], seen: tuple[Tree, ...]) -> Array:
    """How far what candidate data make is from what was seen; vectors that are zero throughout say nothing."""
    dot = lambda a, b: sum(jnp.vdot(u, v) for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))  # noqa: E731
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


def variation_of(x: Array) -> Array:
    """The mean absolute difference of pixels that lie beside and above one another."""
    return jnp.abs(jnp.diff(x, axis=1)).mean() + jnp.abs(jnp.diff(x, axis=2)).mean()


@partial(jax.jit, static_argnums=(0, 1, 2))
def _descend(
    attack: Attack, predict: Any, frames: tuple[int, ...], known: Any, target: tuple, start: dict, y: Array | None
) -> tuple[dict, Array, Array]:
    """(the best candidate, distances [steps + 1], the candidates' data after the steps in ``frames``)."""
    classes = start["labels"].shape[1] if "labels" in start else None

    def objective(candidate: dict) -> tuple[Array, Array]:
        labels: Any = y if classes is None else jax.nn.softmax(candidate["labels"])
        apart = distance_between(attack.distance, predict(known, Batch(candidate["x"], labels), classes), target)
        smooth = attack.total_variation * variation_of(candidate["x"]) if attack.total_variation else 0.0
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
