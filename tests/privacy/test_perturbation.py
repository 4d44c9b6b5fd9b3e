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
from tests.privacy.observed import OTHER_PLANS, assert_bounded, assert_gaussian, sent_by, wild_data, zero_task
from tests.simulation.problems import CLASSES, FEATURES, SIZES, make_federation, run
from tests.slow import slow_cases

TAU, SIGMA = 0.7, 1.3
STEPS = LocalSGD(lr=0.05, steps=3, batch_size=2)
WIDE = zero_task(1000)


def lone(**options: Any) -> dict[str, Any]:
    """One client a round, of a task whose gradients are zero."""
    return {"task": WIDE, "cohort_size": 1, "trajectory": True, "rounds": 4, **options}


def params_of(result: fedrax.Result) -> np.ndarray:
    """After every round: [rounds, d]."""
    return np.array([np.asarray(params["w"]) for params in result.trajectory])


# -- output perturbation -------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("inner", [FedAvg(local=STEPS), Scaffold(local=STEPS)], ids=["fedavg", "scaffold"])
def test_whatever_the_data_the_model_that_goes_up_is_within_the_bound(inner: fedrax.Algorithm):
    method = OutputPerturbation(inner, tau=TAU, sigma=0.0)

    def sent(x: Any) -> Any:
        upload = sent_by(method, x, jnp.arange(5) % CLASSES)[0][0]
        return tree.norm(getattr(upload, "params", upload))  # the model starts at zero: the update is the model

    length = jax.jit(sent)
    for x in wild_data():
        assert_bounded(lambda x: float(length(jnp.asarray(x, jnp.float32))), x, TAU)
    assert length(jnp.asarray(1e3 * wild_data()[0], jnp.float32)) > 0.9 * TAU


def test_each_client_and_round_has_noise_of_its_own():
    x = params_of(run(OutputPerturbation(FedAvg(local=STEPS), tau=1e-9, sigma=SIGMA), **lone()))
    assert_gaussian(x, SIGMA)  # a model without length, and noise


@pytest.mark.slow
@pytest.mark.parametrize("plan", slow_cases(OTHER_PLANS, [OTHER_PLANS[0], OTHER_PLANS[-1]]), ids=str)
def test_plans_and_devices_agree(plan: dict):
    method = OutputPerturbation(Scaffold(local=STEPS), tau=TAU, sigma=0.1)
    base, other = run(method, rounds=2), run(method, rounds=2, **plan)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), other.server, base.server)


def test_against_numpy():
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


def test_control_variates_come_from_the_noised_model():
    """c_i = (x - x_i) / (T eta) with the x_i that went up, so that c and x say the same of the clients."""
    result = run(OutputPerturbation(Scaffold(local=STEPS), tau=TAU, sigma=SIGMA), rounds=1, cohort_size=len(SIZES))
    implied = tree.scale(-1 / (3 * 0.05), result.params)  # x = 0 before
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), result.server.control, implied)


@pytest.mark.slow
def test_without_noise_and_with_room_it_is_the_method_inside():
    for inner in (FedAvg(local=STEPS), Scaffold(local=STEPS), FedProx(local=STEPS)):
        plain, wrapped = run(inner, rounds=2), run(OutputPerturbation(inner, tau=1e6, sigma=0.0), rounds=2)
        jax.tree.map(np.testing.assert_array_equal, wrapped.server, plain.server)


def test_upcycled_rounds_release_nothing_more():
    method = OutputPerturbation(FedAvg(local=STEPS), tau=1e-9, sigma=SIGMA)
    assert upcycle(method).releases() == method.releases()
    x = params_of(run(upcycle(method, a=0.5), **lone(rounds=2)))
    first = x[0] / 1.5  # x <- x + a (x - 0): the one noisy model, and no other number
    assert_gaussian(first.reshape(2, 500), SIGMA)
    assert_gaussian(((x[1] + 0.5 * x[0]) / 1.5).reshape(2, 500), SIGMA)


@hyperparameters
class SendsItsGradient(FedAvg):
    """Also sends a gradient."""

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        """Of all its data."""
        output = super().client(message, state, data)
        _, gradient = data.full_gradient(message)
        return output._replace(upload={"params": output.upload, "gradient": gradient})


@hyperparameters
class SendsItLater(FedAvg):
    """Keeps a gradient, and sends that of the round before."""

    def init_client(self, params: Any) -> Any:
        """None yet."""
        return tree.zeros_like(params)

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        """The old one goes up."""
        output = super().client(message, state, data)
        _, gradient = data.full_gradient(message)
        return output._replace(upload={"params": output.upload, "old": state}, state=gradient)


def refuse(algorithm: fedrax.Algorithm, match: str, **options: Any) -> None:
    """It must."""
    with pytest.raises(FedraxError, match=match):
        run(algorithm, **(dict[str, Any](rounds=1) | options))


