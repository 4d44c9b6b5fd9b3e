"""Rounds with an empty cohort, as Poisson sampling draws them: no parameter and no state changes."""

import jax
import numpy as np
import pytest

import fedrax
from fedrax.experiments.method_registry import find_algorithm
from fedrax.optim.proximal import L1
from fedrax.participation import Poisson
from tests.contract.test_settings import NORM
from tests.simulation.problems import run

SEED = 0
"""Somebody is there in the first round, and nobody in the second."""
KEPT = {"fedcm": "momentum", "feddyn": "dual", "fedlion": "momentum", "mime": "momentum", "mimelite": "momentum"}
OTHERS = ["episode", "fedadmm", "fedavg", "fedexp", "fednova", "qfedavg", "scaffnew", "scaffold", "signsgd", "upcycled"]


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", [*KEPT, *OTHERS])
def test_an_empty_round_moves_no_parameters(name: str):
    settings = {"cohort_size": 1, "participation": Poisson(), "seed": SEED}
    one, two = (run(find_algorithm(name)(), rounds=rounds, **settings) for rounds in (1, 2))
    assert one.events[0]["clients"] and not two.events[1]["clients"]
    near = {"rtol": 0, "atol": 1e-8 if name == "fedadmm" else 0}  # which minimizes over x anew
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **near), one.params, two.params)
    if name in KEPT:
        before, after = (getattr(result.server, KEPT[name]) for result in (one, two))
        assert any(np.any(leaf) for leaf in jax.tree.leaves(before))
        jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize("name", ["signsgd", "naiveparallelclip"])
def test_decay_and_prox_do_not_act_in_an_empty_round(name: str):
    prox = {} if name == "signsgd" else {"prox": L1(0.1)}
    local = fedrax.LocalSGD(steps=1, weight_decay=0.5, **prox)
    settings = {"cohort_size": 1, "participation": Poisson(), "seed": SEED}
    one, two = (run(find_algorithm(name)(local=local), rounds=rounds, **settings) for rounds in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "vmap", "loop", "debug"])
def test_running_statistics_stay(plan: str):
    settings = {"cohort_size": 1, "participation": Poisson(), "seed": SEED, "task": NORM, "plan": plan}
    one, two = (run(find_algorithm("fedavg")(), rounds=rounds, **settings) for rounds in (1, 2))
    assert one.events[0]["clients"] and not two.events[1]["clients"]
    assert any(np.any(leaf != 1) and np.any(leaf != 0) for leaf in jax.tree.leaves(one.statistics))
    jax.tree.map(np.testing.assert_array_equal, one.statistics, two.statistics)
