"""Blockwise attention: equal results without a large intermediate array."""

from collections.abc import Callable
from typing import Any

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.extend import core

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
from fedrax.models import from_equinox, from_linen
from fedrax.xla.attention import block_attention, has_blockwise_attention
from fedrax.xla.pipeline import optimize, optimize_forward

B, T, H, D = 3, 12, 2, 4


@pytest.fixture(autouse=True)
def small(limits: Callable[..., None]) -> None:
    """Limits for the small arrays of a test."""
    limits(
        attention_bytes=1000,
        attention_block_bytes=300,
        attention_block_rows=4,
        attention_growth=1,
        attention_batched_growth=1,
    )


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def is_blockwise(function: Any, *args: Any) -> bool:
    return has_blockwise_attention(jax.make_jaxpr(optimize_forward(function))(*args))


def assert_agrees(function: Any, *args: Any, rtol: float = 2e-5, twice: bool = False) -> None:
    """Assert equal values, gradients and optionally second derivatives."""
    real = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))
    loss = lambda f: lambda *args: jnp.sum(jnp.tanh(f(*args)))  # noqa: E731
    second = lambda f: jax.grad(lambda *args: sum(jnp.sum(g**2) for g in jax.grad(loss(f), real)(*args)), real)  # noqa: E731
    first = lambda f: lambda *args: (f(*args), jax.grad(loss(f), real)(*args))  # noqa: E731
    for made in (first, second) if twice else (first,):
        expected = jax.jit(made(function))(*args)
        found = jax.jit(optimize(made(optimize_forward(function))))(*args)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max() + 1e-3))


def attention(change: Any = lambda a: a, softmax: Any = jax.nn.softmax, of: Any = lambda a: a) -> Any:
    def function(q: Array, k: Array, v: Array, *others: Array) -> Array:
        scores = change(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, *others)
        return jnp.einsum("bhqk,bkhd->bqhd", of(softmax(scores)), v)

    return function


def scores(q: Array, k: Array) -> Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def with_maps(q: Array, k: Array, v: Array) -> Array:
    """Attention that returns its weights."""
    weights = jax.nn.softmax(scores(q, k))
    return jnp.append(jnp.einsum("bhqk,bkhd->bqhd", weights, v), weights[0, 0, 0])


