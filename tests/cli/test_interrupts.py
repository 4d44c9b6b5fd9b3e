"""Ctrl-C and SIGTERM at each phase of each command."""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedrax import signals
from fedrax.cli import list_command
from tests.cli.conftest import GRID_COMPARISON, TINY, Outcome
from tests.slow import slow_cases

Command = Callable[..., Outcome]


def signal_in(monkeypatch: pytest.MonkeyPatch, place: str, number: int) -> None:
    """Send a signal at each call of ``module.function`` or ``module.Class.method``, before the call."""
    owner, _, name = place.rpartition(".")
    try:
        holder: Any = importlib.import_module(owner)
    except ModuleNotFoundError:
        module, _, kind = owner.rpartition(".")
        holder = getattr(importlib.import_module(module), kind)
    function = getattr(holder, name)

    def interrupted(*values: Any, **named: Any) -> Any:
        signal.raise_signal(number)
        return function(*values, **named)

    monkeypatch.setattr(holder, name, interrupted)


def assert_stopped(outcome: Outcome, number: int, advice: str, folder: Path) -> None:
    """Assert the exit status, one line about the signal, no result, and no partially written file."""
    assert outcome.status == 128 + number and not outcome.out, outcome
    lines = [line for line in outcome.err.splitlines() if line.startswith("fedrax: ")]
    assert lines[-1] == f"fedrax: interrupted{'; ' * bool(advice)}{advice}" and "Traceback" not in outcome.err
    assert not list(folder.rglob(".*.part"))


RESUME = "resume with: fedrax resume r"
RUN_PHASES = {
    "fedrax.experiments.experiment.build": "",
    "fedrax.simulation.run.prepare": "",
    "fedrax.simulation.run.start_run": "",
    "fedrax.simulation.run.write_environment": RESUME,
    "fedrax.simulation.run.run_block_of_rounds": RESUME,
    "fedrax.simulation.run.Run._evaluate": RESUME,
    "fedrax.simulation.run.save": RESUME,
    "fedrax.cli.run_command.report": RESUME,
}


