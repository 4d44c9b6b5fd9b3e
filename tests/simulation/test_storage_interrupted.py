"""Streamed samples and spilled client states: checkpoints, failures and interruptions."""

import errno
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import FedraxError
from fedrax.config.hyperparameters import hyperparameters
from fedrax.simulation import NonFiniteError
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.placement import row_file, streaming
from fedrax.simulation.placement.memory_budget import MemoryBudget
from fedrax.simulation.placement.row_file import RowFile
from fedrax.simulation.settings import Settings
from tests.simulation.problems import (
    FEDERATION,
    LOCAL,
    OFF_DEVICE,
    SCAFFOLD,
    TASK,
    assert_identical,
    read_files,
    run,
)
from tests.slow import slow_cases

DESCRIBED = ("events.jsonl", "environment.json", "clients.json", "run.json", "model.safetensors")
OPTIONS: dict[str, Any] = {"rounds": 7, "eval_every": 3, "stragglers": 0.4, "eval_train": True, "per_client": True}


def open_files() -> set[str]:
    """Open or mapped files of this process that have been unlinked."""
    links = [f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link) and "(deleted)" in os.readlink(link)}


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("before", "after"), [({}, OFF_DEVICE), (OFF_DEVICE, {}), (OFF_DEVICE, OFF_DEVICE)])
def test_a_run_resumes_with_other_placement(before: dict, after: dict, tmp_path: Path):
    """Also if more rounds give clients other rows."""
    options = OPTIONS | {"eval_every": 1}
    run(SCAFFOLD, directory=tmp_path, **before, **(options | {"rounds": 3}))
    resumed = run(SCAFFOLD, directory=tmp_path, resume=True, **after, **options)
    assert_identical(resumed, run(SCAFFOLD, **options))


def test_checkpoint_does_not_depend_on_the_placement(tmp_path: Path):
    for name, away in (("resident", {}), ("away", OFF_DEVICE)):
        run(SCAFFOLD, directory=tmp_path / name, rounds=3, cohort_size=2, **away)
    files = [read_files(tmp_path / name / "checkpoint") for name in ("resident", "away")]
    assert files[0] == files[1]
    with np.load(tmp_path / "away" / "checkpoint" / checkpoint.FILE) as file:
        assert len(next(file[name] for name in file.files if "store" in name)) >= 4


def test_damaged_store_is_rejected(tmp_path: Path):
    """The checksum over all rows is compared after the last one."""
    run(SCAFFOLD, directory=tmp_path, rounds=3)
    file = tmp_path / "checkpoint" / checkpoint.FILE
    content = bytearray(file.read_bytes())
    with np.load(file) as arrays:
        name = next(name for name in arrays.files if "store" in name)
        row = next(row for row in arrays[name] if row.any()).tobytes()
    content[content.index(row)] ^= 1
    file.write_bytes(content)
    with pytest.raises(FedraxError, match="damaged or not a checkpoint"):
        run(SCAFFOLD, directory=tmp_path, rounds=4, resume=True, **OFF_DEVICE)


