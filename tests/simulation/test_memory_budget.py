"""The memory budget: its size, default placement, and vectorized runs that fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import host_memory
from fedrax.simulation import run as running
from fedrax.simulation.executors import execution_plan
from fedrax.simulation.placement import streaming
from fedrax.simulation.placement.memory_budget import MemoryBudget
from fedrax.simulation.process import runtime_errors_explained
from fedrax.simulation.settings import Settings
from fedrax.simulation.setup import prepare
from fedrax.tuning import sweep
from fedrax.xla.peak_memory import peak_bytes
from tests.simulation.problems import FEDERATION, LOCAL, TASK, make_federation, run


def test_default_placement_of_samples_and_states():
    """On CPU devices aligned arrays are read in place at any size; only copies count."""
    host_memory = 1 << 34

    def choose(*what: Any, **how: Any) -> tuple[bool, bool]:
        return streaming.choose_placement(Settings(**how), *what, MemoryBudget(host_memory, on_cpu=True))

    huge = np.broadcast_to(np.zeros(1, np.float32), (host_memory // 8 + 10,))  # zero strides: takes no memory
    assert choose((huge,), 0) == (True, False)
    assert choose((huge[:-20],), 0) == choose((huge,), 0, samples="resident") == (False, False)
    many = np.broadcast_to(np.zeros(1, np.uint8), (1 << 31,))
    assert choose((many[:-1],), 0) == (False, False)
    assert choose((many,), 0) == (True, False)  # more rows than 32-bit indices of compiled programs
    assert choose(FEDERATION.train, host_memory // 2 - 1000) == (False, False)
    assert choose(FEDERATION.train, host_memory // 2 + 1000) == (False, True)
    assert choose(FEDERATION.train, 0, states="spilled") == (False, False)  # there are no states


def test_reservations_reduce_the_budget():
    """Samples take 600 of 1300 bytes, states 300 of the remaining 700, and training clients a quarter of all."""
    samples, account = np.zeros((100, 6), np.uint8), MemoryBudget(1300, on_cpu=False)
    assert streaming.choose_placement(Settings(), (samples,), 300, account) == (False, False)
    assert [execution_plan.clients_per_vmap(Settings(), 1, 9, account, size) for size in (36, 37, 48, 326)] == [
        9,
        5,
        5,
        1,
    ]
    assert execution_plan.clients_per_vmap(Settings(chunk=4), 2, 9, account, 36) == 4
    assert streaming.choose_placement(Settings(), (samples,), 400, MemoryBudget(1300, on_cpu=False)) == (False, True)
    streamed = Settings(samples="streamed")
    assert streaming.choose_placement(streamed, (samples,), 400, MemoryBudget(1300, on_cpu=False)) == (True, False)


@pytest.mark.parametrize("devices", [1, 2])
def test_cohorts_up_to_ten_times_what_fits_are_split_into_few_equal_chunks(devices: int):
    account = MemoryBudget(4 * 10 * 36, on_cpu=False)  # ten clients of 36 bytes in a quarter
    for cohort in range(1, 10 * 10 * devices + 1):
        share = -(-cohort // devices)
        chunk = execution_plan.clients_per_vmap(Settings(), devices, cohort, account, 36)
        chunks = -(-share // chunk)
        assert chunk * 36 <= account.total // 4 and chunks == -(-share // 10)
        assert chunk * chunks - share < chunks  # at most one repeated client in each


def test_peak_memory_of_a_program():
    """Two arrays of 4,000 bytes at a time; patches of convolutions twice; for loops an iteration and the stacked
    outputs.
    """

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(5):
            x = jnp.sin(x)
        return x.sum()

    vector = jnp.zeros(1000)
    assert peak_bytes(jax.make_jaxpr(chain)(vector)) == 8000
    assert peak_bytes(jax.make_jaxpr(lambda x: jax.lax.scan(lambda a, _: (jnp.sin(a), a), x, None, 9))(vector)) == 44000
    conv = lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "VALID")  # noqa: E731
    images, kernel = jnp.zeros((2, 3, 8, 8)), jnp.zeros((4, 3, 3, 3))
    assert peak_bytes(jax.make_jaxpr(conv)(images, kernel)) == 4 * (2 * 4 * 36 + 2 * 2 * 36 * 27)
    images, kernel = jnp.zeros((1, 1, 30, 30)), jnp.zeros((1, 1, 15, 15))  # too large for patches
    assert peak_bytes(jax.make_jaxpr(conv)(images, kernel)) == 4 * 16 * 16


def test_server_state_is_not_counted_per_client():
    settings = Settings(cohort_size=2)
    few, many = (
        prepare(fedrax.algorithms.GradMAS(memory=m), TASK, FEDERATION, settings).traced.peak_bytes for m in (2, 8)
    )
    assert few == many > 0


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/jobs/7\n", "jobs/7/memory.max"),
        ("0::/jobs/7\n", "jobs/memory.max"),
        ("3:cpu:/\n2:memory:/not/seen/inside\n0::/\n", "memory/memory.limit_in_bytes"),
    ],
    ids=["version 2", "parent group", "version 1, in a container"],
)
def test_memory_is_limited_by_the_control_group(
    groups: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    machine, limit = host_memory.host_memory(), 123456789
    (tmp_path / "cgroup").write_text(groups)
    place = tmp_path / file
    place.parent.mkdir(parents=True, exist_ok=True)
    for printed, expected in (("9223372036854771712\n", machine), ("max\n", machine), (f"{limit}\n", limit)):
        place.write_text(printed)
        assert host_memory.host_memory(tmp_path / "cgroup", tmp_path) == expected
    monkeypatch.setattr("fedrax.simulation.placement.memory_budget.host_memory", lambda: limit)
    assert MemoryBudget.of(execution_plan.make_mesh(2)).total == limit // 2


@pytest.mark.parametrize(("clients_per_vmap", "remedy"), [(0, "set a smaller batch"), (2, "set chunk below 2")])
def test_too_little_memory_raises_a_clear_error(clients_per_vmap: int, remedy: str, tmp_path: Path):
    """With an error of XLA, because no program reliably exceeds memory in all versions."""
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 70369012615352 bytes.")
    with (
        pytest.raises(
            fedrax.FedraxError, match=f"memory of a device is too small .*70369.*{remedy}.*; .*run holds the last"
        ),
        runtime_errors_explained(True, tmp_path / "run", clients_per_vmap),
    ):
        raise full


def test_too_large_server_state_raises_a_clear_error():
    """Before it is allocated: inner products of the updates of 400,000 clients take 640 GB in GradMA."""
    federation = make_federation((1,) * 400_000)
    with pytest.raises(fedrax.FedraxError, match=r"server state of GradMA takes .* for 400,000 clients, more"):
        run(fedrax.GradMA(local=LOCAL, memory=400_000), federation)


def test_out_of_memory_at_the_start_of_a_run_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    def begin(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 40000000000 bytes.")

    monkeypatch.setattr(running, "start_run", begin)
    with pytest.raises(fedrax.FedraxError, match="the memory of a device is too small"):
        run()


def test_sweep_is_vectorized_only_if_its_runs_fit(monkeypatch: pytest.MonkeyPatch):
    """Client states are stored for each run."""
    grid = [fedrax.Scaffold(local=LOCAL), fedrax.Scaffold(local=dataclasses.replace(LOCAL, lr=0.1))]
    is_vectorized = {}
    for available in (1 << 30, 1 << 12):
        monkeypatch.setattr(
            "fedrax.simulation.placement.memory_budget.host_memory", lambda available=available: available
        )
        options = {"rounds": 1, "cohort_size": 2, "states": "resident", "samples": "resident"}
        is_vectorized[available] = sweep(grid, TASK, FEDERATION, [0, 1], **options, progress=False)[0][
            0
        ].plan.startswith("vectorized")
    assert is_vectorized == {1 << 30: True, 1 << 12: False}


def test_ignored_chunk_is_warned_of():
    with pytest.warns(UserWarning, match="ignored under plan scan"):
        run(fedrax.FedAvg(LOCAL), rounds=1, plan="scan", chunk=2)
