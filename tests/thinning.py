"""Which cases of a parametrized test ``make test`` leaves to ``make test-all``.

Either any few of them, spread over all (``@pytest.mark.few(3)``), or those that are named (:func:`thinned`).
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def thinned(cases: Iterable[Any], keep: int | Collection[Any] = 1) -> list[Any]:
    """The cases, all but the first ``keep`` of them, or all but those in ``keep``, marked as exhaustive.

    A case is what ``parametrize`` takes: a value, a tuple of values or a ``pytest.param``.
    """
    made = []
    for i, case in enumerate(cases):
        kept = i < keep if isinstance(keep, int) else case in keep
        made.append(case if kept else _marked(case))
    return made


def leave_few(items: Iterable[pytest.Item]) -> None:
    """Mark as exhaustive what ``@pytest.mark.few`` leaves out of its test's cases."""
    cases: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("few")
        if mark is not None and item.get_closest_marker("exhaustive") is None:
            cases.setdefault((item.path, getattr(item, "originalname", item.name), *mark.args), []).append(item)
    for (*_, keep), found in cases.items():
        kept = spread(len(found), keep)
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.exhaustive)


def spread(cases: int, keep: int) -> set[int]:
    """``keep`` of so many, the first among them. They follow the golden ratio: of a grid they are not all in a row."""
    kept: set[int] = set()
    for k in range(min(keep, cases)):
        at = int(cases * (k * 0.6180339887 % 1))
        kept.add(next(i % cases for i in range(at, at + cases) if i % cases not in kept))
    return kept


def _marked(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, pytest.mark.exhaustive))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
