"""Readers that leave, pictures that cannot be written, and what must not be written over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedrax.cli import run_command
from fedrax.report import sinks
from tests.cli.conftest import Outcome
from tests.cli.test_outputs import command


def test_a_reader_who_has_seen_enough_of_a_table_is_no_failure(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = command(tmp_path, "list", "partitions", stdout=pipe)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_whose_reader_leaves_stops_with_a_checkpoint(
    fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = sinks.JsonSink.event

    def left(self: sinks.JsonSink, event: dict) -> None:
        if event["round"] == 2:
            raise BrokenPipeError
        say(self, event)

    monkeypatch.setattr(sinks.JsonSink, "event", left)
    outcome = fedrax("run", tiny, "--run.checkpoint-every", 1, "--out", "r", "--json")
    assert outcome.status == 141 and "fedrax resume r" in outcome.err
    monkeypatch.setattr(sinks.JsonSink, "event", say)
    rounds = lambda: len((tmp_path / "r/events.jsonl").read_text().splitlines())  # noqa: E731
    assert rounds() == 2
    assert fedrax("resume", "r", "--quiet") == Outcome(0, "", "") and rounds() == 4


SMALL = "--data digits --partition shards --partition.clients 8 --model logistic"


@pytest.mark.parametrize(
    "arguments",
    [
        f"partition {SMALL}",
        f"partition {SMALL} --json",
        f"privacy {SMALL} --algorithm clientdp --run.rounds 2 --run.cohort-size 2",
        f"diagnose {SMALL} --comparison None --tune never --run.rounds 1 --run.cohort-size 2",
    ],
)
def test_what_was_found_is_printed_where_its_picture_cannot_be(
    arguments: str, fedrax: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    outcome = fedrax(*arguments.split(), "--picture", "file/p")
    assert outcome.status == 2 and "cannot write file/p.png" in outcome.err
    assert len(outcome.out) > 200 and "file/p" not in outcome.out


def test_a_profile_does_not_take_the_place_of_a_run(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/events.jsonl").write_text("")
    refused = fedrax("profile", "--out", "r")
    assert refused.status == 2 and "r holds a run" in refused.err and "choose another --out" in refused.err


GOING_ON = [sys.executable, "-m", "fedrax", "run", "tiny.toml", "--run.rounds", "1000000", "--out", "r"]


def test_an_interrupt_that_cannot_be_told_is_one(tiny: Path) -> None:
    """As of `fedrax run ... 2>&1 | tee log`, where Ctrl-C ends both."""
    reader, writer = os.pipe()
    paths = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        GOING_ON, cwd=tiny.parent, env=os.environ | {"PYTHONPATH": paths}, stdout=writer, stderr=writer
    ) as process:
        os.close(reader)
        os.close(writer)
        while not (tiny.parent / "r/events.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert (tiny.parent / "r/checkpoint/state.npz").exists()


def test_a_connection_that_breaks_is_no_reader_that_has_seen_enough(
    fedrax: Callable[..., Outcome], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError("the tracker is gone")

    monkeypatch.setattr(run_command, "simulate", broken)
    with pytest.raises(BrokenPipeError, match="the tracker is gone"):
        fedrax("run", tiny)
