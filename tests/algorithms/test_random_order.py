"""Sample orders computed from counters: uniform permutations that differ between epochs."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedrax.contract.client_data import ClientAssignment, ClientData, Layout
from fedrax.contract.task import Batch
from fedrax.prng.permutation import shuffled_index, uniform_index


def key_words(seed: int) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed))


def keys(count: int) -> jax.Array:
    """Key data as clients have them: [count, 2]."""
    return jax.random.key_data(jax.random.split(jax.random.key(5), count))


@pytest.fixture(scope="module")
def orders():
    """(key data [K, 2], epoch, n, length) -> the first ``length`` entries of K permutations."""
    one = lambda w, e, n, i: jax.vmap(shuffled_index, (None, None, 0, None))(w, e, i, n)  # noqa: E731
    return jax.jit(jax.vmap(one, (0, None, None, None)))


def test_permutations_of_every_size_up_to_300():
    sizes = np.arange(1, 301)
    shuffle = jax.jit(jax.vmap(shuffled_index, (0, None, 0, 0)))
    for epoch in (0, 1):
        orders = np.asarray(shuffle(keys(300), epoch, np.minimum(np.arange(300), sizes[:, None] - 1), sizes))
        for n, order in zip(sizes, orders, strict=True):
            assert sorted(order[:n].tolist()) == list(range(n))


def test_permutations_of_large_sizes():
    for n in (4096, 4097, 60_000):
        assert len(np.unique(shuffled_index(key_words(1), 3, jnp.arange(n), n))) == n


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_few_samples_are_about_equally_likely(n: int, orders):
    drawn = np.asarray(orders(keys(24_000), 0, n, jnp.arange(n)))
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == {2: 2, 3: 6, 4: 24, 5: 120}[n]
    # The cheap bijection is not exactly uniform: frequencies may be off by a twentieth, plus chance.
    expected = len(drawn) / len(counts)
    assert np.abs(counts / expected - 1).max() < 0.05 + 4 / np.sqrt(expected)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("n", [7, 10, 32, 100])
def test_every_sample_is_equally_likely_at_every_position(n: int, orders):
    drawn = np.asarray(orders(keys(200 * n), 1, n, jnp.arange(n)))
    for place in (0, 1, n // 2, n - 1):
        counts = np.bincount(drawn[:, place], minlength=n)
        assert scipy.stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("n", [10, 32])
def test_consecutive_samples_of_an_epoch_are_independent(n: int, orders):
    """All ordered pairs of different samples are equally frequent."""
    drawn = np.asarray(orders(keys(100 * n * n), 0, n, jnp.arange(2)))
    counts = np.bincount(drawn[:, 0] * n + drawn[:, 1], minlength=n * n).reshape(n, n)
    assert not np.diag(counts).any()
    counts = counts[~np.eye(n, dtype=bool)]
    assert np.abs(counts / counts.mean() - 1).max() < 0.05 + 5 / np.sqrt(counts.mean())


def test_epochs_and_keys_have_different_permutations(orders):
    index, k = jnp.arange(50), keys(40)
    epochs = [np.asarray(orders(k, epoch, 50, index)) for epoch in range(3)]
    assert len(np.unique(np.concatenate(epochs), axis=0)) == 120
    # two random permutations of 50 agree in one position on average
    assert abs((epochs[0] == epochs[1]).sum(1).mean() - 1) < 0.6


def test_uniform_draws_are_uniform_and_independent():
    drawn = np.asarray(uniform_index(key_words(2), jnp.arange(60_000), 6))
    assert scipy.stats.chisquare(np.bincount(drawn, minlength=6)).pvalue > 1e-6
    pairs = np.bincount(drawn[::2] * 6 + drawn[1::2], minlength=36)
    assert scipy.stats.chisquare(pairs).pvalue > 1e-6


def client(sizes: tuple[int, ...], which: int, seed: int = 0) -> ClientData:
    """A client whose samples are their row numbers."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rows = jnp.arange(offsets[-1])
    task: Any = SimpleNamespace(loss=None)
    return ClientData(
        task,
        Layout.of(np.array(sizes)),
        Batch(rows, rows),
        ClientAssignment(*map(jnp.int32, (which, 0, offsets[which], sizes[which])), weight=jnp.ones(())),
        jax.random.key(seed),
        round=jnp.int32(0),
        num_clients=len(sizes),
        cohort_size=jnp.float32(1),
    )


