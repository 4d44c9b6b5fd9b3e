"""A number that is not finite ends the run; the error names algorithm, round, client and tensor."""

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

SICK = 5
PLANS = ["scan", "vmap", "loop", "debug"]
COHORTS = [[0, 1, 2], [6, 4, 3], [7, 2, 0], [1, SICK, 3], [0, 1, 2]]
"""The sick client takes part in round 4 for the first time."""


def sick_federation(sick: int = SICK) -> fedrax.Federation:
    """One client's samples change to NaN after the federation is made, which would reject them."""
    x, y = (np.array(a) for a in FEDERATION.train)
    federation = dataclasses.replace(FEDERATION, train=type(FEDERATION.train)(x, y))
    x[FEDERATION.offsets[sick] : FEDERATION.offsets[sick + 1]] = np.nan
    return federation


@hyperparameters
class Uploads(fedrax.FedAvg):
    """One client uploads what is not finite, though its loss is, in round 2."""

    def client(self, message: Any, state: Any, data: Any) -> fedrax.ClientOutput:
        """Spoil the upload."""
        output = super().client(message, state, data)
        spoilt = jnp.where((data.size == SIZES[SICK]) & (data.round == 1), jnp.inf, 1.0)
        return output._replace(upload=jax.tree.map(lambda a: a * spoilt, output.upload))


