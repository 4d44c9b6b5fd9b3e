"""Unusual programs, rewritten: constants in what is computed twice, callbacks, empty axes, rows of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from fedrax import classification
from fedrax.contract.task import Batch
from fedrax.models import MLP
from fedrax.xla import microbatch
from fedrax.xla.attention import block_attention
from fedrax.xla.cse import eliminate_common_subexpressions
from fedrax.xla.per_example import analyze_per_example
from fedrax.xla.pipeline import optimize

MASK = jnp.tril(jnp.ones((8, 8)))


@pytest.mark.parametrize("change", [optimize, lambda f: optimize(jax.grad(f))], ids=["value", "gradient"])
def test_arrays_of_functions_inside_what_is_computed_twice(change: Any):
    attend = jax.jit(lambda w, x: jax.nn.softmax((x @ w) * MASK))
    f = lambda w, x: (jax.checkpoint(attend)(w, x) ** 2).sum()  # noqa: E731
    w, x = (jax.random.normal(jax.random.key(k), (8, 8)) for k in range(2))
    plain = jax.grad(f) if change is not optimize else f
    np.testing.assert_allclose(jax.jit(change(f))(w, x), plain(w, x), rtol=1e-5)
    closed = jax.make_jaxpr(f)(w, x)
    np.testing.assert_allclose(core.jaxpr_as_fun(block_attention(closed))(w, x)[0], f(w, x), rtol=1e-5)


def test_arrays_of_functions_do_not_keep_a_checkpoint_from_being_rewritten():
    attend = jax.jit(lambda w, x: jnp.sin(jnp.tile(x @ w, (64, 1)) * jnp.tile(MASK, (64, 1))))
    f = lambda w, x: (jax.checkpoint(attend)(w, x) ** 2).sum()  # noqa: E731
    w, x = (jax.random.normal(jax.random.key(k), (8, 8)) for k in range(2))
    found = jax.make_jaxpr(optimize(f))(w, x)
    assert "cond" in str(found) and "cond" not in str(jax.make_jaxpr(f)(w, x))
    np.testing.assert_allclose(core.jaxpr_as_fun(found)(w, x)[0], f(w, x), rtol=1e-5)


def test_attention_in_blocks_beside_arrays_of_functions_in_a_checkpoint():
    mask = jnp.tril(jnp.ones((1300, 1300)))
    attend = jax.jit(lambda q, k: (jax.nn.softmax((q @ k.T) * mask) @ k).sum())
    f = lambda q, k: jax.checkpoint(attend)(q, k)  # noqa: E731
    q, k = (jax.random.normal(jax.random.key(k), (1300, 8)) for k in range(2))
    closed = block_attention(jax.make_jaxpr(f)(q, k))
    np.testing.assert_allclose(jax.jit(core.jaxpr_as_fun(closed))(q, k)[0], f(q, k), rtol=1e-5)


def test_callbacks_are_like_no_other():
    def made(factor: float) -> Any:
        call = lambda v: np.float32(factor * v)  # noqa: E731
        return jax.checkpoint(lambda x: jax.pure_callback(call, jax.ShapeDtypeStruct((), jnp.float32), x))

    one, other = made(2.0), made(3.0)
    closed = jax.make_jaxpr(lambda x: (one(x), other(x)))(1.0)
    assert [float(v) for v in core.jaxpr_as_fun(eliminate_common_subexpressions(closed))(jnp.float32(1))] == [2, 3]


def test_the_largest_of_nothing():
    f = lambda x: jnp.max(x, axis=1, initial=0.0)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(optimize(f))(jnp.zeros((1, 0))), [0])


def losses(w: Any, batch: Any, key: Any) -> Any:
    """Each sample reads a number of its own among those that are drawn for the batch."""
    x, y = batch
    noise, h = jax.random.normal(key, (len(x), 10)), x @ w
    return (h**2).sum(1) * jnp.exp(jnp.take_along_axis(noise, y[:, None], 1)[:, 0])


def test_numbers_drawn_for_the_batch_that_each_sample_reads(limits: Callable[..., None]):
    """In pieces they would be drawn anew, and be the same in each."""
    key = jax.random.key(0)
    w, batch = jax.random.normal(key, (5, 7)), (jax.random.normal(key, (24, 5)), jnp.arange(24) % 10)
    assert analyze_per_example(losses, w, batch, key) is None
    limits(microbatch_weight_ratio=0, microbatch_bytes=4 * 28)
    cut = microbatch.plan_microbatches(losses, w, batch, key, 13)
    assert cut is None or cut.drawn is not None


@pytest.mark.parametrize("classes", [10, 17])
def test_models_of_few_and_of_many_outputs_are_cut(classes: int, limits: Callable[..., None]):
    """The zoo's last layer is one program, whatever the number of samples."""
    limits(microbatch_weight_ratio=0, microbatch_bytes=1 << 13)
    task, key = classification(MLP().build((8,), classes)), jax.random.key(0)
    batch = Batch(jnp.ones((64, 8)), jnp.zeros(64, int))
    assert microbatch.plan_microbatches(task.loss, task.init(key), batch, key, 13) is not None
