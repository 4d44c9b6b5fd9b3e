"""Every method with every option, number by number against the independent NumPy implementation."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrax.simulation.settings import Settings, cohort_sampler
from tests.algorithms.problems import Case, assert_same, expected, make_problem, simulate
from tests.algorithms.table import LOCAL_WORK, METHODS, OPTIONS, SERVER_RULES
from tests.slow import slow_cases

MORE = [*LOCAL_WORK, *SERVER_RULES, *OPTIONS]
ALL = [*METHODS.values(), *MORE]
AS_USERS_RUN: dict[str, Any] = {"plan": "scan", "devices": 2}
WHOLE = {
    *("FedAvg-rich", "Scaffold-I-clipped", "LoSAC-consistent", "Mime", "FedADMM", "Episode", "FedNova", "PFedMe"),
    *("GradMA", "FedBuff", "Attacked-krum-alittle"),
}
"""Methods unlike each other, with the whole compiler, which takes four times as long, at the end; other cases are
compiled quickly, and every method wholly in float32 where there is time."""
FIRST = {"FedAvg-rich", "LoSAC-consistent", "Mime", "Attacked-krum-alittle"}
"""Of these the ones that ``make test`` takes: local options, blocks, two phases, wrappers. It compiles the others
quickly; GradMA has ``test_gradma_compiled`` besides."""

EXPLAINED = set(re.findall("`([a-z_]+)`", (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()))
"""What the documentation explains; among it the keys of events."""


def works_of(case: Case) -> list[np.ndarray] | None:
    """The shares of the work that fedrax draws for this case: data of the experiment, not mathematics."""
    if not case.stragglers:
        return None
    settings = Settings(rounds=case.rounds, cohort_size=4, stragglers=case.stragglers)
    sampler = cohort_sampler(settings, make_problem(sizes=case.sizes).federation.sizes, case.script())
    works = [sampler.work(r, len(cohort)) for r, cohort in enumerate(case.cohorts())]
    assert any((work < 1).any() for work in works)
    return works


def test_the_table_names_no_case_twice():
    assert len({case.name for case in ALL}) == len(ALL)


def assert_float64(case: Case, **settings: Any) -> None:
    """Both sides compute in float64; they differ by the order of their sums alone. No case is trivial."""
    method, result = expected(case, works=works_of(case)), simulate(case, **settings)
    assert np.abs(method.x - make_problem(sizes=case.sizes).x0).max() > 1e-3
    assert_same(result, method, case, "softmax", tolerance=1e-12)
    assert {key for key in result.events[-1] if not key.startswith(("test_", "train_"))} <= EXPLAINED
    if "blocks" not in case.local:  # blocks of different sizes are counted by their mean
        assert result.events[-1]["gradients"] == sum(client.evaluated for client in method.clients)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.slow if case in OPTIONS else ()) for case in MORE]
)
def test_every_option_in_float64(case: Case):
    assert_float64(case)


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in FIRST])
def test_every_method_in_float64(name: str):
    assert_float64(METHODS[name], **AS_USERS_RUN)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "Episode"])
def test_float64_on_the_quadratic(name: str):
    """Another loss, with one leaf of parameters and floating targets."""
    case = Case(name, {"local": {"lr": 0.05, "epochs": 2, "batch_size": 3}})
    assert_same(simulate(case, "quadratic"), expected(case, "quadratic"), case, "quadratic", tolerance=1e-12)


# From here on with the compiler that users have


@pytest.mark.slow(keep=2)
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("name", slow_cases(sorted(WHOLE), FIRST))
def test_methods_in_float64_by_the_whole_compiler(name: str):
    assert_float64(METHODS[name], **AS_USERS_RUN)


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize("case", METHODS.values(), ids=METHODS.keys())
def test_every_method_in_float32(case: Case):
    """A unit of float32 rounding is 6e-8 of numbers near one; some 30 contracting steps one after another, and the
    division by T eta in SCAFFOLD's c_i, leave at most 5e-7. The tolerance has room for other compilers.
    """
    method = expected(case, works=works_of(case))
    assert_same(simulate(case, dtype="float32", **AS_USERS_RUN), method, case, "softmax", tolerance=3e-6)
