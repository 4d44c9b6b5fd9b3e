"""Rounds with an empty cohort, as Poisson sampling draws them, change neither parameters nor states."""

import jax
import numpy as np
import pytest

import fedrax
from fedrax.experiments.method_registry import find_algorithm
from fedrax.optim.proximal import L1
from fedrax.participation import Poisson
from tests.contract.test_settings import NORM_TASK
from tests.simulation.problems import run

SEED = 0
"""With this seed the first round has clients and the second one has none."""
SERVER_MOMENTUM = {
    "fedcm": "momentum",
    "feddyn": "dual",
    "fedlion": "momentum",
    "mime": "momentum",
    "mimelite": "momentum",
}
OTHER_METHODS = [
    "episode",
    "fedadmm",
    "fedavg",
    "fedexp",
    "fednova",
    "qfedavg",
    "scaffnew",
    "scaffold",
    "signsgd",
    "upcycled",
]


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", [*SERVER_MOMENTUM, *OTHER_METHODS])
def test_empty_round_does_not_move_parameters(name: str):
    settings = {"cohort_size": 1, "participation": Poisson(), "seed": SEED}
    one, two = (run(find_algorithm(name)(), rounds=rounds, **settings) for rounds in (1, 2))
    assert one.events[0]["clients"] and not two.events[1]["clients"]
    tolerance = {"rtol": 0, "atol": 1e-8 if name == "fedadmm" else 0}  # minimizes over x again
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one.params, two.params)
    if name in SERVER_MOMENTUM:
        before, after = (getattr(result.server, SERVER_MOMENTUM[name]) for result in (one, two))
        assert any(np.any(leaf) for leaf in jax.tree.leaves(before))
        jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("name", ["signsgd", "naiveparallelclip"])
def test_weight_decay_and_prox_do_not_act_in_an_empty_round(name: str):
    prox = {} if name == "signsgd" else {"prox": L1(0.1)}
    local = fedrax.LocalSGD(steps=1, weight_decay=0.5, **prox)
    settings = {"cohort_size": 1, "participation": Poisson(), "seed": SEED}
    one, two = (run(find_algorithm(name)(local=local), rounds=rounds, **settings) for rounds in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "vmap", "loop", "debug"])
def test_empty_round_does_not_change_running_statistics(plan: str):
    settings = {"cohort_size": 1, "participation": Poisson(), "seed": SEED, "task": NORM_TASK, "plan": plan}
    one, two = (run(find_algorithm("fedavg")(), rounds=rounds, **settings) for rounds in (1, 2))
    assert one.events[0]["clients"] and not two.events[1]["clients"]
    assert any(np.any(leaf != 1) and np.any(leaf != 0) for leaf in jax.tree.leaves(one.statistics))
    jax.tree.map(np.testing.assert_array_equal, one.statistics, two.statistics)
