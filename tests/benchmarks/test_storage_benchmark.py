"""The benchmark of samples and states on disk: its problems, its check of equal results, and its page."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks.sessions import Session
from benchmarks.storage import (
    CASES,
    PASSES,
    SAMPLES,
    STATES,
    Case,
    cohorts,
    disagreements,
    measure_here,
    medians,
    table,
    write_report,
    write_samples,
)
from fedrax.simulation.placement.row_file import RowFile

SMALL = {"clients": 40, "rows": 4, "features": 6, "classes": 3, "cohort": 8}
PARAMETERS = 3 * (6 + 1)
MACHINE = {
    "cpu": "any",
    "cores": 2,
    "memory_gib": 1.0,
    "system": "any",
    "python": "3",
    "gemm_gflops_1_thread": 1.0,
    "gemm_gflops_all_cores": 1.0,
    "copy_gb_per_second_1_thread": 1.0,
    "copy_gb_per_second_all_cores": 1.0,
}


def measured(case: Case, tmp_path) -> list[dict]:
    """Runs with every placement."""
    path = tmp_path / "x.npy"
    write_samples(path, case)
    return [{"case": case.name, "place": place} | measure_here(case, place, str(path)) for place in case.places]


@pytest.mark.slow
def test_runs_are_equal_for_every_placement_of_samples(tmp_path):
    runs = measured(replace(SAMPLES, **SMALL), tmp_path)
    assert disagreements(Session(tmp_path / "a.jsonl", {}, runs)) == []
    assert ["streamed" in run["plan"] for run in runs] == [False, False, True]
    for run in runs:
        assert run["rounds"] == 4  # five in the last epoch, minus the one with an evaluation
        assert run["bulk_bytes"] == 40 * 4 * 6 * 4
        assert run["bytes_a_round"] == 8 * 4 * 6 * 4


def test_runs_are_equal_for_every_placement_of_states(tmp_path):
    runs = measured(replace(STATES, **SMALL), tmp_path)
    assert disagreements(Session(tmp_path / "a.jsonl", {}, runs)) == []
    assert ["on disk" in run["plan"] for run in runs] == [False, True]
    assert all(run["bulk_bytes"] == 40 * PARAMETERS * 4 for run in runs)
    assert all(run["bytes_a_round"] == 2 * 8 * PARAMETERS * 4 for run in runs)


def test_lost_states_are_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(RowFile, "write", lambda *_: None)
    problems = disagreements(Session(tmp_path / "a.jsonl", {}, measured(replace(STATES, **SMALL), tmp_path)))
    assert problems == ["states: the placements do not all end at the same server state and test loss"]


def test_cases_survive_serialization(tmp_path):
    case = Case(**json.loads(json.dumps(asdict(SAMPLES))))
    assert replace(case, places=tuple(case.places)) == SAMPLES


def test_sizes_agree_with_the_page():
    assert SAMPLES.clients * SAMPLES.rows * SAMPLES.features * 4 == 1_200_000_000
    assert STATES.clients * STATES.classes * (STATES.features + 1) * 4 == 1_200_000_000
    assert all(case.clients % case.cohort == 0 for case in CASES)


def test_every_client_takes_part_once_per_pass():
    drawn = cohorts(replace(STATES, **SMALL)).reshape(PASSES, 40)
    assert np.array_equal(np.sort(drawn), np.tile(np.arange(40), (PASSES, 1)))
    assert not np.array_equal(drawn[0], drawn[1])


def test_samples_are_written_in_chunks(tmp_path):
    write_samples(tmp_path / "x.npy", replace(SAMPLES, clients=15, rows=100, features=6))
    x = np.load(tmp_path / "x.npy", allow_pickle=False)
    assert x.shape == (1500, 6) and x.dtype == np.float32
    assert np.array_equal(x[1000:], np.roll(x[:500], 1, axis=1))


def session_of(tmp_path, repeats: int = 3) -> Session:
    """Runs with invented times: the second placement of each case takes twice as long as the first one, the third 3
    times.
    """
    runs = [
        {
            "case": case.name,
            "place": place,
            "repeat": repeat,
            "round_median": 0.01 * (at + 1) * repeat,
            "first_round_with_import": 2.0,
            "peak_pss_mb": 1000.0,
            "foreign_cpu": 0.0,
            "bulk_bytes": 1_200_000_000,
            "bytes_a_round": 24_000_000,
            "server": case.name,
            "test_loss": 1.0,
        }
        for case in CASES
        for repeat in range(1, repeats + 1)
        for at, place in enumerate(case.places)
    ]
    return Session(tmp_path / "a.jsonl", {"id": "x", "date": "today", "machine": MACHINE}, runs)


def test_page_compares_placements(tmp_path):
    session = session_of(tmp_path)
    rows = list(medians(session))
    assert "| 1.2 GB of samples | streamed | 60 | 3.00 | 24 | 2.00 | 1000 | 0.00 |" in table(rows)
    assert "| 1.2 GB of states | spilled | 40 | 2.00 |" in table(rows)
    written = write_report(session, rows, tmp_path)
    assert {path.name for path in written} == {"storage.md", "storage.png", "storage.svg"}
    page = (tmp_path / "storage.md").read_text()
    assert table(rows) in page and "bit for bit" in page and "Not all agree" not in page


@pytest.mark.parametrize("field", ["server", "test_loss"])
def test_page_names_different_results(tmp_path, field):
    session = session_of(tmp_path)
    session.runs[-1][field] = "another" if field == "server" else 1.0 + 1e-9
    write_report(session, list(medians(session)), tmp_path)
    page = (tmp_path / "storage.md").read_text()
    assert "**Not all agree**" in page and "- states: the placements do not all end" in page


def test_unfinished_session_writes_no_page(tmp_path):
    session = session_of(tmp_path)
    session.runs = [run for run in session.runs if run["place"] != "spilled"]
    with pytest.raises(SystemExit, match="no finished run of states spilled"):
        list(medians(session))


def test_failed_run_is_not_on_the_page(tmp_path):
    session = session_of(tmp_path)
    session.runs[-1] = {"case": "states", "place": "spilled", "repeat": 3, "failed": "no space left"}
    assert disagreements(session) == []
    write_report(session, list(medians(session)), tmp_path)
    assert "Medians of 2 runs" in (tmp_path / "storage.md").read_text()
