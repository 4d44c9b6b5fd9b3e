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

from fedrax.config.arguments import checked_arguments
from fedrax.contract.model import Model, Params, Variables
from fedrax.models.adapters.modules import (
    Arguments,
    ModuleFunction,
    create_module,
    library,
    make_model,
    mode_arguments,
)
from fedrax.xla import closure_values


@checked_arguments
def from_nnx(module: Any, *, features: ModuleFunction | None = None, blocks: Sequence[ModuleFunction] = ()) -> Model:
    """Convert a Flax NNX module, which maps a batch [B, ...] to outputs [B, ...], to a model.

    Several inputs of a sample are keyword arguments of ``__call__`` (a dictionary) or positional ones (a tuple).
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

    def is_statistic(path: Any, value: Any) -> bool:
        if not isinstance(value, nnx.Variable) or isinstance(value, nnx.Param | nnx.RngState | nnx.Intermediate):
            return False
        return not isinstance(value.get_value(), tuple)  # sown intermediates are tuples that grow with every call

    def split(key: Any) -> tuple[Any, ...]:
        made = create_module(create, "rngs", nnx.Rngs(key))
        streams = {v.key.tag for _, v in nnx.iter_graph(made) if isinstance(v, nnx.RngStream)}
        return type(made), streams, *nnx.split(made, nnx.Param, is_statistic, ...)

    kind, streams, graph, params_template, statistics_template, other = _with_shapes(split)
    has_statistics = bool(jax.tree.leaves(statistics_template))
    statistic_paths = {path for path, _ in nnx.to_flat_state(statistics_template)}

    def streams_of(key: Array) -> dict[str, Array]:
        """One key per random stream, by name."""
        others = {name: jax.random.fold_in(key, i) for i, name in enumerate(sorted(streams - {"default"}), 1)}
        return {"default": key} | others

    def init(key: Array) -> Params:
        made = create_module(create, "rngs", nnx.Rngs(key))
        params, statistics = (nnx.to_pure_dict(nnx.state(made, kind)) for kind in (nnx.Param, is_statistic))
        return Variables(params, statistics) if has_statistics else params

    def run(method: Callable, variables: Any, arguments: Arguments, key: Array | None, train: bool) -> tuple[Any, Any]:
        params, statistics = variables if has_statistics else (variables, {})
        states = _filled(nnx, params_template, params), _filled(nnx, statistics_template, statistics), other
        network = nnx.merge(graph, *states, copy=True)
        if train:
            network.train()
        else:
            network.eval()
        if key is not None:
            nnx.reseed(network, policy="match_shape", **streams_of(key))
        rngs, options = inspect.signature(method).parameters.get("rngs"), mode_arguments(method, train)
        if rngs is not None and (key is not None or rngs.default is inspect.Parameter.empty):
            options["rngs"] = nnx.Rngs(jax.random.key(0) if key is None else key)
        outputs = method(network, *arguments[0], **arguments[1], **options)
        updated = nnx.state(network, lambda path, value: path in statistic_paths and is_statistic(path, value))
        return outputs, nnx.to_pure_dict(updated)

    return make_model(kind, init, run, features, blocks, has_statistics)


def _filled(nnx: ModuleType, template: Any, values: Any) -> Any:
    """A copy of the template state with the given values."""
    state = jax.tree.map(lambda v: v, template)  # a copy, because the template must not be changed
    nnx.replace_by_pure_dict(state, values)
    return state


def _with_shapes(split: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    """``split(0)``, with shapes in place of arrays in all but the last part if possible.

    Tracing avoids one compilation per parameter. It is not possible for a module whose construction depends on array
    values, or that has arrays that are not variables, because NNX treats traced ones as constants.
    """
    traced: list[Any] = []

    @jax.jit
    def last_part(key: Array) -> Any:
        traced[:] = split(key)
        return traced.pop()

    try:
        last = last_part(jax.random.key(0))
    except Exception:  # split(0) raises the same error if it is the module's
        return split(0)
    if _has_tracers(traced[2]):
        return split(0)

    def shape_of(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x

    return *jax.tree.map(shape_of, traced), last


def _has_tracers(graph: Any) -> bool:
    """Whether a module's constants or closures have traced arrays."""
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
