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
from tests.flower.messages import (
    COHORT,
    FEDERATION,
    ROUNDS,
    SIZES,
    TASK,
    SerializingGrid,
    assert_close,
    client_samples,
    run_federation,
)

METHOD = FedAvg(local=LocalSGD(lr=0.05, steps=3, batch_size=4))


def grid() -> SerializingGrid:
    """A grid with six clients."""
    return SerializingGrid(client_app(METHOD, TASK, client_samples, seed=0), len(SIZES))


@pytest.mark.parametrize("policy", [PowerOfChoice(4), Oort(), ImportanceSampling(), RoundRobin(), FixedList((1, 3, 4))])
def test_cohorts_and_weights_agree_with_the_simulation(policy: ParticipationPolicy):
    options: dict[str, Any] = {"participation": policy, "weights": "samples", "eval_every": 1}
    simulated = simulate(METHOD, TASK, FEDERATION, rounds=ROUNDS, cohort_size=COHORT, plan="scan", devices=1, **options)
    federated = run_federation(METHOD, grid(), **options)
    assert_close(federated.params, simulated.params)
    for name in ("clients", "bytes_down", "bytes_up", "asked"):
        assert [event.get(name) for event in federated.events] == [event.get(name) for event in simulated.events]


def test_resumed_federation_has_the_state_of_its_policy(tmp_path: Path):
    options: dict[str, Any] = {"participation": ImportanceSampling(), "eval_every": 1}
    uninterrupted = run_federation(METHOD, grid(), rounds=4, **options)
    run_federation(METHOD, grid(), rounds=2, directory=tmp_path, **options)
    assert_close(
        run_federation(METHOD, grid(), rounds=4, directory=tmp_path, resume=True, **options).params,
        uninterrupted.params,
        0,
    )
    with pytest.raises(FedraxError, match="participation ImportanceSampling"):
        run_federation(
            METHOD, grid(), rounds=5, directory=tmp_path, resume=True, participation=ImportanceSampling("loss")
        )


def test_clients_without_a_reply_count_as_not_sampled():
    lossy = grid()
    lossy.lose = lambda message, client: client in (0, 1) and message.metadata.message_type == MessageType.EVALUATE
    policy = PowerOfChoice(len(SIZES))
    result = run_federation(METHOD, lossy, rounds=1, cohort_size=4, participation=policy, eval_every=9)
    assert result.events[0]["clients"] == 4
    lossy.lose = lambda message, client: client == 0 and message.metadata.message_type == MessageType.TRAIN
    result = run_federation(METHOD, lossy, rounds=3, cohort_size=len(SIZES), participation=ImportanceSampling())
    assert [event["clients"] for event in result.events] == [len(SIZES) - 1] * 3
    whole = run_federation(METHOD, lossy, rounds=3, cohort_size=len(SIZES))  # all probabilities are one
    assert_close(result.params, whole.params)


def test_arrivals_of_a_trace_are_rejected(tmp_path: Path):
    trace = tmp_path / "seconds.csv"
    trace.write_text("client,seconds\n" + "".join(f"{i},1\n" for i in range(len(SIZES))))
    with pytest.raises(FedraxError, match="arrive"):
        run_federation(METHOD, grid(), cohort_size=1, participation=Asynchronous(trace, concurrency=2))
