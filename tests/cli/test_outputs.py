"""Outputs that fail (full disks, narrow terminals, closed pipes), and errors of user code."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedrax import Task
from fedrax.cli import run_command
from fedrax.contract import task as tasks
from fedrax.report import comparison_table, sinks
from fedrax.report.runs import MethodRuns, SavedRun, summarize
from tests.cli.conftest import TINY, Outcome, events_by_run
from tests.cli.test_bad_input import file

RUN = TINY.replace("eval_every", "seed = 0\neval_every")
EVENT = (
    '{"round": 1, "clients": 3, "bytes_down": 8, "bytes_up": 8, "gradients": 6, "seconds": 0.1, "test_accuracy": 0.5}\n'
)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A directory for ``show``, whose table contains letters beyond ASCII."""
    for seed in (0, 1):
        file(f"r{seed}/experiment.toml", RUN.replace("seed = 0", f"seed = {seed}"))(tmp_path)
        file(f"r{seed}/events.jsonl", EVENT)(tmp_path)
    return tmp_path


def command(folder: Path, *arguments: str, stdout: Any = subprocess.PIPE, **environment: str) -> Any:
    """``fedrax ...`` in a process."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-m", "fedrax", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths} | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_full_disk_behind_standard_output_raises_a_clear_error(run_directory: Path):
    with open("/dev/full", "w") as full:
        done = command(run_directory, "show", ".", "--json", stdout=full)
    assert (done.returncode, done.stderr) == (2, "fedrax: cannot write the output: No space left on device\n")


def test_ascii_terminal_shows_escapes(run_directory: Path):
    done = command(run_directory, "show", ".", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == "" and "\\xb1" in done.stdout


MALFORMED_RUNS = {
    "rounds": (RUN.replace("rounds = 4", "rounds = 'six'"), EVENT, "run.rounds must be a number, not 'six'"),
    "seed": (RUN.replace("seed = 0", "seed = 1.5"), EVENT, "run.seed must be a number, not 1.5"),
    "target": (RUN + "target = [1]\n", EVENT, "run.target must be a number, not [1]"),
    "no run": ("[algorithm]\nname = 'fedavg'\n", EVENT, "not the complete experiment"),
    "nested too deeply": (RUN + f"[{'.'.join('a' * 5000)}]\n", EVENT, "nested too deeply"),
    "event without bytes": (RUN, EVENT.replace('"bytes_up": 8, ', ""), "it has no 'bytes_up'"),
    "event without seconds": (RUN, EVENT.replace(', "seconds": 0.1', ""), "it has no 'seconds'"),
    "clients in words": (RUN, EVENT.replace('"clients": 3', '"clients": "three"'), "'clients' is 'three'"),
    "negative bytes": (RUN, EVENT.replace('"bytes_up": 8', '"bytes_up": -8'), "'bytes_up' is -8"),
    "accuracy in words": (RUN, EVENT.replace("0.5", '"half"'), "'test_accuracy' is 'half'"),
    "no bytes": (RUN, EVENT.replace('"bytes_up": 8', '"bytes_up": null'), "'bytes_up' is None"),
    "infinite seconds": (RUN, EVENT.replace("0.1", "1e999"), "'seconds' is inf"),
    "too many bytes": (RUN, EVENT.replace('"bytes_up": 8', f'"bytes_up": {10**400}'), "'bytes_up' is 1000"),
    "a number too large": (RUN, EVENT.replace("0.5", f"{10**400}"), "'test_accuracy' is 1000"),
    "truth": (RUN, EVENT.replace("0.5", "true"), "'test_accuracy' is True"),
    "a list": (RUN, EVENT.replace("0.5", "[0.5]"), "'test_accuracy' is [0.5]"),
    "brackets": (RUN, "[" * 100_000 + "\n", "is not an event"),
    "too long": (RUN, "1" * (2 << 20) + "\n", "is too long"),
    "no text": (RUN, EVENT.encode() + b"\xff\xfe\n", "line 2, is not an event"),
}


@pytest.mark.parametrize("name", MALFORMED_RUNS)
def test_malformed_runs_raise_a_clear_error(name: str, tmp_path: Path, fedrax: Any):
    written, events, message = MALFORMED_RUNS[name]
    file("r/experiment.toml", written)(tmp_path)
    file("r/events.jsonl", events)(tmp_path)
    outcome = fedrax("show", "r")
    assert outcome.status == 2 and message in outcome.err and outcome.err.count("\n") == 1, outcome


@pytest.mark.parametrize("name", ["experiment.toml", "events.jsonl"])
def test_pipes_in_a_run_directory_are_not_read(name: str, run_directory: Path, fedrax: Any):
    (run_directory / "r0" / name).unlink()
    os.mkfifo(run_directory / "r0" / name)
    outcome = fedrax("doctor", "r0")
    assert outcome.status == 1 and "not a regular file" in outcome.out
    if name == "events.jsonl":
        assert "not a regular file" in fedrax("show", "r0").err


@pytest.mark.parametrize("target", ["0", "7", "-7", "nan"])
def test_targets_must_be_accuracies(target: str, run_directory: Path, fedrax: Any):
    for arguments in (("show", "."), ("compare", "--algorithms", "fedavg")):
        outcome = fedrax(*arguments, "--target", target)
        assert outcome.status == 2 and "accuracy in (0, 1]" in outcome.err


@pytest.mark.parametrize("text", ["", "# nothing\n", "name = 'x'\nnormalize = true\n"])
@pytest.mark.parametrize("name", ["run", "compare", "partition", "profile"])
def test_empty_file_is_rejected(name: str, text: str, tmp_path: Path, fedrax: Any):
    (tmp_path / "x.toml").write_text(text)
    outcome = fedrax(name, "x.toml")
    assert outcome.status == 2 and "x.toml is not an experiment" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["x.toml"]


# -- user code
# ----------------------------------------------------------------------------------------------------------

OWN = """
from fedrax import FedAvg
from fedrax.config.hyperparameters import hyperparameters
from fedrax.models import Logistic

