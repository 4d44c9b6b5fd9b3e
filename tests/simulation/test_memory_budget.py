"""The memory budget: how much there is, default placement, and vectorized runs that fit."""

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
    """On CPU devices well-placed arrays are read in place, however large; what would be copied counts."""
    host_memory = 1 << 34

    def choose(*what: Any, **how: Any) -> tuple[bool, bool]:
        return streaming.choose_placement(Settings(**how), *what, MemoryBudget(host_memory, on_cpu=True))

    huge = np.broadcast_to(np.zeros(1, np.float32), (host_memory // 8 + 10,))  # strides are zero: takes no memory
    assert choose((huge,), 0) == (True, False)
    assert choose((huge[:-20],), 0) == choose((huge,), 0, samples="resident") == (False, False)
    many = np.broadcast_to(np.zeros(1, np.uint8), (1 << 31,))
    assert choose((many[:-1],), 0) == (False, False)
    assert choose((many,), 0) == (True, False)  # more rows than compiled code counts
    assert choose(FEDERATION.train, host_memory // 2 - 1000) == (False, False)
    assert choose(FEDERATION.train, host_memory // 2 + 1000) == (False, True)
    assert choose(FEDERATION.train, 0, states="spilled") == (False, False)  # no states


def test_what_is_spent_on_one_is_not_there_for_another():
    """Samples take 600 of 1300 bytes, states 300 of the 700 left; clients at work a quarter of all."""
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


def test_what_a_client_at_work_takes():
    """Two arrays of 4,000 bytes at a time; twice what kernels see; loops hold a turn, and what is gathered."""

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
    images, kernel = jnp.zeros((1, 1, 30, 30)), jnp.zeros((1, 1, 15, 15))  # too large to be laid out
    assert peak_bytes(jax.make_jaxpr(conv)(images, kernel)) == 4 * 16 * 16


def test_what_a_server_makes_is_there_once_for_all_clients():
    """However many updates it remembers, a client at work takes the same."""
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
    ids=["version 2", "around it", "version 1, in a container"],
)
def test_memory_is_what_the_control_group_allows(
    groups: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    machine, limit = host_memory.host_memory(), 123456789
    (tmp_path / "cgroup").write_text(groups)
    place = tmp_path / file
    place.parent.mkdir(parents=True, exist_ok=True)
    for said, expected in (("9223372036854771712\n", machine), ("max\n", machine), (f"{limit}\n", limit)):
        place.write_text(said)
        assert host_memory.host_memory(tmp_path / "cgroup", tmp_path) == expected
    monkeypatch.setattr("fedrax.simulation.placement.memory_budget.host_memory", lambda: limit)
    assert MemoryBudget.of(execution_plan.make_mesh(2)).total == limit // 2


@pytest.mark.parametrize(("side_by_side", "less"), [(0, "set a smaller batch"), (2, "set chunk below 2")])
def test_too_little_memory_raises_a_clear_error(side_by_side: int, less: str, tmp_path: Path):
    """As XLA says it; versions differ in what they lay out, so that no program is sure to take too much."""
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 70369012615352 bytes.")
    with (
        pytest.raises(
            fedrax.FedraxError, match=f"memory of a device is too small .*70369.*{less}.*; .*run holds the last"
        ),
        runtime_errors_explained(True, tmp_path / "run", side_by_side),
    ):
        raise full


def test_a_server_beyond_memory_raises_a_clear_error():
    """Before any of it is made: GradMA's inner products of the updates of 400,000 clients alone are 640 GB."""
    federation = make_federation((1,) * 400_000)
    with pytest.raises(fedrax.FedraxError, match=r"server state of GradMA takes .* for 400,000 clients, more"):
        run(fedrax.GradMA(local=LOCAL, memory=400_000), federation)


def test_memory_that_the_start_of_a_run_lacks_raises_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    def begin(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 40000000000 bytes.")

    monkeypatch.setattr(running, "start_run", begin)
    with pytest.raises(fedrax.FedraxError, match="the memory of a device is too small"):
        run()


def test_a_sweep_goes_side_by_side_only_where_its_runs_fit(monkeypatch: pytest.MonkeyPatch):
    """What clients keep lies there once for each run."""
    grid = [fedrax.Scaffold(local=LOCAL), fedrax.Scaffold(local=dataclasses.replace(LOCAL, lr=0.1))]
    ways = {}
    for there in (1 << 30, 1 << 12):
        monkeypatch.setattr("fedrax.simulation.placement.memory_budget.host_memory", lambda there=there: there)
        options = {"rounds": 1, "cohort_size": 2, "states": "resident", "samples": "resident"}
        ways[there] = sweep(grid, TASK, FEDERATION, [0, 1], **options, progress=False)[0][0].plan.startswith(
            "vectorized"
        )
    assert ways == {1 << 30: True, 1 << 12: False}


def test_a_chunk_where_clients_are_not_side_by_side_is_warned_of():
    with pytest.warns(UserWarning, match="ignored under plan scan"):
        run(fedrax.FedAvg(LOCAL), rounds=1, plan="scan", chunk=2)
