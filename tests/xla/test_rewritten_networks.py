"""Networks with rewritten convolutions and pooling against the original ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import fedrax
from fedrax.algorithms.moon import MOON
from fedrax.models import Model, from_equinox, from_linen, from_nnx
from fedrax.simulation.setup import prepare
from tests.xla.agreement import assert_same, draw


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Enable float64."""
    with jax.enable_x64(True):
        yield


class Linen(nn.Module):
    """Strided, dilated, depthwise, grouped and transposed convolutions, both kinds of pooling, group norm."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(nn.GroupNorm(2)(nn.Conv(8, (3, 3), strides=2)(x)))
        x = nn.max_pool(nn.Conv(8, (3, 3), kernel_dilation=2, feature_group_count=8)(x), (3, 3), (2, 2), "SAME")
        x = nn.gelu(nn.ConvTranspose(8, (4, 4), strides=(2, 2))(x))
        x = nn.avg_pool(nn.Conv(4, (3, 3), feature_group_count=2)(x), (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(len(x), -1))


class Nnx(nnx.Module):
    """Convolutions over one axis."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, 6, kernel_size=(5,), strides=(2,), rngs=rngs)
        self.norm, self.last = nnx.LayerNorm(6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.last(nnx.relu(self.norm(self.first(x.reshape(len(x), -1, 3)))).mean(1))


class Equinox(equinox.Module):
    """Channels first, one sample at a time."""

    layers: list

    def __init__(self, key: Array):
        a, b, c = jax.random.split(key, 3)
        self.layers = [
            equinox.nn.Conv2d(3, 6, 3, stride=2, key=a),
            jax.nn.relu,
            equinox.nn.MaxPool2d(2, 1),
            equinox.nn.ConvTranspose2d(6, 4, 3, stride=2, key=b),
            equinox.nn.AvgPool2d(2, 2),
            jnp.ravel,
            equinox.nn.Linear(64, 3, key=c),
        ]

    def __call__(self, x: Array) -> Array:
        x = x.transpose(2, 0, 1)
        for layer in self.layers:
            x = layer(x)
        return x


def networks() -> dict[str, Model]:
    """One network of each library for images [12, 12, 3] -> [3]."""
    return {
        "linen": from_linen(Linen(), jnp.zeros((1, 12, 12, 3))),
        "nnx": from_nnx(lambda rngs: Nnx(rngs)),
        "equinox": from_equinox(Equinox),
    }


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["linen", "nnx", "equinox"])
def test_networks_agree_with_their_original_form(name: str):
    with jax.enable_x64(False):
        model = networks()[name]
        rng = np.random.default_rng(0)
        x, y = jnp.asarray(draw(rng, (5, 12, 12, 3))), jnp.asarray(rng.integers(0, 3, 5))
        params = jax.jit(model.init)(jax.random.key(0))

        def loss(params: Any) -> Array:
            scores = jax.nn.log_softmax(model.apply(params, x))
            return -jnp.take_along_axis(scores, y[:, None], 1).mean()

        assert_same(jax.value_and_grad(loss), params)


class Plain(nn.Module):
    """Dense convolutions."""

    def setup(self):
        self.first, self.norm, self.last = nn.Conv(8, (3, 3), 2), nn.GroupNorm(2), nn.Dense(3)

    def features(self, x: Array) -> Array:
        return nn.relu(self.norm(self.first(x))).mean((1, 2))

    def __call__(self, x: Array) -> Array:
        return self.last(self.features(x))


LOCALS = {
    "batches": fedrax.FedAvg(local=fedrax.LocalSGD(lr=0.1, steps=2, batch_size=3)),
    "whole passes": fedrax.algorithms.FedSGD(),
    "blocks": fedrax.LoSAC(local=fedrax.LocalSGD(lr=0.1, steps=2, blocks=2)),
    "two phases": fedrax.Episode(local=fedrax.LocalSGD(lr=0.1, steps=2, batch_size=3)),
    "features": MOON(local=fedrax.LocalSGD(lr=0.1, steps=2, batch_size=3)),
}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", LOCALS)
def test_every_gradient_of_a_run_is_rewritten(name: str):
    """In user-defined networks, wherever a method computes a gradient."""
    with jax.enable_x64(False):
        rng = np.random.default_rng(0)
        x, y = draw(rng, (12, 12, 12, 3)), rng.integers(0, 3, 12)
        federation = fedrax.Federation.from_arrays(x, y, np.arange(12) % 2, num_classes=3)
        model = from_linen(Plain(), jnp.zeros((1, 12, 12, 3)), features="features")
        settings = fedrax.Settings(rounds=1, cohort_size=2)
        setup = prepare(LOCALS[name], fedrax.classification(model), federation, settings)
        text = str(setup.traced.program)
        assert "lhs_spec" in text and text.count("lhs_spec") == text.count(
            "lhs_spec=(0, 3, 1, 2), rhs_spec=(3, 2, 0, 1)"
        )
