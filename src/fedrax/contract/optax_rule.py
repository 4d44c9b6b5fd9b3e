"""Any optimizer of optax as the local or the server rule."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.compiled.edits import enclosed
from fedrax.contract.fields import Leaf, Static
from fedrax.contract.hyperparameters import hyperparameters
from fedrax.errors import FedraxError
from fedrax.tree import Tree


@hyperparameters
class Optax:
    """A gradient transformation of optax: finished, or as the function that makes it with its options.

    ``Optax(optax.adamw(1e-2))`` is compiled as it stands. ``Optax.of(optax.adamw, learning_rate=1e-2)`` has its
    floating options as inputs of the compiled program, so that another step size does not compile anew and a grid of
    them is one sweep; the other options (``nesterov=True``, masks) shape the program. An option that the function
    looks at with a Python ``if`` cannot be such an input: give the finished transformation then.
    """

    transform: Static[Any]
    """An ``optax.GradientTransformation``, or a function that makes one of ``floats`` and ``fixed``."""
    floats: Leaf[Any] = dataclasses.field(default_factory=dict)
    """Floating options by name."""
    fixed: Static[Any] = ()
    """Other options, pairs of name and value."""

    @classmethod
    def of(cls, make: Callable[..., Any], **options: Any) -> Optax:
        """The transformation ``make(**options)``, its floating options traced."""
        numbers = float | np.floating | jax.Array
        floats = {name: value for name, value in options.items() if isinstance(value, numbers)}
        fixed = tuple((name, value) for name, value in options.items() if name not in floats)
        for name, value in fixed:
            if not isinstance(value, Hashable):
                raise FedraxError(
                    f"Optax: the option {name!r} must be hashable, for it shapes the program: give a function, as optax"
                    " takes in its place, or Optax the finished transformation"
                )
        return cls(make, floats, fixed)

    def check(self) -> None:
        """Refuse what is no transformation, and options that it does not take."""
        if not (_is_finished(self.transform) or callable(self.transform)):
            raise FedraxError(
                f"Optax needs a gradient transformation such as optax.adamw(1e-2), not {self.transform!r}"
            )
        if _is_finished(self.transform):
            if self.floats or self.fixed:
                raise FedraxError(
                    "Optax takes options for a function that makes a transformation: Optax.of(optax.adamw, ...)"
                )
            return
        taken = inspect.signature(self.transform).parameters  # type: ignore[arg-type]
        names = [*self.floats, *(name for name, _ in self.fixed)]
        wrong = [name for name in names if name not in taken]
        if wrong and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            raise FedraxError(f"{self._name} has no option {wrong[0]!r}; it has: {', '.join(taken)}")

    @property
    def _name(self) -> str:
        return getattr(self.transform, "__name__", repr(self.transform))

    @property
    def wants_lr(self) -> bool:
        """Whether the function that makes the transformation asks for a learning rate that is not given."""
        if _is_finished(self.transform):
            return False
        given = {*self.floats, *dict(self.fixed)}
        return "learning_rate" in inspect.signature(self.transform).parameters and "learning_rate" not in given  # type: ignore[arg-type]

    def made(self, lr: Any = None) -> Any:
        """The transformation; ``lr`` is its learning rate where none is given."""
        if _is_finished(self.transform):
            return self.transform
        options = {**self.floats, **dict(self.fixed)}
        if self.wants_lr:
            if lr is None:
                raise FedraxError(
                    f"{self._name} needs a learning rate: Optax.of(optax.{self._name}, learning_rate=...)"
                )
            options["learning_rate"] = lr
        try:
            return self.transform(**options)  # type: ignore[operator]
        except jax.errors.ConcretizationTypeError as error:
            raise FedraxError(
                f"{self._name} looks at the value of an option while it is made: give Optax the finished transformation"
            ) from error

    def init(self, params: Tree) -> Tree:
        """The optimizer's state."""
        state = self.made(1.0).init(params)
        holding = lambda part: "learning_rate" in getattr(part, "hyperparams", ())  # noqa: E731
        if self.wants_lr and any(map(holding, jax.tree.leaves(state, is_leaf=holding))):
            raise FedraxError(
                f"{self._name} keeps its learning rate in its state, where local.lr does not reach it: leave"
                " optax.inject_hyperparams out, what Optax.of is given are inputs of the program already"
            )
        return state

    def move(self, x: Tree, state: Tree, direction: Tree, lr: Any, factor: Any = 1.0) -> tuple[Tree, Tree]:
        """(x + factor * update, state) for a direction to descend along."""
        try:
            updates, state = self.made(lr).update(direction, state, x)
        except TypeError as error:
            if not _MISSING.search(str(error)):
                raise
            raise FedraxError(
                f"{self._name} needs more than a direction ({error}): give an optimizer that moves by gradients alone"
            ) from error
        return tree.add_scaled(x, factor, updates), state

    def step(self, params: Tree, state: Tree, delta: Tree, round: Array) -> tuple[Tree, Tree]:
        """(parameters, state) after one server step on the pseudo-gradient -``delta``."""
        return self.move(params, state, tree.scale(-1, delta), None)

    def __repr__(self) -> str:
        """What decides the numbers, the same in every process: functions by their names and what they hold."""
        return f"Optax({_described(self.transform)}, {self.floats!r}, {_described(self.fixed)})"


_MISSING = re.compile(r"missing \d+ required .*argument")


def _is_finished(transform: Any) -> bool:
    return hasattr(transform, "init") and hasattr(transform, "update")


def _described(value: Any) -> str:
    if inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}({', '.join(map(_described, enclosed(value)))})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_described, value))})"
    return repr(value)
