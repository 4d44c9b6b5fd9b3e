"""Streamed samples and spilled client states: the same results as with everything on the devices."""

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax import FedAvg
from fedrax.algorithms import PFedMe
from fedrax.contract.algorithm import Algorithm
from fedrax.host_memory import release_pages
from fedrax.personalization import Ditto
from fedrax.simulation import evaluation
from fedrax.simulation.executors import execution_plan
from fedrax.simulation.executors.compiled import Engine
from fedrax.simulation.placement import planner, row_file, streaming
from fedrax.simulation.placement.row_file import RowFile
from tests.simulation.problems import (
    FEATURES,
    FEDERATION,
    LOCAL,
    OFF_DEVICE,
    SCAFFOLD,
    TASK,
    assert_identical,
    make_federation,
    run,
)

METHODS = {
    "fedavg": fedrax.FedAvg(local=LOCAL),
    "scaffold": SCAFFOLD,
    "losac": fedrax.LoSAC(local=fedrax.LocalSGD(lr=0.05, steps=3, blocks=2)),
    "mifa": fedrax.algorithms.MIFA(local=LOCAL),
    "episode": fedrax.Episode(gamma=0.05, local=LOCAL),
}
OPTIONS: dict[str, Any] = {"rounds": 7, "eval_every": 3, "stragglers": 0.4, "eval_train": True, "per_client": True}


# -- equal results -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1 << 30, 1200, 1], ids=["roomy", "tight", "no room"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Memory for the samples and states of a block: any block fits, one or two rounds fit, or not even one fits."""
    monkeypatch.setattr(streaming, "_BLOCK_BYTES", request.param)
    return request.param


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", METHODS)
def test_methods_agree_on_two_devices(name: str, block_bytes: int):
    away = run(METHODS[name], **OFF_DEVICE, **OPTIONS)
    assert_identical(away, run(METHODS[name], **OPTIONS))
    assert away.plan.endswith(", samples streamed" + ", client states on disk" * (name not in ("fedavg", "episode")))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("plan", "devices"), [("vmap", 2), ("loop", 2), ("scan", 1), ("vmap", 1), ("loop", 1), ("debug", 1)]
)
def test_plans_agree(plan: str, devices: int):
    options = OPTIONS | {"plan": plan, "devices": devices, "chunk": 2, "rounds": 4}
    away = run(SCAFFOLD, **OFF_DEVICE, **options)
    assert_identical(away, run(SCAFFOLD, **options))
    assert away.plan.endswith(", samples streamed, client states on disk")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("away", [{"samples": "streamed"}, {"states": "spilled"}], ids=["samples", "states"])
@pytest.mark.parametrize(
    "changes",
    [
        {"local": fedrax.LocalSGD(lr=0.05, epochs=2, batch_size=3, order="stored")},
        {"local": fedrax.LocalSGD(lr=0.05, steps=2, batch_size=2, order="replacement")},
        {"federation": make_federation((4,) * 8), "local": fedrax.LocalSGD(lr=0.05, epochs=1, batch_size=2)},
        {"dtype": "float64"},
    ],
    ids=["stored", "replacement", "equal", "float64"],
)
def test_streaming_or_spilling_with_other_batches(changes: dict, away: dict):
    options = OPTIONS | {key: value for key, value in changes.items() if key != "local"}
    algorithm = fedrax.Scaffold(local=changes.get("local", LOCAL))
    assert_identical(run(algorithm, **away, **options), run(algorithm, **options))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_float64_samples(dtype: str):
    """Streamed samples are converted to float32 only in runs of single precision."""
    x, y = FEDERATION.train
    federation = fedrax.Federation.from_arrays(
        x.astype(float) + 1e-9, y, offsets=FEDERATION.offsets, test=tuple(FEDERATION.test), shuffle=False
    )
    assert federation.train.x.dtype == np.float64
    away, resident = (run(SCAFFOLD, federation, dtype=dtype, **OPTIONS, **more) for more in (OFF_DEVICE, {}))
    assert_identical(away, resident)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("block_bytes", [1 << 30, 24 * 20 * 64, 1], ids=["roomy", "tight", "no room"])
