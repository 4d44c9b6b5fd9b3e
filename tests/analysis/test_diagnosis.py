"""Measured constants of problems whose constants are known in closed form."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrax
from fedrax import Federation, FedraxError, LocalSGD, Settings, Task, classification, cli, simulate
from fedrax.analysis import diagnose, gradient_dissimilarity, rendering
from fedrax.analysis.dissimilarity import ClientProbe, describe_dissimilarity
from fedrax.analysis.smoothness import curvature
from fedrax.data import Shards, load
from fedrax.models import LeNet5, Linear, Logistic
from fedrax.simulation.setup import prepare


def problem(loss: Callable, numbers: Any, start: Any) -> tuple[Task, Federation]:
    """A federation with a list of numbers for each client, and a task with the loss (x, number) -> scalar."""
    values = np.concatenate([np.asarray(own, np.float32).reshape(len(own), -1) for own in numbers])
    owner = np.repeat(np.arange(len(numbers)), [len(own) for own in numbers])
    federation = Federation.from_arrays(values, np.zeros(len(values), np.float32), owner)

    def losses(params: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(lambda row: loss(params["x"], row))(batch.x)

    return Task(lambda key: {"x": jnp.asarray(start, jnp.float32)}, losses), federation


def squares(x: Any, b: Any) -> Any:
    """|x - b|^2 / 2."""
    return 0.5 * jnp.sum((x - b) ** 2)


RUN: dict[str, Any] = {"rounds": 16, "cohort_size": 2, "eval_every": 16}


def test_constants_of_two_parabolas():
    """f_i = (x -+ c)^2 / 2: the larger of both |grad f_i| is |grad f| + c, for any x."""
    task, federation = problem(squares, [[3.0], [-3.0]], [8.0])
    diagnosis = diagnose(task, federation, Settings(**RUN), LocalSGD(lr=0.1, steps=2, batch_size="full"))
    assert diagnosis.kappa == pytest.approx(3, rel=1e-3) and diagnosis.rho == pytest.approx(1, rel=1e-3)
    assert (diagnosis.l0, diagnosis.l1) == pytest.approx((1, 0), abs=1e-3)
    assert diagnosis.noise == 0
    x = 8 * (1 - 0.1) ** (2 * 16)  # with full participation the run is gradient descent on f
    assert diagnosis.points[-1].gradient == pytest.approx(x, rel=1e-3)
    assert diagnosis.points[-1].gradient_spread == pytest.approx(3, rel=1e-3)
    assert diagnosis.dissimilarity == pytest.approx(np.sqrt(1 + 9 / x**2), rel=1e-3)
    assert diagnosis.points[0].drift == pytest.approx(3 * (1 - 0.9**2), rel=1e-3)
    assert diagnosis.points[0].update == pytest.approx(8 * (1 - 0.9**2), rel=1e-3)


@pytest.mark.parametrize(("weights", "reduction"), [("samples", "mean"), ("uniform", "sum"), ("samples", "sum")])
def test_constants_are_those_of_the_weighted_objective(weights: Any, reduction: Any):
    """f = sum_i p_i f_i with p_i by the weights of the settings and f_i a mean or a sum of h_i |x - b|^2 / 2 over rows
    b.
    """
    rng, sizes = np.random.default_rng(3), np.array([2, 10, 40])
    rows = [np.c_[np.full(n, h), rng.normal(h, 1.0, (n, 2))] for n, h in zip(sizes, (1.0, 2.0, 0.5), strict=True)]
    task, federation = problem(lambda x, r: 0.5 * r[0] * jnp.sum((x - r[1:]) ** 2), rows, [4.0, -1.0])
    local = LocalSGD(lr=1e-3, steps=2, batch_size="full", reduction=reduction)
    diagnosis = diagnose(task, federation, Settings(**RUN, weights=weights), local)
    p = sizes / sizes.sum() if weights == "samples" else np.full(3, 1 / 3)
    scale = sizes if reduction == "sum" else np.ones(3)
    bent, centers = scale * [1.0, 2.0, 0.5], np.array([own[:, 1:].mean(0) for own in rows])
    gradients = bent[:, None] * ([4.0, -1.0] - centers)
    mean, start = p @ gradients, diagnosis.points[0]
    spread = (scale * [1.0, 2.0, 0.5]) ** 2 * [own[:, 1:].var(0).sum() for own in rows]
    updates = (1 - (1 - 1e-3 * bent[:, None]) ** 2) / bent[:, None] * gradients
    assert start.gradient == pytest.approx(np.linalg.norm(mean), rel=1e-4)
    assert start.dissimilarity == pytest.approx(np.sqrt(p @ (gradients**2).sum(1) / (mean @ mean)), rel=1e-4)
    assert start.gradient_spread == pytest.approx(np.sqrt(p @ ((gradients - mean) ** 2).sum(1)), rel=1e-4)
    assert start.noise == pytest.approx(np.sqrt(p @ spread), rel=1e-4)
    assert start.curvature == pytest.approx(p @ bent, rel=1e-4)
    assert start.update == pytest.approx(np.linalg.norm(p @ updates), rel=1e-3)
    assert start.drift == pytest.approx(np.sqrt(p @ ((updates - p @ updates) ** 2).sum(1)), rel=1e-3)
    of_epochs = dataclasses.replace(local, steps=None, epochs=1, batch_size=1, lr=1e-6)
    assert ClientProbe(task, federation, 0, p * 3).drift({"x": jnp.ones(2)}, of_epochs, 0).steps == pytest.approx(
        p @ sizes
    )
    few = curvature(task, federation, 3000, shares=p * scale)({"x": jnp.ones(2)})
    assert few == pytest.approx(p @ bent, rel=1e-4)
    assert curvature(task, federation, 51, shares=p * scale)({"x": jnp.ones(2)}) == pytest.approx(p @ bent, rel=0.5)


def test_probe_and_run_use_disjoint_random_keys():
    """jax.random.split and fold_in produce the same keys, so that the probe must not start from the key of the run."""
    task, federation = problem(squares, [[3.0], [-3.0]], [8.0])
    run = prepare(fedrax.FedAvg(), task, federation, Settings(seed=3, cohort_size=2)).key

    def below(key: Any, *counts: int) -> set[tuple[int, ...]]:
        keys = [key]
        for count in counts:
            keys = [own for one in keys for own in jax.random.split(one, count)]
        return {tuple(jax.random.key_data(own).tolist()) for own in keys}

    assert not below(ClientProbe(task, federation, 3).key, 4, 2, 2) & (below(run, 4) | below(run, 4, 2))


def test_constants_of_clients_with_different_curvatures():
    """f_i = s_i x^2 / 2: |grad f_i| = (s_i / mean s) |grad f|."""
    task, federation = problem(lambda x, s: 0.5 * s[0] * jnp.sum(x**2), [[1.0], [2.0], [6.0]], [5.0])
    diagnosis = diagnose(task, federation, Settings(**RUN), LocalSGD(lr=0.02, steps=1, batch_size="full"))
    assert diagnosis.kappa == pytest.approx(0, abs=1e-3) and diagnosis.rho == pytest.approx(2, rel=1e-3)
    assert diagnosis.dissimilarity == pytest.approx(np.sqrt((1 + 4 + 36) / 3) / 3, rel=1e-3)


def test_l0_and_l1_of_an_exponential():
    """f = exp(a x): f'' = a f'."""
    task, federation = problem(lambda x, a: jnp.exp(a[0] * jnp.sum(x)), [[1.5], [1.5]], [1.5])
    diagnosis = diagnose(task, federation, Settings(**RUN), LocalSGD(lr=0.05, steps=1, batch_size="full"))
    assert diagnosis.l1 == pytest.approx(1.5, rel=0.01) and diagnosis.l0 == pytest.approx(0, abs=0.05)
    assert diagnosis.growth > 0.9


