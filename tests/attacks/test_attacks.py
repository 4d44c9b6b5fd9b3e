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
START = TASK.init(jax.random.key(3))
LOSAC = fedrax.LoSAC(local=LocalSGD(lr=0.1, steps=2, blocks=1))


@fedrax.hyperparameters
class Noised(fedrax.algorithms.FedSGD):
    """FedSGD whose clients add Gaussian noise of deviation 0.05 to every number of the gradient they send."""

    def client(self, message: Any, state: Any, data: fedrax.ClientData) -> fedrax.ClientOutput:
        output = super().client(message, state, data)
        leaves, structure = jax.tree.flatten(output.upload)
        keys = jax.random.split(data.key("noise"), len(leaves))
        noised = [a + 0.05 * jax.random.normal(k, a.shape, a.dtype) for a, k in zip(leaves, keys, strict=True)]
        return output._replace(upload=jax.tree.unflatten(structure, noised))


@fedrax.hyperparameters
class Halting(fedrax.algorithms.FedSGD):
    """FedSGD whose clients send the gradient halved until its first number is small."""

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


def recorded(algorithm: fedrax.Algorithm, rounds: int = 1, samples: int = 1) -> list[Any]:
    settings: dict[str, Any] = {"rounds": rounds, "cohort_size": CLIENTS, "eval_every": 100, "weights": "uniform"}
    return fedrax.simulate(
        algorithm, TASK, federation(samples), params=START, record=MessageSelection(clients=(1,)), **settings
    ).exchanges


def psnr_of(found: Any, samples: int = 1) -> float:
    return score(found.x, IMAGES[samples : 2 * samples]).psnr


# -- one gradient ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_gradient() -> Any:
    (sent,) = recorded(fedrax.algorithms.FedSGD())
    return as_gradient(TASK, sent.received, sent.sent.upload)


def test_dlg_recovers_image_and_label_of_one_gradient(one_gradient: Any) -> None:
    found = dlg(150).invert(one_gradient, (1, 8, 8, 1), 10, frames=4)
    result = score(found.x, IMAGES[1:2], found.y, LABELS[1:2])
    assert result.psnr > 25 and result.ssim > 0.95 and result.labels == 1
    assert found.distance == np.nanmin(found.distances) < 1e-4 * found.distances[0]
    assert found.frame_steps.tolist() == [0, 50, 100, 150]
    assert np.linalg.norm(found.frames[-1] - IMAGES[1:2]) < np.linalg.norm(found.frames[0] - IMAGES[1:2])


def test_idlg_and_inverting_gradients_recover_it_too(one_gradient: Any) -> None:
    labels = recover_labels(one_gradient.target[0], 1)
    assert labels.tolist() == LABELS[1:2].tolist()
    assert psnr_of(dlg(150).invert(one_gradient, (1, 8, 8, 1), y=labels)) > 25
    found = inverting_gradients(800, total_variation=1e-4).invert(one_gradient, (1, 8, 8, 1), y=labels)
    assert psnr_of(found) > 20
    assert found.x.min() >= 0 and found.x.max() <= 1


def test_noise_on_the_upload_defends(one_gradient: Any) -> None:
    (sent,) = recorded(Noised())
    found = dlg(150).invert(one_gradient._replace(target=(sent.sent.upload,)), (1, 8, 8, 1), 10)
    assert psnr_of(found) < 12


def test_the_gradient_that_candidates_make_is_by_hand() -> None:
    """Softmax regression with labels that are chances: mean of (softmax(W x + b) - p) outer x."""
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
def test_descent_takes_the_paper_s_steps(one_gradient: Any) -> None:
    """x - lr d/dx |g(x) - g|², twice, by a difference quotient of the squared distance along its gradient."""
    start = np.full((1, 8, 8, 1), 0.5)
    found = gradient_descent(1e-3, 2).invert(one_gradient, (1, 8, 8, 1), y=LABELS[1:2], start=start, frames=3)

    def apart(x: np.ndarray) -> float:
        made = one_gradient.predict(
            one_gradient.known, fedrax.contract.Batch(jnp.asarray(x), jnp.asarray(LABELS[1:2])), None
        )[0]
        pairs = zip(jax.tree.leaves(made), jax.tree.leaves(one_gradient.target[0]), strict=True)
        return float(sum(np.sum((np.asarray(a, float) - np.asarray(b, float)) ** 2) for a, b in pairs))

    move = found.frames[1] - found.frames[0]
    slope = (apart(start + 0.5 * move) - apart(start - 0.5 * move)) / np.sum(move**2)
    assert slope == pytest.approx(-1e3, rel=0.02)  # the move is -lr times the gradient
    np.testing.assert_allclose(found.distances[:2], [apart(found.frames[0]), apart(found.frames[1])], rtol=1e-4)


