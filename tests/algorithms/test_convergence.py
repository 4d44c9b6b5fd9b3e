"""Limits of the methods: the optimum, or the biased fixed point that theory predicts.

Strongly convex quadratics with heterogeneous clients, in float64: f_i(w) = w H_i w / 2 - b_i w + const.

"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrax
from tests import reference
from tests.algorithms.problems import NUM_CLIENTS, Problem, make_algorithm, make_problem
from tests.slow import slow_cases

SIZES = (9,) * NUM_CLIENTS
LR, STEPS = 0.1, 4
FULL = {"lr": LR, "steps": STEPS, "batch_size": "full"}


@cache
def moments() -> tuple[np.ndarray, np.ndarray]:
    """H_i [N, d, d] and b_i [N, d]."""
    clients = make_problem("quadratic", SIZES).clients(reference.Local())
    return (
        np.array([c.a.T @ c.a / c.size for c in clients]),
        np.array([c.a.T @ c.b / c.size for c in clients]),
    )


@cache
def optimum() -> np.ndarray:
    """Minimizer of the mean of all f_i."""
    h, b = moments()
    return np.linalg.solve(h.mean(0), b.mean(0))


def biased_point(mu: float = 0.0) -> np.ndarray:
    """Fixed point of FedAvg (or FedProx) with T full steps: sum_i A_i (b_i - H_i x) = 0.

    From x, client i moves to x + A_i (b_i - H_i x) with A_i = (I - (I - eta K_i)^T) K_i^-1, K_i = H_i + mu I.
    """
    h, b = moments()
    eye = np.eye(h.shape[1])
    moves = []
    for hi in h:
        k = hi + mu * eye
        moves.append((eye - np.linalg.matrix_power(eye - LR * k, STEPS)) @ np.linalg.inv(k))
    return np.linalg.solve(
        sum(a @ hi for a, hi in zip(moves, h, strict=True)), sum(a @ bi for a, bi in zip(moves, b, strict=True))
    )


@cache
def problem() -> Problem:
    return make_problem("quadratic", SIZES)


def run(method: str, options: dict, rounds: int = 600, cohort: int = NUM_CLIENTS, **settings: Any) -> fedrax.Result:
    """Run in float64, by default with full participation."""
    p = problem()
    defaults = {"rounds": rounds, "cohort_size": cohort, "dtype": "float64", "devices": 1, "eval_every": 10_000}
    return fedrax.simulate(
        make_algorithm(method, options), p.task, p.federation, params=p.params, **(defaults | settings)
    )


def distance(result: fedrax.Result, point: np.ndarray) -> float:
    """Largest difference between the final parameters and ``point``."""
    return float(np.linalg.norm(np.asarray(result.params["w"]) - point))


def test_problem_is_heterogeneous_and_steps_are_stable():
    h, _ = moments()
    assert np.linalg.eigvalsh(h).min() > 0.01
    assert LR * np.linalg.eigvalsh(h).max() < 1
    assert np.linalg.norm(biased_point() - optimum()) > 0.01


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("method", "options", "mu"),
    [
        ("FedAvg", {"local": FULL}, 0.0),
        ("FedProx", {"local": FULL, "mu": 0.8}, 0.8),
        ("MIFA", {"local": FULL}, 0.0),
        ("FedAvg", {"local": FULL, "server_optimizer": ("SGD", {"lr": 0.5, "momentum": 0.5})}, 0.0),
        ("Upcycled", {"inner": ("FedAvg", {"local": FULL}), "a": 0.3}, 0.0),
    ],
    ids=["FedAvg", "FedProx", "MIFA", "FedAvgM", "Upcycled"],
)
def test_methods_without_drift_correction_converge_to_the_biased_point(method: str, options: dict, mu: float):
    result = run(method, options)
    assert distance(result, biased_point(mu)) < 1e-9
    assert distance(result, optimum()) > 3e-3


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", ["Scaffold", "MimeSVRG", "Episode"])
def test_local_momentum_includes_the_drift_correction(method: str, nesterov: bool):
    momentum = fedrax.optim.Optax.of(optax.sgd, momentum=0.5, nesterov=nesterov)
    after = run(method, {"local": FULL | {"optimizer": momentum}})
    before = run(method, {"local": FULL | {"momentum": 0.5}})
    assert distance(after, optimum()) < 1e-9
    assert distance(before, optimum()) > 1e-3


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("Scaffold", {"local": FULL}),
        ("Scaffold", {"local": FULL, "option": "I"}),
        ("Scaffold", {"local": FULL | {"clip": 0.02}}),
        ("MimeSVRG", {"local": FULL}),
        ("Mime", {"local": FULL, "beta": 0.5}),
        ("FedADMM", {"local": FULL, "rho": 4.0}),
        ("Episode", {"local": FULL}),
        ("Episode", {"local": FULL, "gamma": 0.1}),
        ("FedDyn", {"local": FULL, "alpha": 0.5}),
        ("FedDyn", {"local": FULL | {"momentum": 0.3}, "alpha": 1.0}),
        ("FedNova", {"local": FULL | {"steps": 1}}),
        ("Scaffnew", {"local": {"lr": LR, "batch_size": "full"}, "p": 0.3}),
        ("Upcycled", {"inner": ("Scaffold", {"local": FULL}), "a": 0.3, "extrapolate": "both"}),
        ("FedSGD", {"server_optimizer": ("SGD", {"lr": LR})}),
        ("FedAvg", {"local": FULL | {"steps": 1}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_drift_corrected_methods_converge_to_the_optimum(method: str, options: dict):
    result = run(method, options, rounds=1500)
    assert distance(result, optimum()) < 1e-8
    if "gamma" in options:
        assert result.events[0]["clipped"] == 1
        assert result.events[-1]["clipped"] == 0


def test_scaffnew_converges_to_the_optimum_with_partial_participation():
    """TAMUNA's proof scales the step of h_i by chi < 1 there; the limit is the same without it."""
    result = run("Scaffnew", {"local": {"lr": LR, "batch_size": "full"}, "p": 0.3}, rounds=6000, cohort=4)
    assert distance(result, optimum()) < 1e-8


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("reading", ["printed", "consistent"])
@pytest.mark.parametrize("cohort", slow_cases([4, NUM_CLIENTS]))
def test_losac_converges_to_the_optimum_with_any_fixed_cohort(reading: str, cohort: int):
    """Three blocks in random order; the printed form takes about M N / S times larger steps."""
    local = {"lr": 0.02 if reading == "consistent" else 0.01, "steps": 5, "blocks": 3}
    result = run("LoSAC", {"local": local, "reading": reading}, rounds=6000, cohort=cohort)
    assert distance(result, optimum()) < 1e-8


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("FedSaga", {"local": {"lr": 0.05, "steps": 6, "blocks": 3}}),
        ("FedAvg", {"local": FULL | {"clip": 0.02}}),
        ("GradMAW", {"local": FULL}),
        ("FedCM", {"local": FULL, "alpha": 0.3}),
        ("MimeLite", {"local": FULL, "beta": 0.7}),
    ],
    ids=["FedSaga", "CELGC", "GradMAW", "FedCM", "MimeLite"],
)
def test_other_local_corrections_leave_a_bias(method: str, options: dict):
    result = run(method, options, rounds=3000)
    assert 3e-3 < distance(result, optimum()) < 10