def test_noise_of_single_samples_is_their_standard_deviation():
    """On |x - b|^2 / 2 the gradient of a sample is x - b: the noise is the deviation of the client's b, for any x."""
    rng = np.random.default_rng(0)
    numbers = [rng.normal(scale=scale, size=(n, 3)) for n, scale in ((5, 1.0), (40, 2.0), (70, 0.5))]
    task, federation = problem(squares, numbers, np.zeros(3))
    clients = ClientProbe(task, federation)
    sigma = np.sqrt(np.mean([own.var(axis=0).sum() for own in numbers]))
    every = np.full((3, 70), -1)
    for i, (low, size) in enumerate(zip(federation.offsets[:-1], federation.sizes, strict=True)):
        every[i, :size] = low + np.arange(size)
    noise = lambda rows: float(np.sqrt(clients.variances({"x": jnp.ones(3)}, rows).mean()))  # noqa: E731
    assert noise(every) == pytest.approx(sigma, rel=1e-5)
    some = lambda: np.stack([rng.choice(own[own >= 0], 4, replace=False) for own in every])  # noqa: E731
    few = [noise(some()) for _ in range(200)]
    assert np.mean(np.square(few)) == pytest.approx(sigma**2, rel=0.1)


@pytest.mark.parametrize(
    "local",
    [
        LocalSGD(batch_size="full"),
        LocalSGD(batch_size=10),
        LocalSGD(batch_size=8, order="stored", steps=2),
        LocalSGD(batch_size=4, order="replacement"),
        LocalSGD(batch_size=50),
        LocalSGD(blocks=2, steps=3),
        LocalSGD(blocks=7, steps=3),
    ],
    ids=["full", "shuffle", "two steps", "replacement", "larger than the client", "two blocks", "seven blocks"],
)
def test_noise_of_batches_agrees_with_numpy(local: LocalSGD):
    """Batches drawn in NumPy: a batch of all samples has no noise, one of most samples little."""
    rng = np.random.default_rng(2)
    numbers = [rng.normal(1.0, scale, size=(n, 2)) for n, scale in ((10, 1.0), (12, 2.0), (25, 0.5))]
    task, federation = problem(squares, numbers, np.full(2, 3.0))
    diagnosis = diagnose(task, federation, Settings(**RUN | {"rounds": 1}), dataclasses.replace(local, lr=1e-6)).points[
        0
    ]
    expected = np.mean([mean_squared_error(local, own - 3.0, rng) for own in numbers])
    assert diagnosis.batch_noise == pytest.approx(np.sqrt(expected), rel=0.03, abs=1e-6)


