"""A few hundred cases of each kind, half of them where there is time; FEDRAX_FUZZ_SEED chooses others."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import strategies as st

from tests.fuzz import arrays, configurations, files, harness, runs
from tests.fuzz.harness import fuzz
from tests.slow import slow_cases

SEED = int(os.environ.get("FEDRAX_FUZZ_SEED", "0"))
KINDS = {
    "configurations": (configurations.tables, configurations.check, 150),
    "arrays": (arrays.samples, arrays.check, 150),
    "files": (files.contents, files.check, 150),
    "runs": (runs.directories, runs.check, 75),
}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", slow_cases([SEED, SEED + 1]), ids=["first", "second"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_sentences(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDRAX_CACHE", os.environ.get("FEDRAX_CACHE", ""))  # the cases change it
    cases, check, count = KINDS[kind]
    counts = fuzz(cases(), check, count, seed)
    assert counts["accepted"] and counts["refused"], counts


def test_the_harness_sees_raw_errors_and_hangs(monkeypatch: pytest.MonkeyPatch):
    def check(number: int) -> bool:
        if number > 5:
            raise KeyError(number)
        return True

    with pytest.raises(KeyError, match="6"):  # the smallest
        fuzz(st.integers(), check, 100)
    monkeypatch.setattr(harness, "SECONDS", 0.05)
    with pytest.raises(AssertionError, match="it hangs"), harness.time_limit():
        time.sleep(5)
