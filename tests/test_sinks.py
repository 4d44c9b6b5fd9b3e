"""Sinks: what reaches TensorBoard, Weights & Biases and MLflow; the last two where they are installed."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedrax.errors import FedraxError
from fedrax.report import sinks
from fedrax.simulation import RunInfo

RUN = RunInfo("FedAvg", "scan", 2, 0, 3, 8, 100, 100, 25)
EVENTS = [
    {"round": 1, "train_loss": 2.0, "bytes_down": 300, "bytes_up": 300, "seconds": 0.5},
    {"round": 2, "train_loss": 1.0, "bytes_down": 600, "bytes_up": 600, "seconds": 0.6, "test_accuracy": 0.75},
]


def play(
    sink: sinks.JsonSink | sinks.TensorBoardSink | sinks.WandbSink | sinks.MlflowSink | sinks.ProgressSink,
) -> None:
    """Show a sink a whole run."""
    sink.start(RUN)
    for event in EVENTS:
        sink.event(event)
    sink.finish(object())


def test_json() -> None:
    file = io.StringIO()
    play(sinks.JsonSink(file))
    assert [json.loads(line) for line in file.getvalue().splitlines()] == EVENTS


def test_progress() -> None:
    from rich.console import Console

    screen = Console(file=io.StringIO(), width=160, force_terminal=True)
    with sinks.progress_bar(screen) as bar:
        play(sinks.ProgressSink("a run", bar))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    for part in ("a run", "2/2 rounds", "loss 1", "test accuracy 0.750"):
        assert part in shown


def test_progress_fits_a_narrow_terminal() -> None:
    from rich.console import Console

    screen = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    with sinks.progress_bar(screen) as bar:
        play(sinks.ProgressSink("a run with quite a long description of itself", bar))
    shown = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", screen.file.getvalue())  # type: ignore[attr-defined]
    lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert all(len(line) <= 60 for line in lines)
    assert "2/2 rounds" in lines[-1] and "test accuracy 0.750" in lines[-1] and lines[-1].startswith("a run")


def scalars(log: Path) -> list[tuple[str, int, float]]:
    """What an events file holds: records of a length, a checksum, a message and a checksum."""
    messages = pytest.importorskip("tensorboardX.proto.event_pb2")
    rest, found = log.read_bytes(), []
    while rest:
        length = int.from_bytes(rest[:8], "little")
        event = messages.Event.FromString(rest[12 : 12 + length])
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        rest = rest[16 + length :]
    return found


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    play(sinks.TensorBoardSink(tmp_path))
    (log,) = tmp_path.glob("events.out.tfevents.*")
    found = scalars(log)
    assert [entry for entry in found if entry[0] == "train_loss"] == [("train_loss", 1, 2.0), ("train_loss", 2, 1.0)]
    assert [entry for entry in found if entry[0] == "test_accuracy"] == [("test_accuracy", 2, 0.75)]


def test_tensorboard_follows_no_link(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedraxError, match=r"log is a link, into which no log is written"):
        play(sinks.TensorBoardSink(tmp_path / "log"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_wandb(tmp_path: Path) -> None:
    """In a process of its own: the file is complete when its process has ended."""
    pytest.importorskip("wandb")
    code = (
        "import sys; from pathlib import Path; from tests.test_sinks import play\n"
        "from fedrax.report.sinks import WandbSink\n"
        "play(WandbSink('project', 'a run', {'run': {'rounds': 2}}, Path(sys.argv[1])))"
    )
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    kept = next((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert b"test_accuracy" in kept.read_bytes()


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    play(sinks.MlflowSink("experiment", "a run", {"run": {"rounds": 2}}))
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert runs[0].info.status == "FINISHED"
    assert runs[0].data.params == {"run.rounds": "2"}
    history = client.get_metric_history(runs[0].info.run_id, "train_loss")
    assert [(m.step, m.value) for m in history] == [(1, 2.0), (2, 1.0)]
