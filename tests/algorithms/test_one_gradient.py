"""Methods with one gradient per round: running statistics, and rejection of options for local steps."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from fedrax import FedAvg, FedraxError, LocalSGD, Upcycled
from fedrax.algorithms import FedSGD, NaiveParallelClip, SignSGD
from fedrax.config.hyperparameters import check
from fedrax.contract.algorithm import Algorithm
from fedrax.optim import InverseTimeDecay, Optax
from fedrax.optim.proximal import L1
from fedrax.personalization import Ditto, Personalized
from tests.contract.test_settings import NORM_TASK
from tests.simulation.problems import make_federation, run

CARRIED = LocalSGD(optimizer=Optax.of(optax.adam), carry=True)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", [SignSGD, NaiveParallelClip])
def test_running_statistics_equal_those_of_one_fedavg_step(method: Any):
    """At a tiny learning rate, over several rounds."""
    no_motion = LocalSGD(lr=1e-9, steps=1, batch_size=6)
    options = {"task": NORM_TASK, "federation": make_federation((6,) * 8)}
    actual, desired = (run(m(local=no_motion), rounds=2, **options).statistics for m in (method, FedAvg))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, desired)
    before = run(method(local=no_motion), rounds=1, **options).statistics
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (before, actual)), strict=True))


def test_full_gradients_do_not_update_running_statistics():
    with pytest.raises(FedraxError, match="FedSGD does not support running statistics"):
        run(FedSGD(), task=NORM_TASK, rounds=1)
    with pytest.raises(FedraxError, match=r"takes steps on batches: set local.batch_size"):
        run(SignSGD(LocalSGD(batch_size="full")), task=NORM_TASK, rounds=1)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FedSGD(local=LocalSGD(momentum=0.9)), "FedSGD takes one step a round, the server's: set server_optimizer.mom"),
        (FedSGD(local=LocalSGD(clip=0.1)), "unset local.clip"),
        (FedSGD(local=LocalSGD(prox=L1(0.1))), "unset local.prox"),
        (FedSGD(local=LocalSGD(optimizer=Optax.of(optax.adam))), "unset local.optimizer"),
        (NaiveParallelClip(local=LocalSGD(momentum=0.9)), "NaiveParallelClip takes one step a round"),
        (NaiveParallelClip(local=LocalSGD(optimizer=Optax.of(optax.adam))), "unset local.optimizer"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_options_of_local_steps_are_rejected(method: Algorithm, message: str):
    with pytest.raises(FedraxError, match=message):
        check(method)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FedSGD(local=LocalSGD(steps=5)), r"FedSGD takes one step a round, and local.steps = 5 is ignored"),
        (SignSGD(local=LocalSGD(epochs=2)), r"SignSGD .* local.epochs = 2 is ignored"),
        (NaiveParallelClip(local=LocalSGD(steps=2)), r"NaiveParallelClip .* local.steps = 2 is ignored"),
        (FedSGD(local=LocalSGD(lr=0.5)), r"local.lr is ignored by FedSGD, .*: set server_optimizer.lr"),
        (
            FedSGD(local=LocalSGD(schedule=InverseTimeDecay())),
            r"local.schedule is ignored: set server_optimizer.schedule",
        ),
        (FedSGD(local=LocalSGD(steps=1, blocks=2)), r"local.blocks is ignored by FedSGD"),
        (Upcycled(FedAvg(), extrapolate="both"), "FedAvg has no control variates, and extrapolate = 'both' is ignored"),
        (Personalized(FedAvg()), "nothing is personal, so that Personalized has no effect: set personal_params"),
        (Personalized(FedAvg(), ("a",), alternate=CARRIED), r"and alternate.carry is ignored"),
        (Ditto(FedAvg(), own_steps=CARRIED), r"and own_steps.carry is ignored"),
    ],
    ids=[
        "FedSGD",
        "SignSGD",
        "NaiveParallelClip",
        "step size",
        "schedule",
        "blocks",
        "Upcycled",
        "Personalized",
        "alternate",
        "Ditto",
    ],
)
def test_ignored_options_are_warned_of(method: Algorithm, message: str):
    """A file for several methods may contain options for the others."""
    with pytest.warns(UserWarning, match=message):
        check(method)