def test_run_stops_at_each_phase_and_resumes(
    fedrax: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the experiment is written nothing is left; afterwards the run resumes, also if interrupted again."""
    for i, (place, advice) in enumerate(RUN_PHASES.items()):
        number = (signal.SIGINT, signal.SIGTERM)[i % 2]
        begun = (tmp_path / "r/experiment.toml").exists()
        with monkeypatch.context() as patch:
            signal_in(patch, place, number)
            outcome = fedrax("resume", "r") if begun else fedrax("run", tiny, "--out", "r")
        assert_stopped(outcome, number, advice or (RESUME if begun else ""), tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert fedrax("resume", "r", "--quiet").status == 0
    with monkeypatch.context() as patch:
        signal_in(patch, "fedrax.cli.run_command.report", signal.SIGHUP)
        assert_stopped(fedrax("resume", "r"), signal.SIGHUP, RESUME, tmp_path)
    assert fedrax("run", tiny, "--out", "whole", "--quiet").status == 0
    events = [(tmp_path / name / "events.jsonl").read_text().splitlines() for name in ("r", "whole")]
    actual, desired = ([json.loads(line) | {"seconds": 0} for line in lines] for lines in events)
    assert actual == desired


SAME = "the same command resumes the comparison"
COMPARISON_PHASES = (
    "fedrax.experiments.experiment.load_federation",
    "fedrax.experiments.search.trials.search",
    "fedrax.experiments.search.trials.sweep",
    "fedrax.experiments.search.trials.ExperimentFile.start",
    "fedrax.experiments.jobs.simulate",
    "fedrax.simulation.run.run_block_of_rounds",
    "fedrax.experiments.jobs.ProgressWatcher.done",
    "fedrax.experiments.run_comparison.ComparisonResult.save",
    "fedrax.report.curves.write_figure",
)


def test_comparison_stops_at_each_phase_and_continues(
    fedrax: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.toml").write_text(GRID_COMPARISON)
    monkeypatch.setattr("fedrax.experiments.search.trials.should_vectorize", lambda *_: True)
    for i, place in enumerate(COMPARISON_PHASES):
        number = (signal.SIGTERM, signal.SIGINT)[i % 2]
        with monkeypatch.context() as patch:
            signal_in(patch, place, number)
            outcome = fedrax("compare", "t.toml", "--out", "c")
        assert_stopped(outcome, number, SAME, tmp_path)
    outcome = fedrax("compare", "t.toml", "--out", "c")
    assert outcome.status == 0 and "of 2" not in outcome.err  # no run was left
    assert "2 seeds" in fedrax("show", "c").out


FLAGS = "--data digits --partition shards --partition.clients 8 --model logistic"
RUNS = "--run.cohort-size 2 --run.rounds 1"
OTHERS = [
    (f"partition --picture p {FLAGS}", "fedrax.cli.partition_command.measure_heterogeneity"),
    (f"partition --picture p {FLAGS}", "fedrax.data.plot.draw_label_counts"),
    (f"profile {FLAGS} {RUNS}", "fedrax.profiling.profiler.prepare"),
    (f"diagnose --comparison d.toml --picture p {FLAGS} {RUNS}", "fedrax.analysis.diagnosis.numeric_context"),
    (f"diagnose --tune always {FLAGS} {RUNS}", "fedrax.tuning.sweeps.prepare"),
    (f"privacy --algorithm clientdp {FLAGS} {RUNS}", "fedrax.cli.privacy_command.forecast"),
    (f"audit --algorithm clientdp {FLAGS} {RUNS}", "fedrax.cli.audit_command.audit_client"),
    ("doctor r", "fedrax.report.doctor.examine"),
    ("report r", "fedrax.report.html.write_report"),
    ("show r", "fedrax.report.comparison_table.show"),
    ("list algorithms", "fedrax.cli.list_command.main"),
]


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(("line", "place"), OTHERS, ids=lambda text: text.partition(" ")[0].rpartition(".")[2])
def test_other_commands_stop_at_once(
    line: str, place: str, fedrax: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if line.endswith(" r"):
        (tmp_path / "r").mkdir()
        (tmp_path / "r/experiment.toml").write_text(TINY.replace("eval_every", "seed = 0\neval_every"))
        (tmp_path / "r/events.jsonl").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for number in (signal.SIGINT, signal.SIGTERM):
        with monkeypatch.context() as patch:
            signal_in(patch, place, number)
            outcome = fedrax(*line.split())
        assert_stopped(outcome, number, "", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


NAN = """
import jax
import jax.numpy as jnp
from fedrax import FedAvg, hyperparameters

@hyperparameters
class Uploads(FedAvg):
    def client(self, message, state, data):
        output = super().client(message, state, data)
        return output._replace(upload=jax.tree.map(lambda a: a * jnp.nan, output.upload))
"""
DIVERGES = (
    TINY.replace('name = "tiny"', 'name = "tiny"\nseeds = [0]').partition("[algorithm]")[0]
    + """
[run]
rounds = 4
cohort_size = 3
[[compare]]
name = "mine.py:Uploads"
local = { lr = 0.1, epochs = 40 }
[[compare]]
name = "fedavg"
"""
)


def test_interrupt_during_the_search_for_a_nan_stops_the_comparison(
    fedrax: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(NAN)
    (tmp_path / "t.toml").write_text(DIVERGES)
    with monkeypatch.context() as patch:
        signal_in(patch, "fedrax.simulation.results.progress.ProgressSink.note", signal.SIGINT)  # called by the search
        outcome = fedrax("compare", "t.toml", "--out", "c")
    assert_stopped(outcome, signal.SIGINT, SAME, tmp_path)
    assert "looking for its source, for at most 20 s" in outcome.err
    assert "fedrax: Uploads, round 1: the server state is not finite; the search for its source was int" in outcome.err
    assert [path.name for path in (tmp_path / "c").glob("*/*")] == ["seed-0"]
    again = fedrax("compare", "t.toml", "--out", "c")
    assert again.status == 1 and "diverged" in again.out and "fedavg" in again.out and "looking" not in again.err


@pytest.mark.parametrize("num_lost", slow_cases([1, 0]))
def test_interrupt_swallowed_by_a_callback_is_sent_again(
    num_lost: int, fedrax: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also repeatedly, if the signal arrives just before a blocking system call and does not interrupt it."""
    before, handler, kill = sys.unraisablehook, signal.getsignal(signal.SIGINT), signal.pthread_kill
    sent: list[int] = []

    def send(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > num_lost:
            kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", send)

    def interrupted(phase: str, info: Any) -> None:
        gc.callbacks.remove(interrupted)
        raise KeyboardInterrupt

    def busy(arguments: list[str]) -> int:
        gc.callbacks.append(interrupted)
        gc.collect()
        time.sleep(30)  # ended by the repeated interrupt
        return 0

    monkeypatch.setattr(list_command, "main", busy)
    began = time.monotonic()
    assert fedrax("list") == Outcome(130, "", "fedrax: interrupted\n")
    assert time.monotonic() - began < 20 and len(sent) > num_lost
    assert sys.unraisablehook is before and signal.getsignal(signal.SIGINT) is handler


FAST_NOTICE_PROGRAM = """
import atexit, sys, time
from fedrax import cli, signals

signals.NOTICE_SECONDS, signals.GRACE_SECONDS = 0.6, 0.6
atexit.register(time.sleep, 1000)
sys.exit(cli.main())
"""
"""``fedrax`` with short delays, and an exit handler that blocks as JAX does during a long computation."""
ENDLESS_METHOD = """
import time
import jax
from fedrax import FedAvg, hyperparameters

def forever(x):
    print("computing", flush=True)
    time.sleep(1000)
    return x

@hyperparameters
class Forever(FedAvg):
    def client(self, message, state, data):
        output = super().client(message, state, data)
        loss = output.info["loss"]
        loss = jax.pure_callback(forever, jax.ShapeDtypeStruct(loss.shape, loss.dtype), loss)
        return output._replace(info=output.info | {"loss": loss})
"""


@pytest.mark.parametrize("name", slow_cases(["run", "profile"]))
def test_second_signal_ends_an_uninterruptible_computation(name: str, tmp_path: Path) -> None:
    """In a run the first signal waits for the block of rounds and says so; the second one ends the process."""
    (tmp_path / "mine.py").write_text(ENDLESS_METHOD)
    flags = "--model logistic --partition.clients 4 --run.cohort-size 2 --run.plan scan --run.devices 1"
    more = "--out r --quiet" if name == "run" else "--rounds 1"
    process = subprocess.Popen(
        [sys.executable, "-c", FAST_NOTICE_PROGRAM, name, "mine.py:Forever", *flags.split(), *more.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    last = threading.Timer(300, process.kill)  # if the test fails
    last.start()
    with process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline() == "computing\n"
            process.send_signal(signal.SIGTERM)
            if name == "run":  # XLA may print something before
                assert any("a second signal stops at once" in line for line in process.stderr)
                process.send_signal(signal.SIGTERM)
            printed = process.stderr.readlines()
        finally:
            last.cancel()
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert printed[-1] == f"fedrax: interrupted{f'; {RESUME} --trust' * (name == 'run')}\n"
    assert not list(tmp_path.rglob(".*.part"))


def test_signals_in_quick_succession_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout`` sends its signal to the process and to its group."""

    def received_twice(number: int) -> None:
        with signals.interrupt_flag() as flag:
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert flag.signal == number

    monkeypatch.setattr(signals, "ECHO_SECONDS", 1000.0)
    with pytest.raises(signals.Interrupted) as stopped:
        received_twice(signal.SIGTERM)  # a second request would end this process
    assert stopped.value.signal == signal.SIGTERM
    monkeypatch.setattr(signals, "ECHO_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt) as at_once:
        received_twice(signal.SIGINT)
    assert type(at_once.value) is KeyboardInterrupt


def test_other_unraisable_errors_reach_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)

    class Fails:
        def __del__(self) -> None:
            raise ValueError("gone")

    with signals.stop_signals_raise(print, None):
        Fails()
    assert [num_lost.exc_type for num_lost in seen] == [ValueError]
