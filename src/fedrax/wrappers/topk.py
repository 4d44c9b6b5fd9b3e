"""Sparse uploads: the largest numbers alone, with the rest remembered."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedrax import tree
from fedrax.algorithms.fedavg import FedAvg
from fedrax.contract.algorithm import Algorithm, ClientOutput
from fedrax.contract.client_data import ClientData
from fedrax.contract.fields import Bound, Static
from fedrax.contract.hyperparameters import hyperparameters
from fedrax.contract.wrapper import Wrapper
from fedrax.errors import FedraxError
from fedrax.tree import Tree


@partial(jax.tree_util.register_dataclass, data_fields=["indices", "values"], meta_fields=["structure", "shapes"])
@dataclass(frozen=True)
class Sparse:
    """k numbers of a tree as they travel; all others are zero."""

    indices: Array
    """int32 [k], in the tree's leaves laid end to end."""
    values: Array
    """[k]"""
    structure: Any
    shapes: tuple

    @classmethod
    def largest(cls, values: Tree, k: int) -> Sparse:
        """The k numbers of largest magnitude."""
        flat, _ = ravel_pytree(values)
        _, indices = jax.lax.top_k(jnp.abs(flat), k)
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(values))
        return cls(indices.astype(jnp.int32), flat[indices], jax.tree.structure(values), shapes)

    def dense(self) -> Tree:
        """The whole tree."""
        sizes = [math.prod(shape) for shape, _ in self.shapes]
        flat = jnp.zeros(sum(sizes), self.values.dtype).at[self.indices].set(self.values)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        parts = zip(jnp.split(flat, ends), self.shapes, strict=True)
        wide = lambda name: jnp.promote_types(name, self.values.dtype)  # noqa: E731
        return self.structure.unflatten([part.reshape(shape).astype(wide(name)) for part, (shape, name) in parts])


@hyperparameters
class TopK(Wrapper):
    """Of each client's update the largest numbers alone go up; what is left is added to its next update.

    With the rest e_i and the update u: e_i + u is cut to its k = ceil(``fraction`` d) numbers of largest magnitude, of
    d in the whole update, which travel with their indices; e_i <- e_i + u less what was sent. Memory of the rest
    (error feedback) as in Stich, Cordonnier and Jaggi (2018), Algorithm 1; Karimireddy et al. (2019) for its
    convergence. A client that takes part rarely sends its rest late.

    The update is the upload of ``inner``, or the field ``params`` of it, whose other fields travel whole. A round of
    several phases keeps a rest for each.
    """

    inner: Algorithm = FedAvg()
    fraction: Static[Annotated[float, Bound(gt=0, le=1)]] = 0.1
    """Share of the numbers that travel."""

    def init_client_own(self, params: Tree) -> Tree:
        """A rest for each phase: nothing is left out yet."""
        return tuple(tree.zeros_like(params) for _ in self.inner.phases)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """The largest numbers of update and rest go up."""
        output = client(message, state, data)
        rest, *others = own  # of this phase; by the end of the round the first phase's is in front again
        upload, update = output.upload, self._update(output.upload, rest)
        whole = tree.add(rest, update)
        size = sum(leaf.size for leaf in jax.tree.leaves(whole))
        sent = Sparse.largest(whole, max(1, math.ceil(self.fraction * size)))
        upload = sent if update is upload else upload._replace(params=sent)
        return output._replace(upload=upload), (*others, tree.sub(whole, sent.dense()))

    def _update(self, upload: Tree, like: Tree) -> Tree:
        update, shapes = getattr(upload, "params", upload), lambda t: [leaf.shape for leaf in jax.tree.leaves(t)]
        if jax.tree.structure(update) != jax.tree.structure(like) or shapes(update) != shapes(like):
            name = type(self.inner).__name__
            raise FedraxError(
                f"TopK needs an upload, or a field params of it, in the shape of the model: {name} has none"
            )
        if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(update)):
            raise FedraxError("TopK picks among floating numbers: put what makes whole numbers of them around TopK")
        return update

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """What ``inner`` receives: zero where nothing was sent."""
        sparse = lambda part: isinstance(part, Sparse)  # noqa: E731
        return receive(jax.tree.map(lambda part: part.dense() if sparse(part) else part, upload, is_leaf=sparse))