def test_fedadmm_diverges_with_many_local_steps_and_small_rho():
    """T = 5 and rho = 1, the example of its documentation."""
    weak, strong = (run("FedADMM", {"local": FULL | {"steps": 5}, "rho": rho}, rounds=40) for rho in (1.0, 4.0))
    assert distance(weak, optimum()) > 1e6
    assert distance(strong, optimum()) < 0.1


L1 = 0.03


def with_l1(local: dict, weight: float = L1) -> dict:
    """Local steps with a proximal operator."""
    return {"local": local | {"prox": ("L1", {"weight": weight})}}


BLOCKS = {"lr": 0.02, "steps": 5, "blocks": 3}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("method", "options", "cohort"),
    [
        ("LoSAC", with_l1(BLOCKS), NUM_CLIENTS),
        # the printed scales multiply the gradient by M N / S, so the regularizer must be as much larger
        ("LoSAC", with_l1(BLOCKS | {"lr": 0.01}, 3 * NUM_CLIENTS / 4 * L1) | {"reading": "printed"}, 4),
        ("Scaffold", with_l1(FULL), NUM_CLIENTS),
        ("FedADMM", {"local": FULL, "rho": 4.0, "prox": ("L1", {"weight": L1})}, 4),
    ],
    ids=["LoSAC-Prox", "LoSAC-Prox printed", "SCAFFOLD-Prox", "FedADMM"],
)
def test_proximal_methods_solve_the_regularized_problem(method: str, options: dict, cohort: int):
    """The limit minimizes F = mean f_i + lambda |w|_1: zero is a subgradient."""
    weight = L1
    result = run(method, options, rounds=6000, cohort=cohort)
    w = np.asarray(result.params["w"])
    h, b = moments()
    gradient = h.mean(0) @ w - b.mean(0)
    zero = np.abs(w) < 1e-12
    assert zero.any()
    assert not zero.all()
    assert (np.abs(gradient[zero]) <= weight).all()
    np.testing.assert_allclose(gradient[~zero], -weight * np.sign(w[~zero]), atol=1e-7)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_two_clients_of_the_episode_paper(gamma: float):
    """Section 4.1: f_k = x^2 / 2 + a_k x. CELGC stays at 0, EPISODE converges to the minimum -1/2."""
    task = fedrax.Task(
        init=lambda key: {"x": jnp.zeros(())},
        loss=lambda params, batch, key: params["x"] ** 2 / 2 + batch.x * params["x"],
    )
    a, y = np.array([-gamma - 1, gamma + 2]), np.zeros(2, np.float32)
    federation = fedrax.Federation.from_arrays(a, y, offsets=np.arange(3), shuffle=False)
    settings = {"rounds": 10, "cohort_size": 2, "dtype": "float64", "devices": 1}
    one = {"lr": 1.0, "steps": 1, "batch_size": 1}
    celgc = fedrax.simulate(make_algorithm("FedAvg", {"local": one | {"clip": gamma}}), task, federation, **settings)
    episode = fedrax.simulate(make_algorithm("Episode", {"local": one, "gamma": gamma}), task, federation, **settings)
    assert float(celgc.params["x"]) == 0
    assert float(episode.params["x"]) == -0.5


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["Scaffold", "FedDyn"])
def test_topk_converges_exactly_and_quantization_approximately_with_client_states(name: str):
    """With ``Quantized``, client states and the server's sum drift apart by rounding; TopK has error feedback."""
    inner = make_algorithm(name, {"local": FULL} | ({"alpha": 0.5} if name == "FedDyn" else {}))
    wrapped = {
        "8": fedrax.compression.Quantized(inner),
        "4": fedrax.compression.Quantized(inner, bits=4),
        "top": fedrax.compression.TopK(inner, fraction=0.5),
    }
    options: dict[str, Any] = {"rounds": 400, "cohort_size": NUM_CLIENTS, "dtype": "float64", "devices": 1}
    far = {}
    for key, method in wrapped.items():
        result = fedrax.simulate(method, problem().task, problem().federation, params=problem().params, **options)
        far[key] = distance(result, optimum())
    assert far["top"] < 1e-6 < 1e-4 < far["8"] < far["4"] < 0.1


