"""Traces that are shared between programs, compiled functions shared by their text, and queries of jaxprs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
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
_FUNCTIONS = (core.ClosedJaxpr, core.Jaxpr)
_NUMBERS = (bool, int, float)
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
"""For ``jax.jit(inline=...)``: inlined at trace time, which ``True`` no longer means in JAX 0.11 and newer."""
CACHE_SIZE = 32
"""Traces of one function."""


def trace_once(
    fixed: int, axes: Callable[..., list[tuple[str, int]]] = lambda *_: [], rules: Rules = NO_RULES
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for functions whose first ``fixed`` arguments are hashable and whose others are pytrees of arrays.

    The function is inlined where it is called. ``jax.jit`` with ``inline`` would trace it again inside every
    ``shard_map``; here a trace is found again wherever the shapes and JAX's settings are the same. Of the axes of a
    mesh the function may speak of those that ``axes`` names with their sizes, from the fixed arguments. Python's
    numbers among the arrays stay constants. ``rules``: for operations on a CPU that are better in other forms.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @lru_cache(CACHE_SIZE)
        def trace(
            statics: tuple, structure: Any, shapes: tuple, numbers: tuple, _: tuple
        ) -> tuple[core.ClosedJaxpr, Any]:
            inner: Callable = function

            def of_arrays(*arrays: Any) -> Any:
                rest = iter(arrays)
                leaves = [next(rest) if number is None else number[1] for number in numbers]
                return inner(*statics, *jax.tree.unflatten(structure, leaves))

            with use_abstract_mesh(NO_MESH):  # what is made here goes into programs for any mesh
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
            results = jaxpr_as_function(made)(*arrays)  # of which constants are no arrays yet
            return jax.tree.unflatten(shape, [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results])

        return call

    return decorated


def cached_trace(function: Callable, *args: Any) -> core.ClosedJaxpr:
    """The trace of a function of pytrees of arrays that holds none of a program which is being traced; remembered."""
    leaves, structure = jax.tree.flatten(args)
    return _cached_trace(
        function, structure, tuple(map(shape_struct, leaves)), (CodeFingerprint(function), *trace_settings())
    )


@lru_cache(CACHE_SIZE)
def _cached_trace(function: Callable, structure: Any, shapes: tuple, _: tuple) -> core.ClosedJaxpr:
    with use_abstract_mesh(NO_MESH):  # for programs of any mesh
        return jax.make_jaxpr(function)(*jax.tree.unflatten(structure, shapes))


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """While Python traces and nothing is thrown away: its garbage collector would go over all of it again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """The function behind one that is :func:`trace_once`."""
    return function.__wrapped__  # type: ignore[attr-defined]


def run_cached(function: Callable[..., T], *args: Any) -> T:
    """What ``jax.jit(function)`` makes of pytrees of arrays, for functions made anew that compute the same.

    They share a compiled program, and where the result is nothing but arguments there is none: most methods start so.
    What a program's text does not show, arrays that functions inside it hold and calls of Python, is not shared.
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
    """The program's equations and those of all functions inside them."""
    for equation in (program.jaxpr if isinstance(program, core.ClosedJaxpr) else program).eqns:
        yield equation
        for function in sub_jaxprs(equation):
            yield from equations_in(function)


def constants_in(program: core.ClosedJaxpr) -> list[Any]:
    """The arrays that the program holds and those that functions inside it do."""
    equations = list(equations_in(program))
    inside = [function for equation in equations for function in sub_jaxprs(equation)]
    standing = [v.val for e in equations for v in e.invars if isinstance(v, core.Literal) and np.ndim(v.val) > 0]
    return [array for one in [program, *inside] for array in getattr(one, "consts", ())] + standing


def sub_jaxprs(equation: core.JaxprEqn) -> list[core.ClosedJaxpr | core.Jaxpr]:
    """The functions that an equation holds."""
    values = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: isinstance(value, _FUNCTIONS))
    return [value for value in values if isinstance(value, _FUNCTIONS)]


def output_sources(program: core.ClosedJaxpr | core.Jaxpr) -> list[Any]:
    """Of each output the variable that it is, though calls hand it on under other names; of a constant its place."""
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    of: dict[Any, Any] = {}
    source = lambda atom: id(atom.val) if isinstance(atom, core.Literal) else of.get(atom, atom)  # noqa: E731
    for equation in jaxpr.eqns:
        if equation.primitive.name in CALL_PRIMITIVES:
            inside = sub_jaxprs(equation)[0]
            given = dict(zip(getattr(inside, "jaxpr", inside).invars, map(source, equation.invars), strict=True))
            found = zip(equation.outvars, output_sources(inside), strict=True)
            of.update((v, given[inner]) for v, inner in found if inner in given)
    return list(map(source, jaxpr.outvars))


def dependent_leaves(function: Callable[..., Tree], secret: Tree, *others: Tree) -> list[str]:
    """The names of the leaves of ``function(secret, *others)`` that are computed from ``secret``.

    ``function`` is traced and not run. Whatever an operation reads is taken to matter for all that it gives, loops and
    calls as a whole: a leaf that is not named does not depend on ``secret``; one that is named may.
    """
    with jax.disable_jit(False):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(secret, *others)
    jaxpr = closed.jaxpr
    touched = set(jaxpr.invars[: len(jax.tree.leaves(secret))])
    for equation in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in touched for v in equation.invars):
            touched.update(equation.outvars)
    outputs = zip(tree.leaf_names(shape), jaxpr.outvars, strict=True)
    return [name for name, v in outputs if not isinstance(v, core.Literal) and v in touched]


def scan_counts(equation: core.JaxprEqn) -> tuple[int, int]:
    """(number of constants, number of carried arrays) of a scan; its other inputs are scanned.

    By the shapes, since versions of JAX name the numbers otherwise.
    """
    body = equation.params["jaxpr"]
    body = body.jaxpr if isinstance(body, core.ClosedJaxpr) else body
    alike = lambda outer, inner: sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))  # noqa: E731
    carried = alike(equation.outvars, body.outvars)
    return alike(equation.invars, body.invars) - carried, carried


def aval_bytes(atom: Any) -> int:
    """Of a variable of a jaxpr."""
    return atom.aval.size * atom.aval.dtype.itemsize


class JaxprText(NamedTuple):
    """A program, known by its text."""

    text: str
    made: core.ClosedJaxpr

    @classmethod
    def of(cls, made: core.ClosedJaxpr) -> JaxprText | None:
        """None where the text does not show all that is computed."""
        calls_python = any("callback" in equation.primitive.name for equation in equations_in(made))
        return None if calls_python or constants_in(made) else cls(str(made), made)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxprText) and self.text == other.text


@lru_cache(CACHE_SIZE)
def _compiled_from_text(known: JaxprText) -> Callable[..., list]:
    return jax.jit(core.jaxpr_as_fun(known.made))


def cpu_passes_apply() -> bool:
    """Whether functions are put in the forms that XLA's CPU backend is fast at.

    Not where nothing is compiled: plan debug computes what stands in a model, by which the other plans are checked.
    """
    return jax.default_backend() == "cpu" and not jax.config.values["jax_disable_jit"]


def trace_settings() -> tuple:
    """JAX's settings and the compiler options, on which traces depend."""
    return (*jax.config.values.items(), current_options())


def shape_struct(a: Any) -> jax.ShapeDtypeStruct:
    """What a function of the array ``a`` is traced with."""
    aval = jax.typeof(a)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
