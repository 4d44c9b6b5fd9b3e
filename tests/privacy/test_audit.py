"""Lower bounds from membership guesses; audits reject broken mechanisms and claims, and no sound one."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrax
from fedrax import FedAvg, Federation, FedraxError, LocalSGD, Settings, classification, hyperparameters
from fedrax.contract.task import Batch
from fedrax.experiments.audit import ProtectedUnit, audit_canaries, audit_client
from fedrax.models import Logistic, Model
from fedrax.privacy import SampleDP
from fedrax.privacy.accounting import Accountant
from fedrax.privacy.audit.bounds import (
    distinguish,
    epsilon_of_mu,
    guess_membership,
    one_run_epsilon,
    one_run_p_value,
    provable_epsilon,
    provable_one_run_epsilon,
)
from fedrax.privacy.audit.game import observe_client
from fedrax.privacy.mechanisms.client_level import ClientDP
from fedrax.privacy.mechanisms.perturbation import OutputPerturbation
from fedrax.privacy.releases import Release
from tests.privacy.methods import Noisy

DELTA = 1e-5
RUNS = 2000


def logits(params, x, key=None):
    """Logits of two classes by two vectors of one shape: an upload of two leaves, whose noise could be equal."""
    return x[:, :1] * params["a"] + x[:, 1:] * params["b"]


PAIR = Model(lambda key: {"a": jnp.zeros(2), "b": jnp.zeros(2)}, logits)
TASK = fedrax.classification(PAIR)
PARAMS = PAIR.init(jax.random.key(0))
LOCAL = fedrax.LocalSGD(lr=1e6, steps=1, batch_size="full")
X = np.array([[1.0, -1.0]], np.float32)
HYPOTHESES = Batch(X, np.array([0])), Batch(X, np.array([1]))
"""A client with one sample of either label; its clipped updates are opposite."""


@hyperparameters
class HalfVariance(Noisy):
    """Adds noise with half of the declared variance."""

    def client(self, message, state, data):
        return Noisy.client(dataclasses.replace(self, noise=self.noise / 2**0.5), message, state, data)


@hyperparameters
class UnprotectedLeaf(Noisy):
    """Uploads one leaf without noise."""

    def client(self, message, state, data):
        output, plain = super().client(message, state, data), fedrax.FedAvg.client(self, message, state, data)
        return output._replace(upload=output.upload | {"b": plain.upload["b"] / fedrax.tree.norm(plain.upload)})


@hyperparameters
class SameKeyTwice(Noisy):
    """Adds the same noise to both leaves."""

    def client(self, message, state, data):
        plain = fedrax.FedAvg.client(self, message, state, data)
        noise, size = jax.random.normal(data.key("noise"), (2,)), fedrax.tree.norm(plain.upload)
        upload = {name: leaf / jnp.maximum(size, 1) + self.noise * noise for name, leaf in plain.upload.items()}
        return plain._replace(upload=upload)


def audited(method: fedrax.Algorithm, rounds: int = 1, **options):
    """Lower bounds for a method from two hypotheses."""
    seen = [
        observe_client(method, TASK, PARAMS, w, RUNS, rounds=rounds, seed=s, **options)
        for s, w in enumerate(HYPOTHESES)
    ]
    return distinguish(*seen, DELTA)


def claimed_epsilon(method: Noisy, rounds: int = 1) -> float:
    """Epsilon of its releases for replaced data of a client, whose messages are as different as possible."""
    (release,) = method.releases()
    halved = Release(release.noise / 2, neighbors="replacement")
    return Accountant([halved], DELTA).epsilon(rounds)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("rounds", [1, 2])
def test_sound_mechanism_passes_the_audit(rounds: int):
    """The lower bound is not vacuous: at least 70 % of mu = 2 sqrt(rounds) / noise."""
    method = Noisy(local=LOCAL, noise=2.0)
    bounds = audited(method, rounds)
    assert 0.7 * np.sqrt(rounds) < bounds.mu < 1.02 * np.sqrt(rounds)
    assert 0 < bounds.epsilon < claimed_epsilon(method, rounds)
    assert epsilon_of_mu(bounds.mu, DELTA) < 1.02 * claimed_epsilon(method, rounds)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("broken", [HalfVariance, UnprotectedLeaf, SameKeyTwice])
def test_broken_mechanisms_fail_the_audit(broken: type[Noisy]):
    method = broken(local=LOCAL, noise=2.0)
    assert epsilon_of_mu(audited(method).mu, DELTA) > 1.1 * claimed_epsilon(method)


def test_public_observations_are_models_messages_and_infos():
    """In two rounds four parameters, which are also the broadcast message, and a loss; for SCAFFOLD also c."""
    method = Noisy(local=LOCAL, noise=2.0, seen="public")
    seen = observe_client(method, TASK, PARAMS, HYPOTHESES[0], 50, rounds=2, seen="public")
    assert seen.shape == (50, 10) and len(np.unique(seen[:, -1])) == 50
    scaffold = fedrax.privacy.ClientDP(fedrax.Scaffold(local=LOCAL))
    assert observe_client(scaffold, TASK, PARAMS, HYPOTHESES[0], 3, rounds=2, seen="public").shape == (3, 16)
    again = observe_client(method, TASK, PARAMS, HYPOTHESES[0], 50, rounds=2, seen="public")
    assert seen.tobytes() == again.tobytes()


def test_server_observations_are_the_uploads_of_a_run():
    """Without random draws, and with a carried state of the local optimizer."""
    local = fedrax.LocalSGD(lr=0.1, steps=2, batch_size="full", optimizer=fedrax.optim.Optax(optax.adam), carry=True)
    method = fedrax.Scaffold(local=local)
    federation = fedrax.Federation.from_arrays(X, np.array([1]), np.zeros(1, int), num_classes=2)
    options = {
        "rounds": 3,
        "cohort_size": 1,
        "params": PARAMS,
        "record": fedrax.simulation.MessageSelection(clients=[0]),
    }
    result = fedrax.simulate(method, TASK, federation, progress=False, **options)
    sent = [leaf.ravel() for one in result.exchanges for leaf in jax.tree.leaves(one.sent)]
    seen = observe_client(method, TASK, PARAMS, HYPOTHESES[1], 1, rounds=3)
    np.testing.assert_allclose(seen[0], np.concatenate(sent), rtol=1e-6)
    assert np.abs(seen).max() > 0.01


def test_observations_of_empty_cohorts_are_zero():
    """MIFA's server has no stored update of a client that never takes part."""
    method = fedrax.algorithms.MIFA(local=fedrax.LocalSGD(lr=0.1, steps=1, batch_size="full"), memory="server")
    seen = observe_client(method, TASK, PARAMS, HYPOTHESES[0], 2, rounds=2, seen="public", drawn="poisson", rate=0.0)
    assert not seen.any()


