"""Learning-rate schedules: factors on a learning rate (and on clipping thresholds that scale with it) by round.

A schedule is called with the round, counted from 0, and returns the factor. Any schedule of optax is one, as is any
function of the round. :class:`OptaxSchedule` makes one whose options are hyper-parameters.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.config.annotations import Converter, LazyClasses, Static, infer_type, type_hints
from fedrax.config.hyperparameters import NonNegative, NonNegativeInt, hyperparameters
from fedrax.errors import FedraxError, unknown
from fedrax.optim.optax_adapter import stable_repr


@hyperparameters
class Constant:
    """The same learning rate in every round: the factor is 1.

    Example:
        >>> fedrax.optim.Constant()(round=7)
        1.0
    """

    def __call__(self, round: Array | int) -> Array | float:
        """Return the factor of a round.

        Args:
            round: The round, from 0.

        Returns:
            1.0.
        """
        return 1.0


@hyperparameters
class InverseTimeDecay:
    """Inverse time decay, 1 / (1 + rate * round), which optax does not have.

    Example:
        >>> fedrax.optim.InverseTimeDecay(rate=0.5)(round=2)
        0.5
    """

    rate: NonNegative = 0.01
    """Decay per round."""

    def __call__(self, round: Array | int) -> Array | float:
        """Return the factor of a round.

        Args:
            round: The round, from 0.

        Returns:
            1 / (1 + rate * round).
        """
        return 1 / (1 + self.rate * round)


class OptaxSchedule:
    """A schedule of optax whose options are hyper-parameters: made by :meth:`of`.

    ``LocalSGD(schedule=optax.cosine_decay_schedule(1.0, 100))`` works as well, and shapes the compiled program.
    ``OptaxSchedule.of(optax.cosine_decay_schedule, init_value=1.0, decay_steps=100)`` has its floating options as
    inputs of the program: another value does not recompile, a grid of them is one ``vmap``, and experiment files can
    hold it: ``schedule = { name = "cosine_decay_schedule", init_value = 1.0, decay_steps = 100 }``. Floats whose value
    optax inspects in Python, such as ``decay_rate``, shape the program in both forms.

    Example:
        >>> import optax
        >>> schedule = fedrax.optim.OptaxSchedule.of(
        ...     optax.warmup_cosine_decay_schedule, init_value=0.0, peak_value=1.0, warmup_steps=10, decay_steps=100
        ... )
        >>> local = fedrax.LocalSGD(lr=0.1, steps=5, schedule=schedule)
    """

    _make: Callable[..., Callable[[Any], Any]]

    @staticmethod
    def of(make: Callable[..., Callable[[Any], Any]], **options: Any) -> OptaxSchedule:
        """Return the schedule ``make(**options)``.

        Args:
            make: A function of optax that returns a schedule, or another whose parameters have annotations.
            **options: Its arguments by name.

        Returns:
            A hyper-parameter object with a field for every parameter of ``make``.
        """
        cls = _class_of(make)
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in options.keys() - names:
            raise unknown(f"option of {make.__name__}:", name, names)
        missing = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]  # type: ignore[arg-type]
        for name in missing:
            if name not in options:
                raise FedraxError(f"{make.__name__} needs the option {name!r}: OptaxSchedule.of(..., {name}=...)")
        return cls(**{name: _hashable(value) for name, value in options.items()})

    def __call__(self, round: Array | int) -> Array | float:
        """Return the factor of a round.

        Args:
            round: The round, from 0.

        Returns:
            The value of the schedule at this count.
        """
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name in _MAPPING_OPTIONS & options.keys():
            options[name] = None if options[name] is None else dict(options[name])
        try:
            return type(self)._make(**options)(_as_float(round))
        except jax.errors.ConcretizationTypeError as error:
            raise FedraxError(
                f"{type(self).__name__} inspects the value of an option in Python, which cannot be traced: give the"
                f" finished schedule, schedule={type(self).__name__}(...)"
            ) from error

    def check(self) -> None:
        """Raise FedraxError if optax does not accept the options."""
        try:
            jax.eval_shape(self, jax.ShapeDtypeStruct((), "int32"))
        except (TypeError, ValueError) as error:
            raise FedraxError(f"{type(self).__name__}: {error}") from error

    def __reduce__(self) -> Any:
        """Pickle as the function and its options, because the class is generated at run time."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return _unpickled, (type(self)._make, options)


