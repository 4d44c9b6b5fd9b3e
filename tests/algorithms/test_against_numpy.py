"""Every method and option against the independent NumPy implementation."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrax.simulation.settings import Settings, cohort_sampler
from tests.algorithms.problems import Case, assert_same, expected, make_problem, simulate
from tests.algorithms.table import LOCAL_WORK, METHODS, OPTIONS, SERVER_RULES
from tests.slow import slow_cases

OPTION_CASES = [*LOCAL_WORK, *SERVER_RULES, *OPTIONS]
ALL_CASES = [*METHODS.values(), *OPTION_CASES]
DEFAULT_EXECUTION: dict[str, Any] = {"plan": "scan", "devices": 2}
FULLY_COMPILED = {
    *("FedAvg-all-options", "Scaffold-I-clipped", "LoSAC-consistent", "Mime", "FedADMM"),
    *("Episode", "FedNova", "PFedMe", "GradMA", "FedBuff", "Attacked-krum-alittle"),
}
"""Methods that differ in structure, compiled with all optimizations, which takes four times as long. Other cases use
fast compilation in float64; all methods are compiled with all optimizations in float32 by ``make test-all``."""
FULLY_COMPILED_IN_MAKE_TEST = {"FedAvg-all-options", "LoSAC-consistent", "Mime", "Attacked-krum-alittle"}
"""Cases of ``FULLY_COMPILED`` in ``make test``: local options, blocks, two phases, wrappers. For GradMA see also
``test_gradma_compiled``."""

DOCUMENTED_NAMES = set(re.findall("`([a-z_]+)`", (Path(__file__).parents[2] / "docs" / "run-files.md").read_text()))
"""Names that the documentation explains, among them all keys of events."""


def work_shares(case: Case) -> list[np.ndarray] | None:
    """The shares of local work that fedrax draws for stragglers: inputs of the experiment."""
    if not case.stragglers:
        return None
    settings = Settings(rounds=case.rounds, cohort_size=4, stragglers=case.stragglers)
    sampler = cohort_sampler(settings, make_problem(sizes=case.sizes).federation.sizes, case.script())
    works = [sampler.work(r, len(cohort)) for r, cohort in enumerate(case.cohorts())]
    assert any((work < 1).any() for work in works)
    return works


def test_case_names_are_unique():
    assert len({case.name for case in ALL_CASES}) == len(ALL_CASES)


def assert_float64(case: Case, **settings: Any) -> None:
    """Assert agreement of both implementations in float64 up to the order of summation, and that training moves x."""
    method, result = expected(case, works=work_shares(case)), simulate(case, **settings)
    assert np.abs(method.x - make_problem(sizes=case.sizes).x0).max() > 1e-3
    assert_same(result, method, case, "softmax", tolerance=1e-12)
    assert {key for key in result.events[-1] if not key.startswith(("test_", "train_"))} <= DOCUMENTED_NAMES
    if "blocks" not in case.local:  # blocks of different sizes are counted by their mean size
        assert result.events[-1]["gradients"] == sum(client.evaluated for client in method.clients)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.slow if case in OPTIONS else ()) for case in OPTION_CASES],
)
def test_options_agree_with_numpy_in_float64(case: Case):
    assert_float64(case)


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in FULLY_COMPILED_IN_MAKE_TEST])
def test_methods_agree_with_numpy_in_float64(name: str):
    assert_float64(METHODS[name], **DEFAULT_EXECUTION)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "Episode"])
def test_methods_agree_with_numpy_on_quadratic_loss(name: str):
    """Another loss with one parameter array and real targets."""
    case = Case(name, {"local": {"lr": 0.05, "epochs": 2, "batch_size": 3}})
    assert_same(simulate(case, "quadratic"), expected(case, "quadratic"), case, "quadratic", tolerance=1e-12)


# With XLA's default optimizations:


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("name", slow_cases(sorted(FULLY_COMPILED), FULLY_COMPILED_IN_MAKE_TEST))
def test_fully_compiled_methods_agree_with_numpy_in_float64(name: str):
    assert_float64(METHODS[name], **DEFAULT_EXECUTION)


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("case", METHODS.values(), ids=METHODS.keys())
def test_methods_agree_with_numpy_in_float32(case: Case):
    """float32 rounding is 6e-8 for numbers near 1. About 30 contracting steps, and the division by T eta in SCAFFOLD's
    c_i, lead to at most 5e-7; the tolerance leaves room for other compilers.
    """
    method = expected(case, works=work_shares(case))
    assert_same(simulate(case, dtype="float32", **DEFAULT_EXECUTION), method, case, "softmax", tolerance=3e-6)