def test_mu_and_epsilon_of_a_gaussian_mechanism_agree():
    for mu in (0.3, 1.0, 2.5):
        assert epsilon_of_mu(mu, DELTA) == pytest.approx(Accountant([Release(1 / mu)], DELTA).epsilon(1), rel=1e-6)
    assert epsilon_of_mu(0.0, DELTA) == 0


def test_one_run_bound_of_a_hundred_correct_guesses():
    """P = (1 / (1 + e^-eps))^100 = 0.05 at eps = 3.493; half correct guesses have no evidence."""
    assert one_run_epsilon(100, 100, 100) == pytest.approx(3.4930, abs=1e-3)
    assert one_run_epsilon(100, 100, 50) == 0 == one_run_epsilon(5, 0, 0)
    assert one_run_epsilon(100, 100, 100, delta=1e-4) < 3.493
    assert one_run_p_value(10, 10, 10, 0.0, 0.0) == pytest.approx(2**-10)
    with pytest.raises(FedraxError, match="got 3, 2 and 10"):
        one_run_epsilon(10, 2, 3)


@pytest.mark.slow
def test_one_run_bounds_have_their_confidence():
    """For optimal guesses of randomized response at epsilon 1, at most 5 % of 200 bounds are above 1."""
    rng, chance = np.random.default_rng(0), 1 / (1 + np.exp(-1))
    bounds = [one_run_epsilon(400, 400, int(rng.binomial(400, chance))) for _ in range(200)]
    assert sum(bound > 1 for bound in bounds) <= 0.05 * 200 + 3
    assert np.median(bounds) > 0.75


