"""When client sampling amplifies the guarantee: not for methods whose uploads depend on client states."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest

from fedrax import FedAvg, FedraxError, LocalSGD, Scaffold, hyperparameters
from fedrax.compression import TopK
from fedrax.contract.algorithm import ClientOutput
from fedrax.optim import Optax
from fedrax.participation import Poisson, RoundRobin, WeightedBySamples
from fedrax.personalization import Ditto
from fedrax.privacy import ClientDP
from fedrax.privacy.accounting import Accountant, CohortSampling
from fedrax.privacy.releases import Release
from tests.privacy.methods import Noisy
from tests.simulation.problems import LOCAL, run


def spent(method: Any, **options: Any) -> float:
    result = run(method, cohort_size=2, rounds=3, **options)
    assert result.spent is not None
    return result.spent.epsilon


def unamplified(count: int) -> float:
    """Epsilon of ``count`` releases without amplification, for datasets that differ by an empty client."""
    return Accountant([Release(1.0, seen="public")], 1e-5).epsilon(count)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "inner",
    [
        Scaffold(local=LOCAL),
        TopK(FedAvg(local=LOCAL), fraction=0.5),
        FedAvg(local=LocalSGD(steps=2, optimizer=Optax.of(optax.adam, learning_rate=0.1), carry=True)),
    ],
    ids=["scaffold", "error feedback", "carried optimizer"],
)
def test_client_states_prevent_amplification(inner: Any):
    """A neighboring cohort changes later updates of other clients; only Poisson sampling amplifies."""
    method = ClientDP(inner, noise=1.0)
    busiest = lambda **options: run(method, cohort_size=2, rounds=3, **options).spent.count  # noqa: E731
    assert spent(method) == unamplified(busiest())
    assert spent(method, participation=WeightedBySamples()) == unamplified(busiest(participation=WeightedBySamples()))
    assert spent(method, participation=RoundRobin()) == unamplified(1)
    public = Release(1.0, seen="public")
    assert spent(method, participation=Poisson()) == Accountant(
        [public], 1e-5, CohortSampling("poisson", 2 / 8)
    ).epsilon(3)
    with pytest.raises(FedraxError, match="its clients have state"):
        run(method, amplification="fixed", rounds=1)


@pytest.mark.parametrize("wrap", [lambda m: m, Ditto], ids=["nothing", "models that are not sent"])
def test_sampling_amplifies_where_uploads_do_not_depend_on_client_states(wrap: Any):
    public = Release(1.0, seen="public")
    expected = Accountant([public], 1e-5, CohortSampling("fixed", 2 / 8)).epsilon(3)
    assert spent(wrap(ClientDP(FedAvg(local=LOCAL), noise=1.0)), amplification="fixed") == expected


@hyperparameters
class OfOneLayer(FedAvg):
    """Keeps one layer of the model as client state."""

    def init_client(self, params: Any) -> Any:
        return {name: leaf for name, leaf in params.items() if name == "output"}

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        return FedAvg.client(self, message, state, data)._replace(state=state)


@hyperparameters
class OwnMechanism(Noisy):
    """A private method with client states."""

    def init_client(self, params: Any) -> Any:
        return jnp.zeros(())

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        return Noisy.client(self, message, state, data)._replace(state=state)


@pytest.mark.parametrize(
    ("method", "uploads_depend_on_states"),
    [
        (ClientDP(OfOneLayer(local=LOCAL), noise=1.0), True),
        (OwnMechanism(local=LOCAL, noise=1.0, seen="public"), True),
        (ClientDP(Ditto(FedAvg(local=LOCAL)), noise=1.0), False),
    ],
    ids=["by name", "own mechanism", "models that are not sent"],
)
def test_client_states_of_wrappers_and_methods_are_considered(method: Any, uploads_depend_on_states: bool):
    result = run(method, cohort_size=2, rounds=3)
    assert result.spent is not None and result.spent.empty_place == uploads_depend_on_states
    assert ("its place left empty" in result.spent.about) == uploads_depend_on_states
