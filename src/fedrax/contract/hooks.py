"""What a wrapper may change of the local work: the forms of its rules, and what is refused of their results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

from fedrax.errors import FedraxError
from fedrax.prng.keys import NamedKeys
from fedrax.tree import Tree

LossRule = Callable[[Callable], Callable]
"""(params, batch, key) -> losses [B], made of another such function."""
GradientRule = Callable[[Callable, Tree, Tree, Array | None, Array], tuple[Array, Tree]]
"""(losses, params, batch, weights, key) -> (summed loss, summed gradient) of a batch; ``losses`` as in LossRule,
weights: None, or bool [B], False for rows that do not count."""
DirectionRule = Callable[[Tree, Tree, Any], Tree]
"""(direction, x, step) -> direction, at every local step."""
BatchRule = Callable[[Any], tuple[Tree, Array | None]]
"""step -> (samples, weights) of a local step's batch, as of :meth:`fedrax.ClientData.batch`."""
ResultRule = Callable[[Tree], Tree]
"""x_i after the last local step -> what the method sees of it."""


class CountedSteps:
    """The local steps that a mechanism assumes: those of ``local``, run once and outside of transformed functions."""

    def __init__(self, who: str, local: Any) -> None:
        self.who, self.local = who, local
        self._place, self._begun = get_opaque_trace_state(), False

    def begin(self) -> bool:
        """Whether this is the first time, and not inside a loop or a compiled function of the method's own."""
        first, self._begun = not self._begun and get_opaque_trace_state() == self._place, True
        return first


class TrainingHooks:
    """The hooks by which wrappers change the local training of the method inside."""

    _keys: NamedKeys
    _shared_keys: NamedKeys
    _counted: CountedSteps | None = None
    _withheld = False
    _loss_rules: tuple[tuple[int, LossRule], ...] = ()
    _gradient_rule: GradientRule | None = None
    _frozen = False
    _direction_rules: tuple[tuple[int, DirectionRule], ...] = ()
    _batch_rule: BatchRule | None = None
    result_rules: tuple[ResultRule, ...] = ()

    def inside(self) -> Self:
        """The data for the method inside a wrapper, with different random keys."""
        return self._with(_keys=self._keys.inside(), _shared_keys=self._shared_keys.inside())

    def with_loss(self, rule: LossRule) -> Self:
        """With another local loss, ``rule(losses)``, made of the one before: (params, batch, key) -> [B].

        It is given the task's loss with the terms of the method and of wrappers inside, whose batches and parameters
        are then those that the rule makes of them.
        """
        return self._with(_loss_rules=self._after_inside(self._loss_rules, rule))

    def with_gradients(self, rule: GradientRule, frozen_statistics: bool = False) -> Self:
        """With another way of taking a batch's gradient: see :data:`GradientRule`.

        FedraxError where a wrapper outside has such a rule, and for models with running statistics, which no rule
        moves, unless they are to stay as they are: frozen_statistics.
        """
        _only_one(self._gradient_rule, "how a batch's gradient is taken")
        return self._with(_gradient_rule=rule, _frozen=frozen_statistics)

    def with_directions(self, rule: DirectionRule) -> Self:
        """With ``rule`` applied to the direction of every local step, after the method's own and those inside."""
        return self._with(_direction_rules=self._after_inside(self._direction_rules, rule))

    def _after_inside(self, rules: tuple[tuple[int, Any], ...], rule: Any) -> tuple[tuple[int, Any], ...]:
        """``rules`` in the order in which they are applied, with this place's behind those inside."""
        inside = [one for one in rules if one[0] >= self._keys.depth]
        return (*inside, (self._keys.depth, rule), *rules[len(inside) :])

    def directed(self, direction: Tree, x: Tree, step: Any) -> Tree:
        """A step's direction by the rules of :meth:`with_directions`."""
        for _, rule in self._direction_rules:
            direction = _as_direction(rule(direction, x, step), x)
        return direction

    @property
    def directions_stay(self) -> bool:
        """Whether no rule changes the directions of local steps."""
        return not self._direction_rules

    @property
    def tells_losses(self) -> bool:
        """Whether local steps may go by the losses of their batches: who takes the gradients may keep them back."""
        return self._gradient_rule is None and not self._withheld

    def with_batches(self, rule: BatchRule) -> Self:
        """With other batches in the local steps: see :data:`BatchRule`."""
        self.refuse_uncounted("other batches")
        _only_one(self._batch_rule, "which samples are in a batch")
        return self._with(_batch_rule=rule)

    def with_result(self, rule: ResultRule) -> Self:
        """With ``rule`` applied to where the local steps end, before the method sees it; the outermost one's first."""
        return self._with(result_rules=(*self.result_rules, rule))

    def with_counted_gradients(self, who: str, local: Any) -> Self:
        """Allow exactly one gradient per local step of ``local``, as the mechanism ``who`` assumes.

        Raises FedraxError where the method takes further gradients.
        """
        return self._with(_counted=CountedSteps(who, local))

    def with_withheld_gradients(self, batch: Tree) -> Self:
        """Use the fixed ``batch`` in all local steps, without result rules: detects any other use of samples."""
        return self._with(_withheld=True, _batch_rule=lambda step: (batch, None), result_rules=())

    def check_counted(self, local: Any) -> None:
        """FedraxError where local steps are counted, and are to be others."""
        counted = local if self._counted is None else self._counted.local
        for name in ("steps", "batch_size", "order", "reduction", "blocks"):
            asked, known = getattr(local, name), getattr(counted, name)
            if asked != known:
                self.refuse_uncounted(f"{asked!r} as local.{name} instead of {known!r}")

    def refuse_uncounted(self, what: str) -> None:
        """FedraxError where only the local steps may look at samples, once each."""
        if self._counted is not None:
            raise FedraxError(
                f"{self._counted.who} goes around methods that take one gradient in each local step, and this one also"
                f" asks for {what}"
            )

    def _with(self, **changes: Any) -> Self:
        other = copy.copy(self)
        other.__dict__.update(changes)
        return other


