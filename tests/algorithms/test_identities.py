"""Methods that are equal under stated conditions."""

from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from tests import reference
from tests.algorithms.problems import (
    NUM_CLIENTS,
    Case,
    expected,
    make_algorithm,
    make_problem,
    simulate,
    state_of,
    vectors,
)
from tests.slow import slow_cases

LOCAL = {"lr": 0.1, "epochs": 2, "batch_size": 3}
FULL = {"lr": 0.1, "steps": 4, "batch_size": "full"}
FULL_PARTICIPATION = fedrax.simulation.Script(cohorts=[np.arange(NUM_CLIENTS)] * 3)


def run(method: str, options: dict, sizes: str = "uneven", **settings) -> np.ndarray:
    """Flat parameters after three rounds of full participation, in float64."""
    problem = make_problem("softmax", sizes)
    defaults = {"rounds": 3, "dtype": "float64", "devices": 1, "script": FULL_PARTICIPATION, "params": problem.params}
    result = fedrax.simulate(make_algorithm(method, options), problem.task, problem.federation, **(defaults | settings))
    return reference.join(problem.problem, result.params)


def assert_close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.fixture(scope="module")
def fedavg() -> np.ndarray:
    return run("FedAvg", {"local": LOCAL})


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("FedProx", {"local": LOCAL, "mu": 0.0}),
        ("FedAvg", {"local": LOCAL, "server_optimizer": ("SGD", {"momentum": 0.0})}),
        ("FedAvg", {"local": LOCAL | {"clip": 1e6}}),
        ("FedAvg", {"local": LOCAL | {"momentum": 0.0, "weight_decay": 0.0}}),
        ("FedAvg", {"local": LOCAL | {"prox": ("L1", {"weight": 0.0})}}),
        ("Upcycled", {"inner": ("FedAvg", {"local": LOCAL}), "a": 0.0}),
        ("MIFA", {"local": LOCAL}),
        ("MIFA", {"local": LOCAL, "memory": "server"}),
        ("GradMAS", {"local": LOCAL, "memory": 0, "beta1": 0.0}),
        ("FedCM", {"local": LOCAL, "alpha": 1.0}),
        ("MimeLite", {"local": LOCAL, "beta": 0.0}),
        ("PFedMe", {"local": LOCAL, "lam": 5.0, "inner_steps": 1, "inner_lr": 0.2, "restart": True}),
        ("QFedAvg", {"local": LOCAL, "q": 0.0}),
        ("FedBuff", {"local": LOCAL}),
        ("Ditto", {"inner": ("FedAvg", {"local": LOCAL}), "lam": 0.5}),
        ("Robust", {"inner": ("FedAvg", {"local": LOCAL}), "rule": ("TrimmedMean", {"trim": 0.0})}),
        ("Robust", {"inner": ("FedAvg", {"local": LOCAL}), "rule": ("NormBound", {"bound": 1e6})}),
        ("Robust", {"inner": ("FedAvg", {"local": LOCAL}), "rule": ("Krum", {"keep": NUM_CLIENTS})}),
        ("Attacked", {"inner": ("FedAvg", {"local": LOCAL}), "share": 0.0}),
    ],
    ids=[
        *("FedProx", "FedAvgM", "CELGC", "momentum and decay", "prox", "Upcycled", "MIFA", "MIFA server", "GradMAS"),
        *("FedCM", "MimeLite"),
        "PFedMe",  # with lambda inner_lr = 1, its single inner step from w makes lambda (w - theta) the gradient
        *("QFedAvg", "FedBuff", "Ditto", "trim 0", "large bound", "Krum keeps all", "no attacker"),
    ],
)
def test_methods_with_neutral_options_are_fedavg(method: str, options: dict, fedavg: np.ndarray):
    assert_close(run(method, options), fedavg)


def test_unclipped_episode_is_mimesvrg_on_full_batches():
    assert_close(run("Episode", {"local": FULL}), run("MimeSVRG", {"local": FULL}))


def test_mime_without_momentum_is_bitwise_mimesvrg():
    plain = run("MimeSVRG", {"local": LOCAL}, dtype="float32")
    np.testing.assert_array_equal(run("Mime", {"local": LOCAL, "beta": 0.0}, dtype="float32"), plain)


