"""Sparse uploads of numbers drawn at random, unbiased."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedrax.algorithms.fedavg import FedAvg
from fedrax.compression.topk import numbers_sent
from fedrax.config.annotations import Bound, Static
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput
from fedrax.contract.client_data import ClientData
from fedrax.contract.wrapper import Wrapper
from fedrax.errors import FedraxError
from fedrax.prng.permutation import shuffled_index
from fedrax.tree import Tree


@partial(jax.tree_util.register_dataclass, data_fields=["values", "seed"], meta_fields=["structure", "shapes"])
@dataclass(frozen=True)
class Drawn:
    """k numbers of a tree, whose places the seed says."""

    values: Array
    """[k]"""
    seed: Array
    """uint32 [2]"""
    structure: Any
    shapes: tuple

    @classmethod
    def of(cls, values: Tree, k: int, seed: Array) -> Drawn:
        """k numbers at different random places, times d / k: in expectation the whole tree."""
        flat, _ = ravel_pytree(values)
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(values))
        chosen = flat[_places(seed, k, flat.size)] * (flat.size / k)
        return cls(chosen.astype(flat.dtype), seed, jax.tree.structure(values), shapes)

    def dense(self) -> Tree:
        """The whole tree, zero elsewhere."""
        likes = [jnp.zeros(shape, name) for shape, name in self.shapes]
        flat, unravel = ravel_pytree(self.structure.unflatten(likes))
        return unravel(flat.at[_places(self.seed, len(self.values), flat.size)].set(self.values))


def _places(seed: Array, k: int, size: int) -> Array:
    return shuffled_index(seed, 0, jnp.arange(k, dtype=jnp.int32), size)


@hyperparameters
class RandomK(Wrapper):
    """Of each upload k = ceil(``fraction`` d) of its d numbers go up, drawn anew in each round, times d / k.

    What the server receives is the upload in expectation, with d / k times its squared length (random sparsification;
    Konecny et al. 2016, Wangni et al. 2018). A seed of eight bytes goes up in place of the indices. Nothing is
    remembered. Whole numbers in an upload travel as they are, and so do single ones (numbers of steps, norms), and what
    goes up as ``each`` or ``total``; an upload of nothing else is refused.

    Example:
        >>> method = fedrax.compression.RandomK(inner=fedrax.FedAvg(), fraction=0.05)
        >>> method.fraction
        0.05
    """

    inner: Algorithm = FedAvg()
    fraction: Static[Annotated[float, Bound(gt=0, le=1)]] = 0.1
    """Share of the numbers that travel."""

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Some of the numbers go up."""
        output = client(message, state, data)
        leaves, structure = jax.tree.flatten(output.upload)
        floating = [leaf if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim else None for leaf in leaves]
        size = sum(leaf.size for leaf in jax.tree.leaves(floating))
        if not size:
            raise FedraxError(
                f"RandomK draws among an upload's floating numbers, and {type(self.inner).__name__} sends none up: put"
                " what makes whole numbers of them around RandomK"
            )
        seed = jax.random.key_data(data.key("randomk"))
        drawn = Drawn.of(floating, numbers_sent(size, self.fraction), seed)
        whole = [None if mine is not None else leaf for mine, leaf in zip(floating, leaves, strict=True)]
        return output._replace(upload=Split(drawn, whole, structure)), own

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """What ``inner`` receives: zero where nothing was sent."""
        return receive(upload.joined() if isinstance(upload, Split) else upload)


@partial(jax.tree_util.register_dataclass, data_fields=["drawn", "whole"], meta_fields=["structure"])
@dataclass(frozen=True)
class Split:
    """An upload as it travels: arrays of floats drawn from, other numbers as they are."""

    drawn: Drawn
    whole: list
    structure: Any

    def joined(self) -> Tree:
        """As it was, but for the numbers that were not drawn."""
        pairs = zip(self.drawn.dense(), self.whole, strict=True)
        return self.structure.unflatten([number if number is not None else leaf for leaf, number in pairs])
