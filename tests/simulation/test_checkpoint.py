"""Checkpoints are complete or rejected; if one cannot be written, the previous one remains."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fedrax
from fedrax import FedAvg, FedraxError, LocalSGD
from fedrax.optim import Optax
from fedrax.simulation.executors.execution_plan import make_mesh
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.placement import client_states
from fedrax.xla.microbatch import CLIENT_AXIS
from tests.simulation.problems import LOCAL, assert_close, assert_identical, read_files, run

SCAFFOLD = fedrax.Scaffold(local=LOCAL)
STATE = {"a": np.arange(6.0).reshape(2, 3), "b": (np.int32(4), np.array([1.5], np.float32))}
TEMPLATE = {"a": jnp.zeros((2, 3)), "b": (jnp.int32(0), jnp.zeros(1))}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with a small checkpoint."""
    state = {"a": STATE["a"].astype(np.float32), "b": STATE["b"]}
    checkpoint.save(tmp_path / "c", state, {"round": 3})
    return tmp_path / "c"


def test_round_trip(saved: Path):
    state, meta = checkpoint.load(saved, TEMPLATE)
    assert meta == {"round": 3} == checkpoint.load_meta(saved)
    np.testing.assert_array_equal(state["a"], STATE["a"])
    assert state["b"][0] == 4 and state["b"][1].dtype == np.float32
    assert [path.name for path in saved.iterdir()] == [checkpoint.FILE]


def test_every_flipped_byte_and_truncation_is_rejected_or_harmless(saved: Path):
    """Bytes that no reader uses, such as dates, may change; loaded states are never wrong."""
    file = saved / checkpoint.FILE
    whole, rejected = file.read_bytes(), 0
    damaged = [whole[:n] for n in range(0, len(whole), 7)]
    flips = (1, 0x80)  # one bit of each byte, alternately low and high
    damaged += [whole[:i] + bytes([whole[i] ^ flips[i % 2]]) + whole[i + 1 :] for i in range(len(whole))]
    for content in damaged:
        file.write_bytes(content)
        try:
            state, meta = checkpoint.load(saved, TEMPLATE)
        except FedraxError as error:
            assert str(file) in str(error)
            rejected += 1
        else:
            assert meta == {"round": 3}
            np.testing.assert_array_equal(state["a"], STATE["a"])
            assert state["b"][0] == 4 and state["b"][1] == 1.5
    assert rejected > len(damaged) / 2


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"not a checkpoint", b"\x80\x04\x95pickle."]
)
def test_other_files_are_rejected(content: bytes, saved: Path):
    (saved / checkpoint.FILE).write_bytes(content)
    with pytest.raises(FedraxError, match="damaged or not a checkpoint"):
        checkpoint.load(saved, TEMPLATE)


