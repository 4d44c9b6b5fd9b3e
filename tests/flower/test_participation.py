"""Participation policies of a federation: the same cohorts, weights and traffic as in a simulation."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import MessageType

from fedrax import FedAvg, FedraxError, LocalSGD, simulate
from fedrax.flower import client_app
from fedrax.participation import (
    Asynchronous,
    FixedList,
    ImportanceSampling,
    Oort,
    ParticipationPolicy,
    PowerOfChoice,
    RoundRobin,
)
from tests.flower.messages import COHORT, FEDERATION, ROUNDS, SIZES, TASK, Serialized, assert_close, deployed, own

METHOD = FedAvg(local=LocalSGD(lr=0.05, steps=3, batch_size=4))


def grid() -> Serialized:
    """Six clients."""
    return Serialized(client_app(METHOD, TASK, own, seed=0), len(SIZES))


@pytest.mark.parametrize("policy", [PowerOfChoice(4), Oort(), ImportanceSampling(), RoundRobin(), FixedList((1, 3, 4))])
def test_cohorts_and_weights_are_those_of_a_simulation(policy: ParticipationPolicy):
    options: dict[str, Any] = {"participation": policy, "weights": "samples", "eval_every": 1}
    there = simulate(METHOD, TASK, FEDERATION, rounds=ROUNDS, cohort_size=COHORT, plan="scan", devices=1, **options)
    here = deployed(METHOD, grid(), **options)
    assert_close(here.params, there.params)
    for name in ("clients", "bytes_down", "bytes_up", "asked"):
        assert [event.get(name) for event in here.events] == [event.get(name) for event in there.events]


def test_a_federation_resumes_with_the_state_of_its_policy(tmp_path: Path):
    options: dict[str, Any] = {"participation": ImportanceSampling(), "eval_every": 1}
    whole = deployed(METHOD, grid(), rounds=4, **options)
    deployed(METHOD, grid(), rounds=2, directory=tmp_path, **options)
    assert_close(deployed(METHOD, grid(), rounds=4, directory=tmp_path, resume=True, **options).params, whole.params, 0)
    with pytest.raises(FedraxError, match="participation ImportanceSampling"):
        deployed(METHOD, grid(), rounds=5, directory=tmp_path, resume=True, participation=ImportanceSampling("loss"))


def test_clients_that_do_not_answer_are_not_sampled():
    lossy = grid()
    lossy.lose = lambda message, client: client in (0, 1) and message.metadata.message_type == MessageType.EVALUATE
    policy = PowerOfChoice(len(SIZES))
    result = deployed(METHOD, lossy, rounds=1, cohort_size=4, participation=policy, eval_every=9)
    assert result.events[0]["clients"] == 4
    lossy.lose = lambda message, client: client == 0 and message.metadata.message_type == MessageType.TRAIN
    result = deployed(METHOD, lossy, rounds=3, cohort_size=len(SIZES), participation=ImportanceSampling())
    assert [event["clients"] for event in result.events] == [len(SIZES) - 1] * 3
    whole = deployed(METHOD, lossy, rounds=3, cohort_size=len(SIZES))  # all probabilities are one
    assert_close(result.params, whole.params)


def test_arrivals_of_a_trace_are_refused(tmp_path: Path):
    trace = tmp_path / "seconds.csv"
    trace.write_text("client,seconds\n" + "".join(f"{i},1\n" for i in range(len(SIZES))))
    with pytest.raises(FedraxError, match="arrive"):
        deployed(METHOD, grid(), cohort_size=1, participation=Asynchronous(trace, concurrency=2))