def test_fedcm_mime_and_mimelite_are_equal_with_one_full_batch_step():
    """m <- a grad f + (1 - a) m, x <- x - eta m: with T = 1 there is no client drift, in which the methods differ."""
    one = {"lr": 0.3, "steps": 1, "batch_size": "full"}
    fedcm = run("FedCM", {"local": one, "alpha": 0.4})
    x, m = make_problem("softmax").x0, 0.0
    clients = make_problem("softmax").clients(reference.Local())
    for _ in range(3):
        m = 0.4 * np.mean([client.full_gradient(x) for client in clients], axis=0) + 0.6 * m
        x = x - 0.3 * m
    assert_close(fedcm, x)
    for mime in ("Mime", "MimeLite"):
        assert_close(run(mime, {"local": one, "beta": 0.6}), x)


def test_server_steps_of_fedadmm_converge_to_its_exact_minimum():
    """Iterating Eq. 81 converges to the minimum of Eq. 82, which a step of 1 / (N rho) reaches at once."""
    exact = {"local": LOCAL, "rho": 2.0, "prox": ("NuclearNorm", {"weight": 0.1})}
    many = exact | {"server_steps": 100, "server_lr": 0.4 / (NUM_CLIENTS * 2.0)}
    ends = [run("FedADMM", options) for options in (exact, many)]
    assert_close(*ends)
    assert np.abs(ends[0] - make_problem("softmax").x0).max() > 1e-2


B = np.random.default_rng(5).normal(size=(4, 2)).astype(np.float32)
"""Minimizers of four clients."""


def admm_on_parabolas(curvature: float, steps: int, lr: float, rho: float) -> np.ndarray:
    """z after three rounds of full participation on curvature |x - b_i|^2 / 2, from zero."""
    task = fedrax.Task(
        init=lambda key: {"x": np.zeros(2, np.float32)},
        loss=lambda params, batch, key: curvature * ((params["x"] - batch.x) ** 2).sum(-1) / 2,
    )
    federation = fedrax.Federation.from_arrays(B, np.zeros(4, np.float32), offsets=np.arange(5), shuffle=False)
    method = make_algorithm("FedADMM", {"local": {"lr": lr, "steps": steps, "batch_size": "full"}, "rho": rho})
    settings = {"rounds": 3, "cohort_size": 4, "dtype": "float64", "devices": 1}
    return fedrax.simulate(method, task, federation, **settings).params["x"]


def test_fedadmm_with_one_step_is_exact_admm_if_the_curvature_is_one_over_eta():
    """Then the linearized step (Eq. 80) is the exact minimum (Eq. 77) of classical ADMM."""
    eta, rho = 0.5, 3.0
    z, dual = np.zeros(2), np.zeros((4, 2))
    for _ in range(3):
        x = (B / eta - dual + rho * z) / (1 / eta + rho)
        dual = dual + rho * (x - z)
        z = (dual + rho * x).mean(0) / rho
    assert_close(admm_on_parabolas(1 / eta, 1, eta, rho), z)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("lr", [0.2, 0.5])
def test_fedadmm_with_many_steps_and_large_rho_is_gradient_descent_with_lr_one_over_rho(lr: float):
    """The multiplier moves x_i back to z and becomes -g_i(z), for any local learning rate."""
    z, rho = np.zeros(2), 3.0
    for _ in range(3):
        z = z - 0.7 * (z - B).mean(0) / rho
    assert_close(admm_on_parabolas(0.7, 400, lr, rho), z)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("inner", ["FedAvg", "Scaffold"])
def test_upcycled_is_a_larger_server_learning_rate(inner: str):
    longer = {"local": LOCAL, "server_optimizer": ("SGD", {"lr": 1.4})}
    assert_close(run("Upcycled", {"inner": (inner, {"local": LOCAL}), "a": 0.4}), run(inner, longer))