def test_seeds_and_rounds_do_not_recompile(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Clients have different sizes, so that each seed assigns states differently on two devices."""
    monkeypatch.setattr(streaming, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(planner, "_SMALL_STORE", 0)  # otherwise states are so small that every client has a row
    federation = make_federation(tuple(np.random.default_rng(0).lognormal(1, 1, 70).astype(int) + 1))
    method = fedrax.Scaffold(local=fedrax.LocalSGD(lr=0.05, epochs=1, batch_size=2))
    task, rooms, needed = dataclasses.replace(TASK, name="of its own"), set(), set()
    made = streaming.StateSpill.__init__

    def record_capacity(self: streaming.StateSpill, initial: Any, planner: Any, *more: Any) -> None:
        made(self, initial, planner, *more)
        rooms.add(self.room)
        rounds = planner.sampler.rounds
        needed.add(int(planner.block(0, rounds, rounds).count.max()))

    monkeypatch.setattr(streaming.StateSpill, "__init__", record_capacity)
    with jax.log_compiles():
        for seed in range(4):
            options = {"rounds": 3 + 4 * seed, "cohort_size": 18, "eval_every": 5, "states": "spilled"}
            run(method, federation, task=task, seed=seed, **options)
    assert len(needed) > 1 and max(needed) <= min(rooms)
    assert len(rooms) == 1 and (block_bytes > 1 or min(rooms) < 18)
    assert sum("Compiling jit(block_on_mesh)" in record.getMessage() for record in caplog.records) == 1


def test_blocks_contain_only_their_clients(monkeypatch: pytest.MonkeyPatch):
    """On each device one copy of the samples of the block's clients, and only rows of their states."""
    seen, whole = [], Engine.run

    def record_capacity(self: Engine, algorithm: Any, carry: Any, key: Any, xs: Any, rounds: int) -> Any:
        samples, at = [np.asarray(shard.data) for shard in self.samples.x.addressable_shards], xs.assignments
        for r in range(rounds):
            for d, count in enumerate(xs.count[r]):
                for client, offset, size in zip(at.client[r, d], at.offset[r, d], at.size[r, d], strict=True):
                    if count > 0:
                        first = FEDERATION.offsets[client]
                        mine = FEDERATION.train.x[first : first + size]
                        np.testing.assert_array_equal(samples[d][offset : offset + size], mine)
                    count -= 1
        seen.append((rounds, [int(np.any(part != 0, axis=1).sum()) for part in samples], at.slot.max()))
        return whole(self, algorithm, carry, key, xs, rounds)

    monkeypatch.setattr(Engine, "run", record_capacity)
    monkeypatch.setattr("fedrax.simulation.run._BLOCK_SECONDS", 1000.0)  # blocks as long as possible
    script = fedrax.simulation.Script(cohorts=[[0, 1]] * 3 + [[0, 2]] * 3)
    run(SCAFFOLD, script=script, rounds=6, eval_every=3, **OFF_DEVICE)
    one_each = sum(FEDERATION.sizes[:2]), sum(FEDERATION.sizes[[0, 2]])
    assert [sum(rows) for _, rows, _ in seen][-1] == one_each[1] and sum(seen[0][1]) == one_each[0]
    assert sum(rounds for rounds, _, _ in seen) == 6 and max(rounds for rounds, _, _ in seen) >= 2
    assert max(slot for _, _, slot in seen) == 0  # each device has one client


def test_different_blocks_share_a_program(caplog: pytest.LogCaptureFixture):
    """Other clients and numbers of rounds do not recompile."""
    with jax.log_compiles():
        task = fedrax.Task(init=TASK.init, loss=TASK.loss)
        run(SCAFFOLD, task=task, rounds=30, eval_every=5, stragglers=0.3, **OFF_DEVICE)
    assert sum("Compiling jit(block_on_mesh)" in record.getMessage() for record in caplog.records) == 1


def test_next_block_is_prepared_during_the_current_one(monkeypatch: pytest.MonkeyPatch):
    """Samples of the next block are on the devices before a block ends."""
    made = queue.Queue()
    whole, place = Engine.run, streaming.SampleStreamer.place

    def slow_block(self: Engine, algorithm: Any, carry: Any, key: Any, xs: Any, rounds: int) -> Any:
        first = int(xs.round[0])
        assert first == 0 or first in done
        if first + rounds < 6:
            done.append(made.get(timeout=1800))
        return whole(self, algorithm, carry, key, xs, rounds)

    def record_preparation(self: streaming.SampleStreamer, xs: Any, rounds: int) -> Any:
        placed = place(self, xs, rounds)
        if threading.current_thread() is not threading.main_thread():
            made.put(int(xs.round[0]))
        return placed

    done: list[int] = []
    monkeypatch.setattr(Engine, "run", slow_block)
    monkeypatch.setattr(streaming.SampleStreamer, "place", record_preparation)
    run(SCAFFOLD, rounds=6, eval_every=2, **OFF_DEVICE)
    assert done and done[-1] >= 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fedrax-samples")]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("rows", [6, 7, 23, 43])
@pytest.mark.parametrize("devices", [1, 2])
def test_evaluation_in_chunks(rows: int, devices: int, monkeypatch: pytest.MonkeyPatch):
    """The same metric of each sample for any chunk size."""
    monkeypatch.setattr(evaluation, "_rows_of_a_chunk", lambda: 7)
    rng = np.random.default_rng(rows)
    batch = fedrax.contract.Batch(
        rng.normal(size=(rows, FEATURES)).astype(np.float32), rng.integers(0, 3, rows, np.int32)
    )
    params = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), TASK.init(jax.random.key(0)))
    mesh = execution_plan.make_mesh(devices)
    expected = evaluation.Evaluator(TASK, mesh, batch).per_sample(params)
    for most in (1, 300, 1 << 20):
        found = evaluation.StreamedEvaluator(TASK, mesh, batch, piece_bytes=most).per_sample(params)
        assert found.keys() == expected.keys() == {"loss", "accuracy"}
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


