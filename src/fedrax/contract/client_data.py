"""What a client sees of its own data, inside compiled code: minibatches, blocks and full gradients.

All clients' samples lie back to back in arrays on the device; a client owns the rows ``offset`` to
``offset + size``. Shapes must be known when the program is compiled, sizes are not: so batches carry weights
that blank the rows beyond a client's data, wherever the federation's sizes do not make that unnecessary, and
loops over a client's data run as often as its size asks for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.compiled.convolutions import fast_on_cpu
from fedrax.compiled.products import Format, with_operands
from fedrax.compiled.random_order import shuffled_index, uniform_index
from fedrax.compiled.scopes import GATHER, GRADIENT, scope
from fedrax.tree import Tree

Order = Literal["shuffle", "stored", "replacement"]
Reduction = Literal["mean", "sum"]

_CHUNK = 128
"""Rows of one pass of a full gradient where clients differ in size: enough for efficient products."""
_LARGEST_SLICE = 4096
"""Rows of one pass where all clients have the same size."""
_WIDE = 1024
"""Bytes of a sample from which consecutive rows are better sliced than gathered."""


@dataclass(frozen=True)
class Layout:
    """What is known of the clients' sizes when the program is compiled."""

    largest: int
    smallest: int
    divisor: int
    """Divides every client's size."""

    @classmethod
    def of(cls, sizes: np.ndarray) -> Layout:
        """The layout of a federation whose clients have these sizes."""
        return cls(int(sizes.max()), int(sizes.min()), int(np.gcd.reduce(sizes)))

    @property
    def equal(self) -> bool:
        """All clients have the same number of samples."""
        return self.largest == self.smallest


