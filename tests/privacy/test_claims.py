"""Releases that a claim does not cover are rejected or counted; audits test the claims."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, Federation, FedProx, FedraxError, LocalSGD, Settings, Task, classification, cli, simulate
from fedrax.algorithms import FedBuff
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract import Phase
from fedrax.experiments.audit import audit_canaries, audit_client
from fedrax.models import Logistic
from fedrax.participation import Asynchronous, Availability, RoundRobin, Uniform, WeightedBySamples
from fedrax.personalization import Ditto
from fedrax.privacy import ClientDP, ObjectivePerturbation, OutputPerturbation, SampleDP
from fedrax.privacy.audit.bounds import distinguish
from fedrax.privacy.mechanisms.clipping import Adaptive, Flat
from fedrax.report.privacy_forecast import forecast
from fedrax.simulation import Script
from tests.contract.test_settings import NORM_TASK
from tests.simulation.problems import FEDERATION, run

LOCAL = LocalSGD(lr=0.05, steps=2, batch_size=1)
ONE = Federation.from_arrays(np.array([[1.0, -1.0]], np.float32), np.array([0]), np.zeros(1, int), num_classes=2)
TASK = classification(Logistic().build((2,), 2))


@pytest.mark.parametrize(
    "method",
    [SampleDP(FedAvg(local=LOCAL), rate=0.5), ClientDP(FedAvg(local=LOCAL), at="client"), OutputPerturbation()],
    ids=["SampleDP", "ClientDP", "OutputPerturbation"],
)
def test_client_sampling_by_size_is_rejected(method: Any):
    with pytest.raises(FedraxError, match="cohorts that are sampled by numbers of samples tell the server"):
        run(method, participation=WeightedBySamples(), rounds=1)


@hyperparameters
class TwoRuns(FedAvg):
    """Local training in both phases."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(Phase(self.broadcast, self.client, self.server) for _ in range(2))


@hyperparameters
class MoreSteps(FedAvg):
    """Takes more local steps than its options declare."""

    def client(self, message: Any, state: Any, data: Any) -> Any:
        return dataclasses.replace(self, local=dataclasses.replace(self.local, steps=7))._once(message, data)

    def _once(self, message: Any, data: Any) -> Any:
        return FedAvg.client(self, message, (), data)


def test_local_steps_of_all_phases_are_counted():
    """Twice the releases of one phase; an audit with exchanged labels finds no more than this epsilon."""
    (one,), (two,) = (SampleDP(m(local=LOCAL)).releases() for m in (FedAvg, TwoRuns))
    assert two.times == 2 * one.times == 4
    method = OutputPerturbation(TwoRuns(local=LocalSGD(lr=1e6, steps=1, batch_size="full")), tau=1.0, sigma=2.0)
    found = audit_client(method, TASK, ONE, Settings(cohort_size=1), runs=3000)
    assert 0 < found.proven <= found.claimed
    with pytest.raises(FedraxError, match="one minimization of the mean loss a round"):
        run(ObjectivePerturbation(FedProx(mu=0.5, local=LocalSGD(steps=3, reduction="sum"))), rounds=1)


def test_undeclared_local_steps_are_rejected():
    with pytest.raises(FedraxError, match=r"also asks for 7 as local.steps instead of 2"):
        run(SampleDP(MoreSteps(local=LOCAL)), rounds=1)


def constant() -> Task:
    """A constant loss, so that parameters move by noise only."""
    return Task(lambda key: {"w": jnp.zeros(2000)}, lambda p, b, k: 0 * p["w"].sum() * b.x[:, 0])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("draw", ["round robin", "trace"])
def test_noise_does_not_depend_on_the_actual_cohort_size(draw: str, tmp_path: Path):
    """A last cohort with one client, and one available client, have the noise of two."""
    trace = tmp_path / "trace.csv"
    trace.write_text("round,client\n0,0\n0,1\n1,2\n1,3\n2,4\n")
    rows = Federation.from_arrays(np.ones((10, 1), np.float32), np.zeros(10), np.repeat(range(5), 2))
    method = ClientDP(FedAvg(local=LocalSGD(lr=0.1, steps=1, batch_size=2)), clip=Flat(1.0), noise=100.0)
    participation = RoundRobin() if draw == "round robin" else Availability(trace)
    options: dict[str, Any] = {"cohort_size": 2, "participation": participation, "trajectory": True}
    result = simulate(method, constant(), rows, rounds=3, progress=False, **options)
    path = [np.asarray(params["w"]) for params in result.trajectory]
    assert [event["clients"] for event in result.events] == [2, 2, 1]
    for before, after in ((path[0], path[1]), (path[1], path[2])):
        assert (after - before).std() == pytest.approx(50, rel=0.1)


