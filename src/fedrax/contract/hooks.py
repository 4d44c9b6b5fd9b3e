"""Hooks into local training: how methods and wrappers change the loss, gradients, steps and batches of a client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

from fedrax.errors import FedraxError
from fedrax.prng.keys import NamedKeys
from fedrax.tree import Tree

if TYPE_CHECKING:
    from fedrax.contract.local_training import Step

LossHook = Callable[[Callable], Callable]
"""losses -> losses; both are functions (params, batch, key) -> [B]."""
GradientHook = Callable[[Callable, Tree, Tree, Array | None, Array], tuple[Array, Tree]]
"""(losses, params, batch, real, key) -> (summed loss, summed gradient) of a batch. ``losses`` is a function as in
`LossHook`; real: bool [B], False for padding rows, or None without padding."""
TermHook = Callable[[Tree, Tree], Tree]
"""(gradient, x) -> gradient plus the gradient of a term of the local objective at x."""
DirectionHook = Callable[[Tree, Tree, "Step"], Tree]
"""(direction, x, step) -> direction."""
BatchHook = Callable[[Any], tuple[Tree, Array | None]]
"""number of the local step -> (samples, real) of a local step's batch, as of :meth:`fedrax.ClientData.batch`."""
ResultHook = Callable[[Tree], Tree]
"""Local parameters after the last step -> what the method receives in their place."""


class CountedSteps:
    """Guard of a privacy mechanism: the local steps run once, with the options ``local``, outside of transformations.

    Args:
        mechanism: the name of the mechanism, for messages.
        local: the `LocalSGD` that the mechanism assumes.
    """

    def __init__(self, mechanism: str, local: Any) -> None:
        self.mechanism, self.local = mechanism, local
        self._trace, self._started = get_opaque_trace_state(), False

    def start(self) -> bool:
        """Whether local training starts for the first time, outside of loops and transformed functions."""
        first, self._started = not self._started and get_opaque_trace_state() == self._trace, True
        return first


