"""What clients remember, who else came, and methods of one's own: what a claim has to know of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, Scaffold, Settings, classification, hyperparameters
from fedrax.algorithms import MOON
from fedrax.compression import TopK
from fedrax.contract.algorithm import ClientOutput
from fedrax.experiments.audit import watch_a_client
from fedrax.models import Logistic
from fedrax.optim import Optax
from fedrax.participation import Poisson, Turns, WeightedBySamples
from fedrax.personalization import Ditto
from fedrax.privacy import ClientDP, OutputPerturbation, SampleDP
from fedrax.privacy.accounting import Accountant, CohortSampling
from fedrax.privacy.releases import Release
from fedrax.simulation.settings import cohort_sampler
from tests.privacy.methods import Noisy
from tests.simulation.problems import LOCAL, run

STEPS = LocalSGD(lr=0.05, steps=2, batch_size=2)


def spent(method: Any, **options: Any) -> float:
    result = run(method, cohort_size=2, rounds=3, **options)
    assert result.spent is not None
    return result.spent.epsilon


def alone(count: int) -> float:
    """Of so many answers about a client whose place stays empty where it is not there."""
    return Accountant([Release(1.0, seen="public")], 1e-5).epsilon(count)


@pytest.mark.parametrize(
    "inner",
    [
        Scaffold(local=LOCAL),
        TopK(FedAvg(local=LOCAL), fraction=0.5),
        FedAvg(local=LocalSGD(steps=2, optimizer=Optax.of(optax.adam, learning_rate=0.1), carry=True)),
    ],
    ids=["scaffold", "error feedback", "carried optimizer"],
)
def test_whoever_takes_a_place_remembers_it(inner: Any):
    """Its later updates are others, too: only where each client joins by itself is anything amplified."""
    method = ClientDP(inner, noise=1.0)
    busiest = lambda **options: run(method, cohort_size=2, rounds=3, **options).spent.count  # noqa: E731
    assert spent(method) == alone(busiest())
    assert spent(method, participation=WeightedBySamples()) == alone(busiest(participation=WeightedBySamples()))
    assert spent(method, participation=Turns()) == alone(1)
    public = Release(1.0, seen="public")
    assert spent(method, participation=Poisson()) == Accountant(
        [public], 1e-5, CohortSampling("poisson", 2 / 8)
    ).epsilon(3)
    with pytest.raises(FedraxError, match="keep something from round to round"):
        run(method, amplification="fixed", rounds=1)


@pytest.mark.parametrize("around", [lambda m: m, Ditto], ids=["nothing", "models that are not sent"])
def test_draws_amplify_where_nothing_that_is_sent_was_remembered(around: Any):
    public = Release(1.0, seen="public")
    expected = Accountant([public], 1e-5, CohortSampling("fixed", 2 / 8)).epsilon(3)
    assert spent(around(ClientDP(FedAvg(local=LOCAL), noise=1.0)), amplification="fixed") == expected


def test_who_is_slow_does_not_depend_on_who_else_comes_by_chance():
    """Of cohorts of one size not always as many are slow, and half of all clients are."""
    settings = Settings(rounds=400, cohort_size=4, participation=Poisson(), stragglers=0.5)
    sampler = cohort_sampler(settings, np.full(8, 3))
    slow = np.array([int((sampler.work(r, 4) < 1).sum()) for r in range(400)])
    assert set(slow) == {0, 1, 2, 3, 4}
    assert slow.mean() == pytest.approx(2, abs=0.2)
    fixed = cohort_sampler(Settings(rounds=9, cohort_size=4, stragglers=0.5), np.full(8, 3))
    assert [int((fixed.work(r, 4) < 1).sum()) for r in range(9)] == [2] * 9


@hyperparameters
class Asks(FedAvg):
    """Sends ``what`` it knows in the place of an update."""

    what: str = "cohort_size"

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        output = FedAvg.client(self, message, state, data)
        told = {
            "cohort_size": lambda: data.cohort_size,
            "size": lambda: data.size,
            "mean": lambda: data.samples.x.mean(),
        }[self.what]()
        return output._replace(upload=jax.tree.map(lambda a: 0 * a + told.astype(a.dtype), output.upload))


def test_clients_are_told_how_many_are_expected():
    """Of eight clients each comes by a coin; the model moves by the number that all of them were told."""
    result = run(Asks(local=LOCAL), rounds=4, cohort_size=3, participation=Poisson(), trajectory=True, dtype="float64")
    came = [event["clients"] for event in result.events]
    assert len(set(came)) > 1
    biases = [np.asarray(params["output"]["bias"]) for params in result.trajectory]
    assert len(biases) == len(came)
    for before, after, count in zip(biases, biases[1:], came[1:], strict=False):
        np.testing.assert_allclose(after - before, 3.0 if count else 0.0, atol=1e-9)


@pytest.mark.parametrize("what", ["size", "mean"])
def test_what_is_sent_besides_gradients_is_refused(what: str):
    with pytest.raises(FedraxError, match=r"Asks also sends upload.*no noise has covered"):
        run(SampleDP(Asks(local=STEPS, what=what)), rounds=1)
    run(SampleDP(Asks(local=STEPS, what="cohort_size")), rounds=1)


@hyperparameters
class Calibrated(FedAvg):
    """Weighs the loss of a class by the mean of all samples, as methods against skewed labels do."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        weighed = lambda losses: lambda params, batch, key: losses(params, batch, key) * data.samples.x.mean()  # noqa: E731
        return FedAvg.client(self, message, state, data.with_loss(weighed))