def test_where_layers_stay_at_home_no_vector_is_taken_for_a_gradient() -> None:
    """Nobody but the client knows the point where it would have been taken; its program is matched all the same."""
    personal = fedrax.personalization.Personalized(
        fedrax.FedAvg(local=LocalSGD(lr=0.1, steps=1)), personal_params=("output/*",)
    )
    sent = recorded(personal)
    assert candidate_gradients(personal, sent, START) == []
    view = as_client_program(TASK, personal, START, sent, CLIENTS, CLIENTS)
    batch = fedrax.contract.Batch(jnp.asarray(IMAGES[1:2]), jnp.asarray(LABELS[1:2]))
    made = view.predict(view.known, batch, None)
    for mine, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(view.target), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.slow
def test_counts_of_signs_are_left_out_and_the_momentum_beside_them_is_matched() -> None:
    lion = fedrax.algorithms.FedLion(local=LocalSGD(lr=1e-3, steps=2, batch_size="full"))
    sent = recorded(lion)
    view = as_client_program(TASK, lion, START, sent, CLIENTS, CLIENTS)
    (momentum,) = view.target
    jax.tree.map(np.testing.assert_array_equal, momentum, sent[0].sent.upload.momentum)
    batch = fedrax.contract.Batch(jnp.asarray(IMAGES[1:2]), jnp.asarray(LABELS[1:2]))
    (made,) = view.predict(view.known, batch, None)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), made, momentum)
    inside = as_client_program(
        TASK,
        fedrax.compression.Quantized(lion),
        START,
        recorded(fedrax.compression.Quantized(lion)),
        CLIENTS,
        CLIENTS,
        program=lion,
    )
    assert len(inside.target) == len(inside.predict(inside.known, batch, None))


# -- several rounds --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_losac() -> list[Any]:
    return recorded(LOSAC, rounds=3, samples=2)


@pytest.mark.slow
def test_losac_s_increments_sum_up_to_a_gradient(of_losac: list[Any]) -> None:
    """With M = 1 the sum of all Delta phi_i is the client's last gradient: taken one local step before its end."""
    seen = {one.name: one for one in candidate_gradients(LOSAC, of_losac, START)}
    total = seen["phase 1, upload/gradient_sum, sum"]
    last = of_losac[-1]
    x, phi = last.received.params, last.received.gradient_sum
    history = jax.tree.map(lambda *a: sum(a), *[one.sent.upload.gradient_sum for one in of_losac[:-1]])
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
def test_the_client_s_program_gives_losac_s_data_away() -> None:
    """To a server: two local steps, two rounds."""
    server = as_client_program(TASK, LOSAC, START, recorded(LOSAC, rounds=2), CLIENTS, CLIENTS)
    assert len(server.target) == 4
    assert psnr_of(dlg(200).invert(server, (1, 8, 8, 1), 10)) > 25