def rows_of(data: ClientData, step: int, batch_size: int, order: str) -> list[int]:
    """The real rows of a batch, without padding."""
    batch, real = data.batch(step, batch_size, order)  # type: ignore[arg-type]
    return np.asarray(batch.x)[slice(None) if real is None else np.asarray(real)].tolist()


@pytest.mark.parametrize("sizes", [(7, 4, 9), (6, 6, 6), (6, 3, 9)])
@pytest.mark.parametrize("order", ["shuffle", "stored"])
def test_epoch_contains_every_sample_once(sizes: tuple[int, ...], order: str):
    for which in range(3):
        data = client(sizes, which)
        first = sum(sizes[:which])
        own, per_epoch = list(range(first, first + sizes[which])), -(-sizes[which] // 3)
        assert int(data.batches(3)) == per_epoch
        epochs = [
            [rows_of(data, epoch * per_epoch + step, 3, order) for step in range(per_epoch)] for epoch in range(2)
        ]
        for epoch in epochs:
            assert [len(batch) for batch in epoch] == [3] * (sizes[which] // 3) + [sizes[which] % 3] * (
                sizes[which] % 3 > 0
            )
            visited = list(chain.from_iterable(epoch))
            assert sorted(visited) == own
            assert order == "shuffle" or visited == own


@pytest.mark.parametrize("order", ["shuffle", "stored"])
def test_padding_of_the_last_batch_repeats_the_first_rows_of_the_epoch(order: Any):
    """Batch norm then sees samples of this client only, with about equal weights."""
    data = client((5, 2, 9), 0)
    full, last = (np.asarray(data.batch(step, 4, order)[0].x) for step in (0, 1))
    np.testing.assert_array_equal(last[1:], full[:3])
    assert sorted([*full, last[0]]) == list(range(5))
    whole, _ = client((5, 2, 9), 1).batch(0, 6, order)
    assert np.bincount(np.asarray(whole.x)).tolist() == [0] * 5 + [3, 3]


def test_full_gradient_weighs_samples_equally_in_batch_norm():
    """The client is smaller than another one, to whose size its batch is padded."""

    def loss(params: jax.Array, batch: Batch, key: jax.Array) -> jax.Array:
        return params * (batch.x - batch.x.mean()) ** 2

    data = client((5, 20), 0)
    data.task = SimpleNamespace(loss=loss)
    np.testing.assert_allclose(data.full_gradient(jnp.float32(1))[1], np.var(np.arange(5)), rtol=1e-6)


def test_sampling_with_replacement_is_uniform_over_the_client():
    data = client((7, 4, 9), 1)
    drawn = list(chain.from_iterable(rows_of(data, step, 3, "replacement") for step in range(200)))
    assert set(drawn) == {7, 8, 9, 10}
    assert scipy.stats.chisquare(np.bincount(drawn)[7:]).pvalue > 1e-6


def test_resampled_batch_differs():
    data = client((200, 200), 0)
    assert rows_of(data, 0, 20, "shuffle") != rows_of(data.resampled(), 0, 20, "shuffle")


@pytest.mark.parametrize("blocks", [1, 3, 4, 11])
@pytest.mark.parametrize("sizes", [(7, 4, 9), (6, 6, 6), (12, 12)])
def test_blocks_partition_the_samples(sizes: tuple[int, ...], blocks: int):
    """Block sizes differ by at most one."""
    for which, size in enumerate(sizes):
        ranges = [tuple(map(int, client(sizes, which).block_rows(j, blocks))) for j in range(blocks)]
        covered = [row for first, rows in ranges for row in range(first, first + rows)]
        assert covered == list(range(size))
        assert max(rows for _, rows in ranges) - min(rows for _, rows in ranges) <= 1


def test_blocks_are_drawn_uniformly():
    data = client((12, 12), 0)
    drawn = np.asarray(jax.vmap(lambda t: data.block_index(t, 5))(jnp.arange(10_000)))
    assert scipy.stats.chisquare(np.bincount(drawn, minlength=5)).pvalue > 1e-6


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_shuffled_blocks_come_once_before_any_again(blocks: int):
    data = client((12, 12), 0)
    drawn = np.asarray(jax.vmap(lambda t: data.block_index(t, blocks, "shuffle"))(jnp.arange(400 * blocks)))
    passes = drawn.reshape(-1, blocks)
    assert (np.sort(passes) == np.arange(blocks)).all()
    first = np.bincount(passes[:, 0], minlength=blocks)
    assert scipy.stats.chisquare(first).pvalue > 1e-6 or blocks == 1
