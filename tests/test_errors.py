"""Suggestions for unknown names, and the source line of warnings."""

import warnings
from typing import Any

from fedrax import FedraxWarning, LocalSGD, LoSAC, simulate, sweep
from fedrax.algorithms import FedSGD
from fedrax.contract import check
from fedrax.errors import FedraxError, each_warning_once, unknown, warnings_about
from tests.simulation.problems import FEDERATION, TASK


def test_nearest_name_is_suggested():
    error = unknown("partition", "Dirichlet_client", ["dirichlet_clients", "iid"])
    assert isinstance(error, FedraxError)
    assert str(error) == "unknown partition 'Dirichlet_client'; did you mean 'dirichlet_clients'?"


def test_all_names_are_listed_if_none_is_similar():
    assert str(unknown("plan", "qqq", ["vmap", "scan"])) == "unknown plan 'qqq'; known are: scan, vmap."
    assert str(unknown("plan", "x", [])) == "unknown plan 'x'; known are: none."


def test_long_lists_of_columns_are_truncated_and_unnamed_columns_shown():
    printed = str(unknown("column of t.csv", "?", ["", *(f"{i:04}" for i in range(999))]))
    assert "known are: '', 0000, 0001" in printed and printed.endswith("0058 and 940 others.")


def test_warnings_name_the_method_once():
    """In a comparison by its label; several methods have the same class, and each is checked for every seed."""
    blocks = LocalSGD(steps=1, blocks=2, batch_size=32)
    ignored = "local.batch_size = 32 is ignored: a step uses one of local.blocks = 2, up to 6 samples"
    options: Any = {"rounds": 1, "cohort_size": 2, "progress": False}
    with warnings.catch_warnings(record=True) as printed, each_warning_once():
        warnings.simplefilter("always")
        for seed in range(2):
            simulate(LoSAC(local=blocks), TASK, FEDERATION, seed=seed, **options)
        for label in ("a", "b", "b"):
            with warnings_about(label):
                simulate(LoSAC(local=blocks), TASK, FEDERATION, **options)
        check(FedSGD(local=LocalSGD(steps=5)))
    assert [str(one.message) for one in printed] == [
        f"LoSAC: {ignored}",
        f"a: {ignored}",
        f"b: {ignored}",
        "FedSGD takes one step a round, and local.steps = 5 is ignored",
    ]


def test_sweep_warns_once_at_the_line_of_the_caller():
    blocks = LocalSGD(steps=1, blocks=2, batch_size=32)
    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("always")
        sweep([LoSAC(local=blocks)], TASK, FEDERATION, (0, 1), rounds=1, cohort_size=2, mode="sequential")
    assert [str(one.message).partition(" = ")[0] for one in printed] == ["LoSAC: local.batch_size"]
    assert printed[0].filename == __file__


def test_warnings_have_the_line_of_the_caller():
    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("always")
        simulate(FedSGD(local=LocalSGD(lr=0.7)), TASK, FEDERATION, rounds=1, cohort_size=2, progress=False)
    assert [one.category for one in printed] == [FedraxWarning]
    with open(printed[0].filename) as source:
        assert "simulate(FedSGD(local=LocalSGD(lr=0.7))" in source.readlines()[printed[0].lineno - 1]
