"""A few hundred cases of each kind; FEDRAX_FUZZ_SEED selects others."""

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
def test_random_inputs_are_rejected_or_keep_their_meaning(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDRAX_CACHE", os.environ.get("FEDRAX_CACHE", ""))  # restored, because cases change it
    cases, check, count = KINDS[kind]
    counts = fuzz(cases(), check, count, seed)
    assert counts["accepted"] and counts["refused"], counts


def test_harness_detects_other_errors_and_hangs(monkeypatch: pytest.MonkeyPatch):
    def check(number: int) -> bool:
        if number > 5:
            raise KeyError(number)
        return True

    with pytest.raises(KeyError, match="6"):  # the smallest counterexample
        fuzz(st.integers(), check, 100)
    monkeypatch.setattr(harness, "SECONDS", 0.05)
    with pytest.raises(AssertionError, match="it hangs"), harness.time_limit():
        time.sleep(5)
