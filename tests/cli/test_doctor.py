"""``fedrax doctor``: its report on damaged runs, and repairs that never lose data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedrax
from fedrax.simulation.persistence.run_directory import lock_directory
from tests.cli.conftest import TINY, Outcome
from tests.simulation.problems import read_files, without_times

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four rounds with a checkpoint after each round."""
    from fedrax.cli import main

    folder = tmp_path_factory.mktemp("doctor")
    (folder / "x.toml").write_text(TINY + "checkpoint_every = 1\n")
    assert main(["run", str(folder / "x.toml"), "--out", str(folder / "r"), "--quiet"]) == 0
    return folder / "r"


def flip_bit(name: str) -> Damage:
    """Flip one bit of a file."""

    def damage(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[len(content) // 3] ^= 1
        (run / name).write_bytes(content)

    return damage


def truncate(name: str) -> Damage:
    """Truncate a file to its second half."""

    def damage(run: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) // 2])

    return damage


def replace_last_event(text: bytes | None) -> Damage:
    """Replace the last line of the events; None changes a number in it to another valid number."""

    def damage(run: Path) -> None:
        *lines, last = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
        changed = last.replace(b'"train_loss": 2', b'"train_loss": 1').replace(b'"train_loss": 1.', b'"train_loss": 3.')
        assert changed != last
        (run / "events.jsonl").write_bytes(b"".join(lines) + (changed if text is None else text))

    return damage


STATE, BEFORE = "checkpoint/state.npz", "checkpoint/previous.npz"
REPAIRS = {
    "state flipped": (flip_bit(STATE), "restore the previous checkpoint, of round 3"),
    "state cut": (truncate(STATE), "restore the previous checkpoint, of round 3"),
    "state lost": (lambda run: (run / STATE).unlink(), "restore the previous checkpoint, of round 3"),
    "state a folder": (
        lambda run: ((run / STATE).unlink(), (run / STATE).mkdir()),
        "restore the previous checkpoint, of round 3",
    ),
    "events": (replace_last_event(b'{"round": 4, "clients": "three"}\n'), "keep the first 3 lines"),
    "event changed": (replace_last_event(None), "restore the previous checkpoint, of round 3"),
    "previous": (flip_bit(BEFORE), "rename the damaged previous checkpoint"),
    "left over": (lambda run: (run / ".events.jsonl.part").write_text("{"), "remove .events.jsonl.part"),
    "failure": (lambda run: (run / "failure").mkdir(), "rename failure"),
}


@pytest.mark.parametrize("name", REPAIRS)
def test_damaged_runs_are_repaired(name: str, finished_run: Path, tmp_path: Path, fedrax: Any):
    """The run resumes with the same events, and damaged files are kept."""
    damage, message = REPAIRS[name]
    run = tmp_path / "r"
    shutil.copytree(finished_run, run)
    damage(run)
    before = read_files(run)
    outcome = fedrax("doctor", "r")
    assert outcome.status == 1 and f"--repair would {message}" in outcome.out, outcome
    assert read_files(run) == before
    outcome = fedrax("doctor", "r", "--repair")
    assert outcome.status == 0 and "can be resumed from round" in outcome.out, outcome
    after = list(read_files(run).values())
    assert all(content in after for file, content in before.items() if not file.endswith(".part"))
    assert fedrax("doctor", "r").status == 0
    assert fedrax("resume", "r", "--quiet") == Outcome(0, "", "")
    assert events(run) == events(finished_run)
    assert fedrax("show", "r").status == 0


def events(run: Path) -> list[dict]:
    return without_times(fedrax.simulation.read_events(run))


LOST = {
    "all checkpoints": (
        lambda run: (flip_bit(STATE)(run), flip_bit(BEFORE)(run)),
        "cannot be resumed: no checkpoint is intact",
    ),
    "no events": (lambda run: (run / "events.jsonl").unlink(), "cannot be resumed"),
    "experiment": (truncate("experiment.toml"), "experiment.toml is lost"),
    "no experiment": (lambda run: (run / "experiment.toml").unlink(), "experiment.toml is lost"),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoint"), "resuming starts from the beginning"),
}


@pytest.mark.parametrize("name", LOST)
def test_data_loss_is_reported(name: str, finished_run: Path, tmp_path: Path, fedrax: Any):
    damage, message = LOST[name]
    shutil.copytree(finished_run, tmp_path / "r")
    damage(tmp_path / "r")
    before = read_files(tmp_path / "r")
    outcome = fedrax("doctor", "r", "--repair")
    assert message in outcome.out and "Traceback" not in outcome.err, outcome
    after = list(read_files(tmp_path / "r").values())
    assert all(content in after for content in before.values())


def test_intact_run_is_not_changed(finished_run: Path, fedrax: Any):
    before = read_files(finished_run)
    outcome = fedrax("doctor", finished_run, "--repair", "--json")
    found = json.loads(outcome.out)
    assert outcome.status == 0 and found["intact"] and not found["repairs"]
    assert {f["name"] for f in found["files"]} >= {"experiment.toml", "events.jsonl", STATE, BEFORE}
    assert read_files(finished_run) == before


def test_locked_run_is_not_changed(finished_run: Path, tmp_path: Path, fedrax: Any):
    shutil.copytree(finished_run, tmp_path / "r")
    flip_bit(STATE)(tmp_path / "r")
    before = read_files(tmp_path / "r")
    with lock_directory(tmp_path / "r", resume=True):
        outcome = fedrax("doctor", "r", "--repair")
    assert outcome.status == 2 and "another run is writing to" in outcome.err
    assert read_files(tmp_path / "r") == before


@pytest.mark.parametrize("where", ["nowhere", "x.toml"])
def test_paths_that_are_no_directories_are_rejected(where: str, tmp_path: Path, fedrax: Any):
    (tmp_path / "x.toml").write_text(TINY)
    outcome = fedrax("doctor", where)
    assert outcome.status == 2 and "is not a directory" in outcome.err and not (tmp_path / "nowhere").exists()


def test_directory_without_a_run_is_rejected(finished_run: Path, tmp_path: Path, fedrax: Any):
    (tmp_path / "r").mkdir()
    outcome = fedrax("doctor", "r")
    assert outcome.status == 2 and "r is not a run directory" in outcome.err
    shutil.copytree(finished_run, tmp_path / "r" / "b" / "seed-0")
    outcome = fedrax("doctor", "r", "--repair")
    assert outcome.status == 2 and "r is not a run directory; the first of 1 below it is r/b/seed-0" in outcome.err
    shutil.copytree(finished_run, tmp_path / "s" / "c" / "search" / "fedavg" / "local.lr=0.1" / "seed-0")
    for command in ("doctor", "resume"):
        outcome = fedrax(command, "s")
        deep = "the first of 1 below it is s/c/search/fedavg/local.lr=0.1/seed-0"
        assert outcome.status == 2 and deep in outcome.err
    assert "resume a comparison with the command that started it" in outcome.err
