"""Shared code of the Flax and Equinox adapters: mode arguments, construction of modules, and error messages."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import jax
from jax import Array
from jax.sharding import use_abstract_mesh

from fedrax.contract.model import Model, Params, Variables
from fedrax.devices import use_all_cores
from fedrax.errors import FedraxError, describe_value, unknown
from fedrax.inputs import as_arguments
from fedrax.xla import NO_MESH, equations_in, shape_struct

ModuleFunction = str | Callable[..., Any]
"""A method's name, or a function (module, x)."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a module's call."""

_TRAINING = ("train", "training", "is_training", "is_train", "enable_dropout")
_INFERENCE = ("deterministic", "use_running_average", "inference", "eval", "evaluate", "is_eval", "test", "testing")
MODE_ARGUMENTS = dict.fromkeys(_TRAINING, True) | dict.fromkeys(_INFERENCE, False)
"""Common names of the argument that selects training or evaluation mode, and their values in training."""


def mode_arguments(method: Callable, train: bool) -> dict[str, bool]:
    """The mode arguments of a method, with their values in training or evaluation."""
    names = inspect.signature(method).parameters
    return {name: train == value for name, value in MODE_ARGUMENTS.items() if name in names}


def library(module: str, package: str) -> ModuleType:
    """Import a module of an optional package; FedraxError says how to install it."""
    use_all_cores()  # before the first array: JAX fixes its devices when it creates one
    try:
        return importlib.import_module(module)
    except ImportError:
        raise FedraxError(f"this model needs {package}: pip install 'fedrax[{package}]'.") from None


def create_module(create: Any, name: str, value: Any) -> Any:
    """Call ``create`` with ``value`` as its argument ``name``, or as its first argument if it has none of that name.

    Raises FedraxError unless it is a function or class that takes the argument and makes something to call, or a pair.
    """
    wanted = f"give a module, or a function of {name} that returns one"
    if not callable(create):
        raise FedraxError(f"{wanted}, not of {describe_value(create)}")
    made = _created(create, name, value)
    if not (callable(made) or isinstance(made, tuple)):
        raise FedraxError(f"{wanted}, not {describe_value(made)}")
    return made


def _created(create: Callable, name: str, value: Any) -> Any:
    """The result of ``create``; FedraxError if it takes no argument."""
    inner: Any = create
    while isinstance(inner, partial):
        inner = inner.func
    try:  # the __init__ of a class: the signature of the class may be that of its metaclass, which takes any arguments
        known = inspect.signature(inner.__init__ if isinstance(inner, type) else inner).parameters
    except (TypeError, ValueError):  # no Python signature
        known = {}
    by_name = name in known and known[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    try:
        return create(**{name: value}) if by_name else create(value)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # inside of it
        raise FedraxError(f"{describe_value(create)} must take {name}, to make a module: {error}") from error


def make_model(
    kind: type,
    init: Callable[[Array], Params],
    run: Callable[..., tuple[Any, Any]],
    features: ModuleFunction | None,
    blocks: Sequence[ModuleFunction],
    has_statistics: bool,
) -> Model:
    """Make the model of a module.

    Args:
        kind: Class of the module.
        init: Initializer, key -> parameters, or `Variables` if there are running statistics.
        run: (function (module, ...), variables, arguments of the function, key, train) -> (outputs, running
            statistics).
        features: Method name or function (module, x) that gives the input of the last layer.
        blocks: Method names or functions (module, x) whose composition is ``__call__``.
        has_statistics: Whether the module has running statistics.

    Returns:
        The model.
    """

    def checked_run(function: ModuleFunction, of_samples: bool = True) -> Callable[..., tuple[Any, Any]]:
        method = getattr(kind, function, None) if isinstance(function, str) else function
        if method is None:
            known = [name for name in vars(kind) if not name.startswith("_")]
            raise unknown(f"method of {kind.__name__}", str(function), known)
        # A function (module, x) takes several inputs as they are, a method as the module itself does.
        spread = of_samples and (isinstance(function, str) or function is kind.__call__)
        checked: list[bool] = []

        def called(variables: Any, x: Any, key: Array | None, train: bool) -> tuple[Any, Any]:
            arguments = as_arguments(x) if spread else ((x,), {})
            if train and not checked:
                _check_mode_arguments(kind, run, method, variables, arguments, key)
                checked.append(True)
            with explain_axis_errors(kind):
                return run(method, variables, arguments, key, train)

        return called

    def outputs(called: Callable[..., tuple[Any, Any]]) -> Callable:
        return lambda variables, x, key=None: called(variables, x, key, key is not None)[0]

    whole = checked_run(kind.__call__)
    return Model(
        init,
        outputs(whole),
        None if features is None else outputs(checked_run(features)),
        kind.__name__,
        tuple(outputs(checked_run(block, of_samples=i == 0)) for i, block in enumerate(blocks)) or None,
        (lambda variables, x, key: whole(variables, x, key, True)) if has_statistics else None,
    )


def _check_mode_arguments(kind: type, run: Callable, method: Callable, variables: Any, x: Arguments, key: Any) -> None:
    """Raise FedraxError if a Boolean argument of unknown name selects the mode and its default is wrong in one mode.

    This is so if flipping it makes training draw random numbers or update statistics, or stops evaluation from doing
    so. If the method has a mode argument of known name, other Booleans are options.
    """
    if mode_arguments(method, train=True):
        return

    def effects(method: Callable, train: bool) -> set[str] | None:
        return _training_effects(run, method, variables, x, key, train)

    for name, argument in inspect.signature(method).parameters.items():
        if name in MODE_ARGUMENTS or not isinstance(argument.default, bool):
            continue
        flipped = partial(method, **{name: not argument.default})
        missing = _difference(effects(flipped, True), effects(method, True))
        wrong = missing or _difference(effects(method, False), effects(flipped, False))
        if wrong:
            first, *others = MODE_ARGUMENTS
            raise FedraxError(
                f"{kind.__name__} {' and '.join(sorted(wrong))} depending on its argument {name}, which is not known to"
                f" select training or evaluation: rename it to {first}, or one of {', '.join(others)}"
            )


def _difference(first: set[str] | None, second: set[str] | None) -> set[str]:
    """The elements of ``first`` that are not in ``second``; empty if either is None."""
    return set() if first is None or second is None else first - second


def _training_effects(
    run: Callable, method: Callable, variables: Any, x: Arguments, key: Any, train: bool
) -> set[str] | None:
    """What a call does that only training should: update statistics, draw random numbers; None if the call fails."""

    def call(variables: Any, x: Any, key: Any) -> tuple[Any, list[Array]]:
        outputs, statistics = run(method, variables, x, key if train else None, train)
        return statistics, [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]

    shapes = jax.tree.map(shape_struct, (variables, x, key))
    try:
        with use_abstract_mesh(NO_MESH):
            made = jax.make_jaxpr(call)(*shapes)
    except Exception:  # the flipped argument is not a mode; errors of the method itself are raised by its call
        return None
    count = len(jax.tree.leaves(variables.statistics)) if isinstance(variables, Variables) else 0
    last = len(jax.tree.leaves(variables))
    before, after = made.jaxpr.invars[last - count : last], made.jaxpr.outvars[:count]
    updates = any(a is not b for a, b in zip(before, after, strict=False))
    draws = any(equation.primitive.name == "random_bits" for equation in equations_in(made))
    return {*["updates statistics"] * updates, *["draws random numbers"] * draws}


@contextmanager
def explain_axis_errors(kind: type) -> Iterator[None]:
    """Convert the error of a module that averages over a named axis of devices to FedraxError."""
    try:
        yield
    except NameError as error:
        found = re.search(r"unbound axis name: (\w+)", str(error))
        if found is None:
            raise
        raise FedraxError(
            f"{kind.__name__} averages over the device axis {found[1]}, and a client's batch is on one device: unset"
            " axis_name"
        ) from error
