"""Microbatches: only if samples are independent, and with the same gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import Array, lax

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
from fedrax.contract.task import Batch
from fedrax.models import MLP, Model, from_linen
from fedrax.xla import microbatch
from fedrax.xla.per_example import analyze_per_example
from fedrax.xla.pipeline import optimize

B, WIDE = 6, (4, 4, 4)
Function = Callable[[Any, Array, Array], Array]


def weights(shape: tuple[int, ...]) -> Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def images(rows: int = B, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, *WIDE)), jnp.float32)


def sample_sums(x: Array) -> Array:
    """One number per sample."""
    return (x.reshape(len(x), -1) ** 2).sum(1)


def with_module(made: nn.Module, **more: Any) -> tuple[Function, Any]:
    """A function, and one that draws its weights."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = partial(jax.jit(partial(made.init, **more)), keys, images(2))

    def function(v: Any, x: Array, key: Array) -> Array:
        out, _ = made.apply(v, x, rngs={"dropout": key}, mutable=["batch_stats"], **more)
        return sample_sums(out)

    return function, variables


class Attention(nn.Module):
    """A transformer layer over the pixels."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = x.reshape(len(x), 16, 4)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return nn.Dense(3)(nn.gelu(x)).mean(1)


class Convolutions(nn.Module):
    """Strides, groups, dilation, transposition, normalization and both kinds of pooling."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(nn.GroupNorm(2)(nn.Conv(8, (3, 3), feature_group_count=4)(x)))
        x = nn.swish(nn.InstanceNorm()(nn.ConvTranspose(6, (2, 2), (2, 2))(x)))
        x = nn.max_pool(nn.Conv(4, (3, 3), kernel_dilation=2)(x), (2, 2), (2, 2))
        return nn.Dense(3)(nn.avg_pool(x, (2, 2)).transpose(0, 3, 1, 2).reshape(len(x), -1))


class Recurrent(nn.Module):
    """A GRU and an LSTM over the rows of pixels, with a rematerialized block."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        seen: Any = nn.RNN(nn.GRUCell(5))(x.reshape(len(x), 4, 16))
        seen = nn.RNN(nn.OptimizedLSTMCell(5), reverse=True)(seen)
        return nn.remat(nn.Dense)(3)(seen[:, -1])


class Dropped(nn.Module):
    """Dropout with a mask for the batch."""

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(3)(x.reshape(len(x), -1)))


class BatchNormed(nn.Module):
    """Means over the batch."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.BatchNorm(use_running_average=False, use_bias=False)(x)[..., :2]


def table_and_labels(w: Array, x: Array, key: Array) -> Array:
    rows = jnp.argmax(x.reshape(len(x), -1), 1)
    return -jnp.take_along_axis(jax.nn.log_softmax(w[rows]), (rows % 4)[:, None], 1)[:, 0]


def merged(w: Array, x: Array, key: Array) -> Array:
    """All pixels of all samples as rows of one matrix."""
    return (jnp.tanh(x.reshape(-1, 4) @ w).reshape(len(x), -1)).max(1)


def in_branches(w: Array, x: Array, key: Array) -> Array:
    x = lax.cond(w[0, 0] > 0, lambda x: x + 1, lambda x: 2 * x, x)
    return sample_sums(lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) + i, x))


def pixels_in_turn(w: Array, x: Array, key: Array) -> Array:
    carry = jnp.zeros((len(x), 4))
    pixels = x.reshape(len(x), 16, 4).swapaxes(0, 1)
    return lax.scan(lambda c, p: (jnp.cumsum(c + p @ w, 1), p.sum(1)), carry, pixels)[1].sum(0)


def padded_and_cut(w: Array, x: Array, key: Array) -> Array:
    return sample_sums(jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)))[:, 1:, ::2, ::-1])


@jax.custom_vjp
def of_the_batch(x: Array) -> Array:
    """The identity, with the batch mean as its gradient."""
    return x


of_the_batch.defvjp(lambda x: (x, None), lambda _, g: (jnp.broadcast_to(g.mean(0), g.shape),))


@jax.custom_jvp
def centered(x: Array) -> Array:
    """The identity, with tangents minus their batch mean."""
    return x


