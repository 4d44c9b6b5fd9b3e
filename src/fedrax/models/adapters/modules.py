"""Shared code of the Flax and Equinox adapters: modes, construction of modules, and error messages."""

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
from fedrax.errors import FedraxError, unknown
from fedrax.xla import NO_MESH, equations_in, shape_struct

Part = str | Callable[..., Any]
"""A method's name, or a function whose first argument is the module."""

_TRAINING = ("train", "training", "is_training", "is_train", "enable_dropout")
_INFERENCE = ("deterministic", "use_running_average", "inference", "eval", "evaluate", "is_eval", "test", "testing")
MODES = dict.fromkeys(_TRAINING, True) | dict.fromkeys(_INFERENCE, False)
"""Common names of a method's mode argument, and their values in training."""


def modes(method: Callable, train: bool) -> dict[str, bool]:
    """The values of a method's mode arguments in training or evaluation."""
    names = inspect.signature(method).parameters
    return {name: train == value for name, value in MODES.items() if name in names}


def library(module: str, package: str) -> ModuleType:
    """Import a module of an optional package; FedraxError says how to install it."""
    use_all_cores()  # before the module's first array: afterwards JAX's devices are what they are
    try:
        return importlib.import_module(module)
    except ImportError:
        raise FedraxError(f"this model needs {package}: pip install 'fedrax[{package}]'.") from None


def begun(create: Callable, name: str, value: Any) -> Any:
    """Call ``create`` with ``value`` as its argument ``name`` or, if it has none of that name, as its first."""
    inner: Any = create
    while isinstance(inner, partial):
        inner = inner.func
    try:  # the class's own __init__: the metaclass's __call__ takes any arguments
        known = inspect.signature(inner.__init__ if isinstance(inner, type) else inner).parameters
    except (TypeError, ValueError):  # no Python signature
        known = {}
    by_name = name in known and known[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    return create(**{name: value}) if by_name else create(value)


def model_of(
    kind: type,
    init: Callable[[Array], Params],
    run: Callable[..., tuple[Any, Any]],
    features: Part | None,
    blocks: Sequence[Part],
    has_statistics: bool,
) -> Model:
    """The model of ``run``: (module function and x, variables, x, key, train) -> (outputs, statistics)."""

    def function(part: Part) -> Callable[..., tuple[Any, Any]]:
        method = getattr(kind, part, None) if isinstance(part, str) else part
        if method is None:
            known = [name for name in vars(kind) if not name.startswith("_")]
            raise unknown(f"method of {kind.__name__}", part, known)
        checked: list[bool] = []

        def called(variables: Any, x: Array, key: Array | None, train: bool) -> tuple[Any, Any]:
            if train and not checked:
                _check_switches(kind, run, method, variables, x, key)
                checked.append(True)
            with told_of_axes(kind):
                return run(method, variables, x, key, train)

        return called

    def outputs(called: Callable[..., tuple[Any, Any]]) -> Callable:
        return lambda variables, x, key=None: called(variables, x, key, key is not None)[0]

    whole = function(kind.__call__)
    return Model(
        init,
        outputs(whole),
        None if features is None else outputs(function(features)),
        kind.__name__,
        tuple(outputs(function(block)) for block in blocks) or None,
        (lambda variables, x, key: whole(variables, x, key, True)) if has_statistics else None,
    )


def _check_switches(kind: type, run: Callable, method: Callable, variables: Any, x: Any, key: Any) -> None:
    """Raise FedraxError if a Boolean argument of unknown name is a mode argument with the wrong default.

    This is detected if flipping it makes training draw random numbers or update statistics, or stops evaluation from
    doing so. If the method has a mode argument of known name, other Booleans are options.
    """
    if modes(method, train=True):
        return

    def signs(method: Callable, train: bool) -> set[str] | None:
        return _signs_of_training(run, method, variables, x, key, train)

    for name, argument in inspect.signature(method).parameters.items():
        if name in MODES or not isinstance(argument.default, bool):
            continue
        other = partial(method, **{name: not argument.default})
        lacks = _only_first(signs(other, True), signs(method, True))
        wrong = lacks or _only_first(signs(method, False), signs(other, False))
        if wrong:
            first, *others = MODES
            raise FedraxError(
                f"{kind.__name__} {' and '.join(sorted(wrong))} or not by its argument {name}, which nothing sets in"
                f" training and evaluation: call it {first}, or one of {', '.join(others)}"
            )


def _only_first(first: set[str] | None, second: set[str] | None) -> set[str]:
    """The elements of ``first`` that are not in ``second``; empty if either is None."""
    return set() if first is None or second is None else first - second


def _signs_of_training(
    run: Callable, method: Callable, variables: Any, x: Any, key: Any, train: bool
) -> set[str] | None:
    """Whether a call updates statistics or draws random numbers, as text; None if the call fails."""

    def call(variables: Any, x: Any, key: Any) -> tuple[Any, list[Array]]:
        outputs, statistics = run(method, variables, x, key if train else None, train)
        return statistics, [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]

    shapes = jax.tree.map(shape_struct, (variables, x, key))
    try:
        with use_abstract_mesh(NO_MESH):
            made = jax.make_jaxpr(call)(*shapes)
    except Exception:  # of an argument that asks for more than a switch; the call itself says what is wrong with it
        return None
    count = len(jax.tree.leaves(variables.statistics)) if isinstance(variables, Variables) else 0
    last = len(jax.tree.leaves(variables))
    before, after = made.jaxpr.invars[last - count : last], made.jaxpr.outvars[:count]
    moves = any(a is not b for a, b in zip(before, after, strict=False))
    draws = any(equation.primitive.name == "random_bits" for equation in equations_in(made))
    return {*["moves statistics"] * moves, *["draws random numbers"] * draws}


@contextmanager
def told_of_axes(kind: type) -> Iterator[None]:
    """Explain the error of a module that averages over an axis of devices."""
    try:
        yield
    except NameError as error:
        found = re.search(r"unbound axis name: (\w+)", str(error))
        if found is None:
            raise
        raise FedraxError(
            f"{kind.__name__} takes means over an axis {found[1]}: leave axis_name out, for a client's batch is whole"
        ) from error
