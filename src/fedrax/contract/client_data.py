"""The data of one client inside compiled code: mini-batches, blocks and full gradients.

The samples of all clients are concatenated in arrays on the device; a client has the rows ``offset`` to
``offset + size``. Shapes are static and sizes are not: batches have masks of padding rows (unless the sizes of
the federation make padding impossible), and loops over a client's data have dynamic trip counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree, xla
from fedrax.contract.assignment import ClientAssignment, Layout, TrainState
from fedrax.contract.gradient import batch_gradient, scaled_sum
from fedrax.contract.hooks import GradientHook, TrainingHooks, check_gradient, check_losses
from fedrax.contract.model import with_statistics
from fedrax.contract.task import Batch
from fedrax.errors import FedraxError
from fedrax.prng.keys import NamedKeys
from fedrax.prng.permutation import shuffled_index, uniform_index
from fedrax.tree import Tree

Order = Literal["shuffle", "stored", "replacement"]
BlockOrder = Literal["replacement", "shuffle"]
Reduction = Literal["mean", "sum"]

_CHUNK = 128
"""Rows of one pass of a full gradient where clients differ in size: enough for efficient matrix products."""
_LARGEST_SLICE = 4096
"""Most rows of one pass where all clients have the same size."""
_WIDE = 1024
"""Bytes of a sample from which consecutive rows are sliced, which is faster than a gather there."""


def is_wide(samples: Tree) -> bool:
    """Whether consecutive samples [n, ...] are sliced, not gathered."""
    return sum(a.nbytes // len(a) for a in jax.tree.leaves(samples)) >= _WIDE


class ClientData(TrainingHooks):
    """One client's data in one round, as algorithms see it.

    Args:
        task: the task.
        layout: static bounds on the clients' sizes.
        samples: pytree of the samples of all clients.
        assignment: the client's assignment; ``size`` (n_i, int32) and ``work`` (a straggler's share of the local
            work in (0, 1], or None) are also attributes of the data.
        key: the client's random key in this round.
        round: int32; the number of the round, from 0.
        num_clients: N, the number of clients of the federation.
        cohort_size: S, as a float; the expected size where it varies.
        shared_key: the random key that all clients of the round share.
        phase: the number of the phase in the round.
        carried: the mutable state of local training.
        unroll: whether to unroll loops of static length.
        precision: the operand format of the gradient's matrix products.

    Example:
        >>> task = fedrax.regression(fedrax.models.Linear().build((2,), 1))
        >>> facts = {"round": 0, "num_clients": 1, "cohort_size": 1}
        >>> data = fedrax.ClientData.alone(task, np.ones((3, 2)), np.ones(3), jax.random.key(0), **facts)
        >>> int(data.size)
        3
    """

    def __init__(
        self,
        task: Any,
        layout: Layout,
        samples: Tree,
        assignment: ClientAssignment,
        key: Array,
        *,
        round: Array,
        num_clients: int,
        cohort_size: Array,
        shared_key: Array | None = None,
        phase: int = 0,
        carried: TrainState | None = None,
        unroll: bool = False,
        precision: xla.OperandFormat = "highest",
    ):
        """Called by :func:`fedrax.simulation.round.client_data` for all executors, and by :meth:`alone`."""
        self.task, self.layout, self.samples, self.assignment = task, layout, samples, assignment
        self.size, self.work = assignment.size, assignment.work
        self.round, self.num_clients, self.cohort_size = round, num_clients, cohort_size
        self.unroll, self.carried = unroll, carried or TrainState()
        self.precision: xla.OperandFormat = precision
        self._stepping = self._resampled = False
        self._keys, self._words = NamedKeys(key, phase=phase), jax.random.key_data(key)
        self._shared_keys = NamedKeys(key if shared_key is None else shared_key, phase=phase)

    @classmethod
    def alone(
        cls, task: Any, x: Any, y: Any, key: Array, *, round: int, num_clients: int, cohort_size: int, phase: int = 0
    ) -> Self:
        """Create the data of a single client, outside of a simulation.

        Args:
            task: the task.
            x: inputs [n, ...], or a dictionary or tuple of such arrays.
            y: labels [n, ...].
            key: a JAX random key.
            round: the number of the round, from 0.
            num_clients: N, the number of clients of the federation.
            cohort_size: S, the (expected) size of the cohort.
            phase: the number of the phase.

        Returns:
            The client's data.
        """
        samples = jax.tree.map(jnp.asarray, Batch(x, y))
        rows, zero = len(samples.y), jnp.int32(0)
        assignment = ClientAssignment(zero, zero, zero, jnp.int32(rows), jnp.ones(()))
        facts = {"round": jnp.int32(round), "num_clients": num_clients, "cohort_size": jnp.asarray(cohort_size, float)}
        return cls(task, Layout(rows, rows, rows), samples, assignment, key, phase=phase, **facts)

    # -- random numbers ----------------------------------------------------------------------------------------

    def key(self, name: str, shared: bool = False) -> Array:
        """The client's random key for the purpose ``name`` in this phase of this round.

        Keys of different names are independent of each other and of the keys of batches and dropout. A wrapper and the
        method inside it get different keys for the same name.

        Args:
          name: what is drawn; any text.
          shared: whether all clients of the cohort get the same key, for what they must draw alike.

        Returns:
          A JAX random key.
        """
        return (self._shared_keys if shared else self._keys)(name)

    def dropout_key(self, index: Array | int) -> Array:
        """The random key of the loss in one local step. Internal.

        Args:
            index: the number of the local step, from 0.

        Returns:
            A JAX random key.
        """
        return jax.random.fold_in(self._keys.base, index)

    def resampled(self) -> Self:
        """The same client with independent random keys: for a mini-batch besides those of the local steps.

        Returns:
            The client's data.
        """
        self.refuse_uncounted("a batch besides those of its local steps")
        keys = self._keys.resampled()
        return self._with(_keys=keys, _words=jax.random.key_data(keys.base), _resampled=True)

    # -- changes by methods and wrappers -----------------------------------------------------------------------------

    def _start_training(self) -> Self:
        """The data inside the loop of :meth:`LocalSGD.run`, which may run once where a mechanism counts gradients.

        Custom loops are rejected there, because their number of gradients is unknown to the privacy accountant.
        """
        if self._counted is not None and not self._counted.start():
            self.refuse_uncounted(
                "further local steps, or for local steps inside a loop or a transformed function (jit, cond, vmap,"
                " grad)"
            )
        return self._with(_stepping=True)

    def with_steps(self, steps: Array) -> Self:
        """Set the number of local steps T_i. A script's number has priority; a straggler does its share.

        Args:
            steps: int32; the number of local steps.

        Returns:
            The changed data.
        """
        self.refuse_uncounted("another number of local steps")
        if self.assignment.steps is not None:
            return self
        steps = steps if self.work is None else jnp.ceil(self.work * steps).astype(jnp.int32)
        return self._with(assignment=self.assignment._replace(steps=steps))

    def with_carried(self, carried: TrainState) -> Self:
        """Replace the running statistics and the state of the local optimizer.

        Args:
            carried: the mutable state of local training.

        Returns:
            The changed data.
        """
        return self._with(carried=carried)

    def with_samples(self, samples: Tree, size: Array) -> Self:
        """Replace the samples: the client then has the first ``size`` rows from its offset on, at least one.

        ``with_samples(data.samples, size)`` drops the client's last samples.

        Args:
            samples: pytree of the samples of all clients.
            size: int32; the number of samples to use.

        Returns:
            The changed data.
        """
        self.refuse_uncounted("other samples")
        unknown = Layout(self.layout.largest, 0, 1)  # sizes are no longer known statically
        return self._in_terms_of(samples, size)._with(layout=unknown)

    def _in_terms_of(self, samples: Tree, size: Array) -> Self:
        """The same client as a function of its samples and its size, to trace what depends on them."""
        assignment = self.assignment._replace(size=size)
        return self._with(samples=samples, size=size, assignment=assignment, _counted=None)  # tracing is not training

    def variables(self, params: Tree) -> Tree:
        """Combine the parameters with the running statistics, where the model has some.

        Args:
            params: pytree of parameters.

        Returns:
            The input of the task's functions.
        """
        return with_statistics(params, self.carried.statistics)

    @property
    def delay(self) -> Array | None:
        """int32; how many rounds after this one the upload arrives; None where all come at once."""
        return self.assignment.delay

    @property
    def given_rows(self) -> Array | None:
        """int32 [T, B], the rows of each batch where a script gives them; of a fresh batch [1, B]."""
        fresh = self.assignment.fresh
        return self.assignment.batches if not self._resampled else None if fresh is None else fresh[None]

    # -- samples -----------------------------------------------------------------------------------------------

    @xla.scope(xla.GATHER)
    def batch(self, step: Array | int, batch_size: int, order: Order) -> tuple[Tree, Array | None]:
        """Gather the mini-batch of a local step.

        ``shuffle`` permutes the data in every epoch, ``stored`` keeps their order, ``replacement`` draws with
        replacement. The last mini-batch of an epoch is padded, where B does not divide the size, with other samples
        of this client.

        Args:
            step: the number of the local step, from 0.
            batch_size: B, the samples of a batch.
            order: the order of the samples; see `LocalSGD.order`.

        Returns:
            The samples, leaves [B, ...], and bool [B], False for padding; None without padding.
        """
        if not self._stepping:
            self.refuse_uncounted("a batch beside them")
        if self._batch_hook is not None and not self._resampled:
            return self._batch_hook(step)
        if self.given_rows is not None:
            rows = self.given_rows[0 if self._resampled else step]
            return self.gather(jnp.maximum(rows, 0)), rows >= 0
        size = min(batch_size, self.layout.largest)
        lanes = jnp.arange(size, dtype=jnp.int32)
        if order == "replacement":
            return self.gather(uniform_index(self._words, step * size + lanes, self.size)), None
        per_epoch = self.batches(size)
        epoch, start = step // per_epoch, (step % per_epoch) * size
        whole = self.layout.divisor % size == 0
        if order == "stored" and whole:
            return self._slice(start, size), None
        positions = start + lanes
        inside = positions < self.size
        if not whole:  # pad with other samples of this client
            wrapped = positions - self.size if size <= self.layout.smallest else jax.lax.rem(positions, self.size)
            positions = jnp.where(inside, positions, wrapped)
        if order == "shuffle":
            positions = shuffled_index(self._words, epoch, positions, self.size)
        return self.gather(positions), None if whole else inside

    def batches(self, batch_size: int) -> Array | int:
        """The number of mini-batches in an epoch, ceil(n_i / B).

        Args:
            batch_size: B, the samples of a batch.

        Returns:
            A Python int where all clients have the same size, otherwise int32.
        """
        size = min(batch_size, self.layout.largest)
        if self.layout.equal:
            return -(-self.layout.largest // size)
        return (self.size + size - 1) // size

    @xla.scope(xla.GATHER)
    def block_index(self, step: Array | int, num_blocks: int, order: BlockOrder = "replacement") -> Array:
        """Draw the block of a step from {0, ..., M - 1}, unless a script sets it.

        Args:
            step: the number of the local step, from 0.
            num_blocks: M, the number of blocks.
            order: the order of the blocks; see `LocalSGD.block_order`.

        Returns:
            int32; the block.
        """
        if self._resampled and self.assignment.fresh is not None:
            return self.assignment.fresh
        if self.assignment.blocks is not None and not self._resampled:
            return self.assignment.blocks[step]
        if order == "shuffle":
            return shuffled_index(self._words, step // num_blocks, step % num_blocks, num_blocks)
        return uniform_index(self._words, step, num_blocks, stream=2)

    def block_rows(self, block: Array | int, num_blocks: int) -> tuple[Array, Array | int]:
        """The rows of block j of M: floor(j n_i / M) to floor((j + 1) n_i / M).

        Args:
            block: j, the number of the block.
            num_blocks: M, the number of blocks.

        Returns:
            The first row and the number of rows.
        """
        if self.layout.divisor % num_blocks == 0 and self.layout.equal:
            rows = self.layout.largest // num_blocks
            return jnp.asarray(block * rows, jnp.int32), rows
        low = (block * self.size) // num_blocks
        return low, ((block + 1) * self.size) // num_blocks - low

    # -- gradients ---------------------------------------------------------------------------------------------

    def losses(self, recorded: list | None = None) -> Callable:
        """Build the local loss, with the changes that wrappers make.

        Args:
            recorded: list to which new running statistics are appended; None: they are not computed.

        Returns:
            (params, batch, key) -> losses [B].
        """

        def own(params: Tree, batch: Tree, key: Array) -> Array:
            if recorded is None or not self.carried.statistics:
                return self.task.loss(self.variables(params), batch, key)
            losses, statistics = self.task.loss_and_statistics(self.variables(params), batch, key)
            recorded.append(statistics)
            return losses

        loss = own
        for _, hook in self._loss_hooks:
            loss = check_losses(hook(loss))
        return loss

    @xla.scope(xla.GRADIENT)
    def loss_and_gradient(
        self,
        params: Tree,
        samples: Tree,
        real: Array | None,
        key: Array,
        reduction: Reduction,
        microbatch_size: int | None = None,
    ) -> tuple[Array, Tree, Tree]:
        """Estimate the client's loss and gradient on a mini-batch.

        Args:
            params: pytree of parameters.
            samples: pytree of samples, leaves [B, ...].
            real: bool [B], False for padding rows, or None.
            key: a JAX random key.
            reduction: whether the client's loss is the mean or the sum over its samples.
            microbatch_size: the most samples whose gradient is computed at a time; None: all of the mini-batch.

        Returns:
            The loss, the gradient and the running statistics after this mini-batch.
        """
        if not self._stepping:
            self.refuse_uncounted("a gradient beside them")
        rows = len(jax.tree.leaves(samples)[0])
        count = rows if real is None else jnp.maximum(real.sum(), 1)
        share = (self.size if reduction == "sum" else 1, count)
        if microbatch_size is None or microbatch_size >= rows:
            return self._part_of_batch(params, samples, real, key, *share)
        number = -(-rows // microbatch_size)
        lanes = jnp.arange(number * microbatch_size)
        if len(lanes) > rows:  # the last microbatch is filled up with the first samples, which batch norm has not seen
            inside = lanes < rows
            real = inside if real is None else inside & real[lanes % rows]
            samples = jax.tree.map(lambda a: a[lanes % rows], samples)
        parts = jax.tree.map(lambda a: a.reshape(number, microbatch_size, *a.shape[1:]), (samples, real))

        def part(statistics: Tree, i: Array) -> tuple[Array, Tree, Tree]:
            (samples, real), data = tree.row(parts, i), self.with_carried(TrainState(statistics))
            with xla.scope(xla.GRADIENT):  # again inside the loop, whose own scope hides the outer one
                return data._part_of_batch(params, samples, real, jax.random.fold_in(key, i), *share)

        def add(i: Array, total: tuple[Array, Tree, Tree]) -> tuple[Array, Tree, Tree]:
            loss, gradient, statistics = part(total[2], i)
            return *tree.add(total[:2], (loss, gradient)), statistics

        shapes = jax.eval_shape(part, self.carried.statistics, jnp.int32(0))[:2]
        zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return jax.lax.fori_loop(0, number, add, (*zero, self.carried.statistics))

    def _part_of_batch(
        self, params: Tree, samples: Tree, real: Array | None, key: Array, scale: Any, count: Any
    ) -> tuple[Array, Tree, Tree]:
        """``scale / count`` times the sums over a batch, or over one of its microbatches; the running statistics."""
        if self._withheld:
            total = lambda params: self.losses()(params, samples, key).sum()  # noqa: E731
            return *jax.value_and_grad(total)(params), self.carried.statistics
        if self._gradient_hook is not None:
            total = self._hooked_gradient(self._gradient_hook, params, samples, real, key)
            loss, gradient = jax.tree.map(lambda t: (t * (scale / count)).astype(t.dtype), total)
            return loss, gradient, self.carried.statistics
        if self.carried.statistics:
            return self._with_statistics(params, samples, real, key, scale, count)
        return *self._microbatched(params, samples, real, key, scale, count), ()

    def _hooked_gradient(
        self, hook: GradientHook, params: Tree, samples: Tree, real: Array | None, key: Array
    ) -> tuple[Array, Tree]:
        """The summed loss and the summed gradient of a batch, computed by a gradient hook."""
        if self.carried.statistics and not self._frozen_statistics:
            raise FedraxError(
                "a hook of with_gradient cannot update running statistics: use group norm instead of batch norm"
            )
        return check_gradient(hook(self.losses(), params, samples, real, key), params)

    def _with_statistics(
        self, params: Tree, samples: Tree, real: Array | None, key: Array, scale: Any, count: Any
    ) -> tuple[Array, Tree, Tree]:
        """Loss, gradient and the new running statistics of a batch."""

        def objective(params: Tree) -> tuple[Array, Tree]:
            recorded: list[Tree] = []
            losses = self.losses(recorded)(params, samples, key)
            return scaled_sum(losses, real, scale, count), recorded[0] if recorded else self.carried.statistics

        (loss, statistics), gradient = xla.value_and_grad(objective, self.precision, has_aux=True)(params)
        return loss, gradient, statistics

    def _batch_gradient(self, losses: Callable | None = None) -> Callable:
        """:func:`batch_gradient` of ``losses``, by default the local loss, with the precision of the run."""
        if self._loss_hooks or self.carried.statistics:  # closures over tracers of the program
            return partial(xla.untraced(batch_gradient), losses or self.losses(), self.precision)
        return partial(batch_gradient, losses or self.task.loss, self.precision)

    def _microbatched(self, params: Tree, samples: Tree, counts: Array | None, key: Array, *scaled: Any) -> Tree:
        """As :func:`batch_gradient`, over microbatches where that is faster; ``scaled``: its last arguments."""
        # a hook may close over arrays with a row for each example
        losses, traced = (self.losses(), None) if self._loss_hooks else (self.task.loss, xla.TRACE_BATCH)
        shared = self.assignment.data_parallel
        pieces = xla.plan_microbatches(
            losses, params, samples, key, traced, 2 if shared is None else jax.lax.axis_size(xla.CLIENT_AXIS)
        )
        drawn: Any = key
        if pieces is not None and pieces.drawn is not None and (pieces.overhead is None or shared is not None):
            arrays, drawn = pieces.drawn.draws(params, samples, key)
            losses, samples = pieces.drawn.losses, (samples, arrays)
        elif pieces is not None and traced is not None:
            losses = xla.replay_trace(losses)
        of_batch = self._batch_gradient(losses)
        gradient = lambda *batch: of_batch(*batch, drawn, *scaled)  # noqa: E731
        return xla.accumulate_gradients(gradient, pieces, params, samples, counts, shared)

    @xla.scope(xla.GRADIENT)
    def range_gradient(
        self,
        params: Tree,
        start: Array | int,
        rows: Array | int,
        at_most: int,
        key: Array,
        microbatch_size: int | None = None,
    ) -> tuple[Array, Tree]:
        """Sum losses and gradients over consecutive rows, in several passes where there are many.

        Args:
            params: pytree of parameters.
            start: the first row, counted from the client's first.
            rows: the number of rows; a Python int where it is static.
            at_most: a static upper bound of ``rows``.
            key: a JAX random key.
            microbatch_size: the most samples of a pass; None: as many as are efficient.

        Returns:
            The summed loss and the summed gradient.
        """
        self.refuse_uncounted("gradients of all of a client's data, or of a block")
        losses, of_batch = self.losses(), self._batch_gradient()

        def gradient(params: Tree, samples: Tree, inside: Array | None, key: Array) -> tuple[Array, Tree]:
            if self._gradient_hook is not None:
                return self._hooked_gradient(self._gradient_hook, params, samples, inside, key)
            if self.carried.statistics:
                return of_batch(params, samples, inside, key)
            return self._microbatched(params, samples, inside, key)

        chunk = at_most if isinstance(rows, int) and rows <= _LARGEST_SLICE else min(at_most, _CHUNK)
        chunk = min(chunk, microbatch_size or chunk)
        if isinstance(rows, int) and rows <= chunk:
            return gradient(params, self._slice(start, rows), None, key)
        lanes = jnp.arange(chunk, dtype=jnp.int32)

        def one_pass(i: Array, total: Tree) -> Tree:
            positions = i * chunk + lanes
            inside = positions < rows
            samples = self.gather(start + jax.lax.rem(positions, jnp.int32(rows)))  # wraps around at the end
            return tree.add(total, gradient(params, samples, inside, jax.random.fold_in(key, i)))

        dtype = jax.eval_shape(lambda p: losses(p, self._slice(0, 1), key), params).dtype
        zero = (jnp.zeros((), dtype), tree.zeros_like(params))
        return jax.lax.fori_loop(0, (rows + chunk - 1) // chunk, one_pass, zero)

    def full_gradient(
        self, params: Tree, reduction: Reduction = "mean", microbatch_size: int | None = None
    ) -> tuple[Array, Tree]:
        """Compute loss and gradient over all of the client's samples.

        Args:
            params: pytree of parameters.
            reduction: whether the client's loss is the mean or the sum over its samples.
            microbatch_size: the most samples of a pass; None: as many as are efficient.

        Returns:
            The loss and the gradient.
        """
        rows = self.layout.largest if self.layout.equal else self.size
        total = self.range_gradient(params, 0, rows, self.layout.largest, self._keys.base, microbatch_size)
        return total if reduction == "sum" else self._mean(total)

    def block_gradient(
        self,
        params: Tree,
        block: Array,
        num_blocks: int,
        key: Array,
        reduction: Reduction,
        microbatch_size: int | None = None,
    ) -> tuple[Array, Tree]:
        """Estimate the client's loss f_i = sum_j f_ij and its gradient by block j: M f_ij and M grad f_ij.

        Args:
            params: pytree of parameters.
            block: j, the number of the block.
            num_blocks: M, the number of blocks.
            key: a JAX random key.
            reduction: whether the client's loss is the mean or the sum over its samples.
            microbatch_size: the most samples of a pass; None: as many as are efficient.

        Returns:
            The loss and the gradient.
        """
        start, rows = self.block_rows(block, num_blocks)
        largest = -(-self.layout.largest // num_blocks)
        total = self.range_gradient(params, start, rows, largest, key, microbatch_size)
        estimate = tree.scale(num_blocks, total)
        return estimate if reduction == "sum" else self._mean(estimate)

    def _mean(self, total: Tree) -> Tree:
        """total / n_i; 1 / n_i as a factor would round float64 losses to float32."""
        return jax.tree.map(lambda t: (t / self.size).astype(t.dtype), total)

    @xla.scope(xla.GATHER)
    def _slice(self, start: Array | int, rows: int) -> Tree:
        """Consecutive rows; narrow ones by a gather, because XLA recomputes slices wherever they are read."""
        if not is_wide(self.samples):
            return self.gather(start + jnp.arange(rows, dtype=jnp.int32))
        take: Callable[[Array], Array] = lambda a: jax.lax.dynamic_slice_in_dim(a, self.assignment.offset + start, rows)  # noqa: E731
        return jax.tree.map(take, self.samples)

    @xla.scope(xla.GATHER)
    def gather(self, positions: Array) -> Tree:
        """Gather samples of the client.

        Args:
            positions: int32 [B], counted from the client's first sample.

        Returns:
            The samples, leaves [B, ...].
        """
        return jax.tree.map(lambda a: a.at[self.assignment.offset + positions].get(mode="clip"), self.samples)

    def all_samples(self) -> tuple[Tree, Array]:
        """Gather all samples of the client, padded to the size n of the largest client.

        Returns:
            The samples, leaves [n, ...], and bool [n], False for padding.
        """
        rows = jnp.arange(self.layout.largest)
        return self.gather(jnp.minimum(rows, self.size - 1)), rows < self.size
