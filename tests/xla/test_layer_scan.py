"""Repeated layers in a scan: which ones are found, and unchanged values and gradients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import Array

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
from fedrax.models import from_equinox, from_linen
from fedrax.xla.layer_scan import scanned_layers
from fedrax.xla.pipeline import optimize_forward

Network = Callable[[Any, Array], Array]


@pytest.fixture(autouse=True)
def small_limits(limits: Callable[..., None]) -> None:
    """Rewrite networks with few layers."""
    limits(layer_scan_equations=10)


def normal(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 2, float)


def norm(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 0.1)


def weights(count: int = 6, size: int = 5) -> list[dict[str, Array]]:
    return [{"w": normal(2 * i, size, size), "b": normal(2 * i + 1, size)} for i in range(count)]


def block(layer: dict[str, Array], x: Array) -> Array:
    return x + jnp.tanh(norm(x) @ layer["w"] + layer["b"])


def chain(params: Any, x: Array) -> Array:
    for layer in params:
        x = block(layer, x)
    return x


def shared(params: Any, x: Array) -> Array:
    for _ in range(5):
        x = block(params[0], x)
    return x


def with_constants(params: Any, x: Array) -> Array:
    """Each layer has a different constant, such as a drop rate that depends on the depth."""
    for i, layer in enumerate(params):
        x = x + (0.5 + i) * jnp.tanh(norm(x) @ layer["w"] + layer["b"])
    return x


def with_skip_connections(params: Any, x: Array) -> Array:
    """Outputs of all layers are read after the last one."""
    every = []
    for layer in params:
        x = block(layer, x)
        every.append(x)
    return x * sum(every[1:-1])


def reversible(params: Any, x: Array) -> Array:
    """A reversible network with two streams."""
    y = 2 * x
    for layer in params:
        x = x + jnp.sin(norm(y) @ layer["w"] + layer["b"])
        y = y + jnp.cos(norm(x) @ layer["w"])
    return x + y


def with_shared_input(params: Any, x: Array) -> Array:
    """All layers read one array that is computed before them."""
    seen = jnp.exp(x)
    for layer in params:
        x = x + jnp.tanh((norm(x) * seen) @ layer["w"] + layer["b"])
    return x


def rectified(params: Any, x: Array) -> Array:
    for layer in params:
        x = x + jax.nn.gelu(jax.nn.relu(norm(x) @ layer["w"] + layer["b"]))
    return x


def recomputed(params: Any, x: Array) -> Array:
    for layer in params:
        x = jax.checkpoint(lambda p, x: block(p, jax.nn.relu(x)))(layer, x)
    return x


def recurrent(params: Any, x: Array) -> Array:
    for layer in params:
        x, _ = jax.lax.scan(lambda h, _, p=layer: (block(p, h), None), x, length=3)
    return x


@jax.jit
def fourier_mixing(x: Array) -> Array:
    """FNet's replacement of attention."""
    return jnp.fft.fft(x).real


def with_fourier_transforms(params: Any, x: Array) -> Array:
    for layer in params:
        x = block(layer, fourier_mixing(x) + jnp.fft.irfft(jnp.fft.rfft(x) * (1 + 0.5j), x.shape[-1]))
    return x


def with_dropout(params: Any, x: Array) -> Array:
    for key, layer in zip(jax.random.split(jax.random.key(7), len(params)), params, strict=True):
        x = block(layer, jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, 0))
    return x


def with_key_chain(params: Any, x: Array) -> Array:
    key = jax.random.key(7)
    for i, layer in enumerate(params):
        key = jax.random.fold_in(key, i)
        x = block(layer, x + jax.random.uniform(key, x.shape))
    return x * jax.random.normal(key)


def stacked_by_hand(params: Any, x: Array) -> Array:
    """Weights of all layers are slices of one array."""
    all_of_them = jax.tree.map(lambda *a: jnp.stack(a), *params)
    for i in range(len(params)):
        x = block(jax.tree.map(lambda a, i=i: a[i], all_of_them), x)
    return x


def two_scans(params: Any, x: Array) -> Array:
    """Two scans with other operations between."""
    x = chain(params[:3], x).reshape(-1, 1)
    for layer in params[3:]:
        x = x * layer["b"].sum() + jnp.sin(norm(x.reshape(-1, 5)) @ layer["w"]).reshape(-1, 1)
    return x