def test_the_best_attack_proves_what_is_provable():
    """Of Gaussian observations a fixed distance apart, and of randomized response, the worst (epsilon, 0) mechanism."""
    rng = np.random.default_rng(5)
    for runs, mu in ((400, 1.5), (4000, 1.5), (4000, 0.7)):
        one, other = rng.normal(size=(runs, 1)), rng.normal(size=(runs, 1)) + mu
        bounds = distinguish(one, other, 1e-5)
        best = provable_epsilon(bounds.runs, epsilon_of_mu(mu, 1e-5), 1e-5, gaussian=True)
        assert 0 < best < epsilon_of_mu(mu, 1e-5)
        assert epsilon_of_mu(bounds.mu, 1e-5) == pytest.approx(best, rel=0.15)
    for runs, epsilon in ((4000, 1.0), (4000, 3.0), (400, 3.0)):
        answers = [(rng.random((runs, 1)) < 1 / (1 + math.exp(side * epsilon))).astype(float) for side in (1, -1)]
        bounds = distinguish(*answers, 1e-5)
        best = provable_epsilon(bounds.runs, epsilon, 1e-5)
        assert 0 < best < epsilon and bounds.epsilon == pytest.approx(best, rel=0.25)


def test_canaries_prove_at_most_what_is_provable():
    rng, epsilon = np.random.default_rng(5), 1.5
    right = rng.binomial(200, 1 / (1 + math.exp(-epsilon)), 100)
    best = provable_one_run_epsilon(400, 200, epsilon, 1e-5)
    assert 0.8 < best < epsilon
    assert np.mean([one_run_epsilon(400, 200, int(r), 1e-5) for r in right]) == pytest.approx(best, rel=0.1)


def test_guesses_are_the_highest_and_lowest_scores():
    assert guess_membership(np.array([0.3, 2.0, -1.0, 0.5, 0.4]), 0.8).tolist() == [-1, 1, -1, 1, 0]


def test_few_runs_have_no_evidence():
    with pytest.raises(FedraxError, match="needs 40 to 1,000,000 runs per hypothesis, not 12"):
        distinguish(np.zeros((12, 1)), np.ones((50, 1)), DELTA)


def test_audit_refutes_theorem_62_and_not_the_claim_of_fedrax():
    """One of 20 samples turns the model of 60 local steps around: it moves by 2 tau, not by tau / 20."""
    local = fedrax.LocalSGD(lr=5.0, steps=60, batch_size="full")
    method = OutputPerturbation(inner=fedrax.FedAvg(local=local), tau=1.0, sigma=0.8)
    x = np.zeros((20, 2), np.float32)
    x[0] = X[0]
    worlds = [Batch(x, np.array([label] + [0] * 19)) for label in (0, 1)]
    seen = [observe_client(method, TASK, PARAMS, world, RUNS, seed=seed) for seed, world in enumerate(worlds)]
    proven = epsilon_of_mu(distinguish(*seen, DELTA).mu, DELTA)
    accountant = Accountant(method.releases(), DELTA)
    paper = accountant.epsilon_paper(1, samples=20)
    assert paper is not None and 5 * paper < proven < 1.02 * accountant.epsilon(1)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("unit", ["client", "sample"])
