"""Uploads of private methods: only what noise covers and the expected cohort size; anything else is rejected."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, FedraxError, LocalSGD, hyperparameters
from fedrax.algorithms import MOON
from fedrax.contract.algorithm import ClientOutput
from fedrax.participation import Poisson
from fedrax.personalization import Ditto
from fedrax.privacy import OutputPerturbation, SampleDP
from tests.simulation.problems import LOCAL, run

STEPS = LocalSGD(lr=0.05, steps=2, batch_size=2)


@hyperparameters
class UploadsStatistic(FedAvg):
    """Uploads a statistic instead of an update."""

    what: str = "cohort_size"

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        output = FedAvg.client(self, message, state, data)
        printed = {
            "cohort_size": lambda: data.cohort_size,
            "size": lambda: data.size,
            "mean": lambda: data.samples.x.mean(),
        }[self.what]()
        return output._replace(upload=jax.tree.map(lambda a: 0 * a + printed.astype(a.dtype), output.upload))


def test_private_clients_have_the_expected_cohort_size():
    """With Poisson sampling, not the actual cohort size."""
    result = run(
        UploadsStatistic(local=LOCAL),
        rounds=4,
        cohort_size=3,
        participation=Poisson(),
        trajectory=True,
        dtype="float64",
    )
    came = [event["clients"] for event in result.events]
    assert len(set(came)) > 1
    biases = [np.asarray(params["output"]["bias"]) for params in result.trajectory]
    assert len(biases) == len(came)
    for before, after, count in zip(biases, biases[1:], came[1:], strict=False):
        np.testing.assert_allclose(after - before, 3.0 if count else 0.0, atol=1e-9)


@pytest.mark.parametrize("what", ["size", "mean"])
def test_uploads_besides_gradients_are_rejected(what: str):
    with pytest.raises(FedraxError, match=r"UploadsStatistic also sends upload.*data without noise"):
        run(SampleDP(UploadsStatistic(local=STEPS, what=what)), rounds=1)
    run(SampleDP(UploadsStatistic(local=STEPS, what="cohort_size")), rounds=1)


@hyperparameters
class Calibrated(FedAvg):
    """Weighs losses by a mean over all samples, as methods against label skew do."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        weighed = lambda losses: lambda params, batch, key: losses(params, batch, key) * data.samples.x.mean()  # noqa: E731
        return FedAvg.client(self, message, state, data.with_loss(weighed))


@hyperparameters
class Redrawn(FedAvg):
    """Draws batches with replacement, for any options."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        local = dataclasses.replace(self.local, order="replacement")
        return FedAvg.client(dataclasses.replace(self, local=local), message, state, data)


def test_gradients_of_changed_losses_and_batches_are_rejected():
    with pytest.raises(FedraxError, match=r"Calibrated also sends upload"):
        run(SampleDP(Calibrated(local=STEPS)), rounds=1)
    with pytest.raises(FedraxError, match=r"asks for 'replacement' as local.order instead of 'shuffle'"):
        run(SampleDP(Redrawn(local=STEPS)), rounds=1)
    run(SampleDP(MOON(local=STEPS)), rounds=1)  # whose loss compares with the stored result of noisy steps


@hyperparameters
class UploadsStateLater(FedAvg):
    """Stores the mean of its samples and uploads it in its next round."""

    def init_client(self, params: Any) -> Any:
        return jnp.zeros(())

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        output = FedAvg.client(self, message, (), data)
        upload = jax.tree.map(lambda a: a + state.astype(a.dtype), output.upload)
        return output._replace(upload=upload, state=data.samples.x.mean().astype(state.dtype))


def test_data_uploaded_in_a_later_round_is_rejected():
    with pytest.raises(FedraxError, match="UploadsStateLater also sends upload"):
        run(SampleDP(UploadsStateLater(local=STEPS)), rounds=1)


@hyperparameters
class InLoop(FedAvg):
    """Runs local training three times in a loop."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        once = lambda i, x: self.local.run(data, x).params  # noqa: E731
        x = jax.lax.fori_loop(0, 3, once, message)
        return ClientOutput(jax.tree.map(jnp.subtract, x, message), state, {"gradients": jnp.zeros(())})


@hyperparameters
class Twice(FedAvg):
    """Runs local training twice, the second time without the carried state."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        first = self.local.run(data.with_carried(type(data.carried)()), message)
        return FedAvg.client(self, first.params, state, data)


@pytest.mark.parametrize("method", [InLoop(local=STEPS), Twice(local=STEPS), Ditto(FedAvg(local=STEPS))])
def test_repeated_local_training_is_rejected(method: Any):
    """All iterations of a loop would have the same noise and be counted once."""
    with pytest.raises(FedraxError, match="further local steps, or for local steps inside a loop"):
        run(SampleDP(method), rounds=1)
    if not isinstance(method, Ditto):  # whose personal steps do not affect the upload
        with pytest.raises(FedraxError, match=r"data without noise|runs local training 2 times"):
            run(OutputPerturbation(method), rounds=1)
