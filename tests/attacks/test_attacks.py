"""Reconstruction attacks on the messages of a client, from the recorder to the score, on tiny networks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import FedraxError, LocalSGD
from fedrax.attacks import (
    Attack,
    as_client_program,
    as_gradient,
    candidate_gradients,
    dlg,
    gradient_descent,
    inverting_gradients,
    label_recovery,
    parameter_vectors,
    recover_labels,
    score,
)
from fedrax.attacks.optimizers import LBFGS
from fedrax.data import load
from fedrax.models import MLP, Logistic
from fedrax.simulation import MessageSelection
from tests.slow import slow_cases

CLIENTS = 3
IMAGES, LABELS = load("digits").train
TASK = fedrax.classification(MLP(hidden=(24,), activation="sigmoid").build((8, 8, 1), 10))
INITIAL_PARAMS = TASK.init(jax.random.key(3))
LOSAC = fedrax.LoSAC(local=LocalSGD(lr=0.1, steps=2, blocks=1))


@fedrax.hyperparameters
class NoisyFedSGD(fedrax.algorithms.FedSGD):
    """FedSGD whose clients add Gaussian noise of standard deviation 0.05 to each entry of their gradient."""

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        output = super().client(message, state, data)
        leaves, structure = jax.tree.flatten(output.upload)
        keys = jax.random.split(data.key("noise"), len(leaves))
        noised = [a + 0.05 * jax.random.normal(k, a.shape, a.dtype) for a, k in zip(leaves, keys, strict=True)]
        return output._replace(upload=jax.tree.unflatten(structure, noised))


@fedrax.hyperparameters
class WhileLoopFedSGD(fedrax.algorithms.FedSGD):
    """FedSGD whose clients halve their gradient in a while loop, which has no reverse-mode derivative."""

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        output = super().client(message, state, data)
        large = lambda g: jnp.abs(g["output"]["bias"][0]) > 1e-3  # noqa: E731
        halved = jax.lax.while_loop(large, lambda g: jax.tree.map(lambda a: a / 2, g), output.upload)
        return output._replace(upload=halved)


def federation(samples: int) -> fedrax.Federation:
    rows = CLIENTS * samples
    return fedrax.Federation.from_arrays(
        IMAGES[:rows], LABELS[:rows], np.repeat(np.arange(CLIENTS), samples), num_classes=10
    )


def record_messages(algorithm: fedrax.Algorithm, rounds: int = 1, samples: int = 1) -> list[Any]:
    settings: dict[str, Any] = {"rounds": rounds, "cohort_size": CLIENTS, "eval_every": 100, "weights": "uniform"}
    return fedrax.simulate(
        algorithm, TASK, federation(samples), params=INITIAL_PARAMS, record=MessageSelection(clients=(1,)), **settings
    ).exchanges


def psnr_of(found: Any, samples: int = 1) -> float:
    return score(found.x, IMAGES[samples : 2 * samples]).psnr


# -- one gradient ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_gradient() -> Any:
    (sent,) = record_messages(fedrax.algorithms.FedSGD())
    return as_gradient(TASK, sent.received, sent.sent.upload)


def test_dlg_recovers_image_and_label_of_one_gradient(one_gradient: Any) -> None:
    found = dlg(150).invert(one_gradient, (1, 8, 8, 1), 10, frames=4)
    result = score(found.x, IMAGES[1:2], found.y, LABELS[1:2])
    assert result.psnr > 25 and result.ssim > 0.95 and result.labels == 1
    assert found.distance == np.nanmin(found.distances) < 1e-4 * found.distances[0]
    assert found.frame_steps.tolist() == [0, 50, 100, 150]
    assert np.linalg.norm(found.frames[-1] - IMAGES[1:2]) < np.linalg.norm(found.frames[0] - IMAGES[1:2])


def test_idlg_and_inverting_gradients_recover_image_and_label(one_gradient: Any) -> None:
    labels = recover_labels(one_gradient.target[0], 1)
    assert labels.tolist() == LABELS[1:2].tolist()
    assert psnr_of(dlg(150).invert(one_gradient, (1, 8, 8, 1), y=labels)) > 25
    found = inverting_gradients(800, total_variation=1e-4).invert(one_gradient, (1, 8, 8, 1), y=labels)
    assert psnr_of(found) > 20
    assert found.x.min() >= 0 and found.x.max() <= 1


def test_noise_on_the_upload_prevents_reconstruction(one_gradient: Any) -> None:
    (sent,) = record_messages(NoisyFedSGD())
    found = dlg(150).invert(one_gradient._replace(target=(sent.sent.upload,)), (1, 8, 8, 1), 10)
    assert psnr_of(found) < 12


def test_predicted_gradient_is_that_of_softmax_regression() -> None:
    """With soft labels p: the mean of (softmax(W x + b) - p) outer x."""
    task = fedrax.classification(Logistic().build((4,), 3))
    rng = np.random.default_rng(0)
    x, chances = rng.normal(size=(5, 4)), rng.dirichlet(np.ones(3), 5)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), task.init(jax.random.key(0)))
    view = as_gradient(task, params, params)
    (made,) = view.predict(view.known, fedrax.contract.Batch(jnp.asarray(x), jnp.asarray(chances)), 3)
    weight, bias = (np.asarray(params["output"][name], float) for name in ("weight", "bias"))
    weight = weight if weight.shape == (3, 4) else weight.T
    logits = x @ weight.T + bias
    odds = np.exp(logits - logits.max(1, keepdims=True))
    error = odds / odds.sum(1, keepdims=True) - chances
    np.testing.assert_allclose(made["output"]["bias"], error.mean(0), atol=1e-6)
    found = np.asarray(made["output"]["weight"])
    np.testing.assert_allclose(found if found.shape == (3, 4) else found.T, error.T @ x / 5, atol=1e-6)


@pytest.mark.slow
def test_dlg_descends_along_the_gradient_of_the_squared_distance(one_gradient: Any) -> None:
    """Two steps x - lr d/dx |g(x) - g|^2, checked by a difference quotient along the move."""
    start = np.full((1, 8, 8, 1), 0.5)
    found = gradient_descent(1e-3, 2).invert(one_gradient, (1, 8, 8, 1), y=LABELS[1:2], start=start, frames=3)

    def squared_distance(x: np.ndarray) -> float:
        made = one_gradient.predict(
            one_gradient.known, fedrax.contract.Batch(jnp.asarray(x), jnp.asarray(LABELS[1:2])), None
        )[0]
        pairs = zip(jax.tree.leaves(made), jax.tree.leaves(one_gradient.target[0]), strict=True)
        return float(sum(np.sum((np.asarray(a, float) - np.asarray(b, float)) ** 2) for a, b in pairs))

    move = found.frames[1] - found.frames[0]
    slope = (squared_distance(start + 0.5 * move) - squared_distance(start - 0.5 * move)) / np.sum(move**2)
    assert slope == pytest.approx(-1e3, rel=0.02)  # the move is -lr times the gradient
    np.testing.assert_allclose(
        found.distances[:2], [squared_distance(found.frames[0]), squared_distance(found.frames[1])], rtol=1e-4
    )


def test_personal_layers_exclude_gradients_but_not_client_programs() -> None:
    """The server does not know the point of a client's gradient, but can match the client's program."""
    personal = fedrax.personalization.Personalized(
        fedrax.FedAvg(local=LocalSGD(lr=0.1, steps=1)), personal_params=("output/*",)
    )
    sent = record_messages(personal)
    assert candidate_gradients(personal, sent, INITIAL_PARAMS) == []
    view = as_client_program(TASK, personal, INITIAL_PARAMS, sent, CLIENTS, CLIENTS)
    batch = fedrax.contract.Batch(jnp.asarray(IMAGES[1:2]), jnp.asarray(LABELS[1:2]))
    made = view.predict(view.known, batch, None)
    for actual, desired in zip(jax.tree.leaves(made), jax.tree.leaves(view.target), strict=True):
        np.testing.assert_allclose(actual, desired, atol=1e-6)


@pytest.mark.slow
def test_sums_of_signs_are_excluded_and_the_momentum_is_matched() -> None:
    lion = fedrax.algorithms.FedLion(local=LocalSGD(lr=1e-3, steps=2, batch_size="full"))
    sent = record_messages(lion)
    view = as_client_program(TASK, lion, INITIAL_PARAMS, sent, CLIENTS, CLIENTS)
    (momentum,) = view.target
    jax.tree.map(np.testing.assert_array_equal, momentum, sent[0].sent.upload.momentum)
    batch = fedrax.contract.Batch(jnp.asarray(IMAGES[1:2]), jnp.asarray(LABELS[1:2]))
    (made,) = view.predict(view.known, batch, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), made, momentum)
    inside = as_client_program(
        TASK,
        fedrax.compression.Quantized(lion),
        INITIAL_PARAMS,
        record_messages(fedrax.compression.Quantized(lion)),
        CLIENTS,
        CLIENTS,
        program=lion,
    )
    assert len(inside.target) == len(inside.predict(inside.known, batch, None))


# -- several rounds --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def losac_messages() -> list[Any]:
    return record_messages(LOSAC, rounds=3, samples=2)


@pytest.mark.slow
def test_increments_of_losac_sum_to_a_gradient(losac_messages: list[Any]) -> None:
    """With M = 1 the sum of all Delta phi_i is the client's last gradient, one local step before the end."""
    seen = {one.name: one for one in candidate_gradients(LOSAC, losac_messages, INITIAL_PARAMS)}
    total = seen["phase 1, upload/gradient_sum, sum"]
    last = losac_messages[-1]
    x, phi = last.received.params, last.received.gradient_sum
    history = jax.tree.map(lambda *a: sum(a), *[one.sent.upload.gradient_sum for one in losac_messages[:-1]])
    view = as_gradient(TASK, x, total.vector)
    batch = fedrax.contract.Batch(jnp.asarray(IMAGES[2:4]), jnp.asarray(LABELS[2:4]))
    (first,) = view.predict((x, ()), batch, None)  # the gradient of the first of two local steps, at x itself
    moved = jax.tree.map(lambda a, p, y, g: a - 0.1 * (p / CLIENTS - y + g), x, phi, history, first)
    (true,) = view.predict((moved, ()), batch, None)
    for a, b in zip(jax.tree.leaves(total.vector), jax.tree.leaves(true), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for name in ("last", "difference"):
        other = seen[f"phase 1, upload/gradient_sum, {name}"]
        assert not np.allclose(other.vector["output"]["bias"], true["output"]["bias"], atol=1e-3)


@pytest.mark.slow
def test_server_reconstructs_data_of_losac_from_the_client_program() -> None:
    """From two rounds of two local steps."""
    server = as_client_program(TASK, LOSAC, INITIAL_PARAMS, record_messages(LOSAC, rounds=2), CLIENTS, CLIENTS)
    assert len(server.target) == 4
    assert psnr_of(dlg(200).invert(server, (1, 8, 8, 1), 10)) > 25


@pytest.mark.parametrize("invert", slow_cases([False, True]))
def test_eavesdropper_reconstructs_data_of_losac_from_two_rounds(invert: bool) -> None:
    """One local step: after the first observed round, which is replayed without matching, the simulated client state is
    exact.
    """
    method = fedrax.LoSAC(local=LocalSGD(lr=0.1, steps=1, blocks=1))
    heard = record_messages(method, rounds=3)[1:]
    view = as_client_program(TASK, method, INITIAL_PARAMS, heard, CLIENTS, CLIENTS, matched=(3,))
    assert len(view.target) == 2
    true = fedrax.contract.Batch(jnp.asarray(IMAGES[1:2]), jnp.asarray(LABELS[1:2]))
    for a, b in zip(jax.tree.leaves(view.predict(view.known, true, None)), jax.tree.leaves(view.target), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    if (
        invert
    ):  # ``make test`` checks only that the predicted messages are exact; the test above reconstructs from such a view
        assert psnr_of(dlg(300).invert(view, (1, 8, 8, 1), 10)) > 25


@pytest.mark.slow
def test_client_program_on_the_true_data_predicts_the_messages() -> None:
    """For methods with two phases, client states and full batches."""
    local = LocalSGD(lr=0.1, steps=2, batch_size="full")
    for method in (fedrax.Scaffold(local=local), fedrax.algorithms.MimeSVRG(local=local)):
        sent = record_messages(method, rounds=2, samples=2)
        view = as_client_program(TASK, method, INITIAL_PARAMS, sent, CLIENTS, CLIENTS)
        made = view.predict(view.known, fedrax.contract.Batch(jnp.asarray(IMAGES[2:4]), jnp.asarray(LABELS[2:4])), None)
        for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(view.target), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_parameter_vectors_are_found_in_nested_messages() -> None:
    params = {"w": np.zeros((2, 3)), "b": np.zeros(2)}
    other = {"w": np.zeros((3, 2)), "b": np.zeros(2)}
    assert list(parameter_vectors(params, params)) == [""]
    assert list(parameter_vectors({"a": params, "deep": (other, params), "n": np.ones(2)}, params)) == ["a", "deep/1"]


# -- components ------------------------------------------------------------------------------------------------------


def test_lbfgs_minimizes_the_rosenbrock_function() -> None:
    rule, x = LBFGS(memory=5), {"x": jnp.asarray([-1.2, 1.0])}
    value = jax.value_and_grad(lambda p: 100 * (p["x"][1] - p["x"][0] ** 2) ** 2 + (1 - p["x"][0]) ** 2)

    def body(k: Any, carry: Any) -> Any:
        at, state = carry
        return rule.propose(at, *value(at), state, 100)

    x, state = jax.jit(lambda c: jax.lax.fori_loop(0, 100, body, c))((x, rule.init(x, 100)))
    np.testing.assert_allclose(state.point, [1, 1], atol=1e-3)


def test_lbfgs_backtracks_from_an_infinite_objective() -> None:
    rule, x = LBFGS(), {"x": jnp.asarray([0.5])}
    value = jax.value_and_grad(
        lambda p: jnp.sum(p["x"] - jnp.log(p["x"])) * 5
    )  # NaN for negative arguments, minimum at 1

    def body(k: Any, carry: Any) -> Any:
        at, state = carry
        return rule.propose(at, *value(at), state, 60)

    _, state = jax.jit(lambda c: jax.lax.fori_loop(0, 60, body, c))((x, rule.init(x, 60)))
    np.testing.assert_allclose(state.point, [1], atol=1e-3)


def test_labels_of_several_samples_are_recovered_with_multiplicity() -> None:
    """Initially every class has probability 1/C, and the gradient of the bias is 1/C minus the share of the class."""
    labels = np.array([0, 2, 2, 2, 9])
    gradient = {"output": {"bias": 0.1 - np.bincount(labels, minlength=10) / 5, "weight": np.zeros((10, 3))}}
    assert recover_labels(gradient, 5).tolist() == labels.tolist()
    with pytest.raises(FedraxError, match="no vector 'head/bias'"):
        recover_labels(gradient, 5, "head/bias")


def test_invalid_input_raises_a_clear_error(one_gradient: Any, losac_messages: list[Any]) -> None:
    shape = (1, 8, 8, 1)
    invalid_calls: list[tuple[str, Any]] = [
        ("give either", lambda: dlg(2).invert(one_gradient, shape)),
        ("one label for each of 1 samples", lambda: dlg(2).invert(one_gradient, shape, y=[1, 2])),
        ("needs images", lambda: inverting_gradients(2).invert(one_gradient, (1, 64), y=[1])),
        (
            "does not support box",
            lambda: Attack(LBFGS(), 2, "cosine", box=(0, 1)).invert(one_gradient, shape, 10),
        ),
        ("steps and restarts", lambda: dlg(0).invert(one_gradient, shape, 10)),
        ("messages of one client, not of 0", lambda: candidate_gradients(LOSAC, [], INITIAL_PARAMS)),
        (
            "none of the rounds in matched was observed",
            lambda: as_client_program(TASK, LOSAC, INITIAL_PARAMS, losac_messages, CLIENTS, CLIENTS, matched=(9,)),
        ),
    ]
    for message, call in invalid_calls:
        with pytest.raises(FedraxError, match=message):
            call()


def test_client_program_without_derivative_raises_a_clear_error() -> None:
    method = WhileLoopFedSGD()
    view = as_client_program(TASK, method, INITIAL_PARAMS, record_messages(method), CLIENTS, CLIENTS)
    with pytest.raises(FedraxError, match="cannot be differentiated"):
        dlg(2).invert(view, (1, 8, 8, 1), 10)


def test_attacks_use_the_highest_matmul_precision(one_gradient: Any) -> None:
    """Accelerators use lower precision by default, in which the attacker's gradient would differ from the messages."""
    seen = []

    def predict(*given: Any) -> Any:
        seen.append(jax.config.values["jax_default_matmul_precision"])
        return one_gradient.predict(*given)

    dlg(steps=1).invert(one_gradient._replace(predict=predict), (1, 8, 8, 1), 10)
    assert set(seen) == {"highest"}


def test_label_recovery_respects_multiplicity() -> None:
    assert label_recovery([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3)