class ClientData:
    """One client's data and circumstances in one round; built by the interpreters, read by algorithms.

    size: samples of this client n_i (int32). round: the round's number from 0 (int32). key: the client's own
    random key of this round. work: the share of the local work a straggler does, in (0, 1], or None where
    nobody straggles. blocks: int32 [T], the block of each step if the experiment fixes them. num_clients: N.
    cohort_size: S (float). unroll: lay out loops of known length step by step. precision: the operands of the
    gradient's matrix products.
    """

    def __init__(
        self,
        task: Any,
        layout: Layout,
        samples: Tree,
        *,
        offset: Array,
        size: Array,
        key: Array,
        round: Array,
        num_clients: int,
        cohort_size: Array,
        work: Array | None = None,
        blocks: Array | None = None,
        unroll: bool = False,
        precision: Format = "highest",
    ):
        self.task, self.layout, self.samples, self.offset, self.size = task, layout, samples, offset, size
        self.key, self.round, self.num_clients, self.cohort_size = key, round, num_clients, cohort_size
        self.work, self.blocks, self.unroll = work, blocks, unroll
        self.precision: Format = precision
        self.words = jax.random.key_data(key)

    def fresh(self) -> ClientData:
        """The same client with an independent random key: for a batch besides those of the local steps."""
        other = copy.copy(self)
        other.key = jax.random.fold_in(self.key, 0x7FFFFFFF)
        other.words = jax.random.key_data(other.key)
        return other

    @scope(GATHER)
    def batch(self, step: Array | int, batch_size: int, order: Order) -> tuple[Tree, Array | None]:
        """The samples of local step ``step`` and their weights: (leaves [B, ...], None or float [B]).

        ``shuffle`` walks the data in a new random order in every epoch, ``stored`` as stored; the last batch
        of an epoch is shorter where B does not divide the size. ``replacement`` draws each sample anew.
        """
        size = min(batch_size, self.layout.largest)
        lanes = jnp.arange(size, dtype=jnp.int32)
        if order == "replacement":
            return self._gather(uniform_index(self.words, step * size + lanes, self.size)), None
        per_epoch = self.batches(size)
        epoch, start = step // per_epoch, (step % per_epoch) * size
        whole = self.layout.divisor % size == 0
        if order == "stored" and whole:
            return self._slice(start, size), None
        positions = start + lanes
        inside = positions < self.size
        if order == "shuffle":
            positions = shuffled_index(self.words, epoch, positions, self.size)
        return self._gather(positions), None if whole else inside

    def batches(self, batch_size: int) -> Array | int:
        """Batches in an epoch: ceil(n_i / B); a Python int where all clients are of one size."""
        size = min(batch_size, self.layout.largest)
        if self.layout.equal:
            return -(-self.layout.largest // size)
        return (self.size + size - 1) // size

    @scope(GATHER)
    def block_index(self, step: Array | int, num_blocks: int) -> Array:
        """The block of step ``step``, drawn uniformly from {0, ..., M - 1} unless the experiment fixes it."""
        if self.blocks is not None:
            return self.blocks[step]
        return uniform_index(self.words, step, num_blocks, stream=2)

    def block_rows(self, block: Array | int, num_blocks: int) -> tuple[Array, Array | int]:
        """(first row, rows) of block j of M: the client's rows floor(j n_i / M) to floor((j + 1) n_i / M)."""
        if self.layout.divisor % num_blocks == 0 and self.layout.equal:
            rows = self.layout.largest // num_blocks
            return jnp.asarray(block * rows, jnp.int32), rows
        low = (block * self.size) // num_blocks
        return low, ((block + 1) * self.size) // num_blocks - low

    @scope(GRADIENT)
    def loss_and_gradient(
        self, params: Tree, samples: Tree, weights: Array | None, key: Array, reduction: Reduction
    ) -> tuple[Array, Tree]:
        """A batch's estimate of the client's loss (mean or sum over its samples) and its gradient at ``params``."""
        scale = self.size if reduction == "sum" else 1

        def objective(params: Tree) -> Array:
            losses = self.task.loss(params, samples, key)
            if weights is None:
                return scale * losses.mean()
            return scale * jnp.where(weights, losses, 0).sum() / weights.sum()

        return self._value_and_grad(objective)(params)

    @scope(GRADIENT)
    def range_gradient(self, params: Tree, start: Array | int, rows: Array | int, at_most: int, key: Array) -> tuple:
        """Summed loss and its gradient over the client's rows ``start`` to ``start + rows``, in passes.

        ``rows`` is a Python int where known; ``at_most`` bounds it.
        """

        def summed(params: Tree, samples: Tree, inside: Array | None, key: Array) -> Array:
            losses = self.task.loss(params, samples, key)
            return losses.sum() if inside is None else jnp.where(inside, losses, 0).sum()

        if isinstance(rows, int) and rows <= _LARGEST_SLICE:
            return self._value_and_grad(summed)(params, self._slice(start, rows), None, key)
        chunk = min(at_most, _CHUNK)
        lanes = jnp.arange(chunk, dtype=jnp.int32)

        def one_pass(i: Array, total: Tree) -> Tree:
            inside = i * chunk + lanes < rows
            samples = self._gather(start + jnp.where(inside, i * chunk + lanes, 0))
            return tree.add(total, self._value_and_grad(summed)(params, samples, inside, jax.random.fold_in(key, i)))

        dtype = jax.eval_shape(lambda p: summed(p, self._slice(0, 1), None, key), params).dtype
        zero = (jnp.zeros((), dtype), tree.zeros_like(params))
        return jax.lax.fori_loop(0, (rows + chunk - 1) // chunk, one_pass, zero)

    def _value_and_grad(self, function: Callable) -> Callable:
        return fast_on_cpu(with_operands(jax.value_and_grad(function), self.precision))

    def full_gradient(self, params: Tree, reduction: Reduction = "mean") -> tuple[Array, Tree]:
        """Loss and gradient over all of the client's data."""
        rows = self.layout.largest if self.layout.equal else self.size
        total = self.range_gradient(params, 0, rows, self.layout.largest, self.key)
        return total if reduction == "sum" else self._mean(total)

    def block_gradient(
        self, params: Tree, block: Array, num_blocks: int, key: Array, reduction: Reduction
    ) -> tuple[Array, Tree]:
        """Block j's estimate M f_ij of the client's loss f_i = sum_j f_ij, and its gradient M grad f_ij."""
        start, rows = self.block_rows(block, num_blocks)
        total = self.range_gradient(params, start, rows, -(-self.layout.largest // num_blocks), key)
        estimate = tree.scale(num_blocks, total)
        return estimate if reduction == "sum" else self._mean(estimate)

    def _mean(self, total: Tree) -> Tree:
        """total / n_i. (Times 1 / n_i would round to float32 even where the losses are float64.)"""
        return jax.tree.map(lambda t: (t / self.size).astype(t.dtype), total)

    @scope(GATHER)
    def _slice(self, start: Array | int, rows: int) -> Tree:
        """Consecutive rows. XLA computes a slice anew in every operation that reads it, a gather once."""
        if sum(a.nbytes // len(a) for a in jax.tree.leaves(self.samples)) < _WIDE:
            return self._gather(start + jnp.arange(rows, dtype=jnp.int32))
        take: Callable[[Array], Array] = lambda a: jax.lax.dynamic_slice_in_dim(a, self.offset + start, rows)  # noqa: E731
        return jax.tree.map(take, self.samples)

    @scope(GATHER)
    def _gather(self, positions: Array) -> Tree:
        return jax.tree.map(lambda a: a.at[self.offset + positions].get(mode="clip"), self.samples)
