"""Output and objective perturbation: the uploaded model, the noise, and other leaks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedrax
from fedrax import FedAvg, FedProx, FedraxError, LocalSGD, Scaffold, hyperparameters, tree
from fedrax.algorithms import upcycle
from fedrax.models import Logistic
from fedrax.privacy.mechanisms.perturbation import ObjectivePerturbation, OutputPerturbation, linear_noise
from fedrax.privacy.releases import Release
from tests import reference
from tests.algorithms.problems import make_problem
from tests.privacy.observed import OTHER_PLANS, assert_bounded, assert_gaussian, extreme_data, sent_by, zero_task
from tests.simulation.problems import CLASSES, FEATURES, SIZES, make_federation, run
from tests.slow import slow_cases

TAU, SIGMA = 0.7, 1.3
STEPS = LocalSGD(lr=0.05, steps=3, batch_size=2)
WIDE = zero_task(1000)


def one_client(**options: Any) -> dict[str, Any]:
    """One client per round, and a task with zero gradients."""
    return {"task": WIDE, "cohort_size": 1, "trajectory": True, "rounds": 4, **options}


def parameters_by_round(result: fedrax.Result) -> np.ndarray:
    """Parameters after every round: [rounds, d]."""
    return np.array([np.asarray(params["w"]) for params in result.trajectory])


# -- output perturbation -------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("inner", [FedAvg(local=STEPS), Scaffold(local=STEPS)], ids=["fedavg", "scaffold"])
def test_uploaded_models_of_any_data_are_within_the_bound(inner: fedrax.Algorithm):
    method = OutputPerturbation(inner, tau=TAU, sigma=0.0)

    def sent(x: Any) -> Any:
        upload = sent_by(method, x, jnp.arange(5) % CLASSES)[0][0]
        return tree.norm(getattr(upload, "params", upload))  # the model starts at zero, so the update is the model

    length = jax.jit(sent)
    for x in extreme_data():
        assert_bounded(lambda x: float(length(jnp.asarray(x, jnp.float32))), x, TAU)
    assert length(jnp.asarray(1e3 * extreme_data()[0], jnp.float32)) > 0.9 * TAU


def test_noise_of_clients_and_rounds_is_independent():
    x = parameters_by_round(run(OutputPerturbation(FedAvg(local=STEPS), tau=1e-9, sigma=SIGMA), **one_client()))
    assert_gaussian(x, SIGMA)  # a zero model plus noise


@pytest.mark.slow
@pytest.mark.parametrize("plan", slow_cases(OTHER_PLANS, [OTHER_PLANS[0], OTHER_PLANS[-1]]), ids=str)
def test_plans_and_devices_agree(plan: dict):
    method = OutputPerturbation(Scaffold(local=STEPS), tau=TAU, sigma=0.1)
    base, other = run(method, rounds=2), run(method, rounds=2, **plan)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), other.server, base.server)


def test_output_perturbation_agrees_with_numpy():
    local = {"lr": 0.1, "steps": 3, "batch_size": 4}
    problem = make_problem()
    method = OutputPerturbation(FedAvg(local=LocalSGD(order="stored", **local)), tau=TAU, sigma=0.0)
    result = fedrax.simulate(
        method, problem.task, problem.federation, params=problem.params, dtype="float64", rounds=2, cohort_size=7
    )
    x = problem.x0
    for _ in range(2):
        ends = [c.descend(x, reference.Part(0, 1.0, 0)).params for c in problem.clients(reference.Local(**local))]
        x = np.mean([end * min(1, TAU / np.linalg.norm(end)) for end in ends], axis=0)
    np.testing.assert_allclose(reference.join(problem.problem, result.params), x, atol=1e-6)


def test_control_variates_are_computed_from_the_noisy_model():
    """c_i = (x - x_i) / (T eta) with the uploaded x_i, so that c reveals nothing beyond x."""
    result = run(OutputPerturbation(Scaffold(local=STEPS), tau=TAU, sigma=SIGMA), rounds=1, cohort_size=len(SIZES))
    implied = tree.scale(-1 / (3 * 0.05), result.params)  # x = 0 before
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), result.server.control, implied)


@pytest.mark.slow
def test_without_noise_and_with_a_large_bound_it_is_the_inner_method():
    for inner in (FedAvg(local=STEPS), Scaffold(local=STEPS), FedProx(local=STEPS)):
        plain, wrapped = run(inner, rounds=2), run(OutputPerturbation(inner, tau=1e6, sigma=0.0), rounds=2)
        jax.tree.map(np.testing.assert_array_equal, wrapped.server, plain.server)


def test_upcycled_has_no_additional_releases():
    method = OutputPerturbation(FedAvg(local=STEPS), tau=1e-9, sigma=SIGMA)
    assert upcycle(method).releases() == method.releases()
    x = parameters_by_round(run(upcycle(method, a=0.5), **one_client(rounds=2)))
    first = x[0] / 1.5  # x <- x + a (x - 0): the one noisy model and no other number
    assert_gaussian(first.reshape(2, 500), SIGMA)
    assert_gaussian(((x[1] + 0.5 * x[0]) / 1.5).reshape(2, 500), SIGMA)


@hyperparameters
class UploadsGradient(FedAvg):
    """Also uploads a gradient."""

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        output = super().client(message, state, data)
        _, gradient = data.full_gradient(message)
        return output._replace(upload={"params": output.upload, "gradient": gradient})


@hyperparameters
class UploadsGradientLater(FedAvg):
    """Stores a gradient and uploads it in the next round."""

    def init_client(self, params: Any) -> Any:
        return tree.zeros_like(params)

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        output = super().client(message, state, data)
        _, gradient = data.full_gradient(message)
        return output._replace(upload={"params": output.upload, "old": state}, state=gradient)


def assert_rejected(algorithm: fedrax.Algorithm, match: str, **options: Any) -> None:
    """Assert that the algorithm is rejected."""
    with pytest.raises(FedraxError, match=match):
        run(algorithm, **(dict[str, Any](rounds=1) | options))


@pytest.mark.parametrize("kind", [OutputPerturbation, lambda inner: ObjectivePerturbation(inner, guarantee="none")])
def test_methods_that_upload_other_statistics_are_rejected_by_name(kind: Any):
    leak = "also sends {}, computed from data without noise"
    assert_rejected(kind(UploadsGradient(local=STEPS)), leak.format("upload/gradient/output/bias"))
    assert_rejected(kind(UploadsGradientLater(local=STEPS)), leak.format("upload/old/output/bias"))
    assert_rejected(kind(Scaffold(local=STEPS, option="I")), leak.format("upload/control/output/bias"))
    momentum = LocalSGD(lr=0.05, steps=3, momentum=0.5)
    assert_rejected(kind(Scaffold(local=momentum)), leak.format("upload/control/output/bias"))
    assert_rejected(kind(fedrax.algorithms.MimeLite(local=STEPS)), leak.format("upload/gradient/output/bias"))
    assert_rejected(
        kind(fedrax.LoSAC(local=LocalSGD(lr=0.02, steps=2, blocks=2))), leak.format("upload/gradient_sum/.*")
    )
    assert_rejected(kind(FedAvg(local=STEPS)), "uniform aggregation weights", weights="samples")


@pytest.mark.slow
def test_local_epochs_are_rejected_if_they_reveal_the_number_of_samples():
    """SCAFFOLD divides by T eta, and T epochs have more steps for larger clients."""
    epochs = Scaffold(local=LocalSGD(lr=0.05, epochs=2, batch_size=2))
    assert_rejected(OutputPerturbation(epochs), "also sends upload/control/output/bias.*set local.steps instead")
    assert run(OutputPerturbation(epochs), make_federation((4, 4, 4, 4)), rounds=1).events


@pytest.mark.slow
def test_repeated_local_training_is_rejected():
    assert_rejected(
        OutputPerturbation(fedrax.personalization.Ditto(FedAvg(local=STEPS))), "runs local training 2 times a round"
    )
    assert run(fedrax.personalization.Ditto(OutputPerturbation(FedAvg(local=STEPS))), rounds=1).events


# -- objective perturbation ----------------------------------------------------------------------------------------


def test_linear_terms_have_their_distribution():
    """|n| is Gamma(d, 1 / alpha) and the direction uniform, over all leaves together."""
    model, alpha = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}, 5.0
    drawn = jax.vmap(lambda key: linear_noise(key, model, alpha))(jax.random.split(jax.random.key(1), 4000))
    flat = np.concatenate([np.asarray(leaf).reshape(4000, -1) for leaf in jax.tree.leaves(drawn)], axis=1)
    lengths = np.linalg.norm(flat, axis=1)
    assert stats.kstest(lengths, stats.gamma(10, scale=1 / alpha).cdf).pvalue > 1e-5
    directions = flat / lengths[:, None]
    assert np.abs(directions.mean(0)).max() < 4.5 * np.sqrt(0.1 / 4000)
    np.testing.assert_allclose(directions.T @ directions / 4000, np.eye(10) / 10, atol=0.012)
    assert abs(np.corrcoef(lengths, directions[:, 0])[0, 1]) < 4.5 / np.sqrt(4000)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_term_is_constant_within_a_round_and_changes_between_rounds(reduction: Any):
    """With a zero loss, a client moves by -T eta n."""
    local = LocalSGD(lr=0.05, steps=3, batch_size=2, reduction=reduction)
    method = ObjectivePerturbation(FedAvg(local=local), alpha=5.0, guarantee="none")
    moved = np.diff(parameters_by_round(run(method, **one_client(rounds=3))), axis=0, prepend=0.0) / (-3 * 0.05)
    lengths = np.linalg.norm(moved, axis=1)
    assert (np.abs(lengths * 5.0 - 1000) < 4.5 * np.sqrt(1000)).all()  # Gamma(1000, 1 / 5)
    assert np.abs(np.corrcoef(moved) - np.eye(3)).max() < 5 / np.sqrt(1000)


def test_objective_perturbation_step_agrees_with_numpy():
    """x_i = x - eta (g_i + mu 0 + n_i): the update minus the gradient is the linear term."""
    problem, local = make_problem(), {"lr": 0.1, "steps": 1, "batch_size": "full"}
    method = ObjectivePerturbation(FedAvg(local=LocalSGD(**local)), alpha=1e9, guarantee="none")
    result = fedrax.simulate(
        method, problem.task, problem.federation, params=problem.params, dtype="float64", rounds=1, cohort_size=7
    )
    gradients = [c.full_gradient(problem.x0) for c in problem.clients(reference.Local(**local))]
    expected = problem.x0 - 0.1 * np.mean(gradients, axis=0)
    np.testing.assert_allclose(reference.join(problem.problem, result.params), expected, atol=1e-6)


def test_requirements_of_the_theorem_are_checked():
    logistic, federation = fedrax.contract.binary_classification(Logistic().build((FEATURES,), 1)), make_federation()
    x, y = (np.asarray(a) for a in federation.train)
    of_two = fedrax.Federation.from_arrays(x, y % 2, offsets=federation.offsets, shuffle=False)
    method = ObjectivePerturbation(FedProx(local=STEPS, mu=0.5), alpha=10.0)
    result = run(method, of_two, task=logistic, rounds=1)
    long = fedrax.Federation.from_arrays(1e3 * x, y % 2, offsets=federation.offsets, shuffle=False)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    short = fedrax.Federation.from_arrays(unit, y % 2, offsets=federation.offsets, shuffle=False)
    a, b = (run(method, f, task=logistic, rounds=1).params for f in (long, short))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), a, b)  # features have length 1 in both
    assert np.isfinite(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.params)])).all()
    assert_rejected(method, "linear in the features, not for classification/logistic")
    weighted = fedrax.contract.binary_classification(Logistic().build((FEATURES,), 1), class_weights=[1, 9])
    with pytest.raises(FedraxError, match="not for weighted_binary/logistic"):  # gradients have length 9
        run(method, of_two, task=weighted, rounds=1)
    assert_rejected(ObjectivePerturbation(FedAvg(local=STEPS)), "FedProx with mu above 0")
    assert_rejected(
        ObjectivePerturbation(fedrax.algorithms.MOON(local=STEPS, mu=0.5)), "FedProx with mu above 0"
    )  # its mu is not that of a proximal term


def test_releases():
    output = OutputPerturbation(FedAvg(local=STEPS), tau=2.0, sigma=3.0)
    assert output.releases() == (Release(noise=0.75, neighbors="replacement", paper_noise=1.5),)
    claim = ObjectivePerturbation(FedProx(mu=0.5), alpha=10.0).releases()[0]
    assert claim.noise == 0 and claim.paper_epsilon == pytest.approx((2 * 10 * 2**0.5 * 0.5 + 2.8 * 0.5) / 0.5)
    assert ObjectivePerturbation(FedAvg(), guarantee="none").releases()[0].paper_epsilon is None