def test_personal_models_with_adaptive_clipping():
    """The broadcast message also contains the clipping norm."""
    inner = FedAvg(local=LocalSGD(lr=0.1, steps=2, batch_size=2))
    moving = run(Ditto(ClientDP(inner, clip=Adaptive(), noise=0.0)), rounds=2, cohort_size=8)
    still = run(Ditto(inner), rounds=1, cohort_size=8)
    assert "test_loss" in moving.events[-1] and moving.client_state(0).own is not None
    first = run(Ditto(ClientDP(inner, clip=Adaptive(), noise=0.0)), rounds=1, cohort_size=8)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), first.client_state(3).own, still.client_state(3).own
    )


def test_scripted_cohorts_are_averaged_over_their_own_size(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text("round,client\n0,0\n0,1\n")
    script = Script(cohorts=[[1, 2, 3, 5]])
    method = ClientDP(FedAvg(local=LOCAL), noise=0.0)
    drawn = (Uniform(), Availability(trace), RoundRobin())
    ends = [run(method, rounds=1, script=script, participation=draw, cohort_size=2).params for draw in drawn]
    for end in ends[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), end, ends[0])


# -- audits --------------------------------------------------------------------------------------------------------


def test_audits_change_the_protected_unit():
    """By default all labels of a client if clients are protected, the label of one sample if samples are."""
    many = Federation.from_arrays(np.tile(ONE.train.x, (20, 1)), np.zeros(20, int), np.zeros(20, int), num_classes=2)
    method = SampleDP(FedAvg(local=LocalSGD(lr=0.05, steps=1, batch_size=20)), clip=0.5, noise=10.0)
    found = audit_client(method, TASK, many, Settings(cohort_size=1), runs=400)
    assert found.unit == "sample" and not found.refuted
    for audit in (audit_client, audit_canaries):
        with pytest.raises(FedraxError, match="the guarantee is for one sample"):
            audit(method, TASK, many, Settings(cohort_size=1), unit="client")


def test_audit_of_banded_noise_observes_one_round():
    method = ClientDP(FedAvg(local=LocalSGD(lr=1e6, steps=1, batch_size=1)), clip=Flat(0.05), noise=8.0, bands=8)
    with pytest.raises(FedraxError, match="participations 8 rounds apart: set rounds to 1"):
        audit_client(method, TASK, ONE, Settings(cohort_size=1), rounds=8, runs=400)
    assert not audit_client(method, TASK, ONE, Settings(cohort_size=1), runs=2000).refuted


def test_audits_reject_what_runs_reject():
    method = SampleDP(FedAvg(local=LOCAL))
    with pytest.raises(FedraxError, match="uniform aggregation weights"):
        audit_client(method, TASK, ONE, Settings(cohort_size=1, weights="samples"), runs=40)
    with pytest.raises(FedraxError, match="running statistics"):
        audit_client(method, NORM_TASK, FEDERATION, Settings(cohort_size=1), runs=40)


def test_nan_observations_have_no_evidence():
    one, other = (np.random.default_rng(seed).normal(size=(400, 3)) for seed in (0, 1))
    for bad in (np.nan, np.inf):
        one[0, 0] = bad
        with pytest.raises(FedraxError, match="not finite"):
            distinguish(one, other, 1e-5)


def test_epsilon_of_asynchronous_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Only rounds in which an upload of the client can arrive are counted."""
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace.csv"
    trace.write_text("client,seconds\n" + "".join(f"{i},{1 + i % 3}\n" for i in range(50)))
    settings = Settings(rounds=10, cohort_size=5, participation=Asynchronous(trace, concurrency=5))
    made = forecast(ClientDP(FedBuff(), noise=20.0), settings, np.full(50, 10), [8.0])
    assert made.answers[0].rounds == 10 and made.answers[0].more
    flags = ["--algorithm", "clientdp", "--algorithm.inner", "fedbuff", "--run.participation", "asynchronous"]
    flags += ["--run.participation.trace", str(trace), "--partition", "shards", "--partition.clients", "50"]
    assert cli.main(["privacy", *flags, "--run.cohort-size", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
