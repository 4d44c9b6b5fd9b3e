"""Models users bring: Flax Linen, Flax NNX and Equinox modules as pairs of pure functions.

Mutable statistics, such as those of batch norm, travel beside the parameters as `Variables`: training gives new
ones, evaluation reads them.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.compiled.cores import use_all_cores
from fedrax.contract.model import Model, Params, Variables
from fedrax.errors import FedraxError, unknown

Part = str | Callable[..., Any]
"""A method's name, or a function whose first argument is the module."""


def from_linen(
    module: Any, sample_input: Array | np.ndarray, *, features: Part | None = None, blocks: Sequence[Part] = ()
) -> Model:
    """A Flax Linen module that maps a batch [B, ...] to outputs [B, ...]; `sample_input` is such a batch.

    Parameters are the collection "params"; all other collections, such as "batch_stats", are statistics, but for those
    that grow with every call: what a module sows into them for its user to look at is left out. Where the module's
    `__call__` has an argument `train`, `training`, `deterministic` or `use_running_average`, it is set by whether the
    module trains; a key feeds "dropout" and random streams of any other name.

    ``features`` and ``blocks`` name methods of the module (or are functions of the module and x): what the last
    layer reads, and the parts that `__call__` applies one after the other. Modes are set as for `__call__`.
    Raises FedraxError for a method that is not there, for a module that does not take the sample input, and for one
    that moves statistics or draws random numbers in evaluation.
    """
    _import("flax.linen", "flax")
    errors = importlib.import_module("flax.errors")

    call, sample = type(module).__call__, jnp.asarray(sample_input)

    @jax.jit  # for its shapes, and for the start: traced once
    def variables_of(key: Array) -> dict[str, Any]:
        return module.init({"params": key}, sample, **_modes(call, train=False))

    try:
        with jax.default_matmul_precision("highest"):  # as a run sets it, so that the trace is found again
            shapes = jax.eval_shape(variables_of, jax.random.key(0))
    except (errors.FlaxError, TypeError, ValueError) as error:
        example = f"{sample_input.dtype} {list(sample_input.shape)}"
        raise FedraxError(f"{type(module).__name__} cannot be begun with a batch {example}: {_said(error)}") from error
    collections = _that_stay(module, shapes, sample, _modes(call, train=True))

    def init(key: Array) -> Params:
        variables = variables_of(key)
        params = variables.get("params", {})
        return Variables(params, {name: variables[name] for name in collections}) if collections else params

    def run(method: Callable, variables: Any, x: Array, key: Array | None, train: bool) -> tuple[Any, Any]:
        params, statistics = variables if collections else (variables, {})
        # what asks for a stream that is not there gets one made of "params"
        rngs = None if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
        options = {"rngs": rngs, "method": method, **_modes(method, train)}
        together = {"params": params, **statistics}
        with _told_of_flax(module, errors):
            if not (collections and train):
                return module.apply(together, x, **options), statistics
            outputs, moved = module.apply(together, x, mutable=collections, **options)
            return outputs, {**statistics, **moved}

    try:
        if collections:
            known = {name: shapes[name] for name in shapes if name in ("params", *collections)}
            jax.eval_shape(lambda v: module.apply(v, sample, **_modes(call, train=False)), known)
    except errors.ModifyScopeVariableError:
        raise FedraxError(
            f"{type(module).__name__} moves its statistics in evaluation too: give its __call__ an argument train, and "
            "its layers use_running_average=not train."
        ) from None
    return _model(type(module), init, run, features, blocks, has_statistics=bool(collections))


def _that_stay(module: Any, shapes: Any, x: Any, modes: dict[str, Any]) -> list[str]:
    """The names of the collections beside the parameters that are as large after a call as before."""
    names = [name for name in shapes if name != "params"]
    is_tuple: Callable[[Any], bool] = lambda v: isinstance(v, tuple)  # noqa: E731
    if not any(is_tuple(v) for name in names for v in jax.tree.leaves(shapes[name], is_leaf=is_tuple)):
        return names

    def called(variables: Any, key: Array) -> Any:
        return module.apply(variables, x, mutable=names, rngs={"dropout": key, "params": key}, **modes)[1]

    after = {**shapes, **jax.eval_shape(called, shapes, jax.random.key(0))}
    return [name for name in names if jax.tree.structure(after[name]) == jax.tree.structure(shapes[name])]


@contextmanager
def _told_of_flax(module: Any, errors: ModuleType) -> Iterator[None]:
    """Errors that are Flax's own as a sentence."""
    name = type(module).__name__
    try:
        yield
    except errors.InvalidRngError as error:
        raise FedraxError(
            f"{name} draws random numbers in evaluation too ({_said(error)}): give its __call__ an argument train, and"
            " draw them only where it is true."
        ) from error
    except errors.FlaxError as error:
        raise FedraxError(f"{name} cannot be computed: {_said(error)}") from error


def _said(error: Exception) -> str:
    """An error's first line, without Flax's address of a page about it."""
    return str(error).strip().split("\n")[0].split(" (https://")[0].rstrip(".")


