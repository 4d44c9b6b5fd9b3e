"""Which cases ``make test`` runs."""

import pytest

from tests.slow import spread


@pytest.mark.parametrize("cases", [1, 2, 7, 12, 84])
def test_a_few_are_as_many_as_asked_for_and_the_first_is_among_them(cases: int):
    for keep in (1, 2, 5, 12, 100):
        kept = spread(cases, keep)
        assert len(kept) == min(cases, keep) and kept <= set(range(cases)) and 0 in kept


def test_a_grid_is_met_in_all_its_rows_and_columns():
    for rows, columns in ((4, 3), (3, 4), (5, 5), (2, 6)):
        kept = spread(rows * columns, max(rows, columns) + 1)
        assert {at // columns for at in kept} == set(range(rows))
        assert len({at % columns for at in kept}) > columns // 2
