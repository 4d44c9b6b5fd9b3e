"""Sinks: output for terminals, TensorBoard, Weights & Biases and MLflow, if installed."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len

from fedrax.errors import FedraxError
from fedrax.report import sinks
from fedrax.simulation import RunInfo
from fedrax.simulation.results.progress import ProgressLine, ProgressSink, progress_is_visible
from tests.cli.conftest import TINY

RUN = RunInfo("FedAvg", "scan", 2, 0, 3, 8, 100, 100, 25)
EVENTS = [
    {"round": 1, "train_loss": 2.0, "bytes_down": 300, "bytes_up": 300, "seconds": 0.5},
    {"round": 2, "train_loss": 1.0, "bytes_down": 600, "bytes_up": 600, "seconds": 0.6, "test_accuracy": 0.75},
]


def run_sink(
    sink: sinks.JsonSink | sinks.TensorBoardSink | sinks.WandbSink | sinks.MlflowSink | ProgressSink,
) -> None:
    """Send a complete run to a sink."""
    sink.start(RUN)
    for event in EVENTS:
        sink.event(event)
    sink.finish(object())


def test_json_sink() -> None:
    file = io.StringIO()
    run_sink(sinks.JsonSink(file))
    assert [json.loads(line) for line in file.getvalue().splitlines()] == EVENTS


class Terminal(io.StringIO):
    """A terminal, and its visible text."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """All states of all lines."""
        return [line for line in re.split(r"[\r\n]+", self.getvalue()) if line.strip()]


def test_progress_is_shown_in_one_line() -> None:
    screen = Terminal()
    run_sink(ProgressSink("a run", ProgressLine(screen, 160)))
    assert screen.lines()[0].split()[-1] == "compiling"
    for part in ("a run", "2/2 rounds", "loss 1", "test accuracy 0.750", "━"):
        assert part in screen.lines()[-1]


def test_progress_of_a_stopped_run_ends_with_its_last_round() -> None:
    screen = Terminal()
    sink = ProgressSink("a run", ProgressLine(screen, 160))
    sink.start(dataclasses.replace(RUN, rounds=50))
    for event in EVENTS:  # within the interval between updates
        sink.event(event)
    sink.finish(object())
    assert "2/50 rounds" in screen.lines()[-1] and "test accuracy 0.750" in screen.lines()[-1]


@pytest.mark.parametrize("width", [20, 40, 60, 100])
def test_progress_fits_a_narrow_terminal(width: int) -> None:
    screen = Terminal()
    run_sink(ProgressSink("a run with quite a long description of itself, 長い名前", ProgressLine(screen, width)))
    assert all(cell_len(line) <= width for line in screen.lines())
    last = screen.lines()[-1]
    assert last.startswith("a run") and ("2/2 rounds" in last or width == 20)
    assert ("test accuracy 0.750" in last) == (width >= 60)


def test_messages_stay_above_the_progress_line() -> None:
    screen = Terminal()
    line = ProgressLine(screen, 30)
    line.show("under way")
    line.say("done: \x1b[2Jone")
    assert screen.getvalue().split("\r")[-1] == "under way" and "\x1b" not in screen.getvalue()
    line.clear()
    assert screen.getvalue().endswith("\r" + " " * 9 + "\r")


def test_progress_is_not_shown_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    run_sink(ProgressSink("a run", ProgressLine(file)))
    assert file.getvalue() == "" and not progress_is_visible(file) and progress_is_visible(Terminal())
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert progress_is_visible(file)
    monkeypatch.setenv("FEDRAX_PROGRESS", "0")
    assert not progress_is_visible(file) and not progress_is_visible(Terminal())


class WriteOnlyStream:
    """A replacement of standard error that only has ``write``, as logging programs install."""

    def write(self, text: str) -> None:
        """Discard the text."""

    def flush(self) -> None:
        """Do nothing."""


class ClosedTerminal(io.StringIO):
    """A terminal that was closed."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """As of a closed pipe or connection."""
        raise BrokenPipeError


def test_unwritable_progress_does_not_end_the_run() -> None:
    for stream in (None, WriteOnlyStream()):
        assert not progress_is_visible(stream)  # type: ignore[arg-type]
    line = ProgressLine(ClosedTerminal(), width=40)
    line.show("as far as that")
    line.say("and this")


def test_progress_in_python_is_shown_on_terminals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of simulate, sweep in both modes, and compare, unless switched off."""
    from fedrax import FedAvg, LocalSGD, compare, simulate, sweep
    from tests.simulation.problems import FEDERATION, TASK

    settings: dict[str, Any] = {"rounds": 2, "cohort_size": 2}
    methods = [FedAvg(local=LocalSGD(lr=lr, steps=1)) for lr in (0.1, 0.2)]
    (tmp_path / "c.toml").write_text(TINY + '[[compare]]\nname = "fedavg"\nlabel = "first"\n')
    calls = {
        r"FedAvg  .*2/2 rounds  .*loss": lambda **k: simulate(methods[0], TASK, FEDERATION, **settings, **k),
        r"FedAvg \(2/2\)  .*2/2 rounds": lambda **k: sweep(
            methods, TASK, FEDERATION, mode="sequential", **settings, **k
        ),
        r"2 runs of FedAvg  .*0/2 rounds": lambda **k: sweep(
            methods, TASK, FEDERATION, mode="vectorized", **settings, **k
        ),
        r"first, seed 0 \(1/1\)  .*4/4 rounds": lambda **k: compare(
            tmp_path / "c.toml", seeds=[0], directory=tmp_path / str(len(k)), **k
        ),
    }
    for pattern, call in calls.items():
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        call()
        assert any(re.search(pattern, line) for line in screen.lines()), (pattern, screen.lines())
        seen = len(screen.getvalue())
        call(progress=False)
        assert len(screen.getvalue()) == seen