class TrainingHooks:
    """Base of `ClientData`: each ``with_`` method returns a copy whose local training has one more hook.

    A step of :meth:`fedrax.LocalSGD.run` applies them in this order: batch, loss and gradient, (weight decay), terms,
    (momentum, the method's direction), directions, (the step), and after the last step results. Of several hooks of one
    kind those of the method come first, then those of its wrappers from the inside out, and those of one wrapper in the
    order of the calls; hooks of results are applied from the outside in.
    """

    _keys: NamedKeys
    _shared_keys: NamedKeys
    _counted: CountedSteps | None = None
    _withheld = False
    _loss_hooks: tuple[tuple[int, LossHook], ...] = ()
    _gradient_hook: GradientHook | None = None
    _frozen_statistics = False
    _term_hooks: tuple[tuple[int, TermHook], ...] = ()
    _direction_hooks: tuple[tuple[int, DirectionHook], ...] = ()
    _batch_hook: BatchHook | None = None
    mean_batch: Any = None
    """Mean number of samples in the batches of the batch hook; None if it leaves the number as it is."""
    _result_hooks: tuple[ResultHook, ...] = ()

    def inside(self) -> Self:
        """The data for the method inside a wrapper, with different random keys."""
        return self._with(_keys=self._keys.inside(), _shared_keys=self._shared_keys.inside())

    def with_loss(self, hook: LossHook) -> Self:
        """Change the local loss.

        Args:
            hook: losses -> losses, where both are functions (params, batch, key) -> [B]. It receives the task's loss as
                the hooks of the method and of inner wrappers have changed it.

        Returns:
            The changed data.
        """
        return self._with(_loss_hooks=self._insert(self._loss_hooks, hook))

    def with_gradient(self, hook: GradientHook, frozen_statistics: bool = False) -> Self:
        """Change how the gradient of a mini-batch is computed.

        The hook must be additive over samples: full batches, blocks and full gradients are computed in parts, and the
        outputs are added. To clip or normalize the gradient of a step use :meth:`with_direction`.

        Args:
            hook: (losses, params, batch, real, key) -> (summed loss, summed gradient) of the batch; ``losses`` is
                the local loss (params, batch, key) -> [B]; real: bool [B], False for padding, or None.
            frozen_statistics: whether running statistics of the model keep their values; hooks cannot update them.

        Returns:
            The changed data.

        Raises:
            FedraxError: if there is such a hook already; in training, if the model has running statistics that are not
                frozen.
        """
        _check_single(self._gradient_hook, "how the gradient of a batch is computed")
        return self._with(_gradient_hook=hook, _frozen_statistics=frozen_statistics)

    def with_term(self, hook: TermHook) -> Self:
        """Add a term to the local objective, given by its gradient. Weight decay comes before, momentum after it.

        Args:
            hook: (gradient, x) -> gradient plus the term's gradient at x, in the dtypes of ``gradient``; see
                `proximal_term`.

        Returns:
            The changed data.
        """
        return self._with(_term_hooks=self._insert(self._term_hooks, hook))

    def with_direction(self, hook: DirectionHook) -> Self:
        """Change the direction of every local step, after the direction of the method.

        Args:
            hook: (direction, x, step) -> direction.

        Returns:
            The changed data.
        """
        return self._with(_direction_hooks=self._insert(self._direction_hooks, hook))

    def with_batch(self, hook: BatchHook, mean_size: Any = None) -> Self:
        """Change the mini-batches of the local steps.

        Args:
            hook: number of the local step -> (samples, real), as :meth:`batch` returns them.
            mean_size: mean number of samples in its batches, for the count of gradients; by default as without it.

        Returns:
            The changed data.

        Raises:
            FedraxError: if there is such a hook already, or a privacy mechanism counts the gradients.
        """
        self.refuse_uncounted("other batches")
        _check_single(self._batch_hook, "which samples are in a batch")
        return self._with(_batch_hook=hook, mean_batch=mean_size)

    def with_result(self, hook: ResultHook) -> Self:
        """Change the parameters that local training returns; the outermost hook comes first.

        Args:
            hook: local parameters -> what the method receives in their place.

        Returns:
            The changed data.
        """
        return self._with(_result_hooks=(*self._result_hooks, hook))

    def with_counted_gradients(self, mechanism: str, local: Any) -> Self:
        """Allow exactly one gradient per local step of ``local``, as a privacy mechanism assumes.

        Args:
            mechanism: the name of the mechanism, for messages.
            local: the `LocalSGD` that the mechanism assumes.

        Returns:
            The changed data; its methods raise FedraxError where the algorithm reads samples in another way.
        """
        return self._with(_counted=CountedSteps(mechanism, local))

    def with_withheld_gradients(self, batch: Tree) -> Self:
        """Use one fixed batch in all local steps, without result hooks: detects any other use of samples.

        Args:
            batch: the samples.

        Returns:
            The changed data.
        """
        return self._with(_withheld=True, _batch_hook=lambda step: (batch, None), _result_hooks=())

    def add_terms(self, gradient: Tree, x: Tree) -> Tree:
        """Add the gradients of all terms. Internal.

        Args:
            gradient: the gradient of the local loss.
            x: the local parameters.

        Returns:
            The gradient of the local objective.
        """
        for _, hook in self._term_hooks:
            gradient = hook(gradient, x)
        return gradient

    def change_direction(self, direction: Tree, x: Tree, step: Step) -> Tree:
        """Apply all direction hooks. Internal.

        Args:
            direction: the direction of the method.
            x: the local parameters.
            step: the local step.

        Returns:
            The direction of the step.
        """
        for _, hook in self._direction_hooks:
            direction = hook(direction, x, step)
            if not same_structure(direction, x):
                raise FedraxError(
                    "a hook of with_direction must return a direction with the tree structure and shapes of the"
                    " parameters"
                )
        return direction

    def change_result(self, params: Tree) -> Tree:
        """Apply all result hooks. Internal.

        Args:
            params: the local parameters after the last step.

        Returns:
            What the method receives.
        """
        for hook in self._result_hooks:
            params = hook(params)
        return params

    @property
    def unchanged_steps(self) -> bool:
        """Whether no hook changes the gradient or the direction of a step after the loss."""
        return not self._direction_hooks and not self._term_hooks

    @property
    def exposes_losses(self) -> bool:
        """Whether local steps may use the losses of their batches; a privacy mechanism withholds them."""
        return self._gradient_hook is None and not self._withheld

    def check_counted(self, local: Any) -> None:
        """Check that local steps with the options ``local`` are those that a privacy mechanism counts.

        Args:
            local: the `LocalSGD` of the local steps.

        Raises:
            FedraxError: if they are not.
        """
        counted = local if self._counted is None else self._counted.local
        for name in ("steps", "batch_size", "order", "reduction", "blocks"):
            actual, assumed = getattr(local, name), getattr(counted, name)
            if actual != assumed:
                self.refuse_uncounted(f"{actual!r} as local.{name} instead of {assumed!r}")

    def refuse_uncounted(self, what: str) -> None:
        """Raise FedraxError if a privacy mechanism counts the gradients of the local steps.

        Args:
            what: what the algorithm asks for besides them, for the message.

        Raises:
            FedraxError: if gradients are counted.
        """
        if self._counted is not None:
            raise FedraxError(
                f"{self._counted.mechanism} supports methods that take one gradient in each local step, and this one"
                f" also asks for {what}"
            )

    def _insert(self, hooks: tuple[tuple[int, Any], ...], hook: Any) -> tuple[tuple[int, Any], ...]:
        """``hooks`` in the order in which they are applied, with that of this depth after those of inner methods."""
        inner = [each for each in hooks if each[0] >= self._keys.depth]
        return (*inner, (self._keys.depth, hook), *hooks[len(inner) :])

    def _with(self, **changes: Any) -> Self:
        other = copy.copy(self)
        other.__dict__.update(changes)
        return other


def check_losses(losses: Callable) -> Callable:
    """``losses``, the result of a loss hook, with a check that it returns one loss for each sample, [B]."""

    def checked(params: Tree, batch: Tree, key: Array) -> Array:
        values = losses(params, batch, key)
        rows = len(jax.tree.leaves(batch)[0])
        if jnp.shape(values) != (rows,):
            raise FedraxError(
                f"a hook of with_loss gives losses of shape {jnp.shape(values)} for a batch of {rows}: it must return"
                " a function that gives one loss for each sample, [B], not their mean"
            )
        return values

    return checked


def check_gradient(output: Any, params: Tree) -> tuple[Array, Tree]:
    """The output of a gradient hook, checked to be (summed loss, summed gradient)."""
    if type(output) is not tuple or len(output) != 2 or not same_structure(output[1], params) or jnp.ndim(output[0]):
        raise FedraxError(
            "a hook of with_gradient must return the pair summed loss, summed gradient: a scalar, and a tree with the"
            " structure and shapes of the parameters"
        )
    return output


def same_structure(one: Any, other: Tree) -> bool:
    """Whether two pytrees have the same structure and the same shapes."""
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        jnp.shape(a) == jnp.shape(b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def _check_single(hook: Callable | None, what: str) -> None:
    if hook is not None:
        raise FedraxError(f"two wrappers, one inside the other, both change {what}: only one of them can")
