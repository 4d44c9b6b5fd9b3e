"""Caches of traces and of compiled functions, and queries of jaxprs."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, use_abstract_mesh

from fedrax import tree
from fedrax.tree import Tree
from fedrax.xla.fingerprint import CodeFingerprint
from fedrax.xla.norms import fuse_norms_of_differences
from fedrax.xla.options import current_options, is_enabled
from fedrax.xla.rewriting import CALL_PRIMITIVES, Rules, evaluate_jaxpr, jaxpr_as_function

P = ParamSpec("P")
T = TypeVar("T")
NO_RULES: Rules = {}
NO_MESH = AbstractMesh((), ())
"""Mesh of cached traces, which are inlined into programs for any mesh."""
_FUNCTIONS = (core.ClosedJaxpr, core.Jaxpr)
_NUMBERS = (bool, int, float)
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
"""Value of ``jax.jit(inline=...)`` for inlining at trace time. ``True`` means something else from JAX 0.11 on."""
CACHE_SIZE = 32
"""Number of results of one function that are cached."""
_CACHES = "_fedrax_caches"
"""Attribute of an owner with its cached results."""
_numbers = itertools.count()
"""Numbers of cached results."""


class _Results:
    """Results of functions for one owner. It has no ``__dict__``, into which fingerprints of user code would look."""

    __slots__ = ("__weakref__", "found")

    def __init__(self) -> None:
        self.found: dict[tuple, tuple[int, Any]] = {}
        """By function and arguments: the number of the result, and the result."""

    def discard(self, number: int) -> None:
        """Remove a result by its number."""
        for key in [key for key, (own, _) in list(self.found.items()) if own == number]:
            self.found.pop(key, None)


def _first(*args: Any) -> Any:
    return args[0]


def owned_cache(owner: Callable[..., Any] = _first) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator: ``lru_cache`` whose results live at most as long as an argument, such as the task of a program.

    A result may refer to the frozen parameters of a model. ``lru_cache`` would hold the model and these parameters in
    memory after the caller has deleted the model. Here results are stored on their owner, and Python's garbage
    collector frees both together. Of all owners together the `CACHE_SIZE` most recent results are stored.

    Args:
        owner: from the arguments, the object that owns the result; by default the first one. Results of objects that
            take no attributes are owned by the process.
    """

    def decorated(function: Callable[..., T]) -> Callable[..., T]:
        lock, of_process = threading.RLock(), _Results()
        recent: OrderedDict[int, weakref.ref[_Results]] = OrderedDict()

        def store(results: _Results, key: tuple, result: T) -> None:
            number = next(_numbers)
            recent[number] = weakref.ref(results, lambda _: recent.pop(number, None))
            results.found[key] = number, result
            if len(recent) > CACHE_SIZE:
                oldest, where = recent.popitem(last=False)
                if (other := where()) is not None:
                    other.discard(oldest)

        @wraps(function)
        def call(*args: Any) -> T:
            holder = owner(*args)
            attributes = getattr(getattr(holder, "__self__", holder), "__dict__", None)  # of a bound method's object
            owned = isinstance(attributes, dict)
            results, key = attributes.setdefault(_CACHES, _Results()) if owned else of_process, (function, args)
            found = results.found.get(key)
            if found is None:
                result = function(*args)
                with lock:
                    store(results, key, result)
                return result
            number, result = found
            with lock:
                if number in recent:
                    recent.move_to_end(number)
            return result

        return call

    return decorated


