"""GradMA's local steps, fully compiled, from many starting points against NumPy.

In the second local step the gradients at the previous and the current point are bitwise equal columns.

"""

from typing import Any

import numpy as np
import pytest

import fedrax
from tests import reference, reference_methods
from tests.algorithms.problems import make_algorithm, make_problem
from tests.slow import slow_cases

pytestmark = pytest.mark.usefixtures("full_compilation")

SEEDS, ROUNDS = 16, 4
FULL_PARTICIPATION = [list(range(7))] * ROUNDS


def distance(method: str, kind: str, local: dict, seed: int) -> float:
    """Largest difference between a run and NumPy from a random start, relative to max(1, largest entry)."""
    problem, options = make_problem(kind), {"local": local}
    start = 2 * np.random.default_rng(seed).normal(size=problem.x0.shape)
    by_paper = reference_methods.build(problem.clients(reference.Local(**local)), start, method, options)
    reference_methods.run(by_paper, FULL_PARTICIPATION)
    settings: dict[str, Any] = {"rounds": ROUNDS, "dtype": "float64", "plan": "scan", "devices": 1, "eval_every": 100}
    result = fedrax.simulate(
        make_algorithm(method, options),
        problem.task,
        problem.federation,
        params=reference.split(problem.problem, start),
        script=fedrax.simulation.Script(cohorts=FULL_PARTICIPATION),
        **settings,
    )
    ours = reference.join(problem.problem, result.params)
    return float(np.abs(ours - by_paper.x).max() / max(1, np.abs(by_paper.x).max()))


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_cases(["GradMA", "GradMAW"]))
@pytest.mark.parametrize(("batch_size", "steps"), slow_cases([(3, 2), (1, 3)]))
def test_alternating_steps_agree_with_numpy(method: str, batch_size: int, steps: int):
    """The learning rate is so large that batches disagree: the repeated gradient and the way back from x are active."""
    local = {"lr": 0.3, "steps": steps, "batch_size": batch_size}
    assert max(distance(method, "quadratic", local, seed) for seed in range(SEEDS)) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "quadratic"])
def test_collinear_columns_agree_with_numpy(kind: str):
    """Two columns are equal and the third one is opposite."""
    local = {"lr": 0.3, "steps": 2, "batch_size": "full"}
    assert max(distance("GradMAW", kind, local, seed) for seed in range(SEEDS)) < 1e-11