def test_initial_rows_take_no_disk_space_after_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Clients that have not taken part occupy no blocks."""
    monkeypatch.setattr(checkpoint, "_PIECE_BYTES", 70 * 4096)
    table = RowFile(tmp_path, 1000, np.zeros(1024, np.float32))
    table.write(np.array([3, 4, 900]), np.ones((3, 1024), np.float32))
    checkpoint.save(tmp_path / "c", {"store": table}, {})
    like = {"store": jax.ShapeDtypeStruct((1000, 1024), np.float32)}
    stored = checkpoint.load(tmp_path / "c", like, in_pieces="store")[0]["store"]
    again = RowFile(tmp_path, 1000, np.zeros(1024, np.float32))
    spill = object.__new__(streaming.StateSpill)
    spill.files = again
    old = np.arange(4, 1000)
    spill.fill(stored, old, old[::-1])
    np.testing.assert_array_equal(np.flatnonzero(again.written), [103, 999])
    np.testing.assert_array_equal(again.read(old), table.read(old)[::-1])
    assert os.fstat(again._file.fileno()).st_blocks * 512 < 100_000


def test_large_store_is_saved_and_loaded_in_chunks(tmp_path: Path):
    """64 MB of states, of which at most two chunks are in memory."""
    initial = np.zeros(1 << 14, np.float32)
    table, again = RowFile(tmp_path, 1000, initial), RowFile(tmp_path, 1000, initial)
    table.write(np.arange(500), np.ones((500, 1 << 14), np.float32))
    spill = object.__new__(streaming.StateSpill)
    spill.files = [again]
    tracemalloc.start()
    checkpoint.save(tmp_path / "c", {"store": [table]}, {})
    like = {"store": [jax.ShapeDtypeStruct(table.shape, table.dtype)]}
    spill.fill(checkpoint.load(tmp_path / "c", like, in_pieces="store")[0]["store"], np.arange(1000), np.arange(1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert again.written.sum() == 500 and again[499][3] == 1 and again[500][3] == 0
    assert peak < 45e6


# -- failures ------------------------------------------------------------------------------------------------------


METHODS = {"fedavg": fedrax.FedAvg(local=LOCAL), "scaffold": SCAFFOLD}
DIVERGING_CASES = [
    (plan, client, name) for plan, client in (("scan", 1), ("scan", 3), ("vmap", 5), ("loop", 5)) for name in METHODS
]
IN_MAKE_TEST = {("scan", 1, "scaffold"), ("scan", 3, "fedavg"), ("vmap", 5, "scaffold"), ("loop", 5, "fedavg")}


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "client", "name"), slow_cases(DIVERGING_CASES, IN_MAKE_TEST))
def test_diverging_client_is_named(plan: str, client: int, name: str, tmp_path: Path):
    """On any device."""
    method = METHODS[name]
    x, y = (np.array(a) for a in FEDERATION.train)
    sick = fedrax.Federation.from_arrays(x, y, offsets=FEDERATION.offsets, num_classes=3, shuffle=False)
    sick.train.x[FEDERATION.offsets[client] : FEDERATION.offsets[client + 1]] = np.nan
    script, messages = fedrax.simulation.Script(cohorts=[[0, 2, 7], [6, 4], [7, 2, 0], [1, 5, 3], [0, 1, 2]]), []
    for where, away in (("resident", {}), ("away", OFF_DEVICE)):
        with pytest.raises(NonFiniteError) as caught:
            run(method, sick, script=script, rounds=5, plan=plan, directory=tmp_path / where, **away)
        messages.append(str(caught.value).replace(where, ""))
    assert messages[0] == messages[1] and f"round 4, client {client}" in messages[0]
    with (
        np.load(tmp_path / "resident" / "failure" / checkpoint.FILE) as one,
        np.load(tmp_path / "away" / "failure" / checkpoint.FILE) as other,
    ):
        assert one.files == other.files and len(one.files) >= 4
        for file in set(one.files) - {"meta"}:
            assert one[file].tobytes() == other[file].tobytes()


@hyperparameters
class FailsThirdUpload(fedrax.FedAvg):
    """The third upload of a client is NaN."""

    def init_client(self, params: Any) -> Any:
        """Number of uploads so far."""
        return jnp.zeros((), jnp.int32)

    def client(self, message: Any, state: Any, data: Any) -> Any:
        output = super().client(message, (), data)
        worn = jnp.where(state >= 2, jnp.nan, 0.0)
        return output._replace(state=state + 1, upload=jax.tree.map(lambda u: u + worn, output.upload))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("client", [0, 2, 4, 6])
def test_client_that_fails_by_its_state_is_named(client: int):
    """The diagnosis starts from the states of the block, which has fewer rows than clients."""
    others = [[c for c in (0, 2, 4, 6) if c != client], [1, 3, 5], [7]]
    script = fedrax.simulation.Script(cohorts=[sorted([client, *some]) for some in others])
    with pytest.raises(NonFiniteError, match=f"^FailsThirdUpload, round 3, client {client}: upload"):
        run(FailsThirdUpload(local=LOCAL), script=script, rounds=3, eval_every=1, cohort_size=4, **OFF_DEVICE)


def test_killed_run_resumes(tmp_path: Path):
    """From the checkpoint alone, to the result of the uninterrupted run."""
    code = f"""
