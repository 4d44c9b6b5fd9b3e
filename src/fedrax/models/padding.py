"""Text models that compute less padding: each batch is cut to the length of its longest text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.config.arguments import checked_arguments
from fedrax.contract.model import Model, Params
from fedrax.errors import FedraxError
from fedrax.inputs import map_inputs


@checked_arguments
def cut_padding(model: Model, lengths: Sequence[int], mask: str = "attention_mask") -> Model:
    """Cut the padding of each batch of texts before a model computes it.

    A batch whose longest text has t tokens is cut to the least of ``lengths`` that is t or more, and to the whole
    length if there is none. The program has a branch for each length. Clients that train side by side (plan vmap) have
    the length of the longest of their batches. Outputs with a value for each position are filled up with zeros.

    The results are those of the whole length for a model that ignores masked positions, except for dropout, whose
    numbers depend on the shape. Padding must follow the tokens, as in `fedrax.data.encode_texts`.

    Args:
        model: A model of texts of any length, such as a Flax module; not of `from_torch`, whose trace has one length.
        lengths: The lengths, for example powers of two.
        mask: Name of the input that is not 0 at tokens and 0 at padding. It is cut, with all integers and Booleans
            [B, time] of its length. It is not used where the samples are one array of tokens, with 0 for padding.

    Returns:
        The model.

    Raises:
        FedraxError: A length is below 1, or, when the model is computed, the samples have no such mask.

    Example:
        >>> model = fedrax.contract.Model(lambda key: jnp.ones(9), lambda p, x, key=None: p[x["input_ids"]].sum(1))
        >>> shorter = fedrax.models.cut_padding(model, lengths=(2, 4))
        >>> x = fedrax.data.encode_texts(["ab", "b"], lambda text: [ord(letter) - 96 for letter in text], length=8)
        >>> shorter.apply(jnp.ones(9), x).shape
        (2,)
    """
    if not lengths or min(lengths) < 1:
        raise FedraxError(f"lengths must be integers of 1 or more, not {list(lengths)}")

    def cut(function: Callable | None) -> Any:
        return None if function is None else _cut(function, tuple(sorted(set(lengths))), mask)

    blocks = None if model.blocks is None else (cut(model.blocks[0]), *model.blocks[1:])
    return replace(model, apply=cut(model.apply), features=cut(model.features), train=cut(model.train), blocks=blocks)


def _cut(function: Callable, lengths: tuple[int, ...], mask: str) -> Callable:
    """A function (parameters, x, ...) on batches cut to one of the lengths."""

    def called(params: Params, x: Any, *rest: Any) -> Any:
        is_token = x.get(mask) if isinstance(x, dict) else x
        if is_token is None or jnp.ndim(is_token) != 2:
            raise FedraxError(f"cut_padding needs samples with the input {mask!r} [n, time]: name another one in mask")
        whole = is_token.shape[1]
        sizes = [*(size for size in lengths if size < whole), whole]
        if len(sizes) == 1:
            return function(params, x, *rest)
        form = jax.eval_shape(function, params, x, *rest)

        def of_size(size: int) -> Callable:
            def compute(params: Params, x: Any, *rest: Any) -> Any:
                short = map_inputs(lambda a: a[:, :size] if _is_text(a, whole) else a, x)
                return jax.tree.map(_filled, function(params, short, *rest), form)

            return compute

        ends = jnp.where(jnp.asarray(is_token) != 0, jnp.arange(1, whole + 1), 0).max()
        index = jnp.searchsorted(jnp.array(sizes), _of_all_lanes(ends))
        return jax.lax.switch(index, [of_size(size) for size in sizes], params, map_inputs(jnp.asarray, x), *rest)

    return called


def _is_text(array: Array, length: int) -> bool:
    """Whether an input has an integer for each token."""
    integers = jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == bool
    return array.ndim == 2 and array.shape[1] == length and integers


def _filled(array: Array, form: jax.ShapeDtypeStruct) -> Array:
    """An output with zeros at the positions that were cut."""
    return jnp.pad(array, [(0, wanted - size) for wanted, size in zip(form.shape, array.shape, strict=True)])


@jax.custom_batching.custom_vmap
def _of_all_lanes(number: Array) -> Array:
    """The largest number of all lanes of a vmap: a branch that differed between lanes would compute all branches."""
    return number


@_of_all_lanes.def_vmap
def _of_batch(axis_size: int, in_batched: list[bool], number: Array) -> tuple[Array, bool]:
    return _of_all_lanes(number.max() if in_batched[0] else number), False