def test_canaries_of_one_run(unit: ProtectedUnit):
    """With strong noise the claim is not refuted; with almost none most canaries are detected."""
    rng = np.random.default_rng(1)
    x = np.eye(40, dtype=np.float32).repeat(2, axis=0)
    federation = fedrax.Federation.from_arrays(x, rng.integers(0, 2, 80), np.arange(40).repeat(2), num_classes=2)
    task = fedrax.classification(Logistic().build((40,), 2))
    settings = fedrax.Settings(rounds=2, cohort_size=40, seed=1)
    quiet, loud = (ClientDP(inner=fedrax.FedAvg(local=LOCAL), noise=noise, at="client") for noise in (1e-3, 50.0))
    found = audit_canaries(quiet, task, federation, settings, unit=unit, canaries=40)
    assert found.trials == 14 and found.proven > 1 and not found.refuted
    assert audit_canaries(loud, task, federation, settings, unit=unit, canaries=40).proven < found.proven


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("at", "unit"), [("server", "client"), ("client", "sample")])
def test_audited_client_of_an_experiment(at: str, unit: ProtectedUnit):
    """The label of its single sample reverses its update, so that the two hypotheses are as different as possible."""
    x = np.tile(X, (6, 1))
    federation = fedrax.Federation.from_arrays(x, np.zeros(6, int), [0, 1, 1, 1, 1, 1], num_classes=2)
    method = ClientDP(inner=fedrax.FedAvg(local=LOCAL), noise=2.0, at=at)
    settings = fedrax.Settings(rounds=2, cohort_size=2)
    audit = audit_client(method, TASK, federation, settings, unit=unit, runs=1000)
    assert audit.claimed == pytest.approx(Accountant([Release(1.0, neighbors="replacement")], DELTA).epsilon(1))
    assert 0.5 * audit.claimed < audit.proven < audit.claimed and not audit.refuted
    with pytest.raises(FedraxError, match="there is no client 2: there are 2"):
        audit_client(method, TASK, federation, settings, client=2)
    with pytest.raises(FedraxError, match="FedAvg adds no noise: there is no claim to audit"):
        audit_client(fedrax.FedAvg(), TASK, federation, settings)


@pytest.mark.slow
def test_audit_includes_client_sampling():
    """The lower bound for a client of every cohort is above the claim for one sampled in one of 20 rounds."""
    federation = fedrax.Federation.from_arrays(X, np.array([0]), np.zeros(1, int), num_classes=2)
    method, settings = ClientDP(fedrax.FedAvg(local=LOCAL), noise=0.7), fedrax.Settings(cohort_size=1, delta=0.01)
    watched = lambda drawn, rate: audit_client(  # noqa: E731
        method, TASK, federation, settings, drawn=drawn, rate=rate, runs=800
    )
    seldom, always = (watched("poisson", rate) for rate in (0.05, 1.0))
    assert seldom.proven <= seldom.claimed < 0.2 and not always.refuted
    assert always.proven > 1 > seldom.claimed
    seldom, always = (watched("fixed", rate) for rate in (0.05, 1.0))
    assert seldom.proven <= seldom.claimed < always.claimed and not always.refuted
    assert always.proven > 2 > seldom.proven
    with pytest.raises(FedraxError, match="sampling hides no client from it"):
        audit_client(dataclasses.replace(method, at="client"), TASK, federation, settings, drawn="fixed")


@hyperparameters
class UnderstatedRate(SampleDP):
    """Claims a tenth of its sampling rate."""

    def releases(self) -> tuple[Release, ...]:
        (one,) = SampleDP.releases(self)
        return (dataclasses.replace(one, rate=one.rate / 10),)


def test_audit_detects_an_understated_sampling_rate():
    x = np.array([[3.0, -3.0]], np.float32)
    one = Federation.from_arrays(x, np.array([0]), np.zeros(1, int), num_classes=2)
    local = LocalSGD(lr=0.05, steps=2, batch_size=1)
    settings = Settings(cohort_size=1, delta=1e-2)
    task = classification(Logistic().build((2,), 2))
    for kind in (SampleDP, UnderstatedRate):
        method = kind(FedAvg(local=local), clip=0.5, noise=0.7, rate=0.8)
        found = audit_client(method, task, one, settings, runs=4000)
        assert (found.unit, found.neighbors) == ("sample", "presence")
        accountant = Accountant(method.releases(), 1e-2)
        assert found.claimed == accountant.epsilon(1)
        assert found.proven > 0
        assert found.refuted == (kind is UnderstatedRate), found
