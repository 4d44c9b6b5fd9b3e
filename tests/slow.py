"""The mark ``slow``: what ``make test`` leaves to ``make test-all``.

``@pytest.mark.slow`` marks a whole test, ``@pytest.mark.slow(keep=3)`` all but three of its cases, spread over all of
them, and :func:`slow_cases` single cases of a parametrized test.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def slow_cases(cases: Iterable[Any], keep: int | Collection[Any] = 1) -> list[Any]:
    """The cases; all but the first ``keep`` of them, or all but those in ``keep``, are marked as slow.

    A case is what ``parametrize`` takes: a value, a tuple of values or a ``pytest.param``.
    """
    made = []
    for i, case in enumerate(cases):
        kept = i < keep if isinstance(keep, int) else case in keep
        made.append(case if kept else _marked(case))
    return made


def keep_some(items: Iterable[pytest.Item]) -> None:
    """Remove the mark from the cases that ``slow(keep=...)`` keeps."""
    cases: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        marks = [mark for mark in item.own_markers if mark.name == "slow"]
        if marks and all("keep" in mark.kwargs for mark in marks):
            keep = marks[0].kwargs["keep"]
            cases.setdefault((item.path, getattr(item, "originalname", item.name), keep), []).append(item)
    for (*_, keep), found in cases.items():
        for i in spread(len(found), keep):
            found[i].own_markers = [mark for mark in found[i].own_markers if mark.name != "slow"]


def spread(cases: int, keep: int) -> set[int]:
    """``keep`` of so many, the first among them, by the golden ratio: of a grid they are not all in one row."""
    kept: set[int] = set()
    for k in range(min(keep, cases)):
        at = int(cases * (k * 0.6180339887 % 1))
        kept.add(next(i % cases for i in range(at, at + cases) if i % cases not in kept))
    return kept


def _marked(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, pytest.mark.slow))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
