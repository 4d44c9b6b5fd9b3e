"""Divergence ends the run, and the error names algorithm, round, client and array."""

import dataclasses
import tracemalloc
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Cohort
from fedrax.data.dataset import nonfinite_rows
from fedrax.simulation import NonFiniteError, read_events
from fedrax.simulation.executors import debug, divergence
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.results.progress import ProgressSink
from tests.simulation.problems import FEDERATION, LOCAL, SIZES, TASK, run, without_times

DIVERGING = 5
PLANS = ["scan", "vmap", "loop", "debug"]
COHORTS = [[0, 1, 2], [6, 4, 3], [7, 2, 0], [1, DIVERGING, 3], [0, 1, 2]]
"""The diverging client takes part in round 4 for the first time."""


def diverging_federation(client: int = DIVERGING) -> fedrax.Federation:
    """Samples of one client become NaN after the federation is created, which would reject them."""
    x, y = (np.array(a) for a in FEDERATION.train)
    federation = dataclasses.replace(FEDERATION, train=type(FEDERATION.train)(x, y))
    x[FEDERATION.offsets[client] : FEDERATION.offsets[client + 1]] = np.nan
    return federation


@hyperparameters
class InfiniteUpload(fedrax.FedAvg):
    """One client uploads infinity in round 2, although its loss is finite."""

    def client(self, message: Any, state: Any, data: Any) -> fedrax.ClientOutput:
        output = super().client(message, state, data)
        factor = jnp.where((data.size == SIZES[DIVERGING]) & (data.round == 1), jnp.inf, 1.0)
        return output._replace(upload=jax.tree.map(lambda a: a * factor, output.upload))


@hyperparameters
class OverflowingServer(fedrax.FedAvg):
    """The server, not a client, becomes nonfinite in round 3."""

    def server(self, server: Any, cohort: Cohort):
        server, info = super().server(server, cohort)
        return server._replace(params={"w": server.params["w"] / jnp.where(cohort.round == 2, 0.0, 1.0)}), info


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("method", "plan"), [*product(["Scaffold", "FedAvg", "MimeSVRG"], PLANS), ("GradMA", "scan")])
def test_diverging_client_is_named(method: str, plan: str, tmp_path: Path):
    algorithm = getattr(fedrax.algorithms, method)(local=LOCAL)
    script = fedrax.simulation.Script(cohorts=COHORTS)
    options = {"script": script, "rounds": 5, "plan": plan, "chunk": 2}
    seen: list[dict] = []
    sink = type("Seen", (), {"start": lambda s, i: None, "event": lambda s, e: seen.append(e), "finish": seen.append})
    with pytest.raises(NonFiniteError) as caught:
        run(algorithm, diverging_federation(), directory=tmp_path, sinks=[sink()], **options)
    message = str(caught.value)
    assert message.startswith(f"{method}, round 4, client {DIVERGING}: ")
    data = "5 of the training samples are not finite themselves, the first is sample 0 of client 5"
    assert message.endswith(f" is not finite; {data}; the server's state it starts from is in {tmp_path / 'failure'}")
    healthy = run(algorithm, **(options | {"rounds": 3}))
    events = read_events(tmp_path)
    assert [{k: v for k, v in e.items() if "test" not in k} for e in without_times(events)] == [
        {k: v for k, v in e.items() if "test" not in k} for e in without_times(healthy.events)
    ]
    assert seen == [*events, None]
    meta = checkpoint.load_meta(tmp_path / "failure")
    assert meta["round"] == 3 and meta["error"] in message
    with np.load(tmp_path / "failure" / checkpoint.FILE) as file:
        kept = [file[name] for name in sorted(file.files) if "params" in name]
    for actual, desired in zip(kept, [healthy.params["output"][n] for n in ("bias", "weight")], strict=True):
        np.testing.assert_array_equal(actual, desired)


def test_state_is_written_before_the_samples_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def search(federation: fedrax.Federation) -> str:
        assert checkpoint.load_meta(tmp_path / "failure")["round"] == 3
        raise MemoryError

    monkeypatch.setattr("fedrax.simulation.run.describe_nonfinite_samples", search)
    with pytest.raises(MemoryError):
        run(
            federation=diverging_federation(),
            script=fedrax.simulation.Script(cohorts=COHORTS),
            rounds=5,
            directory=tmp_path,
        )


def test_samples_are_searched_in_chunks():
    x = np.zeros((20_000, 100), np.float32)
    federation = fedrax.Federation.from_arrays(
        x, np.zeros(len(x), int), offsets=np.array([0, 6_000, 20_000]), shuffle=False
    )
    federation.train.x[7_000:7_500, 3], federation.train.x[19_999] = np.nan, np.inf
    tracemalloc.start()
    bad = nonfinite_rows(federation.train.x, piece_bytes=1 << 16)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bad.tolist() == [*range(7_000, 7_500), 19_999] and most < x.nbytes / 20
    found = debug.describe_nonfinite_samples(federation)
    assert "; 501 of the training samples" in found and found.endswith("the first is sample 1000 of client 1")


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, 3])
def test_diverging_client_outside_of_the_cohort_has_no_effect(chunk: int):
    """Padding of chunks must not run another client."""
    script = fedrax.simulation.Script(cohorts=[[1, 2, 3, 4, 5], [6, 7, 1, 2, 3]])
    for devices in (1, 2):
        options = {"script": script, "rounds": 2, "devices": devices}
        result = run(federation=diverging_federation(0), plan="vmap", chunk=chunk, **options)
        plain = run(federation=diverging_federation(0), plan="scan", **options)
        np.testing.assert_allclose(result.params["output"]["weight"], plain.params["output"]["weight"], rtol=1e-5)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", PLANS)
