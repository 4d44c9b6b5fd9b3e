"""The directory of a run: locked, bound to everything that determines its results, without links."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import FedraxError
from fedrax.files import write_text
from fedrax.models import Logistic, Model
from fedrax.participation import FixedList
from fedrax.report.runs import read_run
from fedrax.simulation import Interrupted, Script, read_events
from fedrax.simulation.persistence.run_directory import lock_directory
from fedrax.simulation.results.events import rounds_done
from tests.simulation.problems import (
    CLASSES,
    FEATURES,
    FEDERATION,
    LOCAL,
    SCAFFOLD,
    TASK,
    assert_identical,
    read_files,
    run,
)


class ActInRound:
    """A sink that calls a function in a round."""

    def __init__(self, round: int, act: Any):
        self.round, self.act = round, act

    def start(self, info: fedrax.simulation.RunInfo) -> None:
        if self.round == 0:
            self.act()

    def event(self, event: dict) -> None:
        if event["round"] == self.round:
            self.act()

    def finish(self, result: object) -> None:
        """Do nothing."""


# -- one run at a time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_in_one_directory_are_rejected(resume: bool, tmp_path: Path):
    """The second run changes nothing, and the first one ends as if alone."""

    def second() -> None:
        before = read_files(tmp_path)
        with pytest.raises(FedraxError, match="another run is writing to"):
            run(SCAFFOLD, directory=tmp_path, resume=resume)
        assert read_files(tmp_path) == before

    assert_identical(run(SCAFFOLD, directory=tmp_path, sinks=[ActInRound(2, second)]), run(SCAFFOLD))


def test_lock_file_is_used_if_folders_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """NFS rejects exclusive locks of descriptors that are not open for writing, see flock(2)."""
    lock = fcntl.flock

    def on_nfs(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", on_nfs)
    with (
        lock_directory(tmp_path / "run", resume=True),
        pytest.raises(FedraxError, match="another run is writing"),
        lock_directory(tmp_path / "run", resume=True),
    ):
        pass
    with lock_directory(tmp_path / "run", resume=True):
        pass


def test_directory_with_a_run_is_not_overwritten(tmp_path: Path):
    run(SCAFFOLD, directory=tmp_path)
    before = read_files(tmp_path)
    with pytest.raises(FedraxError, match="holds a run already"):
        run(SCAFFOLD, directory=tmp_path)
    assert read_files(tmp_path) == before


@pytest.mark.parametrize("replaced", [False, True])
def test_removed_directory_ends_the_run_with_a_clear_error(replaced: bool, tmp_path: Path):
    where = tmp_path / "run"

    def remove() -> None:
        shutil.rmtree(where)
        if replaced:
            where.mkdir()

    with pytest.raises(FedraxError, match="was removed during the run"):
        run(SCAFFOLD, rounds=6, checkpoint_every=1, directory=where, sinks=[ActInRound(3, remove)])


def test_run_that_failed_before_its_first_round_can_be_repeated(tmp_path: Path):
    def fail() -> None:
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        run(SCAFFOLD, directory=tmp_path, sinks=[ActInRound(0, fail)])
    assert_identical(run(SCAFFOLD, directory=tmp_path), run(SCAFFOLD))


# -- identity of a run ------------------------------------------------------------------------------------------------


def federation(**changes: Any) -> fedrax.Federation:
    """The common federation with other contents of the same sizes."""
    made = {"x": np.array(FEDERATION.train.x), "y": np.array(FEDERATION.train.y)}
    test = (np.array(FEDERATION.test.x), np.array(FEDERATION.test.y))
    made |= {name: change(made[name]) for name, change in changes.items() if name in made}
    test = (changes["test"](test[0]), test[1]) if "test" in changes else test
    return fedrax.Federation.from_arrays(
        made["x"], made["y"], offsets=np.asarray(FEDERATION.offsets), test=test, num_classes=CLASSES
    )


def task(activation: Any) -> fedrax.Task:
    """A task whose model contains a function without parameters."""
    model = Logistic().build((FEATURES,), CLASSES)
    return fedrax.classification(Model(model.init, lambda params, x, key=None: model.apply(params, activation(x), key)))


DIFFERENT_RUNS = {
    "one feature": (
        {"federation": federation(x=lambda x: x + (np.arange(x.size) == 5).reshape(x.shape))},
        "its data differ;",
    ),
    "one label": (
        {"federation": federation(y=lambda y: np.where(np.arange(len(y)) == 7, (y + 1) % 3, y))},
        "its data differ;",
    ),
    "test data": ({"federation": federation(test=lambda x: 2 * x)}, "its data differ;"),
    "cohorts": ({"script": Script(cohorts=[[0, 1, 2]] * 4)}, r"its settings \(script\) differ;"),
    "loss": (
        {"task": fedrax.Task(TASK.init, lambda p, b, k: 2 * TASK.loss(p, b, k), TASK.metrics)},
        "its program .*differ",
    ),
    "start": (
        {"params": {"output": {"weight": np.ones((3, 4)), "bias": np.ones(3)}}},
        "its starting parameters differ;",
    ),
    "another method": (
        {"algorithm": fedrax.FedAvg(local=LOCAL)},
        r"its method \(class Scaffold, and here FedAvg\) differs;",
    ),
    "another option": (
        {"algorithm": fedrax.Scaffold(local=LOCAL, option="I")},
        r"its method \(option 'II', and here 'I'\) differs;",
    ),
    "seed": ({"seed": 1}, r"its settings \(seed 0, and here 1\) differ;"),
    "cohort size": (
        {"cohort_size": 2, "stragglers": 0.5},
        r"its settings \(cohort_size 3, and here 2; stragglers 0.0, and here 0.5\) differ;",
    ),
    "devices": ({"devices": 1}, r"its settings \(devices None, and here 1\) differ;"),
    "number of steps": (
        {"algorithm": fedrax.Scaffold(local=fedrax.LocalSGD(lr=0.05, steps=4, batch_size=2))},
        r"its method \(local.steps 3, and here 4\) differs;",
    ),
    "several": (
        {"algorithm": fedrax.Scaffold(local=fedrax.LocalSGD(lr=0.06, steps=3, batch_size=2)), "seed": 1},
        r"its method \(local.lr 0.05, and here 0.06\) and settings \(seed 0, and here 1\) differ;",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT_RUNS)
def test_different_runs_do_not_resume(name: str, tmp_path: Path):
    other, differs = DIFFERENT_RUNS[name]
    run(SCAFFOLD, rounds=2, directory=tmp_path)
    before = read_files(tmp_path)
    with pytest.raises(FedraxError, match=f"belongs to another experiment: {differs}"):
        run(**({"algorithm": SCAFFOLD, "rounds": 4, "directory": tmp_path, "resume": True} | other))
    assert read_files(tmp_path) == before


def test_numpy_scalars_are_equal_settings(tmp_path: Path):
    counted = {"seed": np.int64(3), "stragglers": np.float64(0.5), "participation": FixedList([np.int64(4), 1, 0])}
    run(SCAFFOLD, rounds=2, directory=tmp_path, **counted)
    own = {"seed": 3, "stragglers": 0.5, "participation": FixedList((4, 1, 0))}
    assert len(run(SCAFFOLD, rounds=3, directory=tmp_path, resume=True, **own).events) == 3


def test_different_activation_does_not_resume(tmp_path: Path):
    often = {"eval_every": 2, "task": task(jnp.tanh)}
    run(SCAFFOLD, **often, rounds=2, directory=tmp_path)
    with pytest.raises(FedraxError, match="its program and evaluation differ"):
        run(SCAFFOLD, **often | {"task": task(jnp.sin)}, rounds=4, directory=tmp_path, resume=True)
    again = often | {"task": task(jnp.tanh)}  # a different object with the same program
    assert_identical(run(SCAFFOLD, **again, rounds=4, directory=tmp_path, resume=True), run(SCAFFOLD, **often))


def test_different_version_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(SCAFFOLD, rounds=2, directory=tmp_path)
    monkeypatch.setattr("fedrax.version.VERSION", "99.0")
    with pytest.raises(FedraxError, match=r"computed by fedrax .* and here is fedrax 99\.0"):
        run(SCAFFOLD, rounds=4, directory=tmp_path, resume=True)


# -- links ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".events.jsonl.part", ".environment.json.part", "checkpoint/.state.npz.part"])
def test_links_are_not_followed(name: str, tmp_path: Path):
    victim, where = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    (where / name).parent.mkdir(parents=True)
    (where / name).symlink_to(victim)
    assert_identical(run(SCAFFOLD, directory=where), run(SCAFFOLD))
    assert victim.read_text() == "precious"


def test_checkpoint_behind_a_link_is_rejected(tmp_path: Path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").symlink_to(tmp_path / "victim")
    with pytest.raises(FedraxError, match="is a symbolic link"):
        run(SCAFFOLD, directory=tmp_path / "run")
    assert not list((tmp_path / "victim").iterdir())


def test_unwritable_failure_state_does_not_hide_the_run(tmp_path: Path):
    run(SCAFFOLD, directory=tmp_path)
    (tmp_path / "failure").mkdir()
    write_text(tmp_path / "experiment.toml", "[algorithm]\nname = 'scaffold'\n[run]\nseed = 0\nrounds = 4\n")
    assert read_run(tmp_path).failure is None


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_signal_writes_a_checkpoint(number: signal.Signals, tmp_path: Path, request: pytest.FixtureRequest):
    if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup, where a run continues
        signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, signal.SIG_IGN))
    before = signal.getsignal(number)
    tell = ActInRound(2, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted) as stopped:
        run(SCAFFOLD, rounds=9, eval_every=1, directory=tmp_path, sinks=[tell])
    assert stopped.value.signal == number and signal.getsignal(number) is before
    done = rounds_done(read_events(tmp_path))  # the last line of a traceback; a notebook shows no more
    where = f"its checkpoint is in {tmp_path}: to resume, repeat the call with resume=True"
    assert str(stopped.value) == f"stopped after round {done} of 9; {where}"
    assert_identical(
        run(SCAFFOLD, rounds=9, eval_every=1, directory=tmp_path, resume=True), run(SCAFFOLD, rounds=9, eval_every=1)
    )


def test_signal_without_a_directory_says_that_nothing_was_saved():
    tell = ActInRound(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted, match=r"stopped after round \d of 9; nothing was saved: .* directory=\.\.\."):
        run(SCAFFOLD, rounds=9, eval_every=1, sinks=[tell])


def test_signal_in_the_last_round_stops_the_caller(tmp_path: Path):
    """The run is finished and saved, and its sinks receive the result."""
    seen: list[Any] = []
    tell, others = ActInRound(4, lambda: os.kill(os.getpid(), signal.SIGTERM)), ActInRound(0, lambda: None)
    others.finish = seen.append
    with pytest.raises(Interrupted) as stopped:
        run(directory=tmp_path, sinks=[tell, others])
    assert stopped.value.signal == signal.SIGTERM and seen[0].stopped == "rounds"
    assert_identical(run(directory=tmp_path, resume=True), run())


@pytest.mark.slow
def test_command_line_exits_with_the_status_of_the_signal(tmp_path: Path):
    flags = ["--run.rounds", "1000000", "--run.eval-every", "5", "--model", "logistic", "--quiet", "--out", "run"]
    child = subprocess.Popen(
        [sys.executable, "-m", "fedrax", "run", *flags], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    events = tmp_path / "run" / "events.jsonl"
    while child.poll() is None and not (events.exists() and events.read_bytes().count(b"\n") > 5):
        time.sleep(0.1)
    assert child.returncode is None, child.communicate()
    child.send_signal(signal.SIGTERM)
    _, printed = child.communicate(timeout=1800)
    assert child.returncode == 128 + signal.SIGTERM and "resume with: fedrax resume run" in printed
    assert (tmp_path / "run" / "checkpoint" / "state.npz").exists()


def test_script_with_other_cohorts_does_not_resume(tmp_path: Path):
    options: dict[str, Any] = {"directory": tmp_path / "run"}
    run(script=Script(cohorts=[[0, 1], [2], [3, 4]]), rounds=1, **options)
    with pytest.raises(FedraxError, match=r"settings \(script\) differ"):
        run(script=Script(cohorts=[[0], [1, 2], [3, 4]]), rounds=3, resume=True, **options)
    assert run(script=Script(cohorts=[[0, 1], [2], [3, 4]]), rounds=3, resume=True, **options).events
