"""Sample-level differential privacy: DP-SGD (Abadi et al. 2016) in the clients' local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.algorithms.fedavg import FedAvg
from fedrax.config.annotations import Bound
from fedrax.config.hyperparameters import NonNegative, Positive, PositiveInt, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.traits import Traits
from fedrax.contract.wrapper import Wrapper, wrapped_in
from fedrax.errors import FedraxError
from fedrax.privacy.mechanisms.noise import gradient_count_only, with_noise
from fedrax.privacy.mechanisms.taint import find_leak
from fedrax.privacy.releases import Release
from fedrax.tree import Tree
from fedrax.xla import clipped_gradient_sum, materialized_bytes, with_operand_format

_GRADIENT_BYTES = 2**27
"""Memory for per-sample gradients that are computed at a time, where ``microbatch`` does not say how many."""


@hyperparameters
class SampleDP(Wrapper):
    """``inner`` with DP-SGD in its local steps: each sample's gradient clipped, their sum noised (Abadi et al. 2016).

    The gradient of a step is (sum_j min(1, C / |g_j|) g_j + N(0, (z C)^2)) / B over the samples j of its batch, where B
    is ``local.batch_size``, which is public, and not the number of samples drawn. The guarantee protects single samples
    against every adversary, including the server. It needs a method whose clients use their samples only for one
    gradient in each of a fixed number of local steps. At most ``microbatch`` per-sample gradients are in memory at a
    time. Client losses are not reported.

    Example:
        >>> inner = fedrax.algorithms.FedAvg(local=fedrax.LocalSGD(lr=0.1, steps=5, batch_size=10))
        >>> (release,) = fedrax.privacy.SampleDP(inner=inner, noise=1.5).releases()
        >>> release.unit, release.times
        ('sample', 5)
    """

    inner: Algorithm = FedAvg(local=LocalSGD(steps=5))
    clip: Positive = 1.0
    """Clipping bound C on the norm of a sample's gradient."""
    noise: NonNegative = 1.0
    """Noise multiplier z: the standard deviation of the noise divided by C."""
    rate: Annotated[float, Bound(gt=0, le=1)] | None = None
    """Probability that a sample is in a step's batch, independently of the others (Poisson sampling). A batch then has
    ``rate`` n_i samples on average. By default batches are those of ``local``, which do not amplify privacy."""
    microbatch: PositiveInt | None = None
    """Per-sample gradients computed at a time; by default as many as fit into 128 MiB."""

    def check(self) -> None:
        """Reject local training whose number of steps or batch size is not fixed."""
        if wrapped_in(self.inner, SampleDP) is not None:
            raise FedraxError("SampleDP is nested in SampleDP: remove one of them")
        local = self.inner.local_steps
        if local is None or local.steps is None:
            raise FedraxError("SampleDP needs a fixed number of local steps: set local.steps of the method inside")
        if not isinstance(local.batch_size, int) or local.blocks is not None or local.reduction != "mean":
            raise FedraxError(
                "SampleDP needs a batch size that does not depend on the data: set local.batch_size to a number,"
                " local.reduction to 'mean', and leave local.blocks out"
            )
        if local.microbatches != 1:
            raise FedraxError(
                "SampleDP computes the gradients of a batch's samples in parts by itself: set its microbatch, and leave"
                " local.microbatches out"
            )
        if local.order == "replacement" and self.rate is None:
            raise FedraxError(
                "SampleDP needs batches in which a sample occurs at most once: set local.order to 'shuffle' or"
                " 'stored', or give a rate"
            )

    @property
    def own_traits(self) -> Traits:
        """Uniform weights, because sample counts have no noise; no statistics, which would be sent without noise."""
        statistics = not self.inner.traits.personal_statistics
        return Traits(uniform_weights=True, per_sample_losses=True, no_statistics=statistics)

    def releases(self) -> tuple[Release, ...]:
        """One Gaussian release in each local step of each phase, of sensitivity C to a sample's presence (Poisson).

        Removing a sample changes all shuffled batches. For these, neighboring datasets differ in the replacement of a
        sample, which changes a sum by up to 2 C.
        """
        local = self.inner.local_steps
        assert local is not None and local.steps is not None
        noise, times = float(self.noise), local.steps * len(self.inner.phases)
        if self.rate is None:
            shuffled = Release(noise / 2, times, unit="sample", neighbors="replacement", batches="shuffled")
            return (shuffled,)
        return (Release(noise, times, unit="sample", batches="poisson", rate=float(self.rate)),)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """The client step of ``inner`` with noised gradients."""
        if data.assignment.steps is not None or data.given_rows is not None:
            raise FedraxError(
                "SampleDP accounts for the steps and batches of local, but a script or an outer wrapper sets others:"
                " remove it"
            )
        nothing = jax.tree.map(lambda a: jnp.zeros((1, *a.shape[1:]), a.dtype), data.samples)
        withheld = lambda hidden: self._private(hidden).with_withheld_gradients(nothing)  # noqa: E731
        if (leak := find_leak(client, message, state, data, withheld)) is not None:
            raise FedraxError(
                f"SampleDP needs a method that uses its samples only for gradients of local steps:"
                f" {type(self.inner).__name__} also sends {leak}, computed from data without noise"
            )
        output = client(message, state, self._private(data))
        return output._replace(info=gradient_count_only(output.info)), own

    def _private(self, data: ClientData) -> ClientData:
        """The client data with clipped and noised gradients."""
        local = self.inner.local_steps
        assert local is not None and isinstance(local.batch_size, int) and local.steps is not None
        if self.rate is None:
            private = data.with_gradient(self._of_batch(data, local.batch_size), frozen_statistics=True)
        else:
            private = data.with_batch(_poisson_batches(data, self.rate), mean_size=self.rate * data.size)
            private = private.with_gradient(self._of_rows(data, local.batch_size), frozen_statistics=True)
        return private.with_counted_gradients(type(self).__name__, local)

    def _of_rows(self, data: ClientData, batch_size: int) -> Callable:
        """The gradient rule for batches of row numbers; work is proportional to the rows drawn."""
        part = -(-batch_size // 4)  # a quarter of the mean batch: little work on padding
        return self._rule(data, batch_size, part, lambda rows, at: data.gather(rows[at]), lambda drawn: jnp.sum(drawn))

    def _of_batch(self, data: ClientData, batch_size: int) -> Callable:
        """The gradient rule of batches that are samples."""
        take = lambda samples, at: jax.tree.map(lambda a: a[at], samples)  # noqa: E731
        return self._rule(data, batch_size, batch_size, take, lambda real: len(real))

    def _rule(self, data: ClientData, batch_size: int, most: int, take: Callable, used: Callable) -> Callable:
        """The sum of clipped gradients with noise, scaled so that its mean over the batch is a B-th of it.

        most: samples side by side, where the user does not say. take: (batch, positions [m]) -> samples. used: how
        many positions, from the first on, have a sample to look at.
        """
        stream = data.key("noise")

        def rule(losses: Callable, params: Tree, batch: Any, mask: Array | None, key: Array) -> tuple[Array, Tree]:
            rows = len(jax.tree.leaves(batch)[0])
            real = jnp.ones(rows, bool) if mask is None else mask
            of_one = with_operand_format(jax.grad(_one_loss(losses)), data.precision)
            single = jax.eval_shape(lambda batch: take(batch, jnp.zeros(1, jnp.int32)), batch)
            width = min(self.microbatch or _fitting_gradients(of_one, params, single, key, most), rows)

            def of_some(first: Any) -> Tree:
                at = first + jnp.arange(width)
                inside = (at < rows) & real[jnp.minimum(at, rows - 1)]
                at = jnp.minimum(at, rows - 1)
                keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(at)
                return clipped_gradient_sum(of_one, params, take(batch, at), keys, bound=self.clip, counts=inside)

            if width == rows and isinstance(used(real), int):
                summed = of_some(0)
            else:
                chunks = (used(real) + width - 1) // width
                add = lambda i, total: tree.add(total, of_some(i * width))  # noqa: E731
                summed = jax.lax.fori_loop(0, chunks, add, tree.zeros_like(params))
            words = jax.random.key_data(key)
            mine = jax.random.fold_in(jax.random.fold_in(stream, words[0]), words[1])
            noisy = with_noise(mine, summed, self.noise * self.clip)
            count = rows if mask is None else jnp.maximum(jnp.sum(mask), 1)
            none = jnp.zeros((), jax.tree.leaves(params)[0].dtype)  # a batch's loss is not released
            return none, tree.scale(count / batch_size, noisy)

        return rule


def _poisson_batches(data: ClientData, rate: Any) -> Callable:
    """Poisson batches: step -> (all row numbers, drawn rows first; whether each is drawn)."""
    key, most = data.key("batches"), data.layout.largest

    def batch(step: Any) -> tuple[Array, Array]:
        # 32 random bits: uniform floats have 23, too coarse for small rates
        coins = jax.random.bits(jax.random.fold_in(key, step), (most,), jnp.uint32)
        heads = jnp.floor(jnp.asarray(rate, jnp.float32) * (1 - 2**-23) * 2.0**32).astype(jnp.uint32)
        drawn = ((coins < heads) | (rate >= 1)) & (jnp.arange(most) < data.size)
        rows = jnp.argsort(~drawn, stable=True).astype(jnp.int32)
        return rows, drawn[rows]

    return batch


def _fitting_gradients(of_one: Callable, params: Tree, single: Tree, key: Array, most: int) -> int:
    """Number of per-sample gradients, at most ``most``, whose materialized intermediates fit into memory."""
    keys = jax.eval_shape(lambda key: key[None], key)
    return max(1, min(most, _GRADIENT_BYTES // max(1, materialized_bytes(of_one, params, single, keys))))


def _one_loss(losses: Callable) -> Callable:
    """(params, sample, key) -> the loss of one sample."""

    def loss(params: Tree, sample: Tree, key: Array) -> Array:
        values = losses(params, jax.tree.map(lambda a: a[None], sample), key)
        if values.shape != (1,):
            raise FedraxError(
                "SampleDP clips the gradient of each sample: the task's loss must return one number per sample, not"
                f" shape {values.shape} for a batch of one"
            )
        return values[0]

    return loss
