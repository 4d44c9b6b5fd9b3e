"""The privacy ledger of a run: epsilon in events, the end of a budget, and resuming."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedrax
from fedrax import FedraxError
from fedrax.participation import FixedList, Poisson, Uniform, WeightedBySamples
from fedrax.privacy.accounting import Accountant, CohortSampling
from fedrax.privacy.ledger import Ledger
from fedrax.privacy.mechanisms.client_level import ClientDP
from fedrax.privacy.mechanisms.perturbation import ObjectivePerturbation
from fedrax.privacy.mechanisms.sample_level import SampleDP
from fedrax.privacy.releases import Release
from fedrax.report.runs import read_run
from fedrax.simulation.persistence import checkpoint
from tests.privacy.methods import Noisy
from tests.simulation.problems import FEDERATION, LOCAL, TASK, assert_identical, run, without_times

LOUD = Noisy(local=LOCAL, noise=2.0)
PUBLIC = Noisy(local=LOCAL, noise=2.0, seen="public")
COHORTS = [[0, 1, 2], [2, 3, 4], [2, 5, 6], [0, 1, 7]]
SCRIPT = fedrax.simulation.Script(cohorts=COHORTS)


def epsilon_of(count: int, noise: float = 2.0) -> float:
    """Epsilon of ``count`` releases of one client."""
    return Accountant([Release(noise)], 1e-5).epsilon(count)


def test_events_contain_the_largest_epsilon_over_clients():
    """Client 2 takes part in rounds 1 to 3, and no client more often."""
    result = run(LOUD, script=SCRIPT)
    assert [event["epsilon"] for event in result.events] == [epsilon_of(1), epsilon_of(2), epsilon_of(3), epsilon_of(3)]
    paper = [event["epsilon_paper"] for event in result.events]
    kappa = [1 / 18, 2 / 32, 3 / 32, 2 / 18]  # clients 0 (3 samples), 2 (4), 2, 0; noise 1 for one sample
    np.testing.assert_allclose(paper, [2 * np.sqrt(k * np.log(1e5)) + k for k in kappa], rtol=1e-12)
    spent = result.spent
    assert spent is not None and (spent.epsilon, spent.count, spent.by) == (epsilon_of(3), 3, "analytic Gaussian")
    assert "presence of a client" in repr(result)


def test_client_sampling_amplifies_for_public_observers():
    result = run(PUBLIC, cohort_size=1)
    expected = Accountant([Release(2.0, seen="public")], 1e-5, CohortSampling("fixed", 1 / 8))
    assert [event["epsilon"] for event in result.events] == [expected.epsilon(n) for n in (1, 2, 3, 4)]
    assert result.events[-1]["epsilon"] < epsilon_of(4)
    plain = run(PUBLIC, cohort_size=1, amplification="none")
    assert plain.events[0]["epsilon"] == epsilon_of(1, noise=1.0)  # another client is replaced


@pytest.mark.parametrize(
    ("options", "noise"),
    [
        ({"participation": WeightedBySamples()}, 1.0),  # an absent client makes room for another one
        ({"participation": FixedList((1, 2, 3))}, 2.0),
        ({"cohort_size": 8}, 2.0),
        ({"script": SCRIPT}, 2.0),
    ],
)
def test_deterministic_participation_does_not_amplify(options: dict[str, Any], noise: float):
    result = run(PUBLIC, rounds=2, **options)
    assert result.spent is not None and result.spent.epsilon == epsilon_of(result.spent.count, noise)


def test_non_private_methods_have_no_epsilon():
    result = run(fedrax.FedAvg(local=LOCAL), rounds=1)
    assert result.spent is None and "epsilon" not in result.events[0] and "epsilon" not in repr(result)


def test_infinite_epsilon_is_null_in_events(tmp_path: Path):
    result = run(Noisy(local=LOCAL, noise=0.0), rounds=1, directory=tmp_path / "run")
    assert result.events[0]["epsilon"] is None and result.events[0]["epsilon_paper"] is None
    line = json.loads((tmp_path / "run" / "events.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["epsilon"] is None


def test_run_without_a_finite_epsilon_continues(tmp_path: Path):
    silent, options = Noisy(local=LOCAL, noise=0.0), {"directory": tmp_path / "run", "eval_every": 2}
    run(silent, rounds=2, **options)
    resumed = run(silent, rounds=4, resume=True, **options)
    assert_identical(resumed, run(silent, rounds=4, eval_every=2))
    assert resumed.metric("epsilon") == [] and resumed.cost_to_target("epsilon", 1.0) is None


def test_run_stops_before_exceeding_its_budget(tmp_path: Path):
    """The budget covers two of three participations of client 2; the last round is evaluated and saved."""
    budget, directory = (epsilon_of(2) + epsilon_of(3)) / 2, tmp_path / "run"
    result = run(LOUD, script=SCRIPT, epsilon_budget=budget, directory=directory)
    assert (result.stopped, len(result.events)) == ("budget", 2)
    assert result.events[-1]["epsilon"] == epsilon_of(2) and "test_accuracy" in result.events[-1]
    assert checkpoint.load_meta(directory / "checkpoint")["stopped"] == "budget"
    for number in ("2", "2.5"):
        text = f"algorithm = {{}}\n[run]\nseed = 0\nrounds = 4\nepsilon_budget = {number}\n"
        (directory / "experiment.toml").write_text(text)
        assert read_run(directory).spent
    again = run(LOUD, script=SCRIPT, epsilon_budget=budget, directory=directory, resume=True)
    assert (again.stopped, again.spent, again.events) == ("budget", result.spent, result.events)
    with pytest.raises(FedraxError, match=r"budget of epsilon = [\d.]+ at delta = 1e-05 is spent: 2 rounds have cost"):
        run(LOUD, script=SCRIPT, epsilon_budget=epsilon_of(1), directory=directory, resume=True)
    assert len(run(LOUD, script=SCRIPT, epsilon_budget=None, directory=directory, resume=True).events) == 4
    with pytest.raises(
        FedraxError, match=r"is spent: 4 rounds have cost [\d.]+$"
    ):  # finished, at more than this budget
        run(LOUD, script=SCRIPT, epsilon_budget=budget, directory=directory, resume=True)


def test_extrapolation_without_data_is_free():
    """Upcycled-FL has as many releases as its inner method."""
    upcycled, plain = run(fedrax.algorithms.upcycle(LOUD), script=SCRIPT), run(LOUD, script=SCRIPT)
    assert [event["epsilon"] for event in upcycled.events] == [event["epsilon"] for event in plain.events]


def test_poisson_cohorts_and_perturbation_mechanisms():
    """An empty cohort is accounted as any other one."""
    method = ClientDP(inner=fedrax.FedAvg(local=LOCAL), noise=2.0)
    result = run(method, participation=Poisson(), cohort_size=1, rounds=5)
    expected = Accountant([Release(2.0, seen="public")], 1e-5, CohortSampling("poisson", 1 / 8))
    assert [event["epsilon"] for event in result.events] == [expected.epsilon(n) for n in range(1, 6)]
    assert any(event["clients"] == 0 for event in result.events)


def test_the_guarantee_names_its_adversary_and_its_sampling():
    inner = fedrax.FedAvg(local=LOCAL)
    public, server, stateful = (
        ClientDP(inner, noise=2.0),
        ClientDP(inner, noise=2.0, at="client"),
        ClientDP(fedrax.Scaffold(local=LOCAL), noise=2.0),
    )
    cases = [
        (public, Poisson(), ("public", "poisson"), "all but the server, .*by Poisson sampling of cohorts"),
        (public, Uniform(), ("public", "fixed"), "all but the server, .*by uniform sampling of cohorts"),
        (stateful, Uniform(), ("public", "none"), "all but the server, .*not amplified"),
        (server, Poisson(), ("server", "none"), "also against the server; not amplified"),
        (SampleDP(inner, noise=2.0, rate=0.5), Uniform(), ("server", "batches"), "by Poisson sampling of batches"),
    ]
    for method, participation, expected, text in cases:
        spent = run(method, participation=participation, cohort_size=2, rounds=1).spent
        assert spent is not None and (spent.seen, spent.amplified) == expected and re.search(text, str(spent))


def test_objective_perturbation_has_the_epsilon_of_its_paper_only():
    method = ObjectivePerturbation(inner=fedrax.FedProx(mu=1.0, local=LOCAL), alpha=5.0)
    (release,) = method.releases()
    ledger = Ledger(Accountant([release], 1e-5), np.array([4, 9]))
    event = ledger.spend(np.array([1])) and ledger.spend(np.array([0, 1]))
    assert event["epsilon"] is None and event["epsilon_paper"] == pytest.approx(release.paper_epsilon / 4)
    # Theorem 6.3 requires u_2 <= n_i mu / 2: here n_i >= 5
    few = ObjectivePerturbation(inner=fedrax.FedProx(mu=0.2, local=LOCAL), alpha=5.0).releases()
    outside = Ledger(Accountant(few, 1e-5), np.array([4, 9]))
    assert outside.spend(np.array([1]))["epsilon_paper"] == pytest.approx(few[0].paper_epsilon / 9)
    assert outside.spend(np.array([0]))["epsilon_paper"] is None


def test_amplified_budget_is_counted_by_round():
    expected = Accountant([Release(2.0, seen="public")], 1e-5, CohortSampling("fixed", 1 / 8))
    budget = (expected.epsilon(3) + expected.epsilon(4)) / 2
    assert len(run(PUBLIC, cohort_size=1, rounds=6, epsilon_budget=budget).events) == 3


def test_resumed_runs_have_the_same_ledger(tmp_path: Path):
    """Bitwise, in events, result and checkpoint."""
    options: dict[str, Any] = {"eval_every": 3}
    uninterrupted = run(LOUD, rounds=6, directory=tmp_path / "whole", **options)
    run(LOUD, rounds=3, directory=tmp_path / "parts", **options)
    parts = run(LOUD, rounds=6, directory=tmp_path / "parts", resume=True, **options)
    assert_identical(uninterrupted, parts)
    assert uninterrupted.spent == parts.spent
    kept = [np.load(tmp_path / name / "checkpoint" / "state.npz") for name in ("whole", "parts")]
    (name,) = [name for name in kept[0].files if name.endswith("ledger")]
    assert kept[0][name].tobytes() == kept[1][name].tobytes() and kept[0][name].sum() == 18


@pytest.mark.slow
def test_grid_of_noise_in_a_sweep():
    grid = [Noisy(local=LOCAL, noise=noise) for noise in (1.0, 2.0)]
    options: dict[str, Any] = {"rounds": 2, "cohort_size": 3}
    together = fedrax.sweep(grid, TASK, FEDERATION, settings=fedrax.Settings(**options), mode="vectorized")
    alone = [run(method, **options) for method in grid]
    for (lane,), one in zip(together, alone, strict=True):
        assert [e["epsilon"] for e in lane.events] == [e["epsilon"] for e in one.events]
        assert lane.spent == one.spent
    with pytest.raises(FedraxError, match="vectorized runs cannot stop at a budget"):
        fedrax.sweep(grid, TASK, FEDERATION, mode="vectorized", cohort_size=3, epsilon_budget=3.0)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (LOUD, {"epsilon_budget": 0.01}, "has no room for a round: one costs epsilon = 1.993"),
        (Noisy(local=LOCAL, noise=0.0), {"epsilon_budget": 3.0}, "the epsilon of a release without noise is infinite"),
        (fedrax.FedAvg(local=LOCAL), {"epsilon_budget": 3.0}, "FedAvg adds no noise"),
        (PUBLIC, {"amplification": "poisson"}, "'poisson' does not hold: cohorts are sampled at a fixed size"),
        (LOUD, {"delta": 1.0}, "run.delta must be less than 1"),
        (LOUD, {"epsilon_budget": -1.0}, "run.epsilon_budget must be greater than 0"),
    ],
)
def test_budgets_without_accounting_are_rejected(method: Any, options: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(FedraxError, match=message):
        run(method, directory=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_large_delta_is_warned_of():
    with pytest.warns(UserWarning, match=r"delta = 0.2 is not below 1/8"):
        run(LOUD, rounds=1, delta=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        events = run(LOUD, rounds=1, delta=0.1).events
    assert "seconds" not in without_times(events)[0]