def one_a_sample(losses: Callable) -> Callable:
    """``losses``, refused where it does not give [B]: the mean over the batch is taken of what it gives."""

    def checked(params: Tree, batch: Tree, key: Array) -> Array:
        found = losses(params, batch, key)
        rows = len(jax.tree.leaves(batch)[0])
        if jnp.shape(found) != (rows,):
            raise FedraxError(
                f"a rule of with_loss gives losses of shape {jnp.shape(found)} for a batch of {rows}: it makes a"
                " function that gives one number a sample, [B]; leave the mean out"
            )
        return found

    return checked


def sums(made: Any, params: Tree) -> tuple[Array, Tree]:
    """What a gradient rule returned, if it is (summed loss, summed gradient)."""
    if type(made) is not tuple or len(made) != 2 or not like(made[1], params) or jnp.ndim(made[0]):
        raise FedraxError(
            "a rule of with_gradients returns something else than the pair summed loss, summed gradient: one number,"
            " and a tree with the keys and shapes of the parameters"
        )
    return made


def _as_direction(made: Any, x: Tree) -> Tree:
    """What a direction rule returned, if it is a direction."""
    if not like(made, x):
        raise FedraxError(
            "a rule of with_directions returns other keys or shapes than the parameters': it returns what x moves along"
        )
    return made


def like(one: Any, other: Tree) -> bool:
    """Whether two pytrees have the same keys and shapes."""
    form = lambda t: (jax.tree.structure(t), [jnp.shape(leaf) for leaf in jax.tree.leaves(t)])  # noqa: E731
    return form(one) == form(other)


def _only_one(there: Callable | None, what: str) -> None:
    if there is not None:
        raise FedraxError(f"two wrappers, one inside the other, say {what}: one of them can")
