"""Parameters, constants, statistics and random keys of Flax and Equinox modules."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, simulate
from fedrax.algorithms import FedSGD
from fedrax.contract.task import classification
from fedrax.errors import FedraxError
from fedrax.models import Variables, from_equinox, from_linen, from_nnx
from tests.models.toy_data import FEDERATION, KEY, OTHER, X

eqx, nn, nnx = (pytest.importorskip(module) for module in ("equinox", "flax.linen", "flax.nnx"))


def test_partitioned_parameters_become_plain_arrays():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))(x)

    model = from_linen(Network(), X)
    assert {type(leaf) for leaf in model.init(KEY)["Dense_0"].values()} == {type(X)}
    found = simulate(FedAvg(), classification(model), FEDERATION, rounds=1, cohort_size=2, eval_train=True)
    assert np.isfinite(found.metric("train_accuracy")[-1][1])


class Constants(nn.Module):
    drawn: bool = False

    @nn.compact
    def __call__(self, x):
        make = lambda: jax.random.normal(self.make_rng("params"), (4,)) if self.drawn else jnp.arange(4.0)  # noqa: E731
        return nn.Dense(3)(x + self.variable("constants", "places", make).value)


def test_collections_unchanged_by_training_are_constants():
    model = from_linen(Constants(), X)
    params = model.init(KEY)
    assert model.train is None and not isinstance(params, Variables)
    expected = Constants().apply({"params": params, "constants": {"places": jnp.arange(4.0)}}, X)
    np.testing.assert_allclose(model.apply(params, X), expected, rtol=1e-6)


def test_collections_initialized_at_random_are_statistics():
    model = from_linen(Constants(drawn=True), X)
    assert list(model.init(KEY).statistics) == ["constants"]
    with pytest.raises(FedraxError, match=r"does not support running statistics, .* has constants/places: use"):
        simulate(FedSGD(), classification(model), FEDERATION, rounds=1, cohort_size=2)


def test_variables_created_by_a_call_are_not_statistics():
    class Seen(nnx.Variable):
        pass

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.out = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            x = self.norm(x)
            self.seen = Seen(x.mean())
            return self.out(x)

    model = from_nnx(Network)
    variables = model.init(KEY)
    assert model.train is not None
    _, statistics = model.train(variables, X, KEY)
    assert jax.tree.structure(statistics) == jax.tree.structure(variables.statistics)
    assert simulate(FedAvg(), classification(model), FEDERATION, rounds=2, cohort_size=2).events


@pytest.mark.parametrize("part", [False, True])
def test_constructors_with_keyword_only_random_keys(part):
    class Nnx(nnx.Module):
        def __init__(self, outputs=3, *, rngs):
            self.out = nnx.Linear(4, outputs, rngs=rngs)

        def __call__(self, x):
            return self.out(x)

    class Equinox(eqx.Module):
        out: eqx.nn.Linear

        def __init__(self, outputs=3, *, key):
            self.out = eqx.nn.Linear(4, outputs, key=key)

        def __call__(self, x):
            return self.out(x)

    for model in (from_nnx(partial(Nnx, 3) if part else Nnx), from_equinox(partial(Equinox, 3) if part else Equinox)):
        first, second = model.init(KEY), model.init(OTHER)
        assert model.apply(first, X).shape == (6, 3)
        assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool(jnp.any(a != b)), first, second)))


def test_every_named_random_stream_has_its_own_key():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.streams, self.gain = nnx.Rngs(0, dropout=1), nnx.Param(jnp.ones(()))

        def __call__(self, x):
            draws = [jax.random.normal(key, x.shape) for key in (self.streams.default(), self.streams.dropout())]
            return self.gain * (draws[0] - draws[1])

    model = from_nnx(Network)
    assert jnp.any(model.apply(model.init(KEY), X, KEY) != 0)


@pytest.mark.parametrize("where", ["attribute", "list", "function"])
def test_plain_arrays_in_nnx_modules_are_constants(where):
    """For example positional encodings, masks and knots of splines."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            table = jnp.arange(4.0) / 4
            self.table = nnx.List([table]) if where == "list" else table if where == "attribute" else 0
            self.add = (lambda x: x + table) if where == "function" else None
            self.out = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            if self.add is not None:
                return self.out(self.add(x))
            return self.out(x + (self.table[0] if where == "list" else self.table))

    model = from_nnx(Network)
    params = model.init(jax.random.key(0))
    assert set(params) == {"out"}
    expected = (X + jnp.arange(4.0) / 4) @ params["out"]["kernel"] + params["out"]["bias"]
    np.testing.assert_allclose(jax.jit(model.apply)(params, X), expected, rtol=1e-5)