NOVA: dict[str, tuple[dict, dict, str]] = {
    "plain": ({}, {}, "FedAvg"),
    "momentum": ({"momentum": 0.6}, {}, "FedAvg"),
    "proximal": ({}, {"mu": 0.8}, "FedProx"),
    "tiny mu": ({}, {"mu": 1e-9}, "FedAvg"),
    "server rule": ({}, {"server_optimizer": ("SGD", {"lr": 0.5, "momentum": 0.5})}, "FedAvg"),
}
NOVA_CASES = [(name, weights) for name in NOVA for weights in ("uniform", "samples")]
NOVA_IN_MAKE_TEST = {(name, ("uniform", "samples")[i % 2]) for i, name in enumerate(NOVA)}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("name", "weights"), slow_cases(NOVA_CASES, NOVA_IN_MAKE_TEST))
def test_fednova_with_equal_numbers_of_steps_is_averaging(name: str, weights: str):
    """With T_i = T, the normalization of each update and the factor of the mean cancel."""
    local, options, same = NOVA[name]
    local = {"lr": 0.1, "steps": 5, "batch_size": 3} | local
    plain = {name: value for name, value in options.items() if (name, same) != ("mu", "FedAvg")}
    actual, desired = (run(m, {"local": local} | o, weights=weights) for m, o in (("FedNova", options), (same, plain)))
    np.testing.assert_allclose(actual, desired, rtol=1e-8 if plain != options else 1e-11, atol=1e-13)


def test_fednova_differs_from_averaging_if_numbers_of_steps_differ():
    assert np.abs(run("FedNova", {"local": LOCAL}) - run("FedAvg", {"local": LOCAL})).max() > 1e-3


def test_fedsgd_is_fedavg_with_one_full_step():
    one = {"lr": 0.3, "steps": 1, "batch_size": "full"}
    fedsgd = {"local": one, "server_optimizer": ("SGD", {"lr": 0.3})}
    assert_close(run("FedSGD", fedsgd, weights="samples"), run("FedAvg", {"local": one}, weights="samples"))


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_gradmas_without_memory_is_fedavgm(weights: str):
    gradma = {"local": LOCAL, "memory": 0, "beta1": 0.6, "server_lr": 0.7}
    fedavgm = {"local": LOCAL, "server_optimizer": ("SGD", {"lr": 0.7, "momentum": 0.6})}
    assert_close(run("GradMAS", gradma, weights=weights), run("FedAvg", fedavgm, weights=weights))


def test_gradma_without_server_memory_and_momentum_is_gradmaw():
    assert_close(run("GradMA", {"local": LOCAL, "memory": 0, "beta1": 0.0}), run("GradMAW", {"local": LOCAL}))


@pytest.mark.slow
def test_gradmaw_with_one_local_step_is_fedavg():
    """x_0 = x_{-1} = x, and the gradient at x agrees with itself."""
    one = {"local": {"lr": 0.3, "steps": 1, "batch_size": 4}}
    assert_close(run("GradMAW", one), run("FedAvg", one))
    assert_close(run("GradMA", one), run("GradMAS", one))


def test_losac_readings_agree_for_one_block_and_full_participation():
    local = {"lr": 0.05, "steps": 3, "blocks": 1}
    assert_close(*(run("LoSAC", {"local": local, "reading": reading}) for reading in ("printed", "consistent")))


def test_clipped_step_of_celgc_has_length_gamma():
    local = {"lr": 0.1, "steps": 1, "clip": 1e-3}
    moved = run("FedAvg", {"local": local}, rounds=1, script=fedrax.simulation.Script(cohorts=[[4]]))
    np.testing.assert_allclose(np.linalg.norm(moved - make_problem().x0), 1e-3, rtol=1e-12)