def from_nnx(module: Any, *, features: Part | None = None, blocks: Sequence[Part] = ()) -> Model:
    """A Flax NNX module, or a function `nnx.Rngs -> module`, that maps a batch [B, ...] to outputs.

    A module's own values are the start, whatever the key of `init`; a function gives a start for each key.
    Without a key the module runs in its evaluation mode, with one in its training mode; arguments `train` and the like
    are set as by `from_linen`. A key begins the module's random streams anew, whatever their names, and where its
    `__call__` has an argument `rngs`, it is given streams made of the key. Variables other than parameters and random
    states, such as `nnx.BatchStat`, are statistics.

    ``features`` and ``blocks`` are functions of the module and x (or names of methods): what the last layer reads,
    and the parts that `__call__` applies one after the other. Raises FedraxError for a method that is not there.
    """
    nnx = _import("flax.nnx", "flax")
    create: Callable = (lambda rngs: module) if isinstance(module, nnx.Module) else module

    def moving(path: Any, value: Any) -> bool:
        return isinstance(value, nnx.Variable) and not isinstance(value, nnx.Param | nnx.RngState | nnx.Intermediate)

    def parts(key: Any) -> tuple[Any, ...]:
        made = create(nnx.Rngs(key))
        streams = {v.key.tag for _, v in nnx.iter_graph(made) if isinstance(v, nnx.RngStream)}
        return type(made), streams - {"default", "dropout"}, *nnx.split(made, nnx.Param, moving, ...)

    kind, streams, graph, template, still, other = _with_shapes(parts)
    has_statistics = bool(jax.tree.leaves(still))

    def streams_of(key: Array) -> dict[str, Array]:
        """A key for each name of a stream."""
        others = {name: jax.random.fold_in(key, i) for i, name in enumerate(sorted(streams), 1)}
        return {"default": key, "dropout": key} | others

    def init(key: Array) -> Params:
        made = create(nnx.Rngs(key))
        params, statistics = (nnx.to_pure_dict(nnx.state(made, kind)) for kind in (nnx.Param, moving))
        return Variables(params, statistics) if has_statistics else params

    def filled(template: Any, values: Any) -> Any:
        state = jax.tree.map(lambda v: v, template)  # a fresh copy: filling it must not touch the template
        nnx.replace_by_pure_dict(state, values)
        return state

    def run(method: Callable, variables: Any, x: Array, key: Array | None, train: bool) -> tuple[Any, Any]:
        params, statistics = variables if has_statistics else (variables, {})
        network = nnx.merge(graph, filled(template, params), filled(still, statistics), other, copy=True)
        if train:
            network.train()
        else:
            network.eval()
        if key is not None:
            nnx.reseed(network, policy="match_shape", **streams_of(key))
        asked, options = inspect.signature(method).parameters.get("rngs"), _modes(method, train)
        if asked is not None and (key is not None or asked.default is inspect.Parameter.empty):
            options["rngs"] = nnx.Rngs(jax.random.key(0) if key is None else key)
        outputs = method(network, x, **options)
        return outputs, nnx.to_pure_dict(nnx.state(network, moving))

    return _model(kind, init, run, features, blocks, has_statistics)