import os, signal
import jax
from tests.compiler import set_fast_compilation
jax.config.update("jax_num_cpu_devices", 2)
set_fast_compilation()  # as here, or the last digits differ
from tests.simulation.test_storage import OFF_DEVICE, SCAFFOLD, run
class Kill:
    def start(self, info): pass
    def event(self, event):
        if event["round"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    def finish(self, result): pass
run(SCAFFOLD, rounds=9, checkpoint_every=2, directory={str(tmp_path)!r}, sinks=[Kill()], **OFF_DEVICE)
"""
    path = os.pathsep.join(p for p in sys.path if p)
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, timeout=1800)
    assert killed.returncode == -signal.SIGKILL
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {*DESCRIBED, "checkpoint", checkpoint.FILE, checkpoint.PREVIOUS}
    assert checkpoint.load_meta(tmp_path / "checkpoint")["round"] == 4
    resumed = run(SCAFFOLD, rounds=9, checkpoint_every=2, directory=tmp_path, resume=True, **OFF_DEVICE)
    assert_identical(resumed, run(SCAFFOLD, rounds=9))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_temporary_files_are_removed(tmp_path: Path):
    """They are unlinked at creation, and closed after a result, an error or an interruption."""

    class Look:
        def __init__(self, error: BaseException | None):
            self.error, self.names, self.open = error, set(), set()

        def start(self, info: object) -> None:
            """Do nothing."""

        def event(self, event: dict) -> None:
            self.names |= {path.name for path in tmp_path.rglob("*") if path.parent != tmp_path}
            self.open |= open_files() - before
            if self.error is not None:
                raise self.error

        def finish(self, result: object) -> None:
            """Do nothing."""

    before = open_files()
    for number, kind in enumerate((None, KeyboardInterrupt, RuntimeError)):
        look = Look(error := kind and kind())
        try:
            result = run(SCAFFOLD, directory=tmp_path / str(number), sinks=[look], **OFF_DEVICE)  # type: ignore[list-item]
        except BaseException as caught:
            assert caught is error
        else:
            assert error is None and np.any(result.client_state(next(iter(result.homes))).control["output"]["weight"])
            del result
        assert look.names <= {*DESCRIBED, "checkpoint", checkpoint.FILE, checkpoint.PREVIOUS}
        assert len(look.open) == 2  # a file for each array of the state
        assert open_files() <= before


def test_full_disk_raises_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(row_file.os, "pwritev", full)
    with pytest.raises(FedraxError, match=r"^cannot keep client states on disk in .+: No space left on device$"):
        run(SCAFFOLD, directory=tmp_path, **OFF_DEVICE)


def test_unwritable_directory_raises_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(row_file.tempfile, "gettempdir", lambda: str(tmp_path / "file" / "below"))
    with pytest.raises(FedraxError, match=r"^cannot keep client states on disk in .+: Not a directory$"):
        run(SCAFFOLD, **OFF_DEVICE)


def test_several_processes_are_rejected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    account = MemoryBudget(1 << 30, on_cpu=True)
    for away in ({"samples": "streamed"}, {"states": "spilled"}):
        with pytest.raises(FedraxError, match="by a single process only"):
            streaming.choose_placement(Settings(**away), FEDERATION.train, 8, account)
    assert streaming.choose_placement(Settings(), FEDERATION.train, 1 << 60, account) == (False, False)


def test_sweep_with_spilled_states_is_sequential():
    local = [fedrax.LocalSGD(lr=lr, steps=3, batch_size=2) for lr in (0.05, 0.1)]
    grid = [fedrax.Scaffold(local=each) for each in local]
    options = {"rounds": 3, "cohort_size": 3}
    results = fedrax.sweep(grid, TASK, FEDERATION, (0, 1), **OFF_DEVICE, **options)
    for row, algorithm in zip(results, grid, strict=True):
        for seed, result in enumerate(row):
            assert "samples streamed, client states on disk" in result.plan
            assert_identical(result, fedrax.simulate(algorithm, TASK, FEDERATION, seed=seed, **options))
    with pytest.raises(FedraxError, match=r"use mode=.sequential"):
        fedrax.sweep(grid, TASK, FEDERATION, mode="vectorized", samples="streamed", **options)