@hyperparameters
class Redrawn(FedAvg):
    """Draws batches in which a sample may be several times, whatever its options say."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        local = dataclasses.replace(self.local, order="replacement")
        return FedAvg.client(dataclasses.replace(self, local=local), message, state, data)


def test_gradients_of_other_losses_and_batches_are_refused():
    with pytest.raises(FedraxError, match=r"Calibrated also sends upload"):
        run(SampleDP(Calibrated(local=STEPS)), rounds=1)
    with pytest.raises(FedraxError, match=r"asks for 'replacement' as local.order instead of 'shuffle'"):
        run(SampleDP(Redrawn(local=STEPS)), rounds=1)
    run(SampleDP(MOON(local=STEPS)), rounds=1)  # whose loss compares with what it kept of noised steps


@hyperparameters
class OfOneLayer(FedAvg):
    """Keeps what the model has under one name."""

    def init_client(self, params: Any) -> Any:
        return {name: leaf for name, leaf in params.items() if name == "output"}

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        return FedAvg.client(self, message, state, data)._replace(state=state)


@hyperparameters
class OwnMechanism(Noisy):
    """A private method with a state on its clients."""

    def init_client(self, params: Any) -> Any:
        return jnp.zeros(())

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        return Noisy.client(self, message, state, data)._replace(state=state)


@pytest.mark.parametrize(
    ("method", "remembers"),
    [
        (ClientDP(OfOneLayer(local=LOCAL), noise=1.0), True),
        (OwnMechanism(local=LOCAL, noise=1.0, seen="public"), True),
        (ClientDP(Ditto(FedAvg(local=LOCAL)), noise=1.0), False),
    ],
    ids=["by name", "own mechanism", "models that are not sent"],
)
def test_what_is_remembered_is_asked_of_the_whole_method(method: Any, remembers: bool):
    result = run(method, cohort_size=2, rounds=3)
    assert result.spent is not None and result.spent.empty_place == remembers
    assert ("its place left empty" in result.spent.about) == remembers


@hyperparameters
class Remembers(FedAvg):
    """Keeps the mean of its samples, and sends it in its next round."""

    def init_client(self, params: Any) -> Any:
        return jnp.zeros(())

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        output = FedAvg.client(self, message, (), data)
        upload = jax.tree.map(lambda a: a + state.astype(a.dtype), output.upload)
        return output._replace(upload=upload, state=data.samples.x.mean().astype(state.dtype))


def test_what_is_sent_in_a_later_round_is_refused():
    with pytest.raises(FedraxError, match="Remembers also sends upload"):
        run(SampleDP(Remembers(local=STEPS)), rounds=1)


@hyperparameters
class Turned(FedAvg):
    """Takes its local steps in a loop, three times over."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        once = lambda i, x: self.local.run(data, x).params  # noqa: E731
        x = jax.lax.fori_loop(0, 3, once, message)
        return ClientOutput(jax.tree.map(jnp.subtract, x, message), state, {"gradients": jnp.zeros(())})


@hyperparameters
class Twice(FedAvg):
    """Takes its local steps twice, the second time with what is carried forgotten."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        first = self.local.run(data.with_carried(type(data.carried)()), message)
        return FedAvg.client(self, first.params, state, data)


@pytest.mark.parametrize("method", [Turned(local=STEPS), Twice(local=STEPS), Ditto(FedAvg(local=STEPS))])
def test_local_steps_are_counted_however_often_they_are_taken(method: Any):
    """All turns would have one noise, and be counted as one."""
    with pytest.raises(FedraxError, match="other local steps, or for them in a loop"):
        run(SampleDP(method), rounds=1)
    if not isinstance(method, Ditto):  # whose own steps end in a model that is not sent
        with pytest.raises(FedraxError, match=r"no noise has covered|takes local steps 2 times"):
            run(OutputPerturbation(method), rounds=1)


@hyperparameters
class WeakCoins(SampleDP):
    """Draws a sample ten times as often as it says."""

    def releases(self) -> tuple[Release, ...]:
        (one,) = SampleDP.releases(self)
        return (dataclasses.replace(one, rate=one.rate / 10),)


@pytest.mark.slow(keep=1)
def test_the_draw_of_batches_is_audited():
    """By a sample that is there or not, beside the claim that its coin amplifies."""
    x = np.array([[3.0, -3.0]], np.float32)
    one = Federation.from_arrays(x, np.array([0]), np.zeros(1, int), num_classes=2)
    local = LocalSGD(lr=0.05, steps=2, batch_size=1)
    settings = Settings(cohort_size=1, delta=1e-2)
    task = classification(Logistic().build((2,), 2))
    for kind in (SampleDP, WeakCoins):
        method = kind(FedAvg(local=local), clip=0.5, noise=0.7, rate=0.8)
        found = watch_a_client(method, task, one, settings, runs=4000)
        assert (found.unit, found.neighbors) == ("sample", "presence")
        accountant = Accountant(method.releases(), 1e-2)
        assert found.claimed == accountant.epsilon(1)
        assert found.proven > 0
        assert found.refuted == (kind is WeakCoins), found
