"""Optax optimizers as local and server optimizers."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.config.annotations import Converter, Leaf, Static
from fedrax.config.hyperparameters import hyperparameters
from fedrax.errors import FedraxError
from fedrax.tree import Tree
from fedrax.xla import closure_values


@partial(jax.tree_util.register_dataclass, data_fields=("numbers",), meta_fields=("kind",))
@dataclasses.dataclass(frozen=True)
class StoredKey:
    """A random key in an optimizer's state, stored as an array of integers for checkpoints and messages."""

    numbers: Any
    """Key data, an array of unsigned integers."""
    kind: Any
    """Name of the random number generator in JAX."""


@hyperparameters
class Optax:
    """An optax optimizer: a gradient transformation, or a function that makes one together with its options.

    A plain ``optax.GradientTransformation`` given as ``LocalSGD.optimizer`` or ``server_optimizer`` is stored as
    ``Optax(transformation)``, and its options are constants of the compiled program. ``Optax.of(optax.adamw,
    learning_rate=1e-2)`` has its floating options as inputs of the program: another learning rate does not recompile,
    and a grid of them is one sweep. The other options (``nesterov=True``, masks) are constants. An option whose value
    the function inspects in Python cannot be an input: give the finished transformation.

    A local optimizer that draws random numbers (``optax.add_noise``) gets keys of its client in every round; on the
    server the transformation's own key is used. Local steps pass the loss of their mini-batch to transformations that
    take one (``optax.polyak_sgd``); the server has none.

    Example:
        >>> import optax
        >>> rule = fedrax.optim.Optax.of(optax.adamw, learning_rate=1e-2)
        >>> method = fedrax.FedAvg(server_optimizer=rule)
    """

    transform: Static[Any]
    """An ``optax.GradientTransformation``, or a function that makes one of ``floats`` and ``fixed``."""
    floats: Leaf[Any] = dataclasses.field(default_factory=dict)
    """Floating options by name."""
    fixed: Static[Any] = ()
    """Other options, pairs of name and value."""

    @classmethod
    def of(cls, make: Callable[..., Any], **options: Any) -> Optax:
        """Return the optimizer ``make(**options)`` with its floating options traced.

        Args:
            make: A function that returns a gradient transformation, such as ``optax.adamw``.
            **options: Its arguments by name. One without a ``learning_rate`` takes ``local.lr`` in local steps.

        Returns:
            The optimizer.

        Raises:
            FedraxError: An option is neither a float nor hashable.
        """
        options = {name: _python_option(make, name, value) for name, value in options.items()}
        floats = {name: value for name, value in options.items() if isinstance(value, float | jax.Array)}
        fixed = tuple((name, value) for name, value in options.items() if name not in floats)
        for name, value in fixed:
            if not isinstance(value, Hashable):
                raise FedraxError(
                    f"Optax: the option {name!r} must be hashable, because it is a constant of the compiled program:"
                    " give a function in its place, as optax accepts, or the finished transformation"
                )
        return cls(make, floats, fixed)

    def check(self) -> None:
        """Raise FedraxError if this is not a transformation or the function does not have an option."""
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
        """Name of the optimizer in messages."""
        if not _is_finished(self.transform):
            return getattr(self.transform, "__name__", repr(self.transform))
        update = getattr(self.transform.update, "__qualname__", type(self.transform).__name__)  # type: ignore[union-attr]
        return f"the optimizer ({update.split('.')[0]})"

    @property
    def wants_lr(self) -> bool:
        """Whether the function takes a learning rate and the options have none."""
        if _is_finished(self.transform):
            return False
        given = {*self.floats, *dict(self.fixed)}
        return "learning_rate" in inspect.signature(self.transform).parameters and "learning_rate" not in given  # type: ignore[arg-type]

    def build(self, lr: Any = None) -> Any:
        """Return the gradient transformation.

        Args:
            lr: The learning rate, where none is among the options.

        Returns:
            An ``optax.GradientTransformation``.
        """
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
                f"{self._name} inspects the value of an option in Python, which cannot be traced: give the finished"
                f" transformation, {self._name}(...)"
            ) from error

    def init(self, params: Tree) -> Tree:
        """Return the optimizer's initial state.

        Args:
            params: The model's parameters.

        Returns:
            The state, with random keys stored as :class:`StoredKey`.
        """
        with self._explained():
            state = _without_keys(self.build(1.0).init(params))

        def has_lr(part: Any) -> bool:
            return "learning_rate" in getattr(part, "hyperparams", ())

        if self.wants_lr and any(map(has_lr, jax.tree.leaves(state, is_leaf=has_lr))):
            raise FedraxError(
                f"{self._name} keeps its learning rate in its state, where local.lr has no effect on it: remove"
                " optax.inject_hyperparams, Optax.of already makes the options inputs of the program"
            )
        return state

    def move(
        self, x: Tree, state: Tree, direction: Tree, lr: Any, factor: Any = 1.0, loss: Array | None = None
    ) -> tuple[Tree, Tree]:
        """Take one step of descent.

        Args:
            x: The parameters.
            state: The optimizer's state.
            direction: The gradient, or the negative mean update at the server.
            lr: The learning rate, where none is among the options.
            factor: Multiplies the update.
            loss: The loss at ``x``, for transformations that take one (``optax.polyak_sgd``).

        Returns:
            x + factor * update, and the state after the step.
        """
        with self._explained():
            transform, more = self.build(lr), {}
            if loss is not None:
                import optax

                transform, more = optax.with_extra_args_support(transform), {"value": loss}
            updates, state = transform.update(direction, _with_keys(state), x, **more)
        return tree.add_scaled(x, factor, updates), _without_keys(state)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert errors of the transformation to FedraxError."""
        try:
            yield
        except (FedraxError, jax.errors.ConcretizationTypeError):
            raise
        except Exception as error:
            if isinstance(error, TypeError) and _MISSING_ARGUMENT.search(str(error)):
                raise FedraxError(
                    f"{self._name} needs more arguments than the gradient ({error}): only local steps have the loss of"
                    " their mini-batch, as the argument value, and only without a wrapper that changes their gradients"
                ) from error
            raise FedraxError(
                f"{self._name} cannot update the model's parameters from a gradient: {type(error).__name__}: {error}"
            ) from error

    def step(self, params: Tree, state: Tree, delta: Tree, round: Array) -> tuple[Tree, Tree]:
        """Take one server step.

        Args:
            params: The global parameters x.
            state: The optimizer's state.
            delta: The mean update Delta.
            round: Not used; optax counts its own steps.

        Returns:
            The parameters and the state after the step.
        """
        return self.move(params, state, tree.scale(-1, delta), None)

    def __repr__(self) -> str:
        """Return a text that identifies the optimizer, the same in every process."""
        return f"Optax({stable_repr(self.transform)}, {self.floats!r}, {stable_repr(self.fixed)})"


_MISSING_ARGUMENT = re.compile(r"missing \d+ required .*argument")


def _is_key(leaf: Any) -> bool:
    """Whether a leaf is a random key, of JAX or stored."""
    is_jax_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return is_jax_key or isinstance(leaf, StoredKey)


def _without_keys(state: Tree) -> Tree:
    """The state with JAX's random keys stored as :class:`StoredKey`."""

    def stored(leaf: Any) -> Any:
        return StoredKey(jax.random.key_data(leaf), jax.random.key_impl(leaf)) if _is_key(leaf) else leaf

    return jax.tree.map(stored, state)