def manual_softmax(a: Array) -> Array:
    e = jnp.exp(a - lax.stop_gradient(a.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


@jax.custom_jvp
def capped(a: Array) -> Array:
    return jnp.clip(a, -1, 1)


@capped.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    return capped(*primals), 0.5 * tangents[0]


KEEP = np.random.default_rng(1).random((B, H, T, T)) < 0.8
WAYS: dict[str, tuple] = {
    "plain": (attention(),),
    "by hand": (attention(softmax=manual_softmax),),
    "sigmoid": (attention(softmax=jax.nn.sigmoid),),
    "causal": (attention(lambda a: jnp.where(jnp.tril(jnp.ones((T, T), bool)), a, -1e9)),),
    "mask of samples": (attention(lambda a, m: jnp.where(m, a, -1e9)), jnp.asarray(KEEP[:, :1, :1])),
    "mask of pairs": (attention(lambda a, m: jnp.where(m, a, -jnp.inf)), jnp.asarray(KEEP[:, :1]).at[..., 0].set(True)),
    "two masks": (
        attention(lambda a, m: jnp.where(jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), a.shape) & m, a, -1e9)),
        jnp.asarray(KEEP[:1, :1]),
    ),
    "a mask made of two": (
        attention(
            lambda a: jnp.where(jnp.broadcast_to(jnp.arange(T) < 9, a.shape) ^ jnp.zeros(a.shape, bool), a, -1e9)
        ),
    ),
    "bias of heads": (attention(lambda a, b: a + b), normal(7, H, T, T)),
    "bias of distances": (attention(lambda a: a - jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)) * 0.1),),
    "bias of rows": (attention(lambda a, b: a * b[:, None]), normal(8, T)),
    "capped": (attention(lambda a: 5 * jnp.tanh(a / 5)),),
    "dropped": (attention(of=lambda a: jnp.where(KEEP, a / 0.8, 0)),),
    "half": (attention(of=lambda a: a.astype(jnp.float16).astype(jnp.float32)),),
    "reshaped": (attention(lambda a: (a.reshape(B * H, T, T) + 1).reshape(B, H, T, T)),),
    "less its mean": (attention(lambda a: a - a.mean(-1, keepdims=True)),),
    "scaled by the key": (attention(lambda a, s: a * s), normal(9, T)),
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("way", WAYS)
def test_implementations_of_attention_are_recognized(way: str):
    function, *others = WAYS[way]
    args = (*(normal(i, B, T, H, D) for i in range(3)), *others)
    assert is_blockwise(function, *args)
    assert_agrees(function, *args, rtol=2e-3 if way == "half" else 2e-5, twice=way == "plain")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("shape", [(1, 17, 1, 4), (1, 16, 3, 4), (2, 7, 5, 3), (5, 31, 1, 2), (4, 19, 4, 9)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_number_of_samples_positions_and_heads(shape: tuple, dtype: Any):
    with jax.enable_x64(dtype is np.float64):
        args = [normal(i, *shape, dtype=dtype) for i in range(3)]
        assert is_blockwise(attention(), *args)
        assert_agrees(attention(), *args, rtol=2e-5 if dtype is np.float32 else 1e-12)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("spec", ["qd,kd->qk qk,kd->qd", "dq,dk->kq kq,dk->dq", "hqd,hkd->qhk qhk,hkd->hdq"])
def test_any_order_of_axes(spec: str):
    sizes = {"q": 20, "k": 18, "h": 3, "d": 2}
    of = lambda i, axes: normal(i, *(sizes[a] for a in axes))  # noqa: E731
    first, second = spec.split()
    q, k, v = [*first.split("->")[0].split(","), second.split("->")[0].split(",")[1]]
    function = lambda a, b, c: jnp.einsum(second, jax.nn.softmax(jnp.einsum(first, a, b)), c)  # noqa: E731
    args = of(0, q), of(1, k), of(2, v)
    assert_agrees(function, *args)
    assert is_blockwise(function, *args) == (first != "dq,dk->kq")  # scores whose softmax is over the rows


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda q, k, v: attention()(q, k, v) + attention(of=lambda a: a**2)(q, k, v), id="twice"),
        pytest.param(lambda q, k, v: attention()(attention()(q, k, v), k, v), id="one after another"),
        pytest.param(jax.vmap(lambda q, k, v: attention()(q[None], k[None], v[None])[0]), id="each sample"),
        pytest.param(jax.checkpoint(attention()), id="made once more"),
        pytest.param(lambda q, k, v: lax.scan(lambda c, _: (attention()(c, k, v), None), q, length=3)[0], id="loop"),
    ],
)
def test_attention_inside_other_functions(function: Any):
    args = [normal(i, B, T, H, D) for i in range(3)]
    assert is_blockwise(function, *args)
    assert_agrees(function, *args)


@jax.custom_vjp
def reversing(a: Array) -> Array:
    return a


reversing.defvjp(lambda a: (a, None), lambda _, g: (-g,))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("function", "cut"),
    [
        pytest.param(lambda q, k, v: attention()(q, q, q), True, id="of one array with itself"),
        pytest.param(with_maps, False, id="read elsewhere"),
        pytest.param(attention(lambda a: jnp.sort(a.reshape(-1)).reshape(a.shape)), False, id="all numbers meet"),
        pytest.param(attention(lambda a: jnp.cumsum(a, 2)), False, id="rows meet"),
        pytest.param(attention(capped), False, id="own derivative"),
        pytest.param(attention(reversing), False, id="own backward pass"),
        pytest.param(lambda q, k, v: scores(q, k), False, id="wanted itself"),
        pytest.param(attention(lambda a: a - a.mean(2, keepdims=True)), True, id="rows meet, samples do not"),
    ],
)
def test_functions_that_mix_positions(function: Any, cut: bool):
    args = [normal(i, B, T, H, D) for i in range(3)]
    assert is_blockwise(function, *args) == cut
    assert_agrees(function, *args)


def temporary_bytes(function: Any, *args: Array) -> int:
    """Temporary memory of the program of a gradient."""
    return jax.jit(jax.grad(function, (0, 1, 2))).lower(*args).compile().memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("causal", [True, False])