centered.defjvp(lambda x, t: (x[0], t[0] - t[0].mean(0)))


@jax.custom_jvp
def steeper(x: Array) -> Array:
    """The identity, with doubled tangents."""
    return x


steeper.defjvp(lambda x, t: (x[0], 2 * t[0]))


@jax.custom_jvp
def shared_out(x: Array) -> Array:
    """The identity, with tangents divided by the batch size."""
    return x


shared_out.defjvp(lambda x, t: (x[0], t[0] / len(x[0])))


def series(w: Array, x: Array, key: Array) -> Array:
    """A power series, and special functions."""
    powers = jnp.polyval(jnp.arange(1.0, 4), x / 3) + jnp.exp2(x) + jnp.log2(1 + x**2) + jax.scipy.special.i0(x)
    powers += jax.scipy.special.ndtri(jax.nn.sigmoid(x)) + lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32) // 2, jnp.float32
    )
    return sample_sums(
        powers + jax.scipy.special.gammainc(1.5, x**2) - jax.vmap(jax.grad(jnp.tanh))(x.ravel()).reshape(x.shape)
    )


def token_of_its_own(w: Array, x: Array, key: Array) -> Array:
    """The class token of a transformer, equal for all samples, and parts of a head."""
    tokens = jnp.concatenate([jnp.tile(w[None, :1], (len(x), 1, 1)), x.reshape(len(x), 16, 4)], 1)
    q, k, v = jnp.unstack(jnp.stack([tokens @ w, tokens @ w.T, jnp.tile(tokens[..., :2], (1, 1, 2))], 2), axis=2)
    return sample_sums(jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v)


def labels_as_vectors(w: Array, x: Array, key: Array) -> Array:
    return (jax.nn.one_hot(x.reshape(len(x), -1).argmax(1), 64) * x.reshape(len(x), -1)).sum(1)


