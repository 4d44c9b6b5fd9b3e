"""Adapter of Equinox modules."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
from jax import Array

from fedrax.config.arguments import checked_arguments
from fedrax.contract.model import Model, Params, Variables
from fedrax.errors import FedraxError
from fedrax.models.adapters.modules import (
    MODE_ARGUMENTS,
    Arguments,
    ModuleFunction,
    create_module,
    library,
    make_model,
    mode_arguments,
)


@checked_arguments
def from_equinox(
    module: Any,
    *,
    features: ModuleFunction | None = None,
    blocks: Sequence[ModuleFunction] = (),
    axis_name: str = "batch",
) -> Model:
    """Convert an Equinox module, which maps one sample to outputs, to a model on batches.

    The module is vmapped over the batch. Its floating-point arrays are the parameters. If ``__call__`` has an argument
    ``key``, each sample gets its own key in training. Without a key the module runs in inference mode; a required key
    is then constant. Arguments such as ``inference`` and ``enable_dropout`` are set as in `from_linen`. Several inputs
    of a sample are keyword arguments of ``__call__`` (a dictionary) or positional ones (a tuple).

    A module with state, such as batch norm, has Equinox's signature ``__call__(x, state) -> (output, state)``. The
    state must be the same for all samples of a batch.

    Args:
        module: A module, which is the initial value for every key; or a function ``key -> module``. A module with
            state may be given as the pair that ``equinox.nn.make_with_state`` returns.
        features: Method name or function (module, sample) that gives the input of the last layer.
        blocks: Method names or functions (module, sample) that ``__call__`` applies one after the other. Like
            ``features``, they may take and return the state and take ``key``.
        axis_name: Name of the batch axis in the module's batch norm layers.

    Returns:
        The model.

    Raises:
        FedraxError: Equinox is not installed, a method is missing, the state is not included, batch norm uses
            another axis name, or dropout gets no key.

    Example:
        >>> import equinox
        >>> model = fedrax.models.from_equinox(lambda key: equinox.nn.Linear(3, 2, key=key))
        >>> model.apply(model.init(jax.random.key(0)), jnp.ones((5, 3))).shape
        (5, 2)
    """
    equinox = library("equinox", "equinox")
    is_module = isinstance(module, equinox.Module | tuple)
    create: Callable = (lambda key: module) if is_module else (lambda key: create_module(module, "key", key))
    example, state = _with_state(equinox, lambda: create(jax.random.key(0)))
    names, has_statistics = tuple(state), bool(state)
    _check_axis(equinox, example, axis_name)
    template, static = equinox.partition(example, equinox.is_inexact_array)

    def init(key: Array) -> Params:
        made, start = _with_state(equinox, lambda: create(key))
        leaves = jax.tree.leaves(equinox.filter(made, equinox.is_inexact_array))
        # The template's structure: static fields such as functions differ between modules, and equinox.combine needs
        # equal ones.
        params = jax.tree.unflatten(jax.tree.structure(template), leaves)
        return Variables(params, start) if has_statistics else params

    def run(method: Callable, variables: Any, inputs: Arguments, key: Array | None, train: bool) -> tuple[Any, Any]:
        params, statistics = variables if has_statistics else (variables, {})
        network = equinox.combine(params, static)
        network = network if train else equinox.nn.inference_mode(network)
        arguments = inspect.signature(method).parameters
        key_argument = arguments.get("key")
        if key is None and key_argument is not None and key_argument.default is inspect.Parameter.empty:
            key = jax.random.key(0)
        options = mode_arguments(method, train)
        arrays = jax.tree.leaves(inputs)
        keys = {"key": jax.random.split(key, len(arrays[0]))} if key is not None and key_argument is not None else {}
        if not has_statistics or len(arguments.keys() - {"key", *MODE_ARGUMENTS}) < 2 + len(arrays):
            over_batch = jax.vmap(
                lambda inputs, keys: method(network, *inputs[0], **inputs[1], **options, **keys), axis_name=axis_name
            )
            with _explain_errors(type(example), arrays):
                return over_batch(inputs, keys), statistics
        state = equinox.nn.State.tree_unflatten(names, [statistics[name] for name in names])
        last, named = ((), {"state": state}) if inputs[1] else ((state,), {})
        over_batch = jax.vmap(
            lambda inputs, keys: method(network, *inputs[0], *last, **inputs[1], **named, **options, **keys),
            out_axes=(0, None),
            axis_name=axis_name,
        )
        with _explain_errors(type(example), arrays):
            outputs, state = over_batch(inputs, keys)
        return outputs, dict(zip(names, state.tree_flatten()[0], strict=True))

    return make_model(type(example), init, run, features, blocks, has_statistics)


@contextmanager
def _explain_errors(kind: type, arrays: list[Array]) -> Iterator[None]:
    """Explain the errors of dropout without a key and of convolutions over channels-last images."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and "requires a key" in str(error):
            raise FedraxError(
                f"{kind.__name__} draws random numbers without a key: give its __call__ an argument key, and each"
                " dropout layer a key that jax.random.split derives from it"
            ) from error
        x = next((a for a in arrays if a.ndim == 4), None)
        if x is not None and "conv" in str(error):
            height, width, channels = x.shape[1:]
            layout = (
                f"a sample is [height, width, channels] = [{height}, {width}, {channels}], and Equinox's convolutions"
                " take [channels, height, width]: start __call__ with x = jnp.moveaxis(x, -1, 0)"
            )
            dtype = f"the samples are {x.dtype}: give the task preprocess=fedrax.contract.rescale()"
            error.add_note(f"fedrax: {dtype if 'dtypes' in str(error) else layout}")
        raise


def _with_state(equinox: ModuleType, create: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """An Equinox module without its initial state, and the state by name."""
    made = create()
    try:
        network, state = made if isinstance(made, tuple) else equinox.nn.make_with_state(lambda: made)()
        values, names = state.tree_flatten()
    except (ValueError, AttributeError):  # not a pair, or a module whose initial state was removed
        network, values, names = made, (), (None,)
    if not all(isinstance(name, str) for name in names):
        raise FedraxError(
            "from_equinox takes a module with its state, or the pair that equinox.nn.make_with_state returns"
        )
    return network, {str(name): value for name, value in zip(names, values, strict=True)}


def _check_axis(equinox: ModuleType, module: Any, axis_name: str) -> None:
    """Raise FedraxError if a batch norm layer averages over another axis than the batch."""

    def is_norm(value: Any) -> bool:
        return isinstance(value, equinox.nn.BatchNorm)

    for layer in filter(is_norm, jax.tree.leaves(module, is_leaf=is_norm)):
        if layer.axis_name != axis_name:
            raise FedraxError(
                f"batch norm averages over the axis {layer.axis_name!r}, and the batch axis is {axis_name!r}: set"
                f" axis_name={layer.axis_name!r}"
            )
