"""Selection of the cases that ``slow(keep=...)`` keeps."""

import pytest

from tests.slow import spread_indices


@pytest.mark.parametrize("count", [1, 2, 7, 12, 84])
def test_spread_indices_include_the_first_and_have_the_requested_number(count: int):
    for keep in (1, 2, 5, 12, 100):
        kept = spread_indices(count, keep)
        assert len(kept) == min(count, keep) and kept <= set(range(count)) and 0 in kept


def test_spread_indices_cover_all_rows_and_most_columns_of_a_grid():
    for rows, columns in ((4, 3), (3, 4), (5, 5), (2, 6)):
        kept = spread_indices(rows * columns, max(rows, columns) + 1)
        assert {i // columns for i in kept} == set(range(rows))
        assert len({i % columns for i in kept}) > columns // 2
