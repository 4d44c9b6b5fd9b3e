"""Suggestions for unknown names, and the source line of warnings."""

import warnings

from fedrax import FedraxWarning, LocalSGD, simulate
from fedrax.algorithms import FedSGD
from fedrax.errors import FedraxError, unknown
from tests.simulation.problems import FEDERATION, TASK


def test_the_nearest_name_is_suggested():
    error = unknown("partition", "Dirichlet_client", ["dirichlet_clients", "iid"])
    assert isinstance(error, FedraxError)
    assert str(error) == "unknown partition 'Dirichlet_client'; did you mean 'dirichlet_clients'?"


def test_all_names_are_listed_when_none_is_near():
    assert str(unknown("plan", "qqq", ["vmap", "scan"])) == "unknown plan 'qqq'; known are: scan, vmap."
    assert str(unknown("plan", "x", [])) == "unknown plan 'x'; known are: none."


def test_a_table_of_many_columns_is_not_listed_whole_and_one_without_a_name_is_seen():
    said = str(unknown("column of t.csv", "?", ["", *(f"{i:04}" for i in range(999))]))
    assert "known are: '', 0000, 0001" in said and said.endswith("0058 and 940 others.")


def test_a_warning_names_the_users_own_line():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        simulate(FedSGD(local=LocalSGD(lr=0.7)), TASK, FEDERATION, rounds=1, cohort_size=2, progress=False)
    assert [one.category for one in said] == [FedraxWarning]
    with open(said[0].filename) as source:
        assert "simulate(FedSGD(local=LocalSGD(lr=0.7))" in source.readlines()[said[0].lineno - 1]