SQUARE = weights((4, 4))
TABLE = weights((64, 4))
ALONE: dict[str, tuple[Callable, Any]] = {
    "attention": with_module(Attention()),
    "convolutions": with_module(Convolutions()),
    "recurrent": with_module(Recurrent()),
    "dropout, not training": with_module(Dropped(), train=False),
    "table and labels": (table_and_labels, TABLE),
    "pixels as rows": (merged, SQUARE),
    "numbers of places": (lambda w, x, key: sample_sums(x + w), weights((1, *WIDE))),
    "numbers of channels": (
        lambda w, x, key: sample_sums(jnp.where(x > w, x * w, w / 2)),
        weights((1, 1, 1, WIDE[-1])),
    ),
    "branches and loops": (in_branches, SQUARE),
    "a loop over pixels": (pixels_in_turn, SQUARE),
    "one-hot labels": (labels_as_vectors, SQUARE),
    "sorted pixels": (lambda w, x, key: jnp.sort(x.reshape(len(x), -1))[:, :3].sum(1), SQUARE),
    "vmap": (lambda w, x, key: jax.vmap(lambda p: jnp.linalg.norm(p @ w))(x), SQUARE),
    "noise on the weights": (lambda w, x, key: sample_sums(x @ (w + jax.random.normal(key, w.shape))), SQUARE),
    "channels first": (lambda w, x, key: sample_sums(jnp.einsum("chwn,cd->dnhw", x.T, w).swapaxes(0, 1)), SQUARE),
    "series": (series, SQUARE),
    "a token of its own": (token_of_its_own, SQUARE),
    "frequencies": (lambda w, x, key: sample_sums(jnp.abs(jnp.fft.rfft2(x, axes=(2, 3)))), SQUARE),
    "a steeper derivative": (lambda w, x, key: sample_sums(jax.nn.relu(steeper(x @ w))), SQUARE),
    "padded and cut": (
        lambda w, x, key: sample_sums(jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)))[:, 1:, ::2, ::-1]),
        SQUARE,
    ),
}
TOGETHER: dict[str, tuple[Callable, Any]] = {
    "batch norm": with_module(BatchNormed()),
    "dropout": with_module(Dropped(), train=True),
    "similarities": (lambda w, x, key: (x.reshape(len(x), -1) @ x.reshape(len(x), -1).T).sum(1), SQUARE),
    "a softmax over samples": (lambda w, x, key: jax.nn.softmax(sample_sums(x), 0), SQUARE),
    "sorted samples": (lambda w, x, key: jnp.sort(sample_sums(x)), SQUARE),
    "the next sample": (lambda w, x, key: sample_sums(jnp.roll(x, 1, 0) * x), SQUARE),
    "reversed samples": (lambda w, x, key: sample_sums(x[::-1]), SQUARE),
    "sums so far": (lambda w, x, key: jnp.cumsum(sample_sums(x)), SQUARE),
    "places in the batch": (lambda w, x, key: sample_sums(x) * jnp.arange(len(x)), SQUARE),
    "noise on the samples": (lambda w, x, key: sample_sums(x + jax.random.normal(key, x.shape)), SQUARE),
    "samples among channels": (
        lambda w, x, key: sample_sums(jnp.tanh(x.transpose(1, 0, 2, 3).reshape(4, -1))[:, :B].T),
        SQUARE,
    ),
    "one after another": (lambda w, x, key: lax.scan(lambda c, p: (c + p.sum(), c), 0.0, x)[1], SQUARE),
    "a loop as long as a sample is large": (
        lambda w, x, key: lax.while_loop(lambda s: s.sum() < 100, lambda s: s + 1, sample_sums(x)),
        SQUARE,
    ),
    "the first sample": (lambda w, x, key: sample_sums(x) - x[0].sum(), SQUARE),
    "groups of samples": (lambda w, x, key: jnp.repeat(sample_sums(x).reshape(2, -1).mean(1), len(x) // 2), SQUARE),
    "rows from a table made of samples": (lambda w, x, key: sample_sums(x)[jnp.argsort(sample_sums(x))], SQUARE),
    "a gradient of its own": (lambda w, x, key: sample_sums(of_the_batch(x @ w)), SQUARE),
    "a derivative of its own": (lambda w, x, key: sample_sums(centered(x @ w)), SQUARE),
    "samples in a row": (lambda w, x, key: sample_sums(x * jnp.tile(jnp.unstack(x)[0], (len(x), 1, 1, 1))), SQUARE),
    "samples one after another": (lambda w, x, key: sample_sums(jnp.tile(x[:, 0, 0], (2, 1))[::2]), SQUARE),
    "frequencies over samples": (lambda w, x, key: sample_sums(jnp.abs(jnp.fft.fft(x, axis=0))), SQUARE),
    "one number for all": (lambda w, x, key: sample_sums(x).mean(), SQUARE),
    "no sample": (lambda w, x, key: jnp.ones(len(x)), SQUARE),
}


def function_and_weights(table: dict[str, tuple[Callable, Any]], name: str) -> tuple[Function, Any]:
    """The function and its weights; weights of modules are drawn here, not during collection."""
    function, w = table[name]
    return function, w() if callable(w) else w


OF_THE_NUMBER: dict[str, Callable] = {
    "weight decay over the batch": lambda w, x: sample_sums(x @ w) + 0.7 / (2 * len(x)) * (w**2).sum(),
    "a share of the data": lambda w, x: sample_sums(x @ w) + len(x) / 1000 * (w**2).sum(),
    "its root": lambda w, x: sample_sums(x @ w) / np.sqrt(len(x)),
    "a whole number": lambda w, x: sample_sums(x @ w) * len(x),
    "an array": lambda w, x: sample_sums(x @ w) * jnp.full(len(x), 1 / len(x)),
    "ones that are added up": lambda w, x: sample_sums(x @ w) / jnp.ones(len(x)).sum(),
    "a product of ones": lambda w, x: sample_sums(x @ w) / (jnp.ones(len(x)) @ jnp.ones(len(x))),
    "the largest place": lambda w, x: sample_sums(x @ w) / (1 + jnp.arange(len(x)).max()),
    "ones counted so far": lambda w, x: sample_sums(x @ w) * lax.cumsum(jnp.ones(len(x)), reverse=True)[0],
    "lax.reduce": lambda w, x: sample_sums(x @ w) / lax.reduce(jnp.ones(len(x)), 0.0, lambda a, b: a + b, (0,)),
    "a convolution of ones": lambda w, x: (
        sample_sums(x @ w) / jnp.convolve(jnp.ones(len(x)), jnp.ones(len(x)), "valid")
    ),
    "the lowest frequency": lambda w, x: sample_sums(x @ w) / jnp.fft.rfft(jnp.ones(len(x)))[0].real,
    "a power": lambda w, x: sample_sums(x @ w) ** len(x),
    "a threshold": lambda w, x: 2 * sample_sums(x @ w) if len(x) > 3 else sample_sums(x @ w),
    "another one": lambda w, x: 2 * sample_sums(x @ w) if len(x) > 20 else sample_sums(x @ w),
    "a loop over the batch size": lambda w, x: lax.fori_loop(0, len(x), lambda i, s: s + 0.1, sample_sums(x @ w)),
    "a derivative's": lambda w, x: sample_sums(shared_out(x @ w)),
    "even numbers alone": lambda w, x: sample_sums(x.reshape(2, len(x) // 2, *WIDE).reshape(x.shape) @ w),
}
SIZE_OF_PART = {"a threshold": 3, "even numbers alone": 3}
"""Sizes of parts for functions with which parts of 4 of 24 samples agree by chance."""


@pytest.mark.parametrize("name", OF_THE_NUMBER)
def test_functions_of_the_batch_size_are_not_split(name: str, limits: Callable[..., None]):
    def function(w: Any, x: Array, key: Array) -> Array:
        return OF_THE_NUMBER[name](w, x)

    def plain(w: Any, x: Array, key: Array) -> Array:
        return sample_sums(x @ w)

    size, rows, key = SIZE_OF_PART.get(name, 4), 24, jax.random.key(0)
    seen = analyze_per_example(plain, SQUARE, images(), key)
    assert seen is not None
    limits(microbatch_weight_ratio=0, microbatch_bytes=size * seen.bytes)
    cut = microbatch.plan_microbatches(plain, SQUARE, images(rows), key, 13)
    assert cut is not None and cut.rows == size
    assert microbatch.plan_microbatches(function, SQUARE, images(rows), key, 14 if "even" in name else 13) is None


@pytest.mark.slow(keep=7)
@pytest.mark.parametrize("name", ALONE)
def test_independent_samples_are_recognized(name: str):
    function, w = function_and_weights(ALONE, name)
    assert analyze_per_example(function, w, images(), jax.random.key(0)) is not None
    (x, key), compiled = (images(), jax.random.key(0)), jax.jit(function)
    np.testing.assert_allclose(compiled(w, x, key)[2:5], compiled(w, x[2:5], key), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", TOGETHER)
def test_dependent_samples_are_recognized(name: str):
    function, w = function_and_weights(TOGETHER, name)
    assert analyze_per_example(function, w, images(), jax.random.key(0)) is None


def test_outputs_of_products_are_counted():
    dense = analyze_per_example(lambda w, x, key: merged(w, x, key), SQUARE, images(), jax.random.key(0))
    assert dense is not None and (dense.bytes, dense.weights) == (4 * 16 * 4, SQUARE.nbytes)
    looped = analyze_per_example(pixels_in_turn, SQUARE, images(), jax.random.key(0))
    assert looped is not None and (looped.bytes, looped.weights) == (4 * 16 * 4, 16 * SQUARE.nbytes)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("rows", [5, 6, 7, 12])
@pytest.mark.parametrize("counted", [False, True])
def test_microbatches_sum_to_the_batch(rows: int, counted: bool, limits: Callable[..., None]):
    function, w = ALONE["pixels as rows"]
    limits(
        microbatch_weight_ratio=0,
        microbatch_bytes=3 * analyze_per_example(function, w, images(), jax.random.key(0)).bytes,
    )  # type: ignore[union-attr]
    cut = microbatch.plan_microbatches(function, w, images(rows), jax.random.key(0), 13)
    assert cut is not None and cut.rows == {5: 3, 6: 3, 7: 3, 12: 3}[rows]
    counts = jnp.arange(rows) != rows - 2 if counted else None

    def gradient(w: Any, x: Array, counts: Array | None) -> tuple[Array, Any]:
        total = lambda w: jnp.where(True if counts is None else counts, function(w, x, jax.random.key(0)), 0).sum()  # noqa: E731
        return jax.value_and_grad(total)(w)

    x = images(rows)
    whole, found = gradient(w, x, counts), microbatch.accumulate_gradients(gradient, cut, w, x, counts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), found, whole)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("batch_size", [8, "full"])
def test_run_with_microbatches_is_unchanged(batch_size: Any, limits: Callable[..., None]):
    """Clients of different sizes, incomplete batches, and full batches."""
    rng = np.random.default_rng(0)
    owner = np.repeat([0, 1, 2], [11, 16, 7])
    x, y = rng.normal(size=(len(owner), *WIDE)).astype(np.float32), rng.integers(0, 3, len(owner))
    federation = Federation.from_arrays(x, y, owner, test=(x, y), num_classes=3)

    def run() -> Any:
        task = classification(from_linen(Convolutions(), images(1)))
        local = LocalSGD(lr=0.1, epochs=2, batch_size=batch_size)
        return simulate(FedAvg(local=local), task, federation, rounds=2, cohort_size=2)

    whole = run()
    limits(microbatch_bytes=1 << 13, microbatch_weight_ratio=0)
    found = run()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), found.params, whole.params)
    assert "samples at a time" in found.plan and "at a time" not in whole.plan


def test_plan_debug_runs_the_original_operations(limits: Callable[..., None]):
    """Whole batches without rewritten operations, so that errors of passes are detected by comparison."""
    limits(microbatch_bytes=1 << 13, microbatch_weight_ratio=0)
    federation = Federation.from_arrays(np.asarray(images(8)), np.arange(8) % 3, np.zeros(8, int), num_classes=3)
    seen: list[int] = []

    def recorded(x: Array) -> Array:
        seen.append(len(x))
        return x

    network = Convolutions()
    model = Model(lambda key: network.init(key, images(1)), lambda v, x, key=None: network.apply(v, recorded(x)))

    def run(plan: Any) -> Any:
        return simulate(
            FedAvg(local=LocalSGD(lr=0.1, batch_size=8, steps=2)),
            classification(model),
            federation,
            rounds=1,
            cohort_size=1,
            plan=plan,
        )

    compiled = run("scan")
    assert "gradients of 2 samples at a time" in compiled.plan
    seen.clear()
    stepped = run("debug")
    assert "at a time" not in stepped.plan
    assert seen.count(8) >= 2  # every step; other plans trace once
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), compiled.params, stepped.params)
    with jax.disable_jit():
        assert optimize(sample_sums) is sample_sums


