"""Random draws per sample are hoisted out of microbatches, with equal results."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import Array

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
from fedrax.models import Model, from_equinox, from_linen, from_nnx
from fedrax.xla import microbatch
from fedrax.xla.hoist_rng import hoist_random_draws
from fedrax.xla.per_example import analyze_per_example

KEY = jax.random.key(3)
Losses = Callable[[Any, Array, Array], Array]


def normal(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


SQUARE, ROWS = normal(1, 4, 4), 13


def images(rows: int = ROWS) -> Array:
    return normal(0, rows, 3, 5, 4)


def sample_sums(x: Array) -> Array:
    return (x.reshape(len(x), -1) ** 2).sum(1)


def dropped(x: Array, key: Array, *shape: int) -> Array:
    return jnp.where(jax.random.bernoulli(key, 0.7, shape or x.shape), x / 0.7, 0)


def own_keys(w: Array, x: Array, key: Array) -> Array:
    return sample_sums(jax.vmap(lambda p, k: dropped(p @ w, k))(x, jax.random.split(key, len(x))))


def two_layers(w: Array, x: Array, key: Array) -> Array:
    for k in jax.random.split(key):
        x = jnp.tanh(dropped(x @ w, k))
    return sample_sums(x)


def some_for_all(w: Array, x: Array, key: Array) -> Array:
    return sample_sums(
        dropped(dropped(x, key, 3, 5, 4), jax.random.fold_in(key, 1)) @ (w + jax.random.normal(key, (4, 4)))
    )


def truth_as_numbers(w: Array, x: Array, key: Array) -> Array:
    return sample_sums(x @ w * jax.random.bernoulli(key, 0.5, x.shape).astype(jnp.float32))


def centered(w: Array, x: Array, key: Array) -> Array:
    noise = jax.random.uniform(key, x.shape)
    return sample_sums(x @ w + noise - noise.mean(0))


DRAWING: dict[str, Losses] = {
    "dropout": lambda w, x, key: sample_sums(dropped(x @ w, key)),
    "whole channels": lambda w, x, key: sample_sums(dropped(x @ w, key, len(x), 1, 1, 4)),
    "noise": lambda w, x, key: sample_sums(x @ w + jax.random.normal(key, x.shape)),
    "samples left out": lambda w, x, key: jnp.where(jax.random.bernoulli(key, 0.5, (len(x),)), sample_sums(x @ w), 0),
    "a key for each sample": own_keys,
    "two layers": two_layers,
    "some the same for all": some_for_all,
    "truth as numbers": truth_as_numbers,
    "noise without its mean": centered,
}
WHOLE: dict[str, Losses] = {
    "rows of all samples": lambda w, x, key: sample_sums(dropped(x.reshape(-1, 4), key).reshape(x.shape)),
    "in a remembered block": lambda w, x, key: sample_sums(jax.checkpoint(dropped)(x @ w, key)),
    "other samples": lambda w, x, key: sample_sums(x + x[jax.random.permutation(key, len(x))]),
    "the batch's mean": lambda w, x, key: sample_sums(dropped(x - x.mean(0), key)),
    "nothing for a sample": lambda w, x, key: jnp.cumsum(sample_sums(x)) * jax.random.normal(key),
}


class Linen(nn.Module):
    """Dropout of a dense layer and of attention in Flax."""

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        x = x.reshape(len(x), 15, 4)
        attend = nn.MultiHeadDotProductAttention(2, dropout_rate=0.2, broadcast_dropout=False, deterministic=not train)
        x = nn.Dropout(0.3, deterministic=not train)(nn.Dense(6)(attend(x, x)))
        return nn.Dense(3)(nn.Dropout(0.5, broadcast_dims=(1,), deterministic=not train)(nn.relu(x)).mean(1))


class Equinox(eqx.Module):
    """Called with one sample and its key."""

    dense: eqx.nn.Linear
    last: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key: Array):
        first, second = jax.random.split(key)
        self.dense, self.last = eqx.nn.Linear(60, 8, key=first), eqx.nn.Linear(8, 3, key=second)
        self.dropout = eqx.nn.Dropout(0.4)

    def __call__(self, x: Array, key: Array | None = None) -> Array:
        x = self.dropout(jax.nn.gelu(self.dense(x.reshape(-1))), key=key, inference=key is None)
        return self.last(x)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense, self.last = nnx.Linear(60, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.last(self.dropout(nnx.relu(self.dense(x.reshape(len(x), -1)))))


MODELS: dict[str, Callable[[], Model]] = {
    "Flax Linen": lambda: from_linen(Linen(), images(1)),
    "Equinox": lambda: from_equinox(Equinox),
    "Flax NNX": lambda: from_nnx(Nnx),
}


def assert_parts_agree(losses: Losses, rows: int, size: int) -> None:
    """Assert that losses and gradient of ``rows`` samples equal those of parts of ``size`` with split draws."""
    drawn = hoist_random_draws(losses, SQUARE, images(), KEY)
    assert drawn is not None
    x, (arrays, others) = images(rows), drawn.draws(SQUARE, images(rows), KEY)
    assert all(len(array) == rows for array in arrays)
    assert all(drawn.fits(SQUARE, images(n), KEY) for n in (rows, size))
    parts = [(first, first + size) for first in range(0, rows, size)]

    def of_parts(w: Any) -> Array:
        return jnp.concatenate([drawn.losses(w, (x[i:j], [a[i:j] for a in arrays]), others) for i, j in parts])

    whole = lambda w: losses(w, x, KEY)  # noqa: E731
    np.testing.assert_allclose(of_parts(SQUARE), whole(SQUARE), rtol=2e-6, atol=1e-6)
    gradients = [jax.grad(lambda w, f=f: f(w).sum())(SQUARE) for f in (of_parts, whole)]
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("rows", "size"), [(12, 4), (6, 1), (26, 13)])
@pytest.mark.parametrize("name", DRAWING)
def test_draws_are_split_with_the_samples(name: str, rows: int, size: int):
    assert_parts_agree(DRAWING[name], rows, size)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", DRAWING)
def test_remaining_function_is_independent_by_sample(name: str):
    assert analyze_per_example(DRAWING[name], SQUARE, images(), KEY) is None
    seen, drawn = microbatch._cached_analysis(DRAWING[name], SQUARE, images(), KEY)
    assert seen is not None and drawn is not None


@pytest.mark.parametrize("name", WHOLE)
def test_other_functions_are_not_split(name: str):
    assert microbatch._cached_analysis(WHOLE[name], SQUARE, images(), KEY)[0] is None


def test_masks_are_stored_as_booleans():
    drawn = hoist_random_draws(lambda w, x, key: sample_sums(dropped(x, key, len(x), 1, 1, 4)), SQUARE, images(), KEY)
    ((mask,), _) = drawn.draws(SQUARE, images(), KEY)  # type: ignore[union-attr]
    assert (mask.shape, mask.dtype) == ((ROWS, 1, 1, 4), bool)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("batch_size", [8, "full"])
@pytest.mark.parametrize("library", MODELS)
def test_run_with_microbatches_has_the_same_draws(library: str, batch_size: Any, limits: Callable[..., None]):
    """Clients of different sizes, incomplete batches, and full batches."""
    owner = np.repeat([0, 1, 2], [11, 16, 7])
    x, y = np.asarray(images(34)), np.random.default_rng(0).integers(0, 3, 34)
    federation = Federation.from_arrays(x, y, owner, test=(x, y), num_classes=3)

    def run() -> Any:
        local = LocalSGD(lr=0.1, epochs=2, batch_size=batch_size)
        task = classification(MODELS[library]())
        return simulate(FedAvg(local=local), task, federation, rounds=2, cohort_size=2, progress=False)

    whole = run()
    limits(microbatch_bytes=1 << 7, microbatch_weight_ratio=0)
    found = run()
    assert "at a time" in found.plan and "at a time" not in whole.plan
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found.params, whole.params)