def trace_once(
    fixed: int,
    axes: Callable[..., list[tuple[str, int]]] = lambda *_: [],
    rules: Rules = NO_RULES,
    owner: Callable[..., Any] = _first,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: cache the traces of a function and inline them where it is called.

    ``jax.jit`` with ``inline`` would trace the function again inside every ``shard_map``. Here a trace is reused
    wherever shapes, settings of JAX and the user's code are the same.

    Args:
        fixed: number of leading arguments that are static and hashable; the others are pytrees of arrays, in which
            Python numbers are constants.
        axes: from the static arguments, names and sizes of the mesh axes that the function may use.
        rules: rewrite rules that are applied on CPUs.
        owner: from the static arguments, the object with which the traces are freed; see :func:`owned_cache`.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @owned_cache(lambda statics, *_: owner(*statics))
        def trace(
            statics: tuple, structure: Any, shapes: tuple, numbers: tuple, _: tuple
        ) -> tuple[core.ClosedJaxpr, Any]:
            inner: Callable = function

            def of_arrays(*arrays: Any) -> Any:
                rest = iter(arrays)
                leaves = [next(rest) if number is None else number[1] for number in numbers]
                return inner(*statics, *jax.tree.unflatten(structure, leaves))

            with use_abstract_mesh(NO_MESH):
                names = axes(*statics) or None
                made, shape = jax.make_jaxpr(of_arrays, axis_env=names, return_shape=True)(*shapes)
                made = fuse_norms_of_differences(made)
                if (
                    rules
                    and cpu_passes_apply()
                    and is_enabled("linear_algebra")
                    and any(e.primitive.name in rules for e in equations_in(made))
                ):
                    before = made
                    made = jax.make_jaxpr(lambda *args: evaluate_jaxpr(before, args, rules), axis_env=names)(*shapes)
                return made, jax.tree.structure(shape)

        @wraps(function)
        def call(*args: P.args, **none: P.kwargs) -> T:
            if jax.config.values["jax_disable_jit"]:
                return function(*args, **none)
            leaves, structure = jax.tree.flatten(args[fixed:])
            numbers = tuple((type(leaf), leaf) if isinstance(leaf, _NUMBERS) else None for leaf in leaves)
            arrays = [leaf for leaf, number in zip(leaves, numbers, strict=True) if number is None]
            known = (CodeFingerprint(*args[:fixed]), *trace_settings())  # type: ignore[misc]
            made, shape = trace(args[:fixed], structure, tuple(map(shape_struct, arrays)), numbers, known)
            results = jaxpr_as_function(made)(*arrays)
            # constant results are NumPy arrays
            return jax.tree.unflatten(shape, [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results])

        return call

    return decorated


def cached_trace(function: Callable, *args: Any) -> core.ClosedJaxpr:
    """The cached trace of a function of pytrees of arrays, which must not close over tracers."""
    leaves, structure = jax.tree.flatten(args)
    return _cached_trace(
        function, structure, tuple(map(shape_struct, leaves)), (CodeFingerprint(function), *trace_settings())
    )


@owned_cache()
def _cached_trace(function: Callable, structure: Any, shapes: tuple, _: tuple) -> core.ClosedJaxpr:
    with use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(function)(*jax.tree.unflatten(structure, shapes))


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector during tracing, which creates many objects and releases few."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """The function that :func:`trace_once` wraps."""
    return function.__wrapped__  # type: ignore[attr-defined]


def run_cached(function: Callable[..., T], *args: Any) -> T:
    """Run ``jax.jit(function)``; functions whose jaxprs have the same text share a compiled program.

    A new closure is not compiled again this way. A function that only returns arguments, such as the ``init`` of most
    methods, is not compiled at all. Jaxprs with constants or callbacks, which the text does not show, are not shared.
    """
    compiled = jax.jit(function)
    traced = compiled.trace(*args)
    made, leaves = traced.jaxpr, jax.tree.leaves(args)
    text = JaxprText.of(made)
    if text is None or any(isinstance(out, core.Literal) for out in made.jaxpr.outvars):
        return compiled(*args)
    run = _compiled_from_text(text) if made.eqns else core.jaxpr_as_fun(made)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), map(jnp.asarray, run(*leaves)))


def equations_in(program: core.ClosedJaxpr | core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The equations of a program and of its sub-jaxprs."""
    for equation in (program.jaxpr if isinstance(program, core.ClosedJaxpr) else program).eqns:
        yield equation
        for function in sub_jaxprs(equation):
            yield from equations_in(function)


def constants_in(program: core.ClosedJaxpr) -> list[Any]:
    """Arrays that are constants of a program or of its sub-jaxprs."""
    equations = list(equations_in(program))
    inner = [function for equation in equations for function in sub_jaxprs(equation)]
    literals = [v.val for e in equations for v in e.invars if isinstance(v, core.Literal) and np.ndim(v.val) > 0]
    return [array for one in [program, *inner] for array in getattr(one, "consts", ())] + literals


def sub_jaxprs(equation: core.JaxprEqn) -> list[core.ClosedJaxpr | core.Jaxpr]:
    """The jaxprs in the parameters of an equation."""
    values = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: isinstance(value, _FUNCTIONS))
    return [value for value in values if isinstance(value, _FUNCTIONS)]


