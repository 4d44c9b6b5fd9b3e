"""Random sparsification of uploads, unbiased."""

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
from fedrax.compression.topk import num_sent
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
class SampledEntries:
    """k random entries of a tree; their indices are derived from the seed."""

    values: Array
    """The scaled entries, [k]."""
    seed: Array
    """uint32 [2]."""
    structure: Any
    """Tree structure."""
    shapes: tuple
    """Shape and dtype name of each leaf."""

    @classmethod
    def of(cls, values: Tree, k: int, seed: Array) -> SampledEntries:
        """Sample k of the d entries without replacement and multiply them by d / k, which is unbiased."""
        flat, _ = ravel_pytree(values)
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(values))
        chosen = flat[_sampled_indices(seed, k, flat.size)] * (flat.size / k)
        return cls(chosen.astype(flat.dtype), seed, jax.tree.structure(values), shapes)

    def dense(self) -> Tree:
        """Decompress: the tree with zeros in all other entries."""
        zeros = [jnp.zeros(shape, name) for shape, name in self.shapes]
        flat, unravel = ravel_pytree(self.structure.unflatten(zeros))
        return unravel(flat.at[_sampled_indices(self.seed, len(self.values), flat.size)].set(self.values))


def _sampled_indices(seed: Array, k: int, size: int) -> Array:
    """k different random indices below ``size``: the first k of a permutation."""
    return shuffled_index(seed, 0, jnp.arange(k, dtype=jnp.int32), size)


@hyperparameters
class RandomK(Wrapper):
    """Random sparsification: k = ceil(``fraction`` d) random entries of an upload of d entries, times d / k.

    The server receives an unbiased estimate of the upload whose expected squared norm is d / k times that of the upload
    (Konecny et al. 2016, Wangni et al. 2018). Indices are drawn again in each round; a seed of eight bytes is sent in
    their place. There is no error feedback. Integer arrays and scalars of an upload (numbers of steps, norms), and
    ``each`` and ``total``, are sent unchanged. An upload without floating-point arrays raises FedraxError.

    Example:
        >>> method = fedrax.compression.RandomK(inner=fedrax.FedAvg(), fraction=0.05)
        >>> method.fraction
        0.05
    """

    inner: Algorithm = FedAvg()
    fraction: Static[Annotated[float, Bound(gt=0, le=1)]] = 0.1
    """Fraction of the entries that are sent."""

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Upload a random sample of the entries."""
        output = client(message, state, data)
        leaves, structure = jax.tree.flatten(output.upload)
        floating = [leaf if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim else None for leaf in leaves]
        size = sum(leaf.size for leaf in jax.tree.leaves(floating))
        if not size:
            raise FedraxError(
                f"RandomK samples floating-point entries, and the upload of {type(self.inner).__name__} has none: apply"
                " quantization outside RandomK"
            )
        seed = jax.random.key_data(data.key("randomk"))
        sampled = SampledEntries.of(floating, num_sent(size, self.fraction), seed)
        unchanged = [None if part is not None else leaf for part, leaf in zip(floating, leaves, strict=True)]
        return output._replace(upload=SparseUpload(sampled, unchanged, structure)), own

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """Decompress an upload for ``inner``: zero in the entries that were not sent."""
        return receive(upload.dense() if isinstance(upload, SparseUpload) else upload)


@partial(jax.tree_util.register_dataclass, data_fields=["sampled", "unchanged"], meta_fields=["structure"])
@dataclass(frozen=True)
class SparseUpload:
    """An upload whose floating-point arrays are sampled and whose other leaves are unchanged."""

    sampled: SampledEntries
    """Sample of the floating-point arrays, None in the places of the other leaves."""
    unchanged: list
    """The other leaves, None in the places of the floating-point arrays."""
    structure: Any
    """Tree structure of the upload."""

    def dense(self) -> Tree:
        """Decompress: the upload with zeros in the entries that were not sampled."""
        pairs = zip(self.sampled.dense(), self.unchanged, strict=True)
        return self.structure.unflatten([other if other is not None else leaf for leaf, other in pairs])
