"""The mark ``slow``, which excludes tests from ``make test``; ``make test-all`` runs all tests.

``@pytest.mark.slow`` marks all cases of a test, ``@pytest.mark.slow(keep=3)`` all except three that are spread over the
parameters, and :func:`slow_cases` marks chosen cases of a parametrized test.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def slow_cases(cases: Iterable[Any], keep: int | Collection[Any] = 1) -> list[Any]:
    """Return the cases, of which all but the first ``keep``, or all but those in ``keep``, are marked as slow.

    A case is what ``parametrize`` accepts: a value, a tuple of values or a ``pytest.param``.
    """
    marked = []
    for i, case in enumerate(cases):
        is_kept = i < keep if isinstance(keep, int) else case in keep
        marked.append(case if is_kept else _mark_slow(case))
    return marked


def unmark_kept_cases(items: Iterable[pytest.Item]) -> None:
    """Remove the mark from the cases that ``slow(keep=...)`` keeps."""
    cases: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        marks = [mark for mark in item.own_markers if mark.name == "slow"]
        if marks and all("keep" in mark.kwargs for mark in marks):
            keep = marks[0].kwargs["keep"]
            cases.setdefault((item.path, getattr(item, "originalname", item.name), keep), []).append(item)
    for (*_, keep), group in cases.items():
        for i in spread_indices(len(group), keep):
            group[i].own_markers = [mark for mark in group[i].own_markers if mark.name != "slow"]


def spread_indices(count: int, keep: int) -> set[int]:
    """Return ``keep`` of ``count`` indices, including 0, spread by the golden ratio.

    Equal steps could select a single row or column of a grid of parameters.
    """
    kept: set[int] = set()
    for k in range(min(keep, count)):
        start = int(count * (k * 0.6180339887 % 1))
        kept.add(next(i % count for i in range(start, start + count) if i % count not in kept))
    return kept


def _mark_slow(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, pytest.mark.slow))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
