"""Equinox modules as pairs of pure functions."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
from jax import Array

from fedrax.contract.model import Model, Params, Variables
from fedrax.errors import FedraxError
from fedrax.models.adapters.modules import MODES, Part, begun, library, model_of, modes


def from_equinox(
    module: Any, *, features: Part | None = None, blocks: Sequence[Part] = (), axis_name: str = "batch"
) -> Model:
    """An Equinox module, or a function `key -> module`, that maps one sample; it is vmapped over the batch.

    A module's own values are the start, whatever the key of `init`; a function gives a start for each key.
    Parameters are the module's floating-point arrays. Where its `__call__` has an argument `key`, each
    sample gets its own; without a key the module runs in inference mode, with keys that are always the same where it
    needs some. Arguments `inference`, `enable_dropout` and the like are set as by `from_linen`.

    A module with state, such as batch norm, is `__call__(x, state) -> (output, state)`, as Equinox has it. Give it
    as it is or as the pair that `equinox.nn.make_with_state` returns; ``axis_name`` is the name of the batch's axis
    that its layers know. State must not differ among the samples of a batch.

    ``features`` and ``blocks`` are functions of the module and one sample (or names of methods): what the last
    layer reads, and the parts that `__call__` applies one after the other. A further argument is the state, which
    they return, and `key` the sample's key. Raises FedraxError for a method that is not there, for a module whose
    state is not given along, for batch norm over an axis of another name, and for dropout that gets no key.
    """
    equinox = library("equinox", "equinox")
    is_module = isinstance(module, equinox.Module | tuple)
    create: Callable = (lambda key: module) if is_module else (lambda key: begun(module, "key", key))
    example, state = _with_state(equinox, lambda: create(jax.random.key(0)))
    names, has_statistics = tuple(state), bool(state)
    _check_axis(equinox, example, axis_name)
    template, static = equinox.partition(example, equinox.is_inexact_array)

    def init(key: Array) -> Params:
        made, start = _with_state(equinox, lambda: create(key))
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
        options = modes(method, train)
        keys = {"key": jax.random.split(key, x.shape[0])} if key is not None and asked is not None else {}
        if not has_statistics or len(arguments.keys() - {"key", *MODES}) < 3:
            over_batch = jax.vmap(lambda x, keys: method(network, x, **options, **keys), axis_name=axis_name)
            with _told(type(example), x):
                return over_batch(x, keys), statistics
        state = equinox.nn.State.tree_unflatten(names, [statistics[name] for name in names])
        over_batch = jax.vmap(
            lambda x, keys: method(network, x, state, **options, **keys), out_axes=(0, None), axis_name=axis_name
        )
        with _told(type(example), x):
            outputs, state = over_batch(x, keys)
        return outputs, dict(zip(names, state.tree_flatten()[0], strict=True))

    return model_of(type(example), init, run, features, blocks, has_statistics)


@contextmanager
def _told(kind: type, x: Array) -> Iterator[None]:
    """Dropout without a key as a sentence; and with the error of a convolution over images what it may come of."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and "requires a key" in str(error):
            raise FedraxError(
                f"{kind.__name__} draws random numbers and has no key to draw them from: give its __call__ an argument"
                " key, and each of its dropout layers one that jax.random.split makes of it"
            ) from error
        if x.ndim == 4 and "conv" in str(error):
            height, width, channels = x.shape[1:]
            layout = (
                f"a sample is [height, width, channels] = [{height}, {width}, {channels}], and Equinox's convolutions"
                " take [channels, height, width]: begin __call__ with x = jnp.moveaxis(x, -1, 0)"
            )
            numbers = f"the samples are {x.dtype}: give the task preprocess=fedrax.contract.rescale()"
            error.add_note(f"fedrax: {numbers if 'dtypes' in str(error) else layout}")
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