def mean_squared_error(local: LocalSGD, gradients: np.ndarray, rng: np.random.Generator) -> float:
    """Mean squared distance of a batch's gradient from the mean gradient, over random orders of the samples."""
    n, errors = len(gradients), []
    for _ in range(2000):
        rows = rng.permutation(n)
        if local.blocks is not None:
            cuts = np.arange(local.blocks + 1) * n // local.blocks
            of = [rows[a:b] for a, b in itertools.pairwise(cuts)]
            estimates = [gradients[part].sum(0) * local.blocks / n for part in of]
        elif local.batch_size == "full":
            estimates = [gradients.mean(0)]
        elif local.order == "replacement":
            estimates = [gradients[rng.integers(0, n, local.batch_size)].mean(0)]
        else:
            of = [rows[a : a + local.batch_size] for a in range(0, n, local.batch_size)]
            estimates = [gradients[part].mean(0) for part in of[: local.steps]]
        errors.append(np.mean([np.sum((e - gradients.mean(0)) ** 2) for e in estimates]))
    return float(np.mean(errors))


def test_spread_of_equal_large_gradients_is_zero():
    """In float32."""
    numbers = [[[1000.0, 0.0]] * 70, [[1000.0, 0.02]] * 70]
    task, federation = problem(squares, numbers, np.zeros(2))
    diagnosis = diagnose(task, federation, Settings(**RUN | {"rounds": 1}), LocalSGD(lr=1e-3, steps=1)).points[0]
    assert diagnosis.gradient_spread == pytest.approx(0.01, rel=0.02) and diagnosis.noise < 1e-3
    assert diagnosis.drift == pytest.approx(1e-5, rel=0.05)