def data():
    raise {error}

def model(input_shape, num_outputs):
    return helper()

def helper():
    raise {error}

@hyperparameters
class Mine(FedAvg):
    def client(self, *arguments):
        raise {error}
"""


@pytest.mark.parametrize("error", ["SystemExit(0)", "ValueError('gone')", "KeyError(3)", "OSError('no')"])
@pytest.mark.parametrize(("part", "line"), [("data", 7), ("model", 13), ("algorithm", 18)])
def test_errors_of_user_code_name_its_line(part: str, line: int, error: str, tmp_path: Path, fedrax: Any):
    (tmp_path / "mine.py").write_text(OWN.format(error=error))
    name = {"data": "data", "model": "model", "algorithm": "Mine"}[part]
    outcome = fedrax("run", f"--{part}", f"mine.py:{name}", "--out", "r", "--quiet")
    assert outcome.status == 2 and not (tmp_path / "r" / "experiment.toml").exists()
    if part == "algorithm" and not error.startswith("SystemExit"):
        assert f"Mine (mine.py, line {line}, in client) fails with {error.partition('(')[0]}: " in outcome.err, outcome
        return
    assert f"your code raised an error, mine.py in line {line}" in outcome.err, outcome
    assert outcome.err.splitlines()[-1].startswith(error.partition("(")[0])
    assert len(outcome.err.splitlines()) < 12 and "site-packages" not in outcome.err


# -- comparisons -------------------------------------------------------------------------------------------------------

TABLE = "".join(f"{i % 7},{(3 * i) % 5},{i % 3}\n" for i in range(48))
COMPARED = """
seeds = [0]
data = { name = "csv", path = "d.csv" }
partition = { name = "iid", clients = 4 }
model = "logistic"
run = { rounds = 2, cohort_size = 2 }
[[compare]]
name = "fedavg"
local = { lr = 0.1, steps = 2 }
"""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("changed", ["data", "program", "version"])
def test_finished_runs_of_other_data_or_code_are_not_reused(
    changed: str, tmp_path: Path, fedrax: Any, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "d.csv").write_text("a,b,label\n" + TABLE)
    (tmp_path / "c.toml").write_text(COMPARED)
    assert fedrax("compare", "c.toml", "--out", "c", "--quiet").status == 0
    events = tmp_path / "c" / "fedavg" / "seed-0" / "events.jsonl"
    before = events.read_bytes()
    assert fedrax("compare", "c.toml", "--out", "c", "--quiet").status == 0
    if changed == "data":
        (tmp_path / "d.csv").write_text("a,b,label\n" + TABLE.replace("1,1,", "2,1,"))
        message = "its data differ"
    elif changed == "version":
        monkeypatch.setattr("fedrax.version.VERSION", "99.0")
        message = "and here is fedrax 99.0"
    elif changed == "program":
        made = tasks.classification

        def doubled(*arguments: Any, **options: Any) -> Task:
            task = made(*arguments, **options)
            return Task(task.init, lambda params, batch, key: 2 * task.loss(params, batch, key), task.metrics)

        monkeypatch.setattr(tasks, "classification", doubled)
        message = "its program and evaluation differ"
    outcome = fedrax("compare", "c.toml", "--out", "c", "--quiet")
    assert outcome.status == 2 and message in outcome.err and "choose another --out" in outcome.err, outcome
    assert events.read_bytes() == before


@pytest.mark.slow
def test_run_without_its_last_checkpoint_is_repeated(tmp_path: Path, fedrax: Any):
    (tmp_path / "d.csv").write_text("a,b,label\n" + TABLE)
    (tmp_path / "c.toml").write_text(COMPARED)
    assert fedrax("compare", "c.toml", "--out", "c", "--quiet").status == 0
    whole = events_by_run(tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "fedavg" / "seed-0" / "checkpoint")  # all events are written
    assert fedrax("compare", "c.toml", "--out", "c", "--quiet").status == 0
    assert events_by_run(tmp_path / "c") == whole
    assert (tmp_path / "c" / "fedavg" / "seed-0" / "checkpoint" / "state.npz").exists()


# -- links -------------------------------------------------------------------------------------------------------------

OUTPUTS = ("table.md", "comparison.json", "curves.png", "curves.svg")
FILES = (
    *("experiment.toml", "events.jsonl", "environment.json", "clients.json", "run.json"),
    *("checkpoint/state.npz", "model.safetensors"),
)


def test_outputs_of_a_comparison_do_not_follow_links(tmp_path: Path, fedrax: Any):
    victim, out = tmp_path / "victim", tmp_path / "c"
    victim.write_text("precious")
    (tmp_path / "d.csv").write_text("a,b,label\n" + TABLE)
    (tmp_path / "c.toml").write_text(COMPARED)
    run = out / "fedavg" / "seed-0"
    written = [*(out / name for name in OUTPUTS), *(run / name for name in FILES)]
    places = [path.with_name(f".{path.name}.part") for path in written]
    places += [*(out / name for name in OUTPUTS), run / "environment.json", run / "clients.json"]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(victim)
    outcome = fedrax("compare", "c.toml", "--out", "c", "--quiet")
    assert outcome.status == 0, outcome
    assert victim.read_text() == "precious"
    assert not [path for path in out.rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("columns", [40, 200])
def test_narrow_terminal_shows_one_table_per_method(columns: int):
    run = SavedRun(Path("r"), {"run": {"seed": 0, "rounds": 1}}, [json.loads(EVENT)], None)
    rows = [summarize(MethodRuns(label, [run]), 0.4) for label in ("a method of a long name", "[b]other")]
    screen = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None, markup=False)
    comparison_table.show(screen, rows, 0.4)
    printed = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in printed and all(len(line) <= columns for line in printed.splitlines())
    for words in ("a method of a long name", "[b]other", "0.5000", "rounds to 0.4", "finished"):
        assert words in printed
    assert (printed.count("rounds to 0.4") == 1) == (columns == 200)


def test_columns_that_do_not_fit_are_named():
    run = SavedRun(Path("r"), {"run": {"seed": 0, "rounds": 1}}, [json.loads(EVENT)], None)
    rows = [summarize(MethodRuns(f"m{i}", [run]), 0.4) for i in range(10)]
    headings = comparison_table.cells(rows, 0.4).headings
    seen = []
    for columns in (60, 80, 110, 400):
        screen = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None, markup=False)
        comparison_table.show(screen, rows, 0.4)
        printed = screen.file.getvalue()  # type: ignore[attr-defined]
        table, _, hidden = printed.partition("hidden column")
        assert all(len(line) <= columns for line in printed.splitlines()) and table.count("finished") == 10
        names = " ".join(hidden.partition(": ")[2].split()).split(", ") if hidden else []
        assert names == [heading for heading in headings if heading in names]
        assert ("rounds to 0.4" in names) <= ("MB to 0.4" in names) <= ("gradients to 0.4" in names)
        assert all(heading.split()[0] in table for heading in headings if heading not in names)
        seen.append(len(names))
    assert seen == sorted(seen, reverse=True) and seen[0] > seen[1] > seen[-1] == 0


def test_closed_pipe_is_no_failure(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = command(tmp_path, "list", "partitions", stdout=pipe)
    assert (done.returncode, done.stderr) == (0, "")


def test_run_with_a_closed_pipe_stops_with_a_checkpoint(
    fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = sinks.JsonSink.event

    def raise_broken_pipe(self: sinks.JsonSink, event: dict) -> None:
        if event["round"] == 2:
            raise BrokenPipeError
        say(self, event)

    monkeypatch.setattr(sinks.JsonSink, "event", raise_broken_pipe)
    outcome = fedrax("run", tiny, "--run.checkpoint-every", 1, "--out", "r", "--json")
    assert outcome.status == 141 and "fedrax resume r" in outcome.err
    monkeypatch.setattr(sinks.JsonSink, "event", say)
    rounds = lambda: len((tmp_path / "r/events.jsonl").read_text().splitlines())  # noqa: E731
    assert rounds() == 2
    assert fedrax("resume", "r", "--quiet") == Outcome(0, "", "") and rounds() == 4


SMALL = "--data digits --partition shards --partition.clients 8 --model logistic"


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    "arguments",
    [
        f"partition {SMALL}",
        f"partition {SMALL} --json",
        f"privacy {SMALL} --algorithm clientdp --run.rounds 2 --run.cohort-size 2",
        f"diagnose {SMALL} --comparison None --tune never --run.rounds 1 --run.cohort-size 2",
    ],
)
def test_results_are_printed_if_the_picture_cannot_be_written(
    arguments: str, fedrax: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    outcome = fedrax(*arguments.split(), "--picture", "file/p")
    assert outcome.status == 2 and "cannot write file/p.png" in outcome.err
    assert len(outcome.out) > 200 and "file/p" not in outcome.out


def test_profile_does_not_overwrite_a_run(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/events.jsonl").write_text("")
    rejected = fedrax("profile", "--out", "r")
    assert rejected.status == 2 and "r holds a run" in rejected.err and "choose another --out" in rejected.err


LONG_RUN = [sys.executable, "-m", "fedrax", "run", "tiny.toml", "--run.rounds", "1000000", "--out", "r"]


def test_interrupt_with_closed_streams_writes_a_checkpoint(tiny: Path) -> None:
    """As with `fedrax run ... 2>&1 | tee log`, where Ctrl-C ends both processes."""
    reader, writer = os.pipe()
    paths, events = os.pathsep.join(path for path in sys.path if path), tiny.parent / "r/events.jsonl"
    with subprocess.Popen(
        LONG_RUN, cwd=tiny.parent, env=os.environ | {"PYTHONPATH": paths}, stdout=writer, stderr=writer
    ) as process:
        os.close(reader)
        os.close(writer)
        while not (events.exists() and events.read_bytes()):  # the file is created before the first round
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=600) == 128 + signal.SIGTERM
    assert (tiny.parent / "r/checkpoint/state.npz").exists()


def test_broken_connection_of_a_tracker_is_an_error(
    fedrax: Callable[..., Outcome], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError("the tracker is gone")

    monkeypatch.setattr(run_command, "simulate", broken)
    with pytest.raises(BrokenPipeError, match="the tracker is gone"):
        fedrax("run", tiny)