def test_divergence_by_a_large_learning_rate(plan: str):
    with pytest.raises(NonFiniteError, match=r"^FedAvg, round \d+, client \d+: .+ is not finite$"):
        run(fedrax.FedAvg(local=dataclasses.replace(LOCAL, lr=1e38)), rounds=20, plan=plan)


def message_of_infinite_upload(**options: Any) -> str:
    """The error of a run with one infinite upload."""
    script = fedrax.simulation.Script(cohorts=COHORTS[2:])
    algorithm = InfiniteUpload(local=dataclasses.replace(LOCAL, steps=None, epochs=40))  # eager operations take minutes
    with pytest.raises(NonFiniteError) as caught:
        run(algorithm, script=script, rounds=3, **options)
    return str(caught.value)


def test_infinite_upload_is_found_by_a_compiled_search(capsys: pytest.CaptureFixture[str]):
    message = message_of_infinite_upload(plan="vmap", sinks=[ProgressSink("mine")])
    assert (
        message.startswith(f"InfiniteUpload, round 2, client {DIVERGING}: upload/output/") and "search" not in message
    )
    printed = "InfiniteUpload, round 2: the server state is not finite; looking for its source, for at most 20 s\n"
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_interrupted_search_reports_its_partial_result(kind: str, monkeypatch: pytest.MonkeyPatch):
    if kind == "time":
        monkeypatch.setattr(divergence, "SEARCH_SECONDS", 0.0)
        why = "ended after 0 s"
    else:
        monkeypatch.setattr(divergence, "Engine", FullDevice)
        why = "found no memory"
    known = "InfiniteUpload, round 2: the server state is not finite; the search for its source "
    assert message_of_infinite_upload() == known + f'{why} (0 of 3 clients are finite): plan = "debug" names it'


class FullDevice:
    """A device without memory for the copies of a search."""

    def __init__(self, *_: Any):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


SQUARES = fedrax.Task(
    init=lambda key: {"w": jnp.ones(4)}, loss=lambda params, batch, key: (batch.x @ params["w"] - 1) ** 2
)
OVERFLOWS = [("scan", 1), ("scan", 3), ("loop", 1), ("debug", 3), ("loop", 3), ("debug", 1)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("plan", "size"), OVERFLOWS)
def test_overflowing_server_is_named(plan: str, size: int, tmp_path: Path):
    """No client of the cohort is the cause; with one client, one of the two devices has none."""
    algorithm = OverflowingServer(local=LOCAL)
    with pytest.raises(NonFiniteError, match=r"^OverflowingServer, round 3: server/params/w is not finite"):
        run(algorithm, task=SQUARES, plan=plan, cohort_size=size, rounds=6, directory=tmp_path)
    assert len(read_events(tmp_path)) == 2


def test_resumed_run_removes_the_failure_state(tmp_path: Path):
    script = fedrax.simulation.Script(cohorts=COHORTS)
    with pytest.raises(NonFiniteError):
        run(federation=diverging_federation(), script=script, rounds=5, directory=tmp_path)
    run(federation=diverging_federation(), script=script, rounds=3, directory=tmp_path, resume=True)
    assert not (tmp_path / "failure").exists()
    assert checkpoint.load_meta(tmp_path / "checkpoint")["round"] == 3


def test_task_without_nan_samples_does_not_diverge():
    assert np.isfinite(run(task=TASK, rounds=2).events[-1]["train_loss"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("metrics", "belong into the task's whole_set"),
        ("whole_set", "a metric is None where it is not defined"),
    ],
)
def test_undefined_sample_metric_ends_the_run_with_the_remedy(kind: str, message: str):
    """Recall is defined for samples of one class only."""
    recall = {"metrics": lambda params, batch: jnp.where(batch.y == 0, 1.0, jnp.nan), "whole_set": lambda *_: np.nan}
    task = dataclasses.replace(TASK, **{kind: {"recall": recall[kind]}})
    with pytest.raises(NonFiniteError, match=f"round 2: test_recall is not finite, though the loss is: .*{message}$"):
        run(fedrax.FedAvg(local=LOCAL), task=task, rounds=2, eval_every=2)


def test_overflowing_test_loss_ends_the_run(tmp_path: Path):
    """The parameters are finite, but not the loss of a sample."""
    x, y = (np.array(a) for a in FEDERATION.test)
    far = dataclasses.replace(FEDERATION, test=type(FEDERATION.test)(x, y))
    x[0] = np.inf  # after creation, because the federation would reject it
    task = dataclasses.replace(TASK, metrics={"also": TASK.evaluation_loss})  # first in the order of names
    with pytest.raises(NonFiniteError, match="FedAvg, round 2: test_loss is not finite; the state"):
        run(fedrax.FedAvg(local=LOCAL), task=task, federation=far, rounds=6, eval_every=2, directory=tmp_path / "run")
    events = read_events(tmp_path / "run")
    assert len(events) == 2
    assert "test_loss" not in events[-1]
    assert checkpoint.load_meta(tmp_path / "run" / "failure")["round"] == 2