@hyperparameters
class FunctionSchedule:
    """A schedule given as a function of the round, such as ``schedule=optax.cosine_decay_schedule(1.0, 100)``.

    Example:
        >>> import optax
        >>> local = fedrax.LocalSGD(schedule=optax.cosine_decay_schedule(1.0, decay_steps=100))
        >>> round(round(float(local.schedule(50)), 3), 3)
        0.5
    """

    function: Static[Callable[[Any], Any]]
    """round -> factor; a hashable pure function."""

    def __call__(self, round: Array | int) -> Array | float:
        """Return the factor of a round.

        Args:
            round: The round, from 0.

        Returns:
            ``function(round)``.
        """
        is_optax = str(getattr(self.function, "__module__", "")).startswith("optax.")
        return self.function(_as_float(round) if is_optax else round)

    def __repr__(self) -> str:
        """Return a text that identifies the function, the same in every process."""
        return f"FunctionSchedule({stable_repr(self.function)})"


_MAPPING_OPTIONS = {"boundaries_and_scales"}
"""Options that optax takes as a dictionary. Fields hold them as tuples of pairs, which are hashable."""
_STATIC_FLOATS = {
    ("cosine_onecycle_schedule", "pct_start"),
    ("cosine_onecycle_schedule", "div_factor"),
    ("cosine_onecycle_schedule", "final_div_factor"),
    ("exponential_decay", "decay_rate"),
    ("linear_onecycle_schedule", "pct_start"),
    ("linear_onecycle_schedule", "pct_final"),
    ("linear_onecycle_schedule", "div_factor"),
    ("linear_onecycle_schedule", "final_div_factor"),
    ("warmup_cosine_decay_schedule", "peak_value"),
    ("warmup_exponential_decay_schedule", "decay_rate"),
}
"""Float options whose values optax 0.2.8 inspects in Python when it creates a schedule: they cannot be traced."""
_NAMED_SCHEDULES = (
    "constant_schedule",
    "cosine_decay_schedule",
    "cosine_onecycle_schedule",
    "exponential_decay",
    "linear_onecycle_schedule",
    "linear_schedule",
    "piecewise_constant_schedule",
    "piecewise_interpolate_schedule",
    "polynomial_schedule",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
)
"""The schedules of optax that experiment files can name: their options are numbers."""


def optax_schedules() -> Mapping[str, type]:
    """The classes of the schedules that experiment files can name, by the name of the function in optax."""
    import optax.schedules

    return {
        name: _class_of(getattr(optax.schedules, name)) for name in _NAMED_SCHEDULES if hasattr(optax.schedules, name)
    }


@cache
def _class_of(make: Callable[..., Callable[[Any], Any]]) -> type[OptaxSchedule]:
    """The hyper-parameter class with a field for each option of a function."""
    hints, annotations, defaults = type_hints(make), {}, {}
    for name, parameter in inspect.signature(make).parameters.items():
        default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
        annotations[name] = _type_of(make.__name__, name, hints.get(name, infer_type(default)))
        if default is not dataclasses.MISSING:
            defaults[name] = default
    namespace = {"__annotations__": annotations, "__module__": __name__, "__doc__": inspect.getdoc(make), **defaults}
    return hyperparameters(type(make.__name__, (OptaxSchedule,), namespace | {"_make": staticmethod(make)}))


def _type_of(function: str, name: str, hint: Any) -> Any:
    """The annotation of an option's field."""
    if name in _MAPPING_OPTIONS:
        return Static[tuple[tuple[NonNegativeInt, float], ...] | None]
    kinds = set(getattr(hint, "__args__", (hint,)))
    if hint in (int, bool, str):
        return hint
    if float in kinds:
        kind = Static[float] if (function, name) in _STATIC_FLOATS else float
        return kind | None if type(None) in kinds else kind
    return Static[Any]


def _as_float(round: Array | int) -> Array:
    """The round in the default float type: optax divides it, and JAX divides int32 in float32 in float64 runs too."""
    return jnp.asarray(round, float)


def _hashable(value: Any) -> Any:
    """A mapping as a sorted tuple of pairs; anything else as it is."""
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


def _unpickled(make: Callable[..., Any], options: Mapping[str, Any]) -> OptaxSchedule:
    """The schedule that ``OptaxSchedule.__reduce__`` describes."""
    return _class_of(make)(**options)


def as_schedule(value: Any) -> Any:
    """A function of the round as a :class:`FunctionSchedule`; anything else as it is."""
    if isinstance(value, type) or dataclasses.is_dataclass(value) or not callable(value):
        return value
    function: Any = value
    return FunctionSchedule(function)


if TYPE_CHECKING:
    Schedule = Constant | InverseTimeDecay | FunctionSchedule | OptaxSchedule | Callable[[Any], Any]
else:
    Schedule = Annotated[
        Constant | InverseTimeDecay | FunctionSchedule, Converter(as_schedule), LazyClasses(optax_schedules)
    ]
"""The annotation of a field that holds a schedule."""