def test_memory_is_not_quadratic_in_the_positions(causal: bool, limits: Callable[..., None]):
    limits(attention_block_bytes=1 << 18)
    args = [normal(i, 2, 1024, 2, 8) for i in range(3)]
    change = lambda a: jnp.where(jnp.tril(jnp.ones(a.shape[2:], bool)), a, -1e9) if causal else a  # noqa: E731
    loss = lambda *args: jnp.sum(attention(change)(*args) ** 2)  # noqa: E731
    assert temporary_bytes(optimize_forward(loss), *args) < 5 << 20 < 32 << 20 < temporary_bytes(loss, *args)


def networks() -> dict[str, Any]:
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x: Array, train: bool = False) -> Array:
            x = nn.Dense(8)(x) + self.param("places", nn.initializers.normal(), (1, 30, 8))
            for _ in range(2):
                x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            return nn.Dense(3)(x.mean(1))

    class Equinox(equinox.Module):
        first: equinox.nn.Linear
        attention: equinox.nn.MultiheadAttention
        last: equinox.nn.Linear

        def __init__(self, key: Array):
            self.first = equinox.nn.Linear(4, 8, key=key)
            self.attention = equinox.nn.MultiheadAttention(2, 8, key=key)
            self.last = equinox.nn.Linear(8, 3, key=key)

        def __call__(self, x: Array) -> Array:
            x = jax.vmap(self.first)(x)
            return self.last(self.attention(x, x, x).mean(0))

    return {"linen": from_linen(Linen(), jnp.zeros((1, 30, 4))), "equinox": from_equinox(Equinox)}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["equinox", "linen"])
def test_networks_of_other_libraries(name: str):
    x, y = np.asarray(normal(0, 24, 30, 4)), np.arange(24) % 3
    federation = Federation.from_arrays(x, y, offsets=np.arange(0, 25, 8), test=(x, y))
    run = lambda **options: simulate(  # noqa: E731
        FedAvg(local=LocalSGD(lr=0.1, batch_size=4)),
        classification(networks()[name]),
        federation,
        rounds=2,
        cohort_size=2,
        progress=False,
        **options,
    )
    found = {plan: run(plan=plan) for plan in ("scan", "vmap", "debug")}
    assert ", attention in blocks of rows" in str(found["scan"].plan)
    assert "blocks" not in str(found["debug"].plan)
    for plan in ("vmap", "debug"):
        for a, b in zip(jax.tree.leaves(found["scan"].params), jax.tree.leaves(found[plan].params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


MASK = jnp.tril(jnp.ones((8, 8)))


@pytest.mark.parametrize("change", [optimize, lambda f: optimize(jax.grad(f))], ids=["value", "gradient"])
def test_constants_of_functions_inside_checkpoints(change: Any):
    attend = jax.jit(lambda w, x: jax.nn.softmax((x @ w) * MASK))
    f = lambda w, x: (jax.checkpoint(attend)(w, x) ** 2).sum()  # noqa: E731
    w, x = (jax.random.normal(jax.random.key(k), (8, 8)) for k in range(2))
    plain = jax.grad(f) if change is not optimize else f
    np.testing.assert_allclose(jax.jit(change(f))(w, x), plain(w, x), rtol=1e-5)
    closed = jax.make_jaxpr(f)(w, x)
    np.testing.assert_allclose(core.jaxpr_as_fun(block_attention(closed))(w, x)[0], f(w, x), rtol=1e-5)


def test_blockwise_attention_beside_constants_in_a_checkpoint():
    mask = jnp.tril(jnp.ones((48, 48)))
    attend = jax.jit(lambda q, k: (jax.nn.softmax((q @ k.T) * mask) @ k).sum())
    f = lambda q, k: jax.checkpoint(attend)(q, k)  # noqa: E731
    q, k = (jax.random.normal(jax.random.key(k), (48, 8)) for k in range(2))
    closed = block_attention(jax.make_jaxpr(f)(q, k))
    np.testing.assert_allclose(jax.jit(core.jaxpr_as_fun(closed))(q, k)[0], f(q, k), rtol=1e-5)