# -- components -------------------------------------------------------------------------------------------------------


def test_number_of_rounds_that_fit():
    values = np.array([[[4, 1], [0, 9]], [[1, 4], [2, 9]], [[3, 9], [0, 2]]], np.int32)
    count = np.array([[2, 1], [2, 1], [1, 2]])
    rows = np.array([10, 20, 30, 40, 50, 0, 0, 0, 0, 1000])
    fits = [streaming.rounds_that_fit(values, count, rows, block_bytes) for block_bytes in (1, 69, 70, 109, 110, 500)]
    assert fits == [1, 1, 2, 2, 3, 3]
    assert [streaming.rounds_that_fit(values, count, None, block_bytes) for block_bytes in (1, 2, 3)] == [1, 2, 3]


def test_capacities_are_few():
    sizes = [planner.round_up_size(n) for n in range(1, 5000)]
    assert all(n <= size <= 1.125 * n + 1 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 100


def test_row_file_agrees_with_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Random reads and writes, with system calls that transfer a few bytes at a time."""
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(row_file.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:7]], at))
    monkeypatch.setattr(row_file.os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:7]], at))
    rng = np.random.default_rng(0)
    for initial in (np.float64(2.5), np.arange(3, dtype=np.int16), rng.normal(size=(2, 2)).astype(np.float32)):
        initial = np.asarray(initial)
        table, mirror = RowFile(tmp_path, 30, initial), np.repeat(initial[None], 30, 0)
        for _ in range(20):
            rows = rng.choice(30, rng.integers(0, 8), replace=False)
            values = rng.integers(0, 9, (len(rows), *initial.shape)).astype(initial.dtype)
            table.write(rows, values)
            mirror[rows] = values
            look = rng.choice(30, 9)
            np.testing.assert_array_equal(table.read(look), mirror[look])
        np.testing.assert_array_equal(np.concatenate(list(table.pieces(max_bytes=50))), mirror)
        assert len(table) == 30 and table[-1].tobytes() == mirror[-1].tobytes()
        with pytest.raises(IndexError):
            table[30]
    assert not list(tmp_path.iterdir())


def test_pages_of_a_mapping_are_released(tmp_path: Path):
    """Not of private mappings, whose changes would be lost."""
    np.save(tmp_path / "x.npy", np.zeros((1000, 10)))
    private = np.load(tmp_path / "x.npy", mmap_mode="c")
    private[3] = 1
    release_pages(np.asarray(private))
    assert private[3, 0] == 1
    shared = np.load(tmp_path / "x.npy", mmap_mode="r+")
    shared[4] = 2
    release_pages(np.asarray(shared)[5:])
    assert shared[4, 0] == 2 and np.load(tmp_path / "x.npy")[4, 0] == 2


def test_mapped_array_is_not_copied(tmp_path: Path):
    """Also not by JAX on the CPU: a run with resident samples reads the file."""
    x, y = FEDERATION.train
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    federation = fedrax.Federation.from_arrays(mapped, y, offsets=FEDERATION.offsets, num_classes=3, shuffle=False)
    assert federation.train.x.ctypes.data == mapped.ctypes.data
    assert fedrax.data.aligned_array(mapped).ctypes.data == mapped.ctypes.data
    plain = fedrax.Federation.from_arrays(x, y, offsets=FEDERATION.offsets, num_classes=3, shuffle=False)
    for away in ({}, OFF_DEVICE):
        assert_identical(run(SCAFFOLD, federation, **away), run(SCAFFOLD, plain))
    assert x.shape[1] == FEATURES


# -- scale ---------------------------------------------------------------------------------------------------------

CODE = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import fedrax
from fedrax.models import Logistic
directory, method, n, cohort, rounds = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
x = np.load(directory / "x.npy", mmap_mode="r")
each = len(x) // n
federation = fedrax.Federation.from_arrays(
    x, np.arange(len(x)) % 3, offsets=np.arange(0, len(x) + 1, each), test=(x[:50], np.zeros(50, int)), shuffle=False,
    pixels=True,
)
task = fedrax.classification(Logistic().build(x.shape[1:], 3), federation.preprocess())
algorithm = getattr(fedrax, method)(local=fedrax.LocalSGD(lr=0.1, steps=1, batch_size=each))
everybody = np.random.default_rng(0).permutation(n)
cohorts = [everybody[(np.arange(cohort) + r * cohort) % n] for r in range(rounds)]
result = fedrax.simulate(
    algorithm, task, federation, rounds=rounds, cohort_size=cohort, script=fedrax.simulation.Script(cohorts=cohorts),
    eval_every=100, eval_train=True, samples="streamed", states="spilled", directory=directory / "run",
    keep_clients=False,
)
store = sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(result.store))
sample = np.random.default_rng(1).choice(n, 500, replace=False).tolist()
states = [result.client_state(client) for client in sample if client in result.homes]
busy = sum(any(np.any(leaf) for leaf in jax.tree.leaves(state)) for state in states)
status = open("/proc/self/status").read()  # getrusage would also count the process that started this one
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({"peak": peak, "store": store, "samples": x.nbytes, "busy": busy, "last": result.events[-1]}))
"""


def measure(directory: Path, method: str, clients: int, cohort: int, rounds: int) -> dict[str, Any]:
    """Peak memory, size of the states and of the samples, of a run in a process, in bytes."""
    path = os.pathsep.join(p for p in sys.path if p)
    completed = subprocess.run(
        [sys.executable, "-c", CODE, str(directory), method, str(clients), str(cohort), str(rounds)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def mapped_file(directory: Path, rows: int, features: int) -> None:
    """A sparse file of samples."""
    x = np.lib.format.open_memmap(directory / "x.npy", "w+", np.uint8, (rows, features))
    x[:, 0] = 255 if features < 2000 else 0
    x[:: rows // 100] = np.random.default_rng(0).integers(0, 255, (100, features))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_states_larger_than_memory(tmp_path: Path):
    """All 100,000 clients take part, with 12 kB of state each."""
    mapped_file(tmp_path, 100_000, 999)
    seen = measure(tmp_path, "Scaffold", 100_000, 5000, 21)
    assert seen["store"] > 1.1e9 and seen["busy"] == 500
    assert seen["peak"] < 0.9 * seen["store"]  # 1.4 with the states in memory
    assert 0 < seen["last"]["train_loss"] < 2


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_samples_larger_than_memory(tmp_path: Path):
    """Every sample is used in training and evaluation."""
    mapped_file(tmp_path, 960_000, 2500)
    seen = measure(tmp_path, "FedAvg", 1600, 50, 32)
    assert seen["samples"] == 2.4e9 and seen["last"]["gradients"] == 960_000
    assert seen["peak"] < 0.5 * seen["samples"]
    assert 0 < seen["last"]["train_loss"] < 2


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", [PFedMe(LOCAL), Ditto(FedAvg(local=LOCAL))], ids=["pFedMe", "Ditto"])
def test_metrics_of_personalized_models_are_the_same_with_streamed_samples(method: Algorithm):
    """Devices then hold only the samples of a block, with other indices."""
    ends = [run(method, samples=samples, devices=1, eval_every=2).events[-1] for samples in ("resident", "streamed")]
    names = [name for name in ends[0] if "personal" in name]
    assert len(names) >= 2
    for name in names:
        assert ends[1][name] == pytest.approx(ends[0][name], rel=1e-5), name