ONE_STEP = {"lr": 0.3, "steps": 1, "batch_size": "full"}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("FedAvg", {"local": ONE_STEP}),
        ("Scaffold", {"local": ONE_STEP}),
        ("Scaffold", {"local": ONE_STEP, "option": "I"}),
        ("MimeSVRG", {"local": ONE_STEP}),
        ("Episode", {"local": ONE_STEP}),
        ("NaiveParallelClip", {"local": ONE_STEP}),
        ("FedSGD", {"local": ONE_STEP, "server_optimizer": ("SGD", {"lr": 0.3})}),
        ("MIFA", {"local": ONE_STEP}),
        ("FedNova", {"local": ONE_STEP}),
        ("GradMAW", {"local": ONE_STEP}),
        ("GradMAW", {"local": ONE_STEP, "previous": "local", "scope": "leaf"}),
        ("Scaffnew", {"local": {"lr": 0.3, "batch_size": "full"}, "p": 1.0}),
        ("FedSaga", {"local": {"lr": 0.3, "steps": 1, "blocks": 1}}),
        ("LoSAC", {"local": {"lr": 0.3, "steps": 1, "blocks": 1}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_client_with_one_full_step_is_gradient_descent(method: str, options: dict):
    problem = make_problem("softmax", (9,))
    settings = {"rounds": 3, "dtype": "float64", "devices": 1, "cohort_size": 1}
    algorithm = make_algorithm(method, options)
    result = fedrax.simulate(algorithm, problem.task, problem.federation, params=problem.params, **settings)
    client, x = problem.clients(reference.Local())[0], problem.x0
    for _ in range(3):
        x = x - 0.3 * client.full_gradient(x)
    assert_close(reference.join(problem.problem, result.params), x)


def test_scaffnew_with_one_step_per_round_is_gradient_descent():
    always = {"local": {"lr": 0.3, "batch_size": "full"}, "p": 1.0}
    assert_close(run("Scaffnew", always), run("FedAvg", {"local": ONE_STEP}))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("Scaffold", {"local": LOCAL}),
        ("Episode", {"local": FULL}),
        ("MimeSVRG", {"local": FULL}),
        ("FedExP", {"local": LOCAL}),
        ("Robust", {"inner": ("FedAvg", {"local": LOCAL}), "rule": ("Median", {})}),
    ],
    ids=["Scaffold", "Episode", "MimeSVRG", "FedExP", "median"],
)
def test_corrections_vanish_for_identical_clients(method: str, options: dict):
    local = options.get("local", LOCAL)
    base = make_problem("softmax", (8,))
    x, y = (np.tile(np.asarray(a), (4,) + (1,) * (a.ndim - 1)) for a in base.federation.train)
    federation = fedrax.Federation.from_arrays(x, y, offsets=np.arange(5) * 8, shuffle=False)
    settings = {"rounds": 3, "cohort_size": 4, "dtype": "float64", "devices": 1}
    ends = [
        fedrax.simulate(make_algorithm(m, o), base.task, federation, params=base.params, **settings).params
        for m, o in ((method, options), ("FedAvg", {"local": local}))
    ]
    assert_close(*(reference.join(base.problem, end) for end in ends))


# Server states after each round, with clients that never take part


def _states(case: Case) -> tuple[dict, list[dict]]:
    """Vectors of the server, and of each client, by name."""
    problem, result = make_problem("softmax", case.sizes).problem, simulate(case)
    return vectors(problem, result.server), [vectors(problem, result.client_state(i)) for i in range(NUM_CLIENTS)]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("Scaffold", {"local": LOCAL}),
        ("Scaffold", {"local": LOCAL | {"clip": 0.1, "momentum": 0.5}, "option": "II"}),
        ("Scaffold", {"local": LOCAL, "option": "I"}),
        ("Upcycled", {"inner": ("Scaffold", {"local": LOCAL}), "a": 0.4, "extrapolate": "both"}),
    ],
    ids=["II", "mean gradient", "I", "upcycled"],
)
def test_scaffold_server_control_is_the_mean_of_client_controls(method: str, options: dict, rounds: int):
    server, clients = _states(Case(method, options, rounds=rounds, varying_cohorts=True))
    mean = np.mean([client["control"] for client in clients], axis=0)
    assert np.abs(mean).max() > 1e-3
    assert_close(server["control"], mean)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("FedDyn", {"local": LOCAL, "alpha": 0.4}),
        ("FedDyn", {"local": LOCAL | {"clip": 0.1, "momentum": 0.5}, "alpha": 1.5}),
        ("Upcycled", {"inner": ("FedDyn", {"local": LOCAL, "alpha": 0.4}), "a": 0.4, "extrapolate": "both"}),
    ],
    ids=["plain", "momentum", "upcycled"],
)
def test_feddyn_server_dual_is_the_mean_of_client_duals(method: str, options: dict, rounds: int):
    """Both have the same sign: they move by -alpha (x_i - x)."""
    server, clients = _states(Case(method, options, rounds=rounds, varying_cohorts=True))
    mean = np.mean([client["dual"] for client in clients], axis=0)
    assert np.abs(mean).max() > 1e-3
    assert_close(server["dual"], mean)