@pytest.mark.parametrize("kind", [OutputPerturbation, lambda inner: ObjectivePerturbation(inner, guarantee="none")])
def test_what_is_computed_from_the_exact_data_is_rejected_by_name(kind: Any):
    leak = "also sends {}, computed from data without noise"
    refuse(kind(SendsItsGradient(local=STEPS)), leak.format("upload/gradient/output/bias"))
    refuse(kind(SendsItLater(local=STEPS)), leak.format("upload/old/output/bias"))
    refuse(kind(Scaffold(local=STEPS, option="I")), leak.format("upload/control/output/bias"))
    momentum = LocalSGD(lr=0.05, steps=3, momentum=0.5)
    refuse(kind(Scaffold(local=momentum)), leak.format("upload/control/output/bias"))
    refuse(kind(fedrax.algorithms.MimeLite(local=STEPS)), leak.format("upload/gradient/output/bias"))
    refuse(kind(fedrax.LoSAC(local=LocalSGD(lr=0.02, steps=2, blocks=2))), leak.format("upload/gradient_sum/.*"))
    refuse(kind(FedAvg(local=STEPS)), "uniform aggregation weights", weights="samples")


@pytest.mark.slow
def test_the_number_of_samples_does_not_leak_through_epochs():
    """SCAFFOLD divides by T eta, and T epochs are more steps where there are more samples."""
    epochs = Scaffold(local=LocalSGD(lr=0.05, epochs=2, batch_size=2))
    refuse(OutputPerturbation(epochs), "also sends upload/control/output/bias.*set local.steps instead")
    assert run(OutputPerturbation(epochs), make_federation((4, 4, 4, 4)), rounds=1).events


@pytest.mark.slow
def test_two_local_runs_are_rejected():
    refuse(OutputPerturbation(fedrax.personalization.Ditto(FedAvg(local=STEPS))), "runs local training 2 times a round")
    assert run(fedrax.personalization.Ditto(OutputPerturbation(FedAvg(local=STEPS))), rounds=1).events


# -- objective perturbation ----------------------------------------------------------------------------------------


def test_the_linear_terms_have_their_density():
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
def test_one_term_is_added_for_the_whole_round_and_another_in_the_next(reduction: Any):
    """With no loss of its own, a client moves by -T eta n."""
    local = LocalSGD(lr=0.05, steps=3, batch_size=2, reduction=reduction)
    method = ObjectivePerturbation(FedAvg(local=local), alpha=5.0, guarantee="none")
    moved = np.diff(params_of(run(method, **lone(rounds=3))), axis=0, prepend=0.0) / (-3 * 0.05)
    lengths = np.linalg.norm(moved, axis=1)
    assert (np.abs(lengths * 5.0 - 1000) < 4.5 * np.sqrt(1000)).all()  # Gamma(1000, 1 / 5)
    assert np.abs(np.corrcoef(moved) - np.eye(3)).max() < 5 / np.sqrt(1000)


def test_a_step_against_numpy():
    """x_i = x - eta (g_i + mu 0 + n_i): what is left of the update but the gradient is the term."""
    problem, local = make_problem(), {"lr": 0.1, "steps": 1, "batch_size": "full"}
    method = ObjectivePerturbation(FedAvg(local=LocalSGD(**local)), alpha=1e9, guarantee="none")
    result = fedrax.simulate(
        method, problem.task, problem.federation, params=problem.params, dtype="float64", rounds=1, cohort_size=7
    )
    gradients = [c.full_gradient(problem.x0) for c in problem.clients(reference.Local(**local))]
    expected = problem.x0 - 0.1 * np.mean(gradients, axis=0)
    np.testing.assert_allclose(reference.join(problem.problem, result.params), expected, atol=1e-6)


def test_the_theorem_asks_for_a_model_a_bound_and_a_prox():
    logistic, federation = fedrax.contract.binary_classification(Logistic().build((FEATURES,), 1)), make_federation()
    x, y = (np.asarray(a) for a in federation.train)
    of_two = fedrax.Federation.from_arrays(x, y % 2, offsets=federation.offsets, shuffle=False)
    method = ObjectivePerturbation(FedProx(local=STEPS, mu=0.5), alpha=10.0)
    result = run(method, of_two, task=logistic, rounds=1)
    long = fedrax.Federation.from_arrays(1e3 * x, y % 2, offsets=federation.offsets, shuffle=False)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    short = fedrax.Federation.from_arrays(unit, y % 2, offsets=federation.offsets, shuffle=False)
    a, b = (run(method, f, task=logistic, rounds=1).params for f in (long, short))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), a, b)  # features of length 1 in both
    assert np.isfinite(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.params)])).all()
    refuse(method, "linear in the features, not for classification/logistic")
    weighted = fedrax.contract.binary_classification(Logistic().build((FEATURES,), 1), class_weights=[1, 9])
    with pytest.raises(FedraxError, match="not for weighted_binary/logistic"):  # gradients of length 9
        run(method, of_two, task=weighted, rounds=1)
    refuse(ObjectivePerturbation(FedAvg(local=STEPS)), "FedProx with mu above 0")
    refuse(
        ObjectivePerturbation(fedrax.algorithms.MOON(local=STEPS, mu=0.5)), "FedProx with mu above 0"
    )  # its mu is no prox's


def test_what_is_released():
    output = OutputPerturbation(FedAvg(local=STEPS), tau=2.0, sigma=3.0)
    assert output.releases() == (Release(noise=0.75, neighbors="replacement", paper_noise=1.5),)
    claim = ObjectivePerturbation(FedProx(mu=0.5), alpha=10.0).releases()[0]
    assert claim.noise == 0 and claim.paper_epsilon == pytest.approx((2 * 10 * 2**0.5 * 0.5 + 2.8 * 0.5) / 0.5)
    assert ObjectivePerturbation(FedAvg(), guarantee="none").releases()[0].paper_epsilon is None
