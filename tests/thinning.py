"""Which cases of a parametrised test ``make test`` leaves to ``make test-all``."""

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


def _marked(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return case._replace(marks=(*case.marks, pytest.mark.exhaustive))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
