"""Flax NNX modules as pairs of pure functions."""

import dataclasses
import inspect
import types
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from fedrax.contract.model import Model, Params, Variables
from fedrax.models.adapters.modules import Part, begun, library, model_of, modes
from fedrax.xla import closure_values


def from_nnx(module: Any, *, features: Part | None = None, blocks: Sequence[Part] = ()) -> Model:
    """A Flax NNX module, or a function `nnx.Rngs -> module`, that maps a batch [B, ...] to outputs.

    A module's own values are the start, whatever the key of `init`; a function gives a start for each key.
    Without a key the module runs in its evaluation mode, with one in its training mode; arguments `train` and the like
    are set as by `from_linen`. A key begins the module's random streams anew, whatever their names, and where its
    `__call__` has an argument `rngs`, it is given streams made of the key. Variables other than parameters and random
    states, such as `nnx.BatchStat`, are statistics, but for those that only a call makes; numbers that never move are
    better plain arrays of the module.

    ``features`` and ``blocks`` are functions of the module and x (or names of methods): what the last layer reads,
    and the parts that `__call__` applies one after the other. Raises FedraxError for a method that is not there.
    """
    nnx = library("flax.nnx", "flax")
    create: Callable = (lambda rngs: module) if isinstance(module, nnx.Module) else module

    def moving(path: Any, value: Any) -> bool:
        if not isinstance(value, nnx.Variable) or isinstance(value, nnx.Param | nnx.RngState | nnx.Intermediate):
            return False
        return not isinstance(value.get_value(), tuple)  # which grows with every call: sown, to look at

    def parts(key: Any) -> tuple[Any, ...]:
        made = begun(create, "rngs", nnx.Rngs(key))
        streams = {v.key.tag for _, v in nnx.iter_graph(made) if isinstance(v, nnx.RngStream)}
        return type(made), streams, *nnx.split(made, nnx.Param, moving, ...)

    kind, streams, graph, template, still, other = _with_shapes(parts)
    has_statistics = bool(jax.tree.leaves(still))
    there = {path for path, _ in nnx.to_flat_state(still)}

    def streams_of(key: Array) -> dict[str, Array]:
        """A key for each name of a stream."""
        others = {name: jax.random.fold_in(key, i) for i, name in enumerate(sorted(streams - {"default"}), 1)}
        return {"default": key} | others

    def init(key: Array) -> Params:
        made = begun(create, "rngs", nnx.Rngs(key))
        params, statistics = (nnx.to_pure_dict(nnx.state(made, kind)) for kind in (nnx.Param, moving))
        return Variables(params, statistics) if has_statistics else params

    def run(method: Callable, variables: Any, x: Array, key: Array | None, train: bool) -> tuple[Any, Any]:
        params, statistics = variables if has_statistics else (variables, {})
        states = _filled(nnx, template, params), _filled(nnx, still, statistics), other
        network = nnx.merge(graph, *states, copy=True)
        if train:
            network.train()
        else:
            network.eval()
        if key is not None:
            nnx.reseed(network, policy="match_shape", **streams_of(key))
        asked, options = inspect.signature(method).parameters.get("rngs"), modes(method, train)
        if asked is not None and (key is not None or asked.default is inspect.Parameter.empty):
            options["rngs"] = nnx.Rngs(jax.random.key(0) if key is None else key)
        outputs = method(network, x, **options)
        moved = nnx.state(network, lambda path, value: path in there and moving(path, value))
        return outputs, nnx.to_pure_dict(moved)

    return model_of(kind, init, run, features, blocks, has_statistics)


def _filled(nnx: ModuleType, template: Any, values: Any) -> Any:
    """A state with these values in the place of the template's."""
    state = jax.tree.map(lambda v: v, template)  # a fresh copy: filling it must not touch the template
    nnx.replace_by_pure_dict(state, values)
    return state


def _with_shapes(parts: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    """``parts(0)``, but for the last one of shapes in the place of arrays, where that can be.

    Outside of a program each parameter would be drawn, and what draws it compiled, by itself. It cannot be of a module
    that looks at its numbers, or that keeps arrays which are no variables: NNX takes traced ones for constants.
    """
    found: list[Any] = []

    @jax.jit
    def last(key: Array) -> Any:
        found[:] = parts(key)
        return found.pop()

    try:
        end = last(jax.random.key(0))
    except Exception:  # what is wrong with a module comes again
        return parts(0)
    if _holds_traced(found[2]):
        return parts(0)
    of_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x  # noqa: E731
    return *jax.tree.map(of_shape, found), end


def _holds_traced(graph: Any) -> bool:
    """Whether arrays of a program that was traced stand among a module's constants, or in functions of its own."""
    waiting, seen = [graph], {}
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tracer):
            return True
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, tuple | list):
            waiting += value
        elif isinstance(value, types.FunctionType):
            waiting += closure_values(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            waiting += [getattr(value, field.name) for field in dataclasses.fields(value)]
    return False
