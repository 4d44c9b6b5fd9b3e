"""Adapter of Flax NNX modules."""

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
    """Convert a Flax NNX module, which maps a batch [B, ...] to outputs [B, ...], to a model.

    With a key the module runs in training mode, without one in evaluation mode. Arguments such as ``train`` are set as
    in `from_linen`. A key reseeds all random streams of the module; an argument ``rngs`` of ``__call__`` gets streams
    made from the key. Variables other than parameters and random states, such as ``nnx.BatchStat``, are running
    statistics, except those that only a call creates. Store numbers that never change as plain arrays of the module.

    Args:
        module: A module, which is the initial value for every key; or a function ``nnx.Rngs -> module``.
        features: Method name or function (module, x) that gives the input of the last layer.
        blocks: Method names or functions (module, x) that ``__call__`` applies one after the other.

    Returns:
        The model; its parameters are `Variables` if there are running statistics.

    Raises:
        FedraxError: Flax is not installed, or a method is missing.

    Example:
        >>> from flax import nnx
        >>> model = fedrax.models.from_nnx(lambda rngs: nnx.Linear(3, 2, rngs=rngs))
        >>> model.apply(model.init(jax.random.key(0)), jnp.ones((5, 3))).shape
        (5, 2)
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
        """One key per random stream, by name."""
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
    """A copy of the template state with the given values."""
    state = jax.tree.map(lambda v: v, template)  # a fresh copy: filling it must not touch the template
    nnx.replace_by_pure_dict(state, values)
    return state


def _with_shapes(parts: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    """``parts(0)``, with shapes in place of arrays in all but the last part, where possible.

    Tracing avoids one compilation per parameter. It is not possible for a module whose construction depends on array
    values, or that has arrays that are not variables, because NNX treats traced ones as constants.
    """
    found: list[Any] = []

    @jax.jit
    def last(key: Array) -> Any:
        found[:] = parts(key)
        return found.pop()

    try:
        end = last(jax.random.key(0))
    except Exception:  # parts(0) raises the same error if it is the module's
        return parts(0)
    if _holds_traced(found[2]):
        return parts(0)
    of_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x  # noqa: E731
    return *jax.tree.map(of_shape, found), end


def _holds_traced(graph: Any) -> bool:
    """Whether a module's constants or closures hold traced arrays."""
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