def test_many_named_clients():
    x, owner = np.random.default_rng(0).normal(size=(600, 3)).astype(np.float32), np.repeat(np.arange(300), 2)
    federation = Federation.from_arrays(x, (x[:, 0] > 0).astype(int), [f"site {i}" for i in owner])
    task = fedrax.classification(Linear().build((3,), 2))
    diagnosis = diagnose(task, federation, Settings(rounds=1, cohort_size=4), LocalSGD(lr=0.1, steps=1))
    assert (diagnosis.clients, diagnosis.measured) == (300, 256)
    few = dataclasses.replace(diagnosis, clients=100_000)
    assert (
        "of 256 of 100000 clients differs by about" in "".join(rendering.lines(few, "linear"))
        and few.sampling_error > diagnosis.sampling_error
    )


def test_large_gradients_are_measured_and_overflow_raises_a_clear_error():
    task, federation = problem(lambda x, b: 0.5e15 * jnp.sum((x - b) ** 2), [[3.0], [-3.0]], [8.0])
    steps = LocalSGD(lr=1e-17, steps=1, batch_size="full")
    diagnosis = diagnose(task, federation, Settings(**RUN), steps)
    assert diagnosis.kappa == pytest.approx(3e15, rel=1e-3) and diagnosis.rho == pytest.approx(1, rel=1e-3)
    task, federation = problem(lambda x, b: 0.5 * jnp.sum((x - b) ** 2), [[3.0], [-3.0]], [8.0])
    with pytest.raises(FedraxError, match="after 0 rounds: the local steps diverge, try a smaller"):
        diagnose(task, federation, Settings(**RUN | {"rounds": 1}), LocalSGD(lr=1e36, steps=1, batch_size="full"))


def test_norm_of_the_hessian():
    """A quadratic form of known eigenvalues, over clients of different sizes."""
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=(n, 6)) for n in (3, 8, 20)]
    task, federation = problem(lambda x, a: 0.5 * jnp.dot(a, x) ** 2, rows, np.zeros(6))
    hessian = np.mean([own.T @ own / len(own) for own in rows], axis=0)
    expected = np.linalg.eigvalsh(hessian)[-1]
    assert curvature(task, federation, 1000)({"x": jnp.ones(6)}) == pytest.approx(expected, rel=1e-3)


def test_norm_of_the_hessian_with_close_eigenvalues():
    """Eigenvalues 1, many at 0.8, and -0.9."""
    scales = np.full(20_000, 0.8, np.float32)
    scales[7], scales[9] = 1.0, -0.9
    task, federation = problem(
        lambda x, a: 0.5 * jnp.dot(jnp.asarray(scales), x**2) + 0 * a[0], [[1.0]], np.ones(20_000)
    )
    assert curvature(task, federation, 1000)({"x": jnp.ones(20_000)}) == pytest.approx(1, rel=1e-3)


def test_models_with_running_statistics_are_rejected():
    linear = fedrax.classification(Linear().build((2,), 2))
    moving = dataclasses.replace(linear, loss_and_statistics=lambda v, b, k: (jnp.zeros(1), 0))
    federation = Federation.from_arrays(np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]))
    with pytest.raises(FedraxError, match="running statistics"):
        gradient_dissimilarity(moving, federation)