def output_sources(program: core.ClosedJaxpr | core.Jaxpr) -> list[Any]:
    """For each output the variable that it equals, followed through calls; for a literal the ID of its value."""
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    of: dict[Any, Any] = {}

    def source(atom: Any) -> Any:
        return id(atom.val) if isinstance(atom, core.Literal) else of.get(atom, atom)

    for equation in jaxpr.eqns:
        if equation.primitive.name in CALL_PRIMITIVES:
            inner = sub_jaxprs(equation)[0]
            arguments = dict(zip(getattr(inner, "jaxpr", inner).invars, map(source, equation.invars), strict=True))
            outputs = zip(equation.outvars, output_sources(inner), strict=True)
            of.update((v, arguments[inner_source]) for v, inner_source in outputs if inner_source in arguments)
    return list(map(source, jaxpr.outvars))


def dependent_leaves(function: Callable[..., Tree], secret: Tree, *others: Tree) -> list[str]:
    """Names of the output leaves of ``function(secret, *others)`` that may depend on ``secret``.

    The function is traced and not run. The analysis is conservative: all outputs of an equation, loops and calls as a
    whole, are taken to depend on all of its inputs.
    """
    with jax.disable_jit(False):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(secret, *others)
    jaxpr = closed.jaxpr
    dependent = set(jaxpr.invars[: len(jax.tree.leaves(secret))])
    for equation in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in dependent for v in equation.invars):
            dependent.update(equation.outvars)
    outputs = zip(tree.leaf_names(shape), jaxpr.outvars, strict=True)
    return [name for name, v in outputs if not isinstance(v, core.Literal) and v in dependent]


def scan_counts(equation: core.JaxprEqn) -> tuple[int, int]:
    """(number of constants, number of carried arrays) of a scan; its other inputs are scanned.

    Determined from the ranks of the arrays, since the parameters' names differ between versions of JAX.
    """
    body = equation.params["jaxpr"]
    body = body.jaxpr if isinstance(body, core.ClosedJaxpr) else body

    def not_sliced(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))

    carried = not_sliced(equation.outvars, body.outvars)
    return not_sliced(equation.invars, body.invars) - carried, carried


def aval_bytes(atom: Any) -> int:
    """Bytes of a jaxpr's atom."""
    return atom.aval.size * atom.aval.dtype.itemsize


class JaxprText(NamedTuple):
    """A jaxpr that is compared and hashed by its text."""

    text: str
    made: core.ClosedJaxpr

    @classmethod
    def of(cls, made: core.ClosedJaxpr) -> JaxprText | None:
        """The text of a jaxpr; None if it has constants or callbacks, which the text does not show."""
        calls_python = any("callback" in equation.primitive.name for equation in equations_in(made))
        return None if calls_python or constants_in(made) else cls(str(made), made)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxprText) and self.text == other.text


@lru_cache(CACHE_SIZE)
def _compiled_from_text(program: JaxprText) -> Callable[..., list]:
    """The compiled program of a jaxpr, cached by its text."""
    return jax.jit(core.jaxpr_as_fun(program.made))


def cpu_passes_apply() -> bool:
    """Whether passes for CPUs run: on the CPU backend, and not under ``jax.disable_jit``.

    The executor for debugging disables ``jit`` and evaluates models as they are written, to check the other executors.
    """
    return jax.default_backend() == "cpu" and not jax.config.values["jax_disable_jit"]


def trace_settings() -> tuple:
    """Settings of JAX and compiler options, which are part of the key of a trace."""
    return (*jax.config.values.items(), current_options())


def shape_struct(a: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an array, to trace a function of it."""
    aval = jax.typeof(a)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