REPEATED: list[tuple[Network, list[int]]] = [
    (chain, [6]),
    (shared, [5]),
    (with_constants, [6]),
    (with_skip_connections, [6]),
    (reversible, [6]),
    (with_shared_input, [6]),
    (rectified, [6]),
    (recomputed, [6]),
    (recurrent, [6]),
    (with_fourier_transforms, [6]),
    (with_dropout, [6]),
    (with_key_chain, [6]),
    (stacked_by_hand, [6]),
    (two_scans, [3, 3]),
]


def gradient(network: Network) -> Callable:
    return jax.value_and_grad(lambda params, x: (optimize_forward(network)(params, x) ** 2).sum(), argnums=(0, 1))


def plain(network: Network) -> Callable:
    return jax.value_and_grad(lambda params, x: (network(params, x) ** 2).sum(), argnums=(0, 1))


def assert_close(a: Any, b: Any, digits: float) -> None:
    for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        u, v = np.asarray(u), np.asarray(v)
        assert u.dtype == v.dtype
        np.testing.assert_allclose(u, v, rtol=digits, atol=digits * np.abs(v).max(initial=1e-30))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("network", "scan_lengths"), REPEATED, ids=lambda value: getattr(value, "__name__", ""))
def test_values_and_gradients_are_unchanged(network: Network, scan_lengths: list[int]) -> None:
    args = weights(), normal(100, 4, 5)
    traced = jax.make_jaxpr(gradient(network))(*args)
    assert scanned_layers(traced) == scan_lengths
    assert_close(jax.jit(gradient(network))(*args), jax.jit(plain(network))(*args), 2e-5)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("network", [chain, with_skip_connections, rectified], ids=lambda network: network.__name__)
def test_float64_vmap_loops_and_second_derivatives(network: Network) -> None:
    with jax.enable_x64(True):
        params, xs = jax.tree.map(lambda a: a.astype(np.float64), (weights(), normal(100, 3, 4, 5)))
        both = [jax.jit(jax.vmap(of(network), (None, 0)))(params, xs) for of in (gradient, plain)]
        assert_close(*both, 1e-12)
        looped = [
            jax.jit(lambda xs, of=of: jax.lax.map(lambda x: of(network)(params, x), xs))(xs) for of in (gradient, plain)
        ]
        assert_close(*looped, 1e-12)
        one = lambda of: lambda x: of(network)(params, x)[1][1].sum()  # noqa: E731
        assert_close(*(jax.jit(jax.grad(one(of)))(xs[0]) for of in (gradient, plain)), 1e-10)


@jax.custom_jvp
def straight(x: Array) -> Array:
    return jnp.sign(x)


straight.defjvp(lambda primals, tangents: (jnp.sign(primals[0]), tangents[0]))


@jax.custom_jvp
def halved(x: Array) -> Array:
    return jnp.sign(x)


halved.defjvp(lambda primals, tangents: (jnp.sign(primals[0]), tangents[0] / 2))


@jax.custom_vjp
def clipped(x: Array) -> Array:
    return x + 0