@pytest.mark.parametrize("invert", slow_cases([False, True]))
def test_two_rounds_are_enough_for_an_eavesdropper(invert: bool) -> None:
    """Of LoSAC with one local step: after the round that is only gone through, the copied client's memory is right."""
    method = fedrax.LoSAC(local=LocalSGD(lr=0.1, steps=1, blocks=1))
    heard = recorded(method, rounds=3)[1:]
    view = as_client_program(TASK, method, START, heard, CLIENTS, CLIENTS, matched=(3,))
    assert len(view.target) == 2
    true = fedrax.contract.Batch(jnp.asarray(IMAGES[1:2]), jnp.asarray(LABELS[1:2]))
    for a, b in zip(jax.tree.leaves(view.predict(view.known, true, None)), jax.tree.leaves(view.target), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    if invert:  # where there is time; that such a view gives data away is the test above
        assert psnr_of(dlg(300).invert(view, (1, 8, 8, 1), 10)) > 25


@pytest.mark.slow
def test_a_program_run_on_the_true_data_sends_what_was_sent() -> None:
    """Two phases, states and full batches: the attacker's copy of the client is the client."""
    local = LocalSGD(lr=0.1, steps=2, batch_size="full")
    for method in (fedrax.Scaffold(local=local), fedrax.algorithms.MimeSVRG(local=local)):
        sent = recorded(method, rounds=2, samples=2)
        view = as_client_program(TASK, method, START, sent, CLIENTS, CLIENTS)
        made = view.predict(view.known, fedrax.contract.Batch(jnp.asarray(IMAGES[2:4]), jnp.asarray(LABELS[2:4])), None)
        for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(view.target), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_vectors_are_found_wherever_they_are() -> None:
    params = {"w": np.zeros((2, 3)), "b": np.zeros(2)}
    other = {"w": np.zeros((3, 2)), "b": np.zeros(2)}
    assert list(parameter_vectors(params, params)) == [""]
    assert list(parameter_vectors({"a": params, "deep": (other, params), "n": np.ones(2)}, params)) == ["a", "deep/1"]


# -- the parts -------------------------------------------------------------------------------------------------------


def test_lbfgs_finds_the_minimum_of_rosenbrock_s_valley() -> None:
    rule, x = LBFGS(memory=5), {"x": jnp.asarray([-1.2, 1.0])}
    value = jax.value_and_grad(lambda p: 100 * (p["x"][1] - p["x"][0] ** 2) ** 2 + (1 - p["x"][0]) ** 2)

    def body(k: Any, carry: Any) -> Any:
        at, state = carry
        return rule.propose(at, *value(at), state, 100)

    x, state = jax.jit(lambda c: jax.lax.fori_loop(0, 100, body, c))((x, rule.init(x, 100)))
    np.testing.assert_allclose(state.point, [1, 1], atol=1e-3)


def test_lbfgs_goes_back_from_where_the_objective_is_infinite() -> None:
    rule, x = LBFGS(), {"x": jnp.asarray([0.5])}
    value = jax.value_and_grad(lambda p: jnp.sum(p["x"] - jnp.log(p["x"])) * 5)  # not a number left of zero; best at 1

    def body(k: Any, carry: Any) -> Any:
        at, state = carry
        return rule.propose(at, *value(at), state, 60)

    _, state = jax.jit(lambda c: jax.lax.fori_loop(0, 60, body, c))((x, rule.init(x, 60)))
    np.testing.assert_allclose(state.point, [1], atol=1e-3)


def test_labels_of_several_samples_are_counted() -> None:
    """At the start, when every class has the chance 1/C: the bias' gradient is 1/C less the class's share."""
    labels = np.array([0, 2, 2, 2, 9])
    gradient = {"output": {"bias": 0.1 - np.bincount(labels, minlength=10) / 5, "weight": np.zeros((10, 3))}}
    assert recover_labels(gradient, 5).tolist() == labels.tolist()
    with pytest.raises(FedraxError, match="no vector 'head/bias'"):
        recover_labels(gradient, 5, "head/bias")


def test_bad_input_is_one_sentence(one_gradient: Any, of_losac: list[Any]) -> None:
    shape = (1, 8, 8, 1)
    refused: list[tuple[str, Any]] = [
        ("give either", lambda: dlg(2).invert(one_gradient, shape)),
        ("one label for each of 1 samples", lambda: dlg(2).invert(one_gradient, shape, y=[1, 2])),
        ("needs images", lambda: inverting_gradients(2).invert(one_gradient, (1, 64), y=[1])),
        (
            "does not support box",
            lambda: Attack(LBFGS(), 2, "cosine", box=(0, 1)).invert(one_gradient, shape, 10),
        ),
        ("steps and restarts", lambda: dlg(0).invert(one_gradient, shape, 10)),
        ("messages of one client, not of 0", lambda: candidate_gradients(LOSAC, [], START)),
        (
            "none of the rounds in matched was observed",
            lambda: as_client_program(TASK, LOSAC, START, of_losac, CLIENTS, CLIENTS, matched=(9,)),
        ),
    ]
    for sentence, call in refused:
        with pytest.raises(FedraxError, match=sentence):
            call()


def test_a_client_that_cannot_be_differentiated_is_named() -> None:
    method = Halting()
    view = as_client_program(TASK, method, START, recorded(method), CLIENTS, CLIENTS)
    with pytest.raises(FedraxError, match="cannot be differentiated"):
        dlg(2).invert(view, (1, 8, 8, 1), 10)


def test_products_are_as_exact_as_those_of_the_messages(one_gradient: Any) -> None:
    """Accelerators would take shorter operands by default, and the attacker's gradient would be another one."""
    seen = []

    def predict(*given: Any) -> Any:
        seen.append(jax.config.values["jax_default_matmul_precision"])
        return one_gradient.predict(*given)

    dlg(steps=1).invert(one_gradient._replace(predict=predict), (1, 8, 8, 1), 10)
    assert set(seen) == {"highest"}


def test_label_recovery_counts_a_multiset() -> None:
    assert label_recovery([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3)