def test_decompression_bomb_is_rejected(saved: Path):
    """A member that decompresses to a gigabyte is rejected by its declared size."""
    with zipfile.ZipFile(saved / checkpoint.FILE, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("000000:a", "000001:b/0", "000002:b/1", "meta"):
            with file.open(f"{name}.npy", "w") as member:
                for _ in range(64):
                    member.write(bytes(1 << 20))
    with pytest.raises(FedraxError, match="too long"):
        checkpoint.load_meta(saved)


@pytest.mark.parametrize(
    "like",
    [
        TEMPLATE | {"a": jnp.zeros((3, 2))},
        TEMPLATE | {"a": jnp.zeros((2, 3), jnp.int32)},
        TEMPLATE | {"c": jnp.zeros(1)},
        {"a": TEMPLATE["a"], "b": (TEMPLATE["b"][0], jnp.zeros(2))},
    ],
)
def test_other_shapes_are_rejected(like: dict, saved: Path):
    with pytest.raises(FedraxError, match="belongs to another algorithm or model"):
        checkpoint.load(saved, like)


def test_full_disk_keeps_the_previous_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch):
    before = read_files(saved)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, name in ((np.lib.format, "write_array"), (os, "fsync"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(FedraxError, match="No space left on device"):
                checkpoint.save(saved, {"a": np.ones(4)}, {})
        assert read_files(saved) == before | {checkpoint.PREVIOUS: before[checkpoint.FILE]}


def test_directory_that_cannot_be_created(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    for where in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FedraxError, match="cannot write"):
            checkpoint.save(where, STATE, {})
        with pytest.raises(FedraxError, match="cannot write"):
            run(directory=where)


@pytest.mark.slow
def test_run_with_a_limit_on_file_sizes_resumes(tmp_path: Path):
    """One clear error, and the run resumes from what was written."""
    code = f"""
import resource, sys
import jax
from tests.compiler import set_fast_compilation
jax.config.update("jax_num_cpu_devices", 2)
set_fast_compilation()  # as here, or the last digits differ
from tests.simulation.test_checkpoint import SCAFFOLD, run
from fedrax import FedraxError
run(SCAFFOLD, rounds=4, checkpoint_every=2, directory={str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
try:
    run(SCAFFOLD, rounds=90, checkpoint_every=10, directory={str(tmp_path)!r}, resume=True)
except FedraxError as error:
    print(error)
"""
    path = os.pathsep.join(p for p in sys.path if p)
    out = subprocess.run(
        [sys.executable, "-c", code, str(9000)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=1800,
    ).stdout
    assert out.startswith(f"cannot write {tmp_path}") and "File too large" in out
    assert not list(tmp_path.rglob("*.part"))
    resumed = run(SCAFFOLD, rounds=90, checkpoint_every=10, directory=tmp_path, resume=True)
    uninterrupted = run(SCAFFOLD, rounds=90)
    evaluated = (
        resumed.events.pop(3),
        uninterrupted.events.pop(3),
    )  # an additional time in the last round, which is evaluated
    assert evaluated[0]["train_loss"] == evaluated[1]["train_loss"]
    assert_identical(resumed, uninterrupted)


@pytest.mark.parametrize("devices", [(1, 2), (2, 1)])
def test_more_rounds_on_other_devices(devices: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Client states are placed for other devices and more clients."""
    from fedrax.simulation import setup
    from fedrax.simulation.executors import execution_plan

    whole, make_mesh = run(SCAFFOLD, rounds=8), execution_plan.make_mesh
    for count, rounds in zip(devices, (3, 8), strict=True):
        monkeypatch.setattr(setup, "make_mesh", lambda _, count=count: make_mesh(count))
        resumed = run(SCAFFOLD, rounds=rounds, directory=tmp_path, resume=True)
    assert_close(resumed, whole)
    again = run(SCAFFOLD, rounds=8, directory=tmp_path, resume=True)
    assert_identical(again, resumed)


def test_fewer_rounds_than_finished_are_rejected(tmp_path: Path):
    run(SCAFFOLD, rounds=3, directory=tmp_path)
    with pytest.raises(FedraxError, match="is at round 3, beyond rounds = 2: set rounds to 3 or more"):
        run(SCAFFOLD, rounds=2, directory=tmp_path, resume=True)


def test_resume_requires_a_directory():
    with pytest.raises(FedraxError, match="no directory"):
        run(resume=True)


# -- digests, formats, and the previous checkpoint
# ----------------------------------------------------------------------


def test_array_that_differs_from_its_digest_is_rejected(saved: Path):
    """Also if the checksums of the ZIP file are consistent with the replaced array."""
    with zipfile.ZipFile(saved / checkpoint.FILE) as file:
        members = {name: file.read(name) for name in file.namelist()}
    other = io.BytesIO()
    np.save(other, np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3))
    members["000000:a.npy"] = other.getvalue()
    with zipfile.ZipFile(saved / checkpoint.FILE, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    for read in (lambda: checkpoint.load(saved, TEMPLATE), lambda: checkpoint.verify(saved / checkpoint.FILE)):
        with pytest.raises(FedraxError, match="the array 000000:a is not as it was written"):
            read()


OLD_META = {"identity": {"versions": "fedrax 0.0.9 with jax 0.9.0"}}


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"round": 3}, "an older version of fedrax in format 1"),
        (
            {"format": 2, "digests": {}, "meta": OLD_META},
            r"an older version \(fedrax 0.0.9 with jax 0.9.0\) in format 2",
        ),
        ({"format": 99, "fedrax": "9.0"}, "fedrax 9.0 in format 99.*resume the run with that version"),
    ],
)
def test_checkpoint_of_another_format_is_rejected_with_its_version(described: Any, message: str, saved: Path):
    with zipfile.ZipFile(saved / checkpoint.FILE, "w") as file, file.open("meta.npy", "w") as member:
        np.lib.format.write_array(member, np.frombuffer(json.dumps(described).encode(), np.uint8))
    for read in (lambda: checkpoint.load(saved, TEMPLATE), lambda: checkpoint.check_format(saved)):
        with pytest.raises(checkpoint.CheckpointFormatError, match=message):
            read()


def test_previous_checkpoint_is_kept_and_named(tmp_path: Path):
    """The error of a damaged checkpoint names the previous one, from which the run resumes bit for bit."""
    run(SCAFFOLD, rounds=6, checkpoint_every=2, directory=tmp_path)
    where = tmp_path / "checkpoint"
    assert [checkpoint.verify(where / name)["round"] for name in (checkpoint.FILE, checkpoint.PREVIOUS)] == [6, 4]
    content = bytearray((where / checkpoint.FILE).read_bytes())
    content[200] ^= 1
    (where / checkpoint.FILE).write_bytes(content)
    with pytest.raises(FedraxError, match=r"damaged.*the previous one, of round 4, is intact.*fedrax doctor"):
        run(SCAFFOLD, rounds=6, checkpoint_every=2, directory=tmp_path, resume=True)
    assert checkpoint.verify(where / checkpoint.PREVIOUS)["round"] == 4
    (where / checkpoint.FILE).unlink()
    with pytest.raises(FedraxError, match="the previous one, of round 4, is intact"):
        run(SCAFFOLD, rounds=6, checkpoint_every=2, directory=tmp_path, resume=True)
    (where / checkpoint.PREVIOUS).rename(where / checkpoint.FILE)
    resumed = run(SCAFFOLD, rounds=6, checkpoint_every=2, directory=tmp_path, resume=True)
    assert_identical(resumed, run(SCAFFOLD, rounds=6))


@pytest.mark.parametrize(("options", "stopped"), [({}, "rounds"), ({"target": 0.01, "eval_every": 2}, "target")])
def test_finished_run_without_client_states_is_loaded_but_not_continued(options: dict, stopped: str, tmp_path: Path):
    """It is returned as it was, also if it was stopped just before its end; it is not continued, and its client states
    are never replaced by initial ones.
    """
    options = {"rounds": 4, "checkpoint_every": 2, "directory": tmp_path, "keep_clients": False, **options}
    first, where = run(SCAFFOLD, **options), tmp_path / "checkpoint"
    assert [path.name for path in where.iterdir()] == [checkpoint.FILE]
    shutil.copy(where / checkpoint.FILE, where / checkpoint.PREVIOUS)
    again = run(SCAFFOLD, **options, resume=True)
    assert (again.stopped, again.events, again.homes) == (stopped, first.events, {}) and first.stopped == stopped
    jax.tree.map(np.testing.assert_array_equal, again.server, first.server)
    assert [path.name for path in where.iterdir()] == [checkpoint.FILE]
    with pytest.raises(FedraxError, match="no client states: the run was finished with keep_clients=False"):
        again.client_state(next(iter(first.homes)))
    if stopped == "rounds":
        with pytest.raises(FedraxError, match="saved without client states and cannot be continued"):
            run(SCAFFOLD, **(options | {"rounds": 5}), resume=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_run_started_in_a_terminal_resumes_without_one(tmp_path: Path):
    """JAX prints programs in color on terminals, and the text of the program identifies the run."""
    code = (
        "import sys; assert sys.stdout.isatty()\n"
        "from tests.simulation.test_checkpoint import SCAFFOLD, run\n"
        f"run(SCAFFOLD, rounds=2, directory={str(tmp_path)!r})\n"
    )
    shown, terminal = os.openpty()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TERM": "xterm-256color",
    }
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=terminal, stderr=subprocess.PIPE, text=True
    )
    os.close(terminal)
    os.close(shown)
    assert completed.returncode == 0, completed.stderr
    run(SCAFFOLD, rounds=3, directory=tmp_path, resume=True)


def test_sharded_array_is_read_in_chunks_of_rows():
    """In the order of rows, for any assignment to devices, without a copy of the whole array on the host."""
    for dtype in ("float32", "bfloat16"):
        values = np.arange(33).reshape(11, 3)[:10].astype(dtype)
        array = jax.device_put(values, NamedSharding(make_mesh(2), PartitionSpec(CLIENT_AXIS)))
        pieces = list(client_states.ShardedRows(array).pieces(max_bytes=24))
        assert {len(piece) for piece in pieces} <= {1, 2, 4} and len(pieces) > 2
        np.testing.assert_array_equal(np.concatenate(pieces), values)


CODE = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import fedrax
from fedrax.models import Logistic
x, y = np.ones((5000, 999), np.float32), np.arange(5000) % 25
federation = fedrax.Federation.from_arrays(x, y, offsets=np.arange(5001), shuffle=False)
task = fedrax.classification(Logistic().build((999,), 25))
algorithm = fedrax.Scaffold(local=fedrax.LocalSGD(lr=0.1, steps=1, batch_size=1))
options = {"rounds": int(sys.argv[2]), "cohort_size": 2500, "checkpoint_every": 1, "states": "resident"}
result = fedrax.simulate(algorithm, task, federation, directory=sys.argv[1], resume=True, **options)
store = sum(leaf.nbytes for leaf in jax.tree.leaves(result.store))
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024 / store)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_memory_of_checkpoints_and_resuming_is_bounded(tmp_path: Path):
    """The client states take 0.5 GB, and the process itself about as much."""
    for rounds, most in ((3, 2.1), (4, 2.6)):  # with copies of all states on the host, 2.6 and 3.3
        command = [sys.executable, "-c", CODE, str(tmp_path / "run"), str(rounds)]
        path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
        completed = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=600)
        assert completed.returncode == 0, completed.stderr
        assert float(completed.stdout) < most


@pytest.mark.parametrize("states", ["resident", "spilled"])
def test_bfloat16_int4_and_float8_arrays_survive_a_checkpoint(states: str, tmp_path: Path):
    """NumPy has no such dtypes, so that .npy files do not contain their names."""
    if states == "resident":
        method = FedAvg(local=LOCAL, server_optimizer=Optax(optax.adam(0.01, mu_dtype="bfloat16")))
    else:
        rule = Optax.of(optax.adam, mu_dtype="bfloat16")
        method = FedAvg(local=LocalSGD(lr=0.01, steps=3, batch_size=2, carry=True, optimizer=rule))
    options: dict[str, Any] = {"directory": tmp_path / "run", "states": states, "cohort_size": 3, "eval_every": 2}
    run(method, rounds=2, **options)
    resumed, whole = run(method, rounds=4, resume=True, **options), run(method, rounds=4, cohort_size=3, eval_every=2)
    assert_identical(resumed, whole)
    state = {"a": jnp.arange(4, dtype=jnp.int4), "b": jnp.ones((2, 3), jnp.float8_e4m3fn)}
    checkpoint.save(tmp_path / "c", state, {})
    loaded, _ = checkpoint.load(tmp_path / "c", state)
    jax.tree.map(np.testing.assert_array_equal, loaded, jax.tree.map(np.asarray, state))
    with pytest.raises(FedraxError, match="belongs to another algorithm or model"):
        checkpoint.load(tmp_path / "c", state | {"b": jnp.ones((2, 3), jnp.float8_e5m2)})
