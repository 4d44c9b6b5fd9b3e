"""Every method over messages of Flower gives what the simulator gives, and sends as many bytes as it counts."""

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
    ROUNDS,
    SIZES,
    START,
    TASK,
    Serialized,
    assert_close,
    deployed,
    own,
)

SIMULATED: dict[str, Any] = {"rounds": ROUNDS, "plan": "scan", "devices": 1, "params": START}


def cohort(r: int) -> list[int]:
    """The clients of a round."""
    return cohort_sampler(Settings(rounds=ROUNDS, cohort_size=COHORT), np.array(SIZES)).cohort(r).tolist()


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("kind", algorithms().values(), ids=algorithms().keys())
def test_every_method_gives_the_numbers_of_the_simulator(kind: type[Algorithm]):
    algorithm = example(kind)
    there = simulate(algorithm, TASK, FEDERATION, cohort_size=COHORT, amplification="none", **SIMULATED)
    here = deployed(algorithm, params=START)
    assert_close(here.server, there.server)
    assert len(here.events) == ROUNDS
    met: set[int] = set()
    for r, (ours, theirs) in enumerate(zip(here.events, there.events, strict=True)):
        met |= set(cohort(r)) if needs_initial_parameters(algorithm, START, ()) else set()
        theirs["bytes_down"] += len(met) * tree.num_bytes(START)  # who has not taken part is sent the start, too
        for name in theirs.keys() - {"seconds"}:
            if "personal" not in name:  # of the clients' own data: see test_evaluation.py
                np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)


BY_THE_ASKED = (ClientDP, FedBuff)
"""What their servers divide by is the S that was asked for, whoever came; a script's cohorts are of its own sizes."""
OTHERS = {name: kind for name, kind in algorithms().items() if kind not in BY_THE_ASKED}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS.keys())
def test_a_client_without_a_reply_counts_as_not_sampled(kind: type[Algorithm]):
    """One client of each round works, and its answer is lost: nothing of it is left on either side."""
    algorithm, lost = example(kind), [cohort(r)[r % COHORT] for r in range(ROUNDS)]
    grid = Serialized(client_app(algorithm, TASK, own, seed=0), len(SIZES))

    def lose(message: Message, client: int) -> bool:
        if message.metadata.message_type != MessageType.TRAIN:
            return False
        return client == lost[int(message.metadata.group_id.removeprefix("round ")) - 1]

    grid.lose = lose
    if algorithm.traits.fixed_cohort:
        with pytest.raises(FedraxError, match="no round received enough replies"):
            deployed(algorithm, grid, params=START)
        return
    here = deployed(algorithm, grid, params=START)
    script = Script(cohorts=[[c for c in cohort(r) if c != lost[r]] for r in range(ROUNDS)])
    there = simulate(algorithm, TASK, FEDERATION, script=script, **SIMULATED)
    assert_close(here.params, there.params)
    assert [event["clients"] for event in here.events] == [COHORT - 1] * ROUNDS