def test_failed_start_of_a_sink_finishes_earlier_sinks() -> None:
    from tests.simulation.problems import run

    ended: list[Any] = []

    def raise_error(_: Any) -> None:
        raise FedraxError("there is no room")

    nothing = lambda _: None  # noqa: E731
    first = SimpleNamespace(start=nothing, event=nothing, finish=ended.append)
    second = SimpleNamespace(start=raise_error, event=nothing, finish=lambda _: ended.append("never begun"))
    with pytest.raises(FedraxError, match="there is no room"):
        run(rounds=1, sinks=[first, second])
    assert ended == [None]


def test_mlflow_ends_its_run_after_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def raise_error(_: Any) -> None:
        raise ValueError

    begin = lambda run_name: calls.append("begun")  # noqa: E731
    fake = SimpleNamespace(set_experiment=calls.append, start_run=begin, log_params=raise_error, end_run=calls.append)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    with pytest.raises(FedraxError, match="MLflow cannot start: ValueError"):
        sinks.MlflowSink("experiment").start(RUN)
    assert calls == ["experiment", "begun", "FAILED"]


def scalars(log: Path) -> list[tuple[str, int, float]]:
    """Content of an events file: records of length, checksum, message and checksum."""
    messages = pytest.importorskip("tensorboardX.proto.event_pb2")
    rest, found = log.read_bytes(), []
    while rest:
        length = int.from_bytes(rest[:8], "little")
        event = messages.Event.FromString(rest[12 : 12 + length])
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        rest = rest[16 + length :]
    return found


def test_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    run_sink(sinks.TensorBoardSink(tmp_path))
    (log,) = tmp_path.glob("events.out.tfevents.*")
    found = scalars(log)
    assert [entry for entry in found if entry[0] == "train_loss"] == [("train_loss", 1, 2.0), ("train_loss", 2, 1.0)]
    assert [entry for entry in found if entry[0] == "test_accuracy"] == [("test_accuracy", 2, 0.75)]


def test_tensorboard_does_not_follow_links(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedraxError, match=r"log is a symbolic link, in which no log is written"):
        run_sink(sinks.TensorBoardSink(tmp_path / "log"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_tensorboard_on_a_full_disk_raises_a_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    code = (
        "import resource, signal; from tests.test_sinks import run_sink, sinks\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        f"run_sink(sinks.TensorBoardSink({str(tmp_path)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert f"FedraxError: cannot write TensorBoard's log {tmp_path}: File too large." in printed.stderr


def test_wandb_offline_run(tmp_path: Path) -> None:
    """In a child process, because the file is complete only after its end."""
    pytest.importorskip("wandb")
    code = (
        "import sys; from pathlib import Path; from tests.test_sinks import run_sink\n"
        "from fedrax.report.sinks import WandbSink\n"
        "run_sink(WandbSink('project', 'a run', {'run': {'rounds': 2}}, Path(sys.argv[1])))"
    )
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", code, str(tmp_path)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert completed.returncode == 0, completed.stderr
    kept = next((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert b"test_accuracy" in kept.read_bytes()


def test_wandb_directory_may_be_a_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: asked.update(options)))
    sinks.WandbSink("project", directory=str(tmp_path / "logs")).start(None)  # type: ignore[arg-type]
    assert asked["dir"] == tmp_path / "logs" and asked["dir"].is_dir()


def test_mlflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    run_sink(sinks.MlflowSink("experiment", "a run", {"run": {"rounds": 2}}))
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert runs[0].info.status == "FINISHED"
    assert runs[0].data.params == {"run.rounds": "2"}
    history = client.get_metric_history(runs[0].info.run_id, "train_loss")
    assert [(m.step, m.value) for m in history] == [(1, 2.0), (2, 1.0)]