def _with_keys(state: Tree) -> Tree:
    """The state with each :class:`StoredKey` as a random key of JAX."""

    def loaded(leaf: Any) -> Any:
        return jax.random.wrap_key_data(leaf.numbers, impl=leaf.kind) if _is_key(leaf) else leaf

    return jax.tree.map(loaded, state, is_leaf=_is_key)


def with_new_keys(state: Tree, key: Array) -> Tree:
    """The optimizer's state with its random keys replaced by keys derived from ``key``."""
    counter = itertools.count()

    def new(leaf: Any) -> Any:
        if not _is_key(leaf):
            return leaf
        drawn = jax.random.bits(jax.random.fold_in(key, next(counter)), leaf.numbers.shape, leaf.numbers.dtype)
        return StoredKey(drawn, leaf.kind)

    return jax.tree.map(new, state, is_leaf=_is_key)


def as_optimizer(value: Any) -> Any:
    """An ``optax.GradientTransformation`` as an :class:`Optax`; anything else as it is."""
    return Optax(value) if isinstance(value, tuple) and _is_finished(value) else value


def _python_option(make: Callable[..., Any], name: str, value: Any) -> Any:
    """An option with numbers of NumPy as Python's, and an integer as a float where the function takes a float."""
    if isinstance(value, np.generic):
        value = value.item()
    default = inspect.signature(make).parameters.get(name) if type(value) is int and callable(make) else None
    return float(value) if default and (name == "learning_rate" or isinstance(default.default, float)) else value


def _is_finished(transform: Any) -> bool:
    """Whether it is a gradient transformation and not a function that makes one."""
    return hasattr(transform, "init") and hasattr(transform, "update")


def stable_repr(value: Any) -> str:
    """A repr without memory addresses: functions are named, with the values of their closures."""
    if inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}({', '.join(map(stable_repr, closure_values(value)))})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(stable_repr, value))})"
    return repr(value)


if TYPE_CHECKING:
    OptaxField = Optax | Any
else:
    OptaxField = Annotated[Optax, Converter(as_optimizer)]
"""The annotation of a field that holds an optax optimizer; a gradient transformation is stored as :class:`Optax`."""