def test_extrapolating_only_the_server_control_breaks_the_mean():
    case = Case("Upcycled", {"inner": ("Scaffold", {"local": LOCAL}), "a": 0.4, "extrapolate": "server"})
    server, clients = _states(case)
    assert np.abs(server["control"] - np.mean([c["control"] for c in clients], axis=0)).max() > 1e-3


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("rounds", [1, 4])
def test_mifa_steps_along_the_mean_of_the_memory(rounds: int):
    server, clients = _states(Case("MIFA", {"local": LOCAL}, rounds=rounds, varying_cohorts=True))
    assert_close(server["mean"], np.mean([client[""] for client in clients], axis=0))
    kept, _ = _states(Case("MIFA", {"local": LOCAL, "memory": "server"}, rounds=rounds, varying_cohorts=True))
    assert_close(server["mean"], kept["mean"])
    assert_close(kept["mean"], kept["memory"].mean(0))


def test_fedadmm_server_sum_includes_clients_that_never_took_part():
    """The sum is over all N clients; one that never took part adds rho z, from x_i = z and pi_i = 0."""
    server, clients = _states(Case("FedADMM", {"local": LOCAL, "rho": 2.0}, varying_cohorts=True))
    assert_close(server["total"], sum(client["dual"] + 2.0 * client["model"] for client in clients))
    assert_close(clients[6]["model"], make_problem("softmax").x0)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losac_phi_is_the_sum_of_all_delayed_gradients(reduction: str, rounds: int):
    """phi = sum_i sum_j grad f_ij(z_ij), with z_ij where block j of client i was last used, for any cohort size S."""
    local = {"lr": 0.01, "steps": 5, "blocks": 3, "reduction": reduction}
    case = Case("LoSAC", {"local": local, "reading": "consistent"}, rounds=rounds, varying_cohorts=True)
    server, clients = _states(case)
    assert_close(server["gradient_sum"], sum(client["block_gradients"].sum(0) / 3 for client in clients))
    assert np.abs(server["gradient_sum"]).max() > 1e-2


def test_fedsaga_phi_is_the_sum_of_the_client_delayed_gradients():
    _, clients = _states(Case("FedSaga", {"local": {"lr": 0.05, "steps": 5, "blocks": 3}}))
    for client in clients:
        assert_close(client["gradient_sum"], client["block_gradients"].sum(0) / 3)


def test_client_that_never_took_part_has_its_initial_state():
    result = simulate(Case("Scaffold", {"local": LOCAL}))
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(result.client_state(6)))
    assert len(state_of(result)[1]) == NUM_CLIENTS


def test_gradients_of_the_numpy_reference_are_difference_quotients():
    """The gradients of the reference, written by hand, are those of its losses."""
    for kind in ("softmax", "quadratic"):
        problem = make_problem(kind)
        client, h = problem.clients(reference.Local())[2], 1e-6
        f = lambda x, c=client: c.problem.losses(x, c.a, c.b).mean()  # noqa: E731
        slopes = [(f(problem.x0 + h * e) - f(problem.x0 - h * e)) / (2 * h) for e in np.eye(len(problem.x0))]
        np.testing.assert_allclose(client.full_gradient(problem.x0), slopes, atol=1e-8)
    assert np.isfinite(expected(Case("FedAvg", {"local": LOCAL})).x).all()


def test_scaffold_with_learning_rate_zero_changes_nothing():
    """Rounds with a learning rate of zero leave x and every control variate unchanged."""
    local = LOCAL | {"schedule": ("CosineDecay", {"rounds": 2, "final": 0.0})}
    short, long = (simulate(Case("Scaffold", {"local": local}, rounds=rounds)) for rounds in (2, 4))
    jax.tree.map(assert_close, state_of(long), state_of(short))
