"""Schedules of optax as hyper-parameters, in Python and in experiment files, against optax."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrax
from fedrax import FedAvg, FedraxError, LocalSGD
from fedrax.config.hyperparameters import check
from fedrax.experiments import experiment
from fedrax.optim import FunctionSchedule, InverseTimeDecay, OptaxSchedule
from fedrax.optim.schedules import optax_schedules
from tests.simulation.problems import assert_close, run

VALUES: dict[str, Any] = {
    "value": 0.5,
    "init_value": 0.5,
    "peak_value": 0.9,
    "end_value": 0.1,
    "alpha": 0.1,
    "power": 2.0,
    "decay_steps": 20,
    "transition_steps": 7,
    "warmup_steps": 3,
    "decay_rate": 0.8,
    "interpolate_type": "linear",
    "boundaries_and_scales": {3: 0.5, 6: 0.2},
}


@pytest.mark.parametrize("name", optax_schedules())
def test_traced_schedules_agree_with_optax_and_survive_files(name: str):
    make = getattr(optax.schedules, name)
    options = {key: value for key, value in VALUES.items() if key in inspect.signature(make).parameters}
    schedule = OptaxSchedule.of(make, **options)
    with jax.enable_x64(True):
        factor = jax.jit(lambda schedule, round: schedule(round))
        for round in (0, 2, 3, 5, 6, 25):
            np.testing.assert_allclose(
                factor(schedule, jnp.int32(round)), make(**options)(jnp.float64(round)), rtol=1e-12
            )
    method = FedAvg(local=LocalSGD(schedule=schedule))
    check(method)
    assert pickle.loads(pickle.dumps(method)) == method
    described = experiment.to_table(experiment.Experiment(algorithm=method))
    assert described["algorithm"]["local"]["schedule"]["name"] == name
    assert experiment.from_table(described, "x", Path()).algorithm == method


def test_optax_schedules_and_transformations_are_accepted():
    """As factors of the client's and the server's learning rate, and as local and server optimizer."""
    options = {"rounds": 3, "cohort_size": 2, "devices": 1}
    warmup = optax.linear_schedule(0.1, 1.0, 2)
    given = FedAvg(local=LocalSGD(steps=2, schedule=warmup, optimizer=optax.sgd(0.1)), server_optimizer=optax.sgd(0.5))
    assert isinstance(given.local.schedule, FunctionSchedule)
    wrapped = OptaxSchedule.of(optax.linear_schedule, init_value=0.1, end_value=1.0, transition_steps=2)
    rule = fedrax.optim.Optax.of(optax.sgd, learning_rate=0.5)
    traced = FedAvg(
        local=LocalSGD(steps=2, schedule=wrapped, optimizer=fedrax.optim.Optax(optax.sgd(0.1))), server_optimizer=rule
    )
    assert_close(run(given, **options), run(traced, **options))


def test_errors_of_optax_are_reported():
    with pytest.raises(FedraxError, match="needs the option 'decay_steps'"):
        OptaxSchedule.of(optax.cosine_decay_schedule, init_value=1.0)
    with pytest.raises(FedraxError, match="unknown option of cosine_decay_schedule: 'steps'"):
        OptaxSchedule.of(optax.cosine_decay_schedule, init_value=1.0, steps=3)
    rejected = OptaxSchedule.of(optax.cosine_decay_schedule, init_value=1.0, decay_steps=0)
    with pytest.raises(FedraxError, match=r"cosine_decay_schedule: .*positive"):
        check(LocalSGD(schedule=rejected))


def test_inverse_time_decay():
    assert [InverseTimeDecay(0.5)(round) for round in (0, 2)] == [1.0, 0.5]