@pytest.mark.slow
def test_diagnose_command_prints_the_constants(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--partition", "shards", "--partition.clients", "5", "--model", "logistic", "--run.rounds", "2"]
    flags += ["--run.cohort-size", "3"]
    steps = ["--algorithm.local.steps", "2", "--algorithm.local.lr", "0.1"]
    assert cli.main(["diagnose", *flags, *steps, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [point["round"] for point in printed["points"]] == [0, 1, 2]
    assert all((tmp_path / f"diagnosis.{ending}").exists() for ending in ("png", "svg"))
    assert cli.main(["diagnose", *flags, *steps, "--picture", "None"]) == 0
    shown = capsys.readouterr().out
    assert f"along the run B is {printed['dissimilarity']:.3g} at most" in shown and "picture" not in shown


DIGITS = load("digits")
FEDERATION = Federation.from_dataset(DIGITS, Shards(10, 2), seed=0)
TASK = classification(Logistic().build(DIGITS.train.x.shape[1:], 10))
SHORT: dict[str, Any] = {"rounds": 4, "cohort_size": 3}


def identical_clients(x: Any, y: Any, clients: int) -> Federation:
    """Clients with the same samples."""
    times, offsets = (clients, *[1] * (np.ndim(x) - 1)), np.arange(clients + 1) * len(y)
    return Federation.from_arrays(np.tile(x, times), np.tile(y, clients), offsets=offsets, shuffle=False)


def test_drift_at_a_learning_rate_that_decays_to_zero():
    """At the last point the local steps of the last round are repeated; the next learning rate would be zero."""
    local = LocalSGD(lr=0.1, steps=2, batch_size=10, schedule=optax.cosine_decay_schedule(1.0, 4))
    diagnosis = diagnose(TASK, FEDERATION, Settings(**SHORT), local)
    assert [point.round for point in diagnosis.points] == [0, 1, 2, 4]
    assert diagnosis.points[-1].update > 0 and np.isfinite(diagnosis.drift)


def test_noise_of_batches_is_not_counted_as_drift():
    """Clients with the same samples move apart by the noise of batches of five only."""
    federation = identical_clients(DIGITS.train.x[:100], DIGITS.train.y[:100], 20)
    local = LocalSGD(lr=0.1, steps=10, batch_size=5)
    diagnosis = diagnose(TASK, federation, Settings(**SHORT), local)
    assert diagnosis.gradient_spread < 1e-5 and diagnosis.noise > 1
    assert diagnosis.drift < 0.3
    far = diagnose(TASK, FEDERATION, Settings(**SHORT), local)
    assert far.drift > 0.8


def test_drift_is_that_of_expected_updates():
    """f_i = |x - b|^2 / 2 with b of mean m_i: local steps from zero end at m_i (1 - (1 - eta)^T) on average."""
    rng = np.random.default_rng(0)
    centers = np.array([[0.5, 0.0], [0.5, 1.0], [0.5, -1.0], [0.5, 0.0]])
    numbers = np.concatenate([rng.permutation(np.linspace(-4, 4, 200))[:, None] + c for c in centers])
    federation = Federation.from_arrays(numbers.astype(np.float32), np.zeros(800, np.float32), np.arange(800) // 200)

    def losses(params: Any, batch: Any, key: Any) -> Any:
        return 0.5 * jnp.sum((params["x"] - batch.x) ** 2, axis=1)

    task = Task(lambda key: {"x": jnp.zeros(2)}, losses)
    local, shrink = LocalSGD(lr=0.1, steps=5, batch_size=2), 1 - 0.9**5
    points = [
        diagnose(task, federation, Settings(rounds=1, cohort_size=4, seed=seed), local).points[0] for seed in range(12)
    ]
    assert np.mean([p.drift**2 for p in points]) == pytest.approx(0.5 * shrink**2, rel=0.5)
    assert np.mean([p.update**2 for p in points]) == pytest.approx(0.25 * shrink**2, rel=0.5)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.0, "equal gradients: 1): the distance of a client's gradient from the mean gradient is 0 times"),
        (1.04, "0.29 times the norm of the mean, small (below 0.3): FedAvg is hard to beat"),
        (1.05, "0.32 times the norm of the mean, large (0.3 or more): compare methods that correct client drift"),
        (np.inf, "is infinite for the untrained model mlp"),
    ],
)
def test_dissimilarity_is_explained(value: float, words: str):
    assert words in describe_dissimilarity(value, "mlp")


def test_dropout_does_not_increase_dissimilarity():
    x, y = np.random.default_rng(0).normal(size=(20, 16, 16)).astype(np.float32), np.arange(20) % 10
    federation, task = identical_clients(x, y, 8), classification(LeNet5(norm="none").build((16, 16), 10))
    assert gradient_dissimilarity(task, federation) == pytest.approx(1, abs=1e-4)


def test_points_with_zero_gradient_are_skipped():
    """A hinge loss is flat as soon as all margins are wide enough; earlier points are measured."""

    def losses(params: Any, batch: Any, key: Any) -> Any:
        return jax.nn.relu(1 - batch.y * (batch.x @ params["w"]))

    task = Task(lambda key: {"w": jnp.zeros(2)}, losses)
    x = np.array([[2.0, 0.0], [-2.0, 0.0], [2.0, 1.0], [-2.0, 1.0]], np.float32)
    federation = Federation.from_arrays(x, np.sign(x[:, 0]), np.array([0, 0, 1, 1]))
    diagnosis = diagnose(
        task, federation, Settings(rounds=8, cohort_size=2), LocalSGD(lr=1.0, steps=1, batch_size="full")
    )
    assert [point.round for point in diagnosis.points] == [0] and diagnosis.skipped_rounds == (1, 2, 4, 8)
    assert "skipped        the mean gradient is zero up to rounding after rounds 1, 2, 4, 8" in rendering.lines(
        diagnosis, "linear"
    )
    assert np.isfinite(json.loads(json.dumps(diagnosis.to_dict()))["drift"])
    flat = Task(lambda key: {"w": jnp.ones(2)}, lambda params, batch, key: 0 * batch.x @ params["w"])
    with pytest.raises(FedraxError, match="zero in all measured rounds"):
        diagnose(flat, federation, Settings(rounds=1, cohort_size=2), LocalSGD(lr=1.0, steps=1, batch_size="full"))


def parabolas(centers: Any, start: float, noise: float = 0.0) -> tuple[Task, Federation]:
    """f_i = (x - c_i)^2 / 2, the mean over samples at c_i - ``noise`` and c_i + ``noise``."""
    numbers = np.array([[c + side * noise] for c in centers for side in (-1, 1)], np.float32)
    federation = Federation.from_arrays(numbers, np.zeros(len(numbers), np.float32), np.arange(len(numbers)) // 2)
    loss = lambda params, batch, key: 0.5 * jnp.sum((params["x"] - batch.x) ** 2, axis=1)  # noqa: E731
    return Task(lambda key: {"x": jnp.full(1, start)}, loss), federation


def test_gradients_that_cancel_up_to_rounding_are_zero():
    """At (c_1 + c_2 + c_3) / 3 the mean gradient is a rounding error, which would give a dissimilarity of a million."""
    task, federation = parabolas((0.1, 0.7, -3.3), 5.0)
    local = LocalSGD(lr=0.5, steps=1, batch_size="full")
    diagnosis = diagnose(task, federation, Settings(rounds=64, cohort_size=3), local)
    assert {32, 64} <= set(diagnosis.skipped_rounds) and diagnosis.dissimilarity < 1e6


def test_drift_is_undefined_for_updates_below_the_noise():
    """Batches of one sample move each client by about 100, and the mean update is 1e-3."""
    task, federation = parabolas((1.0, -1.0), 1e-3, noise=100.0)
    local, made = LocalSGD(lr=0.1, steps=1, batch_size=1), []
    for seed in range(6):
        made.append(diagnose(task, federation, Settings(rounds=1, cohort_size=2, seed=seed), local))
    lost = [one for one in made if any(point.update == 0 < point.drift for point in one.points)]
    assert lost and all(not np.isfinite(one.drift) for one in lost)
    assert json.loads(json.dumps(lost[0].to_dict(), allow_nan=False))["drift"] is None
    assert "smaller than the noise of mini-batches" in "".join(rendering.lines(lost[0], "linear"))


def test_constants_that_cannot_be_separated_are_reported():
    task, federation = parabolas((3.0, -3.0), 8.0)
    local = LocalSGD(lr=1e-4, steps=1, batch_size="full")
    text = "".join(rendering.lines(diagnose(task, federation, Settings(rounds=4, cohort_size=2), local), "linear"))
    assert "differ too little to separate" in text and "vary too little to relate curvature" in text


def test_slightly_growing_curvature_is_reported_as_growing():
    """f = x^2 / 2 + x^3 / 30 for x from 4 down: f'' grows by a third of its maximum."""
    federation = Federation.from_arrays(np.zeros((2, 1), np.float32), np.zeros(2, np.float32), np.arange(2))
    loss = lambda params, batch, key: (params["x"] ** 2 / 2 + params["x"] ** 3 / 30)[0] + 0 * batch.y  # noqa: E731
    task = Task(lambda key: {"x": jnp.full(1, 4.0)}, loss)
    local = LocalSGD(lr=0.2, steps=1, batch_size="full")
    diagnosis = diagnose(task, federation, Settings(rounds=16, cohort_size=2), local)
    assert 0.1 < diagnosis.growth < 0.5
    assert "of the largest curvature grows with the gradient" in "".join(rendering.lines(diagnosis, "linear"))


def test_float64_runs_are_measured_in_float64():
    """Gradients of 1e8 that differ by one, which float32 does not resolve."""

    def losses(params: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(lambda row: (1e8 + row[0].astype(params["x"].dtype)) * params["x"].sum())(batch.x)

    task = Task(lambda key: {"x": jnp.zeros(1)}, losses)
    federation = Federation.from_arrays(np.array([[0.0], [1.0]], np.float32), np.zeros(2, np.float32), np.arange(2))
    settings = Settings(rounds=1, cohort_size=2, dtype="float64")
    diagnosis = diagnose(task, federation, settings, LocalSGD(lr=1e-9, steps=1, batch_size="full"))
    assert diagnosis.points[0].gradient_spread == pytest.approx(0.5, rel=1e-6)


def test_float16_parameters_are_measured_in_the_precision_of_the_run():
    def losses(params: Any, batch: Any, key: Any) -> Any:
        return 0.5 * (300 * params["x"].astype(jnp.float32) - batch.x[:, 0]) ** 2

    task = Task(lambda key: {"x": jnp.ones((), jnp.float16)}, losses)
    federation = Federation.from_arrays(np.array([[0.0], [30.0]], np.float32), np.zeros(2, np.float32), np.arange(2))
    local = LocalSGD(lr=1e-7, steps=1, batch_size="full")
    for dtype in ("float32", "float64"):
        diagnosis = diagnose(task, federation, Settings(rounds=1, cohort_size=2, dtype=dtype), local)
        assert diagnosis.points[0].gradient_spread == pytest.approx(300 * 15, rel=1e-6)
    assert gradient_dissimilarity(task, federation) == pytest.approx(np.hypot(1, 15 / 285), rel=1e-5)


def test_trajectory_contains_parameters_at_the_measured_rounds_only(monkeypatch: pytest.MonkeyPatch):
    """Parameters of all rounds would not fit into memory for large models."""
    kept = []

    def record_trajectory(*arguments: Any, **options: Any) -> Any:
        result = simulate(*arguments, **options)
        kept.append(len(result.trajectory))
        return result

    monkeypatch.setattr(sys.modules["fedrax.analysis.diagnosis"], "simulate", record_trajectory)
    diagnosis = diagnose(TASK, FEDERATION, Settings(rounds=100, cohort_size=1), LocalSGD(lr=0.01, steps=1))
    assert [point.round for point in diagnosis.points] == [0, 1, 2, 4, 8, 16, 32, 64, 100] and kept == [8]
