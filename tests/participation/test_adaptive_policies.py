"""Adaptive participation policies: each against NumPy, unbiased weights, resuming, and unsupported combinations."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax import FedAvg, FedraxError, Scaffold, Settings
from fedrax.algorithms import FedExP
from fedrax.participation import ImportanceSampling, Oort, ParticipationPolicy, Population, PowerOfChoice
from fedrax.participation.importance_sampling import inclusion_probabilities, systematic_sample
from fedrax.privacy import ClientDP
from fedrax.simulation import candidate_losses
from tests.contract.test_settings import NORM_TASK
from tests.participation import test_policies
from tests.reported import problems
from tests.simulation.problems import LOCAL, MODEL_BYTES, SIZES, TASK, assert_identical, run

POPULATION = Population(np.array(SIZES), cohort_size=3, rounds=10, seed=0)


def recording(
    policy: ParticipationPolicy,
) -> tuple[ParticipationPolicy, list[tuple[list[int], dict[str, list[float]]]]]:
    """A subclass of the policy that records what it observes: clients and reports of each round."""
    found: list[tuple[list[int], dict[str, list[float]]]] = []

    class Recording(type(policy)):
        def observe(self, state: Any, round: int, clients: np.ndarray, info: Mapping[str, np.ndarray]) -> Any:
            found.append((clients.tolist(), {name: values.tolist() for name, values in info.items()}))
            return super().observe(state, round, clients, info)

    return Recording(**vars(policy)), found


@pytest.mark.parametrize("samples", ["resident", "streamed"])
def test_power_of_choice_evaluates_its_candidates(samples: Any):
    policy, seen = recording(PowerOfChoice(candidates=2))
    method = FedAvg(local=problems.LOCAL)
    result = problems.run(method, rounds=4, cohort_size=1, participation=policy, trajectory=True, samples=samples)
    sizes = np.array(problems.SIZES)
    for r, before in enumerate([problems.START, *result.trajectory[:-1]]):
        asked = Population(sizes, 1, 4, 0).generator(5, r).choice(3, 2, replace=False, p=sizes / sizes.sum())
        rows = [problems.rows_of(client) for client in asked]
        losses = [problems.loss(np.asarray(before), problems.X[own], problems.Y[own]).mean() for own in rows]
        assert seen[r][0] == [asked[np.argmax(losses)]]
    assert len({clients[0] for clients, _ in seen}) > 1
    plain = problems.run(method, rounds=1, cohort_size=1).events[0]
    for r, event in enumerate(
        result.events, 1
    ):  # messages of two models of 6 numbers in float64, and two losses, in each round
        assert event["bytes_down"] == r * (plain["bytes_down"] + 2 * 48)
        assert event["bytes_up"] == r * (plain["bytes_up"] + 2 * 4)
        assert event["asked"] == 2


def test_losses_of_streamed_samples_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(candidate_losses, "STREAMED_BYTES", 1)  # one chunk of rows at a time
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(900, 2)), rng.integers(0, 3, 900)
    many = fedrax.Federation.from_arrays(x, y, offsets=[0, 310, 600, 601, 900], shuffle=False)
    asked = candidate_losses.CandidateLosses(problems.TASK, many, None, problems.START, ())
    with jax.enable_x64(True):
        found = asked(problems.START, np.array([3, 0, 2]))
    losses = problems.loss(problems.START, x, y)
    np.testing.assert_allclose(found, [losses[600 + 1 :].mean(), losses[:310].mean(), losses[600]], rtol=1e-10)


def test_power_of_choice_with_reported_losses_evaluates_no_client():
    own = run(cohort_size=3, rounds=5, participation=test_policies.PowerOfChoice(candidates=5))
    assert_identical(run(cohort_size=3, rounds=5, participation=PowerOfChoice(candidates=5, ask=False)), own)
    assert own.events[-1]["bytes_down"] == 5 * 3 * MODEL_BYTES
    with pytest.raises(FedraxError, match="set candidates to the cohort size or more"):
        run(cohort_size=3, participation=PowerOfChoice(candidates=2))


def test_inclusion_probabilities_are_capped_and_sum_to_the_cohort_size():
    rng = np.random.default_rng(0)
    for size in (1, 4, 9, 12):
        parts = rng.pareto(0.6, 12) + 1e-3
        low, high = 0.0, 1e6
        for _ in range(200):  # c by bisection
            c = (low + high) / 2
            low, high = (c, high) if np.minimum(1, c * parts).sum() < size else (low, c)
        np.testing.assert_allclose(inclusion_probabilities(parts, size), np.minimum(1, high * parts), rtol=1e-9)


def test_inverse_probability_weights_are_unbiased():
    rng, draws = np.random.default_rng(1), 20_000
    population = Population(np.array(SIZES), cohort_size=3, rounds=1, seed=0, weights="samples")
    policy, norms = ImportanceSampling(mixing=0.2), rng.pareto(1.0, len(SIZES))
    norms[5] = np.nan  # has not reported a loss
    inclusion, updates = policy.inclusion(norms, 0, population), norms * rng.choice([-1, 1], len(SIZES))
    updates[5] = 0.7
    assert inclusion.sum() == pytest.approx(3) and inclusion.max() == 1
    cohorts = [policy.sample(norms, 0, population, rng) for _ in range(draws)]
    assert {len(set(cohort.tolist())) for cohort in cohorts} == {3}
    rates = np.bincount(np.concatenate(cohorts), minlength=len(SIZES)) / draws
    assert (np.abs(rates - inclusion) <= 5 * np.sqrt(inclusion * (1 - inclusion) / draws)).all()
    sums = np.array([(population.shares / inclusion * updates)[cohort].sum() for cohort in cohorts])
    right = np.array(SIZES) / sum(SIZES) @ updates
    assert abs(sums.mean() - right) < 5 * sums.std() / np.sqrt(draws)
    biased = np.array([(population.cohort_shares(cohort) * updates[cohort]).sum() for cohort in cohorts])
    assert abs(biased.mean() - right) > 5 * biased.std() / np.sqrt(draws)  # ensures that the test can fail


@pytest.mark.parametrize(("by", "weights"), [("norm", "samples"), ("loss", "uniform")])
def test_importance_sampling_agrees_with_numpy(by: Any, weights: Any):
    policy, seen = recording(ImportanceSampling(by=by))
    options: dict[str, Any] = {"rounds": 4, "cohort_size": 2, "weights": weights}
    result = problems.run(FedAvg(local=problems.LOCAL), participation=policy, **options)
    shares = np.array(problems.SIZES) / 10 if weights == "samples" else np.full(3, 1 / 3)
    w, known = problems.START, np.full(3, np.nan)
    for clients, _ in seen:
        values = shares * np.where(np.isnan(known), np.nanmean(known) if not np.isnan(known).all() else 1, known)
        inclusion = inclusion_probabilities(0.9 * values / values.sum() + 0.1 / 3, 2)
        updates = {i: problems.descend(w, i) - w for i in clients}
        for i in clients:
            rows, steps = problems.rows_of(i), [problems.descend(w, i, steps=t) for t in range(problems.STEPS)]
            losses = [problems.loss(step, problems.X[rows], problems.Y[rows]).mean() for step in steps]
            known[i] = np.linalg.norm(updates[i]) if by == "norm" else np.mean(losses)
        w = w + sum(shares[i] / inclusion[i] * updates[i] for i in clients)
    np.testing.assert_allclose(result.params, w, rtol=1e-10)


def test_utility_of_oort_agrees_with_its_formula(tmp_path: Path):
    seconds = [3.0, 8.0, 1.0, 5.0, 20.0, 2.0, 4.0, 6.0]
    trace = tmp_path / "seconds.csv"
    trace.write_text("client,seconds\n" + "".join(f"{i},{2 * t}\n{i},0.0001\n" for i, t in enumerate(seconds)))
    policy = Oort(trace, deadline=5.0, exploration=0.0, least_exploration=0.0, cutoff=0.2)
    state = policy.init(POPULATION)
    with pytest.raises(FedraxError, match="set trace"):
        Oort(deadline=5.0).init(POPULATION)
    first = policy.sample(state, 0, POPULATION, np.random.default_rng(0))
    assert len(set(first.tolist())) == 3  # no client has reported, so all are explored
    losses = np.array([0.5, 2.0, 1.0, 0.1, 3.0, 0.7, 1.5, 0.2])
    state = policy.observe(state, 3, np.arange(8), {"loss": losses})
    state = policy.observe(state, 6, np.array([2, 5]), {"loss": losses[[2, 5]]})
    right = []
    for i, (size, loss, t) in enumerate(zip(SIZES, losses, seconds, strict=True)):
        one = size * loss + np.sqrt(0.1 * np.log(10) / (7 if i in (2, 5) else 4))
        right.append(one * (5 / t) ** 2 if t > 5.00005 else one)
    utility = policy.utility(state, 9, POPULATION)
    np.testing.assert_allclose(utility, right, rtol=1e-4)
    one = Population(np.array(SIZES), cohort_size=1, rounds=10, seed=0)
    rng, draws = np.random.default_rng(2), 4000
    rates = np.bincount([policy.sample(state, 9, one, rng)[0] for _ in range(draws)], minlength=8) / draws
    admitted = np.where(utility >= 0.2 * utility.max(), utility, 0)
    assert 1 < np.count_nonzero(admitted) < 8
    chance = admitted / admitted.sum()
    assert (np.abs(rates - chance) <= 5 * np.sqrt(chance * (1 - chance) / draws)).all()


def test_oort_explores_fast_clients_first():
    policy = Oort(exploration=0.6, exploration_decay=0.5, least_exploration=0.0)
    state = policy.init(POPULATION)._replace(seconds=np.array([1.0] * 7 + [1e6]))
    state = policy.observe(state, 0, np.array([0, 1, 2]), {"loss": np.ones(3)})
    rng = np.random.default_rng(0)
    for r, explored in ((0, 2), (1, 1), (9, 0)):
        cohorts = [policy.sample(state, r, POPULATION, rng) for _ in range(50)]
        assert {int((cohort > 2).sum()) for cohort in cohorts} == {explored}
        assert not any(7 in cohort for cohort in cohorts)


POLICIES: list[Callable[[], ParticipationPolicy]] = [lambda: PowerOfChoice(5), Oort, ImportanceSampling]


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_resume_bit_for_bit(policy: Callable[[], ParticipationPolicy], tmp_path: Path):
    options: dict[str, Any] = {"cohort_size": 3, "eval_every": 1, "participation": policy()}
    uninterrupted = run(**options, rounds=6)
    assert all(np.isfinite(event["train_loss"]) for event in uninterrupted.events)
    run(**options, directory=tmp_path, rounds=3)
    assert_identical(run(**options, directory=tmp_path, rounds=6, resume=True), uninterrupted)


@pytest.mark.parametrize("policy", POLICIES)
def test_data_dependent_sampling_has_no_amplified_guarantee(policy: Callable[[], ParticipationPolicy]):
    with pytest.raises(FedraxError, match=r"samples cohorts by what clients report|uniform aggregation weights only"):
        run(ClientDP(FedAvg(local=LOCAL), noise=1.0), cohort_size=3, participation=policy())
    assert policy().sampling(POPULATION).drawn == "refilled"


def test_inverse_probabilities_are_rejected_if_weights_must_sum_to_one():
    policy = ImportanceSampling()
    for method, task, message in (
        (Scaffold(local=LOCAL), TASK, "Scaffold is defined for uniform aggregation weights only"),
        (FedExP(local=LOCAL), TASK, "FedExP needs weights that sum to one"),
        (FedAvg(local=LOCAL), NORM_TASK, "running statistics need a mean"),
    ):
        with pytest.raises(FedraxError, match=message):
            run(method, task=task, participation=policy)


def test_policies_in_experiment_files(tmp_path: Path):
    (tmp_path / "seconds.csv").write_text("client,seconds\n0,1\n")
    for text, policy in (
        ('{name = "power_of_choice", candidates = 7, ask = false}', PowerOfChoice(7, ask=False)),
        ('{name = "importance_sampling", by = "loss"}', ImportanceSampling("loss")),
        ('{name = "oort", trace = "seconds.csv", deadline = 3}', Oort(tmp_path / "seconds.csv", 3.0)),
    ):
        (tmp_path / "e.toml").write_text(f"[run]\nparticipation = {text}\n")
        assert fedrax.experiments.read_file(tmp_path / "e.toml").run.participation == policy
    assert Settings(participation=Oort()).participation.adaptive
    assert systematic_sample(np.ones(3), np.random.default_rng(0)).tolist() == [0, 1, 2]