@hyperparameters
class Overflowing(fedrax.FedAvg):
    """The server, not a client, leaves the finite numbers, in round 3."""

    def server(self, server: Any, cohort: Cohort):
        """Blow up."""
        server, info = super().server(server, cohort)
        return server._replace(params={"w": server.params["w"] / jnp.where(cohort.round == 2, 0.0, 1.0)}), info


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("method", "plan"), [*product(["Scaffold", "FedAvg", "MimeSVRG"], PLANS), ("GradMA", "scan")])
def test_the_sick_client_is_named(method: str, plan: str, tmp_path: Path):
    algorithm = getattr(fedrax.algorithms, method)(local=LOCAL)
    script = fedrax.simulation.Script(cohorts=COHORTS)
    options = {"script": script, "rounds": 5, "plan": plan, "chunk": 2}
    seen: list[dict] = []
    sink = type("Seen", (), {"start": lambda s, i: None, "event": lambda s, e: seen.append(e), "finish": seen.append})
    with pytest.raises(NonFiniteError) as caught:
        run(algorithm, sick_federation(), directory=tmp_path, sinks=[sink()], **options)
    message = str(caught.value)
    assert message.startswith(f"{method}, round 4, client {SICK}: ")
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
    for ours, theirs in zip(kept, [healthy.params["output"][n] for n in ("bias", "weight")], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_state_is_kept_before_the_samples_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def search(federation: fedrax.Federation) -> str:
        assert checkpoint.load_meta(tmp_path / "failure")["round"] == 3
        raise MemoryError

    monkeypatch.setattr("fedrax.simulation.run.describe_nonfinite_samples", search)
    with pytest.raises(MemoryError):
        run(
            federation=sick_federation(), script=fedrax.simulation.Script(cohorts=COHORTS), rounds=5, directory=tmp_path
        )


def test_samples_are_searched_in_pieces():
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
def test_a_sick_client_outside_the_cohort_does_no_harm(chunk: int):
    """Places that fill up a chunk must not be filled with whoever comes first."""
    script = fedrax.simulation.Script(cohorts=[[1, 2, 3, 4, 5], [6, 7, 1, 2, 3]])
    for devices in (1, 2):
        options = {"script": script, "rounds": 2, "devices": devices}
        result = run(federation=sick_federation(0), plan="vmap", chunk=chunk, **options)
        plain = run(federation=sick_federation(0), plan="scan", **options)
        np.testing.assert_allclose(result.params["output"]["weight"], plain.params["output"]["weight"], rtol=1e-5)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_too_long(plan: str):
    with pytest.raises(NonFiniteError, match=r"^FedAvg, round \d+, client \d+: .+ is not finite$"):
        run(fedrax.FedAvg(local=dataclasses.replace(LOCAL, lr=1e38)), rounds=20, plan=plan)


def uploads(**options: Any) -> str:
    """The message of a run that one client spoils."""
    script = fedrax.simulation.Script(cohorts=COHORTS[2:])
    algorithm = Uploads(local=dataclasses.replace(LOCAL, steps=None, epochs=40))  # of which eager ones take minutes
    with pytest.raises(NonFiniteError) as caught:
        run(algorithm, script=script, rounds=3, **options)
    return str(caught.value)


def test_a_spoilt_upload_is_found_by_a_compiled_search(capsys: pytest.CaptureFixture[str]):
    message = uploads(plan="vmap", sinks=[ProgressSink("mine")])
    assert message.startswith(f"Uploads, round 2, client {SICK}: upload/output/") and "search" not in message
    said = "Uploads, round 2: the server state is not finite; looking for its source, for at most 20 s\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_a_search_that_is_cut_short_hands_over_what_it_has(kind: str, monkeypatch: pytest.MonkeyPatch):
    if kind == "time":
        monkeypatch.setattr(divergence, "SEARCH_SECONDS", 0.0)
        why = "ended after 0 s"
    else:
        monkeypatch.setattr(divergence, "Engine", Full)
        why = "found no memory"
    known = "Uploads, round 2: the server state is not finite; the search for its source "
    assert uploads() == known + f'{why} (0 of 3 clients are finite): plan = "debug" names it'


class Full:
    """A device without room for the copies of a search."""

    def __init__(self, *_: Any):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


SQUARES = fedrax.Task(
    init=lambda key: {"w": jnp.ones(4)}, loss=lambda params, batch, key: (batch.x @ params["w"] - 1) ** 2
)
OVERFLOWS = [("scan", 1), ("scan", 3), ("loop", 1), ("debug", 3), ("loop", 3), ("debug", 1)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("plan", "size"), OVERFLOWS)
def test_a_server_that_overflows(plan: str, size: int, tmp_path: Path):
    """Nobody of the cohort is to blame; with one client, one of the two devices has none."""
    algorithm = Overflowing(local=LOCAL)
    with pytest.raises(NonFiniteError, match=r"^Overflowing, round 3: server/params/w is not finite"):
        run(algorithm, task=SQUARES, plan=plan, cohort_size=size, rounds=6, directory=tmp_path)
    assert len(read_events(tmp_path)) == 2


def test_a_resumed_run_takes_the_failure_away(tmp_path: Path):
    script = fedrax.simulation.Script(cohorts=COHORTS)
    with pytest.raises(NonFiniteError):
        run(federation=sick_federation(), script=script, rounds=5, directory=tmp_path)
    run(federation=sick_federation(), script=script, rounds=3, directory=tmp_path, resume=True)
    assert not (tmp_path / "failure").exists()
    assert checkpoint.load_meta(tmp_path / "checkpoint")["round"] == 3


def test_task_is_healthy():
    """The sickness above is the data's."""
    assert np.isfinite(run(task=TASK, rounds=2).events[-1]["train_loss"])


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("metrics", "belong into the task's whole_set"),
        ("whole_set", "a metric is None where it is not defined"),
    ],
)
def test_a_metric_that_is_not_defined_ends_the_run_and_says_where_it_belongs(kind: str, sentence: str):
    """Recall, of the samples of one class, is no number of any other sample."""
    recall = {"metrics": lambda params, batch: jnp.where(batch.y == 0, 1.0, jnp.nan), "whole_set": lambda *_: np.nan}
    task = dataclasses.replace(TASK, **{kind: {"recall": recall[kind]}})
    with pytest.raises(NonFiniteError, match=f"round 2: test_recall is not finite, though the loss is: .*{sentence}$"):
        run(fedrax.FedAvg(local=LOCAL), task=task, rounds=2, eval_every=2)


def test_a_test_loss_that_overflows_ends_the_run(tmp_path: Path):
    """The parameters are finite, what they say of a sample is not."""
    x, y = (np.array(a) for a in FEDERATION.test)
    far = dataclasses.replace(FEDERATION, test=type(FEDERATION.test)(x, y))
    x[0] = np.inf  # afterwards: the federation would reject it
    task = dataclasses.replace(TASK, metrics={"also": TASK.evaluation_loss})  # whose name comes first
    with pytest.raises(NonFiniteError, match="FedAvg, round 2: test_loss is not finite; the state"):
        run(fedrax.FedAvg(local=LOCAL), task=task, federation=far, rounds=6, eval_every=2, directory=tmp_path / "run")
    events = read_events(tmp_path / "run")
    assert len(events) == 2
    assert "test_loss" not in events[-1]
    assert checkpoint.load_meta(tmp_path / "run" / "failure")["round"] == 2
