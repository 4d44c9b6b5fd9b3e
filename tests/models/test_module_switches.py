"""Arguments with which modules switch between training and evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, simulate
from fedrax.contract.task import classification
from fedrax.errors import FedraxError
from fedrax.models import Model, from_equinox, from_linen, from_nnx
from tests.models.toy_data import FEDERATION, KEY, OTHER, X

eqx, nn, nnx = (pytest.importorskip(module) for module in ("equinox", "flax.linen", "flax.nnx"))


def is_random_only_in_training(model: Model) -> bool:
    params = model.init(KEY)
    noisy = bool(jnp.any(model.apply(params, X, KEY) != model.apply(params, X, OTHER)))
    return noisy and bool(jnp.all(model.apply(params, X) == model.apply(params, X)))


class EnableDropout(eqx.Module):
    out: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.out, self.dropout = eqx.nn.Linear(4, 3, key=key), eqx.nn.Dropout(0.5)

    def __call__(self, x, enable_dropout: bool = False, key=None):
        return self.dropout(self.out(x), key=key, inference=not enable_dropout)


class Inference(EnableDropout):
    def __call__(self, x, *, key, inference: bool = False):
        return self.dropout(self.out(x), key=key, inference=inference)


class NoKey(EnableDropout):
    def __call__(self, x):
        return self.dropout(self.out(x))


@pytest.mark.parametrize("network", [EnableDropout, Inference])
def test_dropout_arguments_of_equinox_modules_are_set(network):
    model = from_equinox(network)
    assert is_random_only_in_training(model)
    params = model.init(KEY)
    np.testing.assert_allclose(model.apply(params, X), jax.vmap(network(KEY).out)(X), rtol=1e-5, atol=1e-6)


def test_dropout_without_a_key_argument_is_rejected():
    model = from_equinox(NoKey)
    model.apply(model.init(KEY), X)
    with pytest.raises(FedraxError, match=r"NoKey draws random numbers without a key.* an argument key"):
        simulate(FedAvg(), classification(model), FEDERATION, rounds=1, cohort_size=2)


class IsTraining(nn.Module):
    @nn.compact
    def __call__(self, x, is_training):
        return nn.Dropout(0.5, deterministic=not is_training)(nn.Dense(3)(x))


class IsTesting(nnx.Module):
    def __init__(self, rngs):
        self.out, self.dropout = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, testing: bool = True):
        return self.dropout(self.out(x), deterministic=testing)


def test_other_common_names_of_the_training_argument_are_known():
    assert is_random_only_in_training(from_linen(IsTraining(), X))
    assert is_random_only_in_training(from_nnx(IsTesting))


class Stochastic(nnx.Module):
    def __init__(self, rngs):
        self.out, self.dropout = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, stochastic: bool = False):
        return self.dropout(self.out(x), deterministic=not stochastic)


class Adaptive(nn.Module):
    @nn.compact
    def __call__(self, x, adapt: bool = False):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not adapt)(x))


class Always(nnx.Module):
    def __init__(self, rngs):
        self.out, self.dropout = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, noisy: bool = True):
        return self.dropout(self.out(x), deterministic=not noisy)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_nnx(Stochastic), "Stochastic draws random numbers depending on its argument stochastic"),
        (lambda: from_linen(Adaptive(), X), "Adaptive updates statistics depending on its argument adapt"),
        (lambda: from_nnx(Always), "Always draws random numbers depending on its argument noisy"),
    ],
)
def test_unknown_training_argument_with_the_wrong_default_is_rejected(make, message):
    with pytest.raises(FedraxError, match=message):
        simulate(FedAvg(), classification(make()), FEDERATION, rounds=1, cohort_size=2)


def test_other_boolean_arguments_keep_their_defaults():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False, return_hidden: bool = False, checked: bool = True):
            hidden = nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x))
            outputs = nn.Dense(3)(hidden)
            return (outputs, hidden) if return_hidden else outputs

    assert is_random_only_in_training(from_linen(Network(), X))