def reads_drawn(w: Any, batch: Any, key: Any) -> Any:
    """Each sample reads one of the numbers that are drawn for the batch."""
    x, y = batch
    noise, h = jax.random.normal(key, (len(x), 10)), x @ w
    return (h**2).sum(1) * jnp.exp(jnp.take_along_axis(noise, y[:, None], 1)[:, 0])


def test_functions_that_draw_for_the_batch_are_not_split(limits: Callable[..., None]):
    """Microbatches would draw again, with the same result in each."""
    key = jax.random.key(0)
    w, batch = jax.random.normal(key, (5, 7)), (jax.random.normal(key, (24, 5)), jnp.arange(24) % 10)
    assert analyze_per_example(reads_drawn, w, batch, key) is None
    limits(microbatch_weight_ratio=0, microbatch_bytes=4 * 28)
    cut = microbatch.plan_microbatches(reads_drawn, w, batch, key, 13)
    assert cut is None or cut.drawn is not None


@pytest.mark.parametrize("classes", [10, 17])
def test_models_with_few_and_many_outputs_are_split(classes: int, limits: Callable[..., None]):
    """The zoo's last layer has the same form for any number of samples."""
    limits(microbatch_weight_ratio=0, microbatch_bytes=1 << 13)
    task, key = classification(MLP().build((8,), classes)), jax.random.key(0)
    batch = Batch(jnp.ones((64, 8)), jnp.zeros(64, int))
    assert microbatch.plan_microbatches(task.loss, task.init(key), batch, key, 13) is not None