def _with_shapes(parts: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    """``parts(0)``, but for the last one of shapes in the place of arrays, where that can be.

    Outside of a program each parameter would be drawn, and what draws it compiled, by itself.
    """
    found: list[Any] = []

    @jax.jit
    def last(key: Array) -> Any:
        found[:] = parts(key)
        return found.pop()

    try:
        end = last(jax.random.key(0))
    except Exception:  # of a module that looks at its numbers; what is wrong with one comes again
        return parts(0)
    of_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x  # noqa: E731
    return *jax.tree.map(of_shape, found), end


def from_equinox(
    module: Any, *, features: Part | None = None, blocks: Sequence[Part] = (), axis_name: str = "batch"
) -> Model:
    """An Equinox module, or a function `key -> module`, that maps one sample; it is vmapped over the batch.

    A module's own values are the start, whatever the key of `init`; a function gives a start for each key.
    Parameters are the module's floating-point arrays. Where its `__call__` has an argument `key`, each
    sample gets its own; without a key the module runs in inference mode, with keys that are always the same where it
    needs some.

    A module with state, such as batch norm, is `__call__(x, state) -> (output, state)`, as Equinox has it. Give it
    as it is or as the pair that `equinox.nn.make_with_state` returns; ``axis_name`` is the name of the batch's axis
    that its layers know. State must not differ among the samples of a batch.

    ``features`` and ``blocks`` are functions of the module and one sample (or names of methods): what the last
    layer reads, and the parts that `__call__` applies one after the other. A further argument is the state, which
    they return, and `key` the sample's key. Raises FedraxError for a method that is not there, for a module whose
    state is not given along, and for batch norm over an axis of another name.
    """
    equinox = _import("equinox", "equinox")
    is_module = isinstance(module, equinox.Module | tuple)
    example, state = _with_state(equinox, (lambda: module) if is_module else (lambda: module(jax.random.key(0))))
    names, has_statistics = tuple(state), bool(state)
    _check_axis(equinox, example, axis_name)
    template, static = equinox.partition(example, equinox.is_inexact_array)

    def init(key: Array) -> Params:
        made, start = _with_state(equinox, (lambda: module) if is_module else (lambda: module(key)))
        leaves = jax.tree.leaves(equinox.filter(made, equinox.is_inexact_array))
        # each module made has static fields of its own, such as functions, and trees that differ in them do not combine
        params = jax.tree.unflatten(jax.tree.structure(template), leaves)
        return Variables(params, start) if has_statistics else params

    def run(method: Callable, variables: Any, x: Array, key: Array | None, train: bool) -> tuple[Any, Any]:
        params, statistics = variables if has_statistics else (variables, {})
        network = equinox.combine(params, static)
        network = network if train else equinox.nn.inference_mode(network)
        arguments = inspect.signature(method).parameters
        asked = arguments.get("key")
        if key is None and asked is not None and asked.default is inspect.Parameter.empty:
            key = jax.random.key(0)
        keys = {"key": jax.random.split(key, x.shape[0])} if key is not None and asked is not None else {}
        if not has_statistics or len(arguments.keys() - {"key"}) < 3:
            over_batch = jax.vmap(lambda x, keys: method(network, x, **keys), axis_name=axis_name)
            with _told_of_layout(x):
                return over_batch(x, keys), statistics
        state = equinox.nn.State.tree_unflatten(names, [statistics[name] for name in names])
        over_batch = jax.vmap(
            lambda x, keys: method(network, x, state, **keys), out_axes=(0, None), axis_name=axis_name
        )
        with _told_of_layout(x):
            outputs, state = over_batch(x, keys)
        return outputs, dict(zip(names, state.tree_flatten()[0], strict=True))

    return _model(type(example), init, run, features, blocks, has_statistics)


@contextmanager
def _told_of_layout(x: Array) -> Iterator[None]:
    """Add to a convolution's error over images what it may come of, which the shapes in it do not say."""
    try:
        yield
    except Exception as error:
        if x.ndim == 4 and "conv" in str(error):
            height, width, channels = x.shape[1:]
            error.add_note(
                f"fedrax: a sample is [height, width, channels] = [{height}, {width}, {channels}], and Equinox's"
                " convolutions take [channels, height, width]: begin __call__ with x = jnp.moveaxis(x, -1, 0)"
            )
        raise


def _with_state(equinox: ModuleType, create: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """An Equinox module without its initial state, and that state by name."""
    made = create()
    try:
        network, state = made if isinstance(made, tuple) else equinox.nn.make_with_state(lambda: made)()
        values, names = state.tree_flatten()
    except (ValueError, AttributeError):  # not a pair, or a module whose initial state has been taken out
        network, values, names = made, (), (None,)
    if not all(isinstance(name, str) for name in names):
        raise FedraxError("a module with state comes as it is, or as the pair that equinox.nn.make_with_state returns.")
    return network, {str(name): value for name, value in zip(names, values, strict=True)}


def _check_axis(equinox: ModuleType, module: Any, axis_name: str) -> None:
    is_norm: Callable[[Any], bool] = lambda v: isinstance(v, equinox.nn.BatchNorm)  # noqa: E731
    for layer in filter(is_norm, jax.tree.leaves(module, is_leaf=is_norm)):
        if layer.axis_name != axis_name:
            raise FedraxError(
                f"batch norm is over the axis {layer.axis_name!r}, the batch is {axis_name!r}: say axis_name."
            )


def _model(
    kind: type,
    init: Callable[[Array], Params],
    run: Callable[..., tuple[Any, Any]],
    features: Part | None,
    blocks: Sequence[Part],
    has_statistics: bool,
) -> Model:
    """The model of ``run``: (function of the module and x, variables, x, key, whether to train) -> (outputs,
    statistics).
    """

    def function(part: Part) -> Callable:
        method = getattr(kind, part, None) if isinstance(part, str) else part
        if method is None:
            known = [name for name in vars(kind) if not name.startswith("_")]
            raise unknown(f"method of {kind.__name__}", part, known)
        return lambda variables, x, key=None: run(method, variables, x, key, key is not None)[0]

    return Model(
        init,
        function(kind.__call__),
        None if features is None else function(features),
        kind.__name__,
        tuple(function(block) for block in blocks) or None,
        (lambda variables, x, key: run(kind.__call__, variables, x, key, True)) if has_statistics else None,
    )


_TRAINING = {"train", "training"}
_INFERENCE = {"deterministic", "use_running_average"}


def _modes(method: Callable, train: bool) -> dict[str, Any]:
    """Values of a method's arguments that say whether it trains."""
    names = inspect.signature(method).parameters
    return {name: train == (name in _TRAINING) for name in names if name in _TRAINING | _INFERENCE}


def _import(module: str, package: str) -> ModuleType:
    use_all_cores()  # before the module's first array: afterwards JAX's devices are what they are
    try:
        return importlib.import_module(module)
    except ImportError:
        raise FedraxError(f"this model needs {package}: pip install 'fedrax[{package}]'.") from None
