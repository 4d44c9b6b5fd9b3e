"""Every method over Flower's messages gives the results of the simulator and sends the counted bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MessageType

from fedrax import Algorithm, FedraxError, Settings, simulate, tree
from fedrax.algorithms import FedBuff
from fedrax.experiments.method_registry import algorithms
from fedrax.flower import client_app
from fedrax.flower.schema import needs_initial_parameters
from fedrax.privacy import ClientDP
from fedrax.simulation import Script
from fedrax.simulation.settings import cohort_sampler
from tests.examples import example
from tests.flower.messages import (
    COHORT,
    FEDERATION,
    INITIAL_PARAMS,
    ROUNDS,
    SIZES,
    TASK,
    SerializingGrid,
    assert_close,
    client_samples,
    run_federation,
)

SIMULATED: dict[str, Any] = {"rounds": ROUNDS, "plan": "scan", "devices": 1, "params": INITIAL_PARAMS}


def cohort(r: int) -> list[int]:
    """Clients of a round."""
    return cohort_sampler(Settings(rounds=ROUNDS, cohort_size=COHORT), np.array(SIZES)).cohort(r).tolist()


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("kind", algorithms().values(), ids=algorithms().keys())
def test_methods_agree_with_the_simulator(kind: type[Algorithm]):
    algorithm = example(kind)
    simulated = simulate(algorithm, TASK, FEDERATION, cohort_size=COHORT, amplification="none", **SIMULATED)
    federated = run_federation(algorithm, params=INITIAL_PARAMS)
    assert_close(federated.server, simulated.server)
    assert len(federated.events) == ROUNDS
    seen_clients: set[int] = set()
    for r, (actual, desired) in enumerate(zip(federated.events, simulated.events, strict=True)):
        seen_clients |= set(cohort(r)) if needs_initial_parameters(algorithm, INITIAL_PARAMS, ()) else set()
        desired["bytes_down"] += len(seen_clients) * tree.num_bytes(
            INITIAL_PARAMS
        )  # a client that has not taken part is also sent the initial parameters
        for name in desired.keys() - {"seconds"}:
            if "personal" not in name:  # data of the clients: see test_evaluation.py
                np.testing.assert_allclose(actual[name], desired[name], rtol=2e-4, atol=2e-5, err_msg=name)


DIVIDE_BY_COHORT_SIZE = (ClientDP, FedBuff)
"""Methods whose servers divide by the requested cohort size; a script's cohorts have their own sizes."""
OTHER_METHODS = {name: kind for name, kind in algorithms().items() if kind not in DIVIDE_BY_COHORT_SIZE}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kind", OTHER_METHODS.values(), ids=OTHER_METHODS.keys())
def test_client_without_a_reply_counts_as_not_sampled(kind: type[Algorithm]):
    """In each round the reply of one client is lost after its work; neither side keeps any of it."""
    algorithm, lost = example(kind), [cohort(r)[r % COHORT] for r in range(ROUNDS)]
    grid = SerializingGrid(client_app(algorithm, TASK, client_samples, seed=0), len(SIZES))

    def lose(message: Message, client: int) -> bool:
        if message.metadata.message_type != MessageType.TRAIN:
            return False
        return client == lost[int(message.metadata.group_id.removeprefix("round ")) - 1]

    grid.lose = lose
    if algorithm.traits.fixed_cohort:
        with pytest.raises(FedraxError, match="no round received enough replies"):
            run_federation(algorithm, grid, params=INITIAL_PARAMS)
        return
    federated = run_federation(algorithm, grid, params=INITIAL_PARAMS)
    script = Script(cohorts=[[c for c in cohort(r) if c != lost[r]] for r in range(ROUNDS)])
    simulated = simulate(algorithm, TASK, FEDERATION, script=script, **SIMULATED)
    assert_close(federated.params, simulated.params)
    assert [event["clients"] for event in federated.events] == [COHORT - 1] * ROUNDS
