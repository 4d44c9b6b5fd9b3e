"""The directory of a federation is a run directory, for reports and for ``fedrax doctor``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Array, Message, MessageType

from fedrax import FedAvg, LocalSGD, Scaffold, simulate
from fedrax.cli import main
from fedrax.flower import client_app
from fedrax.privacy import ClientDP
from fedrax.report import find_runs, read_run
from fedrax.simulation import NonFiniteError
from tests.flower.messages import (
    COHORT,
    FEDERATION,
    INITIAL_PARAMS,
    ROUNDS,
    SIZES,
    TASK,
    SerializingGrid,
    client_samples,
    run_federation,
)

METHOD = Scaffold(local=LocalSGD(lr=0.05, steps=3, batch_size=4))


def run_command(capsys: pytest.CaptureFixture[str], *command: Any) -> tuple[int, str]:
    """Exit status and output of a command."""
    capsys.readouterr()
    status = main([str(part) for part in command])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_report_shows_a_federation_beside_its_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Losses and bytes are equal; time and messages are measured."""
    simulated, federated = tmp_path / "there", tmp_path / "here"
    options: dict[str, Any] = {"rounds": ROUNDS, "cohort_size": COHORT, "eval_every": 2, "params": INITIAL_PARAMS}
    simulate(METHOD, TASK, FEDERATION, directory=simulated, **options)
    run_federation(METHOD, directory=federated, **options)
    status, out = run_command(capsys, "show", simulated, federated, "--json", "--target", "0.01")
    rows = {row["label"]: row for row in json.loads(out)["methods"]}
    assert status == 0 and set(rows) == {"scaffold", "scaffold (deployed)"}
    actual, desired = rows["scaffold (deployed)"], rows["scaffold"]
    assert actual["loss"]["mean"] == pytest.approx(desired["loss"]["mean"], rel=1e-4)
    assert (actual["megabytes"], actual["state"]) == (desired["megabytes"], "finished")
    event = read_run(federated).events[-1]
    assert event["wire_bytes_up"] > event["bytes_up"] and event["wire_bytes_down"] > event["bytes_down"]
    assert run_command(capsys, "report", simulated, federated, "--out", tmp_path / "r.html")[0] == 0
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "on the wire" in page and "those of a federation are measured" in page
    assert f"data of the clients: 6 clients of 3 to {max(SIZES)} training samples" in page


def test_doctor_prints_how_to_resume_each_kind_of_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    simulate(METHOD, TASK, FEDERATION, rounds=1, directory=tmp_path / "python")
    run_federation(METHOD, rounds=1, directory=tmp_path / "federation")
    remedies = {"python": "run the Python program", "federation": "start the server app again with resume=True"}
    for name, words in remedies.items():
        status, out = run_command(capsys, "doctor", tmp_path / name)
        assert status == 0 and f"can be resumed from round 1: {words}" in out, out
        status, out = run_command(capsys, "resume", tmp_path / name)
        assert status == 2 and words in out and "experiment file" in out
    (tmp_path / "federation" / "run.json").write_text("{}")
    status, out = run_command(capsys, "doctor", tmp_path / "federation")
    assert status == 1 and "does not describe a run" in out


def test_secret_seed_is_not_written_and_such_runs_differ(tmp_path: Path):
    for name in "ab":
        run_federation(METHOD, rounds=1, seed=None, directory=tmp_path / name)
    assert [run.seed for run in find_runs(tmp_path)] == [None, None]
    assert '"seed": "none"' in (tmp_path / "a" / "run.json").read_text("utf-8")


def test_spent_budget_is_shown(tmp_path: Path):
    method = ClientDP(FedAvg(local=METHOD.local), noise=5.0)
    first = run_federation(method, rounds=1, cohort_size=6, seed=None)
    budget = first.events[0]["epsilon"] + 1e-6
    run_federation(method, rounds=3, cohort_size=6, seed=None, epsilon_budget=budget, directory=tmp_path)
    assert read_run(tmp_path).state == "budget spent in round 1"


def test_divergence_is_shown_until_the_run_is_resumed(tmp_path: Path):
    grid = SerializingGrid(client_app(METHOD, TASK, client_samples, seed=0), len(SIZES))

    def make_infinite(reply: Message, client: int) -> None:
        if reply.metadata.message_type == MessageType.TRAIN:
            sent = reply.content.array_records["sent"]
            for name, a in sent.items():
                sent[name] = Array(a.dtype, a.shape, a.stype, b"\xff" * len(a.data))

    grid.change = make_infinite
    with pytest.raises(NonFiniteError):
        run_federation(METHOD, grid, directory=tmp_path)
    assert read_run(tmp_path).state == "diverged in round 1"
    run_federation(METHOD, directory=tmp_path, resume=True)
    assert read_run(tmp_path).state == "finished"