clipped.defvjp(lambda x: (x + 0, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_vjp
def reversed_back(x: Array) -> Array:
    return x + 0


reversed_back.defvjp(lambda x: (x + 0, None), lambda _, g: (-g,))


def straight_through_helper(share: float) -> Callable:
    """A function of JAX with a custom derivative, as in straight-through estimators."""
    function = jax.custom_jvp(jnp.sign)
    function.defjvps(lambda tangent, _, x: share * tangent)
    return function


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("one", "other"),
    [(straight, halved), (clipped, reversed_back), (straight_through_helper(1.0), straight_through_helper(0.5))],
)
def test_layers_with_different_derivatives_are_not_merged(one: Callable, other: Callable) -> None:
    def network(kinds: list[Callable]) -> Network:
        def made(params: Any, x: Array) -> Array:
            for kind, layer in zip(kinds, params, strict=True):
                x = x + jnp.sin(kind(norm(x) @ layer["w"] + layer["b"]))
            return x

        return made

    args, same, fourier_mixing = (weights(), normal(100, 4, 5)), network([one] * 6), network([one] * 3 + [other] * 3)
    assert scanned_layers(jax.make_jaxpr(gradient(same))(*args)) == [6]
    assert scanned_layers(jax.make_jaxpr(gradient(fourier_mixing))(*args)) == [3, 3]
    for made in (same, fourier_mixing):
        assert_close(jax.jit(gradient(made))(*args), jax.jit(plain(made))(*args), 2e-5)


def unlike_shapes(params: Any, x: Array) -> Array:
    for i, layer in enumerate(params):
        x = jnp.concatenate([x, norm(x[:, -5:]) @ layer["w"]], axis=1) if i % 2 else jnp.sin(x)
    return x


def read_two_before(params: Any, x: Array) -> Array:
    before = x
    for layer in params:
        before, x = x, jnp.tanh(norm(before) @ layer["w"] + layer["b"]) + 1
    return x


def holding_arrays(params: Any, x: Array) -> Array:
    for i, layer in enumerate(params):
        table = np.arange(5.0) + i  # of which the text of a function inside shows nothing
        x = jax.lax.cond(x.sum() > 0, lambda x, t=table: x + jnp.asarray(t, x.dtype), lambda x: x, block(layer, x))
    return x


def giving_a_key(params: Any, x: Array) -> Array:
    """The key of the last layer is used after it, and none is passed on."""
    for i, layer in enumerate(params):
        key = jax.random.fold_in(jax.random.key(7), i)
        x = block(layer, x + jax.random.uniform(key, x.shape))
    return x * jax.random.normal(key)


NOT_REPEATED = [unlike_shapes, read_two_before, holding_arrays, giving_a_key]


@pytest.mark.parametrize("network", NOT_REPEATED, ids=lambda network: network.__name__)
def test_other_networks_are_unchanged(network: Network) -> None:
    args = weights(), normal(100, 4, 5)
    assert_close(jax.jit(gradient(network))(*args), jax.jit(plain(network))(*args), 2e-5)


def test_effects_keep_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    def network(params: Any, x: Array) -> Array:
        for i, layer in enumerate(params):
            x = block(layer, x)
            jax.debug.print("layer " + str(i))
        return x

    jax.block_until_ready(jax.jit(optimize_forward(network))(weights(), normal(100, 4, 5)))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()) == sorted(f"layer {i}".split()[j] for i in range(6) for j in (0, 1))


def test_large_and_short_networks_are_unchanged(limits: Callable[..., None]) -> None:
    args = weights(), normal(100, 4, 5)
    found = lambda: scanned_layers(jax.make_jaxpr(gradient(chain))(*args))  # noqa: E731
    limits(layer_scan_bytes=2000)
    assert not found()
    limits(layer_scan_bytes=64 << 20, layer_scan_equations=250)
    assert not found()


class Residual(nn.Module):
    """Two stages of blocks with group norm."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (4, 8):
            x = nn.Conv(width, (3, 3), strides=(2, 2))(x)
            for _ in range(3):
                y = nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(width, (3, 3))(x)))
                x = nn.relu(x + nn.GroupNorm(num_groups=2)(nn.Conv(width, (3, 3))(y)))
        return nn.Dense(3)(x.mean((1, 2)))


class Transformer(eqx.Module):
    """Blocks of attention and dense layers for one sample."""

    blocks: list
    last: eqx.nn.Linear

    def __init__(self, key: Array):
        *keys, last = jax.random.split(key, 4)
        self.blocks = [
            (
                eqx.nn.LayerNorm(6),
                eqx.nn.MultiheadAttention(2, 6, key=k),
                eqx.nn.MLP(6, 6, 12, 1, activation=jax.nn.gelu, key=k),
            )
            for k in keys
        ]
        self.last = eqx.nn.Linear(6, 3, key=last)

    def __call__(self, x: Array) -> Array:
        x = x.reshape(-1, 6)
        for normed, attention, dense in self.blocks:
            y = jax.vmap(normed)(x)
            x = x + attention(y, y, y)
            x = x + jax.vmap(dense)(x)
        return self.last(x.mean(0))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["equinox", "linen"])
def test_run_is_unchanged_and_reports_the_scans(name: str, limits: Callable[..., None]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 12, 12, 1)).astype(np.float32), rng.integers(0, 3, 24)
    federation = Federation.from_arrays(x, y, offsets=[0, 5, 16, 24], test=(x, y), num_classes=3)
    losses, plans = [], []
    for worth in (10, 10**9):
        limits(layer_scan_equations=worth)
        made = from_linen(Residual(), x[:1]) if name == "linen" else from_equinox(Transformer(jax.random.key(0)))
        method = FedAvg(local=LocalSGD(lr=0.1, steps=2, batch_size=4))
        result = simulate(method, classification(made), federation, rounds=2, cohort_size=3, seed=1, progress=False)
        losses.append(result.events[-1]["test_loss"])
        plans.append(result.plan)
    assert "3 layers of one shape in a loop" in plans[0] and "loop" not in plans[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-5)
