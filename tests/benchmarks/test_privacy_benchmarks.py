"""Benchmarks of private mechanisms: audited claims, audits that must fail, and the pages."""

from __future__ import annotations

from benchmarks import audits, privacy
from benchmarks.broken_mechanisms import BROKEN
from benchmarks.sessions import Session
from tests.benchmarks.test_storage_benchmark import MACHINE

HEADER = {"id": "a", "date": "2026-01-01", "machine": MACHINE, "runs": 80}


def test_grid_contains_every_mechanism_and_sampling():
    every = list(audits.configurations())
    assert len(every) >= 200 and len({one[:5] for one in every}) == len(every)
    assert {one.drawn for one in every} == {"always", "fixed", "poisson"}
    assert {type(one.private).__name__ for one in every} == {"ClientDP", "SampleDP", "OutputPerturbation"}


def test_audits_fail_for_violated_claims_and_for_powerless_tests(tmp_path):
    fine = {
        "method": "FedAvg",
        "mechanism": "ClientDP",
        "drawn": "always",
        "proven": 1.1,
        "together": 0.9,
        "claimed": 1.0,
    }
    broken = fine | {"fault": "a leaf left out", "noise": 1.0, "proven": 3.0, "together": 2.0}
    session = Session(tmp_path / "a.jsonl", HEADER, [fine, broken, {"seconds": 60.0}])
    assert audits.failures(session) == []  # above the claim by itself, but not after correction for multiple tests
    table = audits.table(session)
    assert "| ClientDP | always | 1 | 1.10 to 1.10 | 1 | 0 |" in table
    assert "| ClientDP, a leaf left out | always | 1 | 3.00 to 3.00 | 1 | 1 |" in table
    assert "1 of 1 are" in audits.write_report(session, tmp_path).read_text()
    session.runs[0] = fine | {"together": 1.05}
    assert audits.failures(session) == ["ClientDP of FedAvg is refuted"]
    session.runs[:2] = [fine, broken | {"together": 0.5}]
    assert audits.failures(session) == ["ClientDP with a leaf left out, noise 1.0, is not detected"]


def test_every_fault_exists_at_server_and_client():
    every = list(audits.broken())
    assert {(fault, vars(runs_as)["at"]) for fault, _, runs_as in every} == {
        (f, a) for f in BROKEN for a in ("server", "client")
    }
    assert all(one.private.releases() == runs_as.releases() for _, one, runs_as in every)


def test_page_compares_private_steps_with_plain_ones_and_with_opacus(tmp_path):
    cost = {"fedrax": 1.0, "fedrax, SampleDP": 2.5, "PyTorch": 2.0, "Opacus": 10.0, "Opacus, ghost clipping": 5.0}
    facts = {"steps": 10, "repeat": 1, "foreign_cpu": 0.0, "peak_pss_mb": 9.0, "version": "1.6.0"}
    runs = [
        {"model": model, "name": name, "seconds": [0.01 * c] * 3} | facts
        for model in privacy.MODELS
        for name, c in cost.items()
    ]
    seconds = {"FedAvg": 0.01, "ClientDP, noise at the server": 0.011, "ClientDP, noise at the clients": 0.02}
    rounds = {name: {"processor": [2 * s, s, s], "wall": [s / 2] * 3} for name, s in seconds.items()}
    session = Session(tmp_path / "a.jsonl", HEADER, [{"repeat": 1, "rounds": rounds}, *runs])
    assert "| ClientDP, noise at the server | 11 | 5.5 | 1.10 | 1.10 |" in privacy.rounds_table(session)
    assert "| fedrax, SampleDP | 2.5 | 2.50 | 0.25 | 9 | 0.00 |" in privacy.table(session)
    assert "Opacus 1.6.0" in privacy.write_report(session, tmp_path).read_text()