# The synthetic pair of the EPISODE paper (Fig. 3)

HETEROGENEITY = (1, 2, 4, 8)
SEEDS = 25


def distances(method: str, options: dict, rounds: int) -> np.ndarray:
    """|x - minimizer of the mean| after ``rounds`` rounds: [H, seed], by one compiled program."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        x, noise = params["x"], jax.random.uniform(key, (), minval=-1, maxval=1)
        return x**4 - 3 * x**3 + batch.x * x**2 + x + noise * x

    result = []
    task = fedrax.Task(init=lambda key: {"x": jnp.ones(())}, loss=loss)
    for h in HETEROGENEITY:
        a, y = np.array([h, -2 * h], np.float32), np.zeros(2, np.float32)
        federation = fedrax.Federation.from_arrays(a, y, offsets=np.arange(3), shuffle=False)
        roots = np.roots([4, -9, -h, 1])
        best = min(roots.real, key=lambda x, h=h: x**4 - 3 * x**3 - h / 2 * x**2 + x)
        ends = [
            fedrax.simulate(
                make_algorithm(method, options), task, federation, rounds=rounds, cohort_size=2, seed=seed, devices=1
            ).params["x"]
            for seed in range(SEEDS)
        ]
        result.append(np.abs(np.array(ends) - best))
    return np.array(result)


NOISY = {"lr": 0.01, "steps": 8, "batch_size": 1}


@pytest.mark.slow
def test_episode_converges_on_the_synthetic_pair():
    assert (distances("Episode", {"local": NOISY, "gamma": 0.05}, 30).max(1) < 0.03).all()


@pytest.mark.slow
def test_celgc_is_biased_on_the_synthetic_pair():
    far = distances("FedAvg", {"local": NOISY | {"clip": 0.05}}, 30).mean(1)
    np.testing.assert_allclose(far, [0.01, 0.08, 1.0, 1.9], rtol=0.25)
