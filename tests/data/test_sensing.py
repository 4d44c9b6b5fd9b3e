"""Matrix sensing: moments of its definition, and the outputs of its model."""

import jax
import numpy as np
import pytest

from fedrax import Federation, regression
from fedrax.data import Natural, load
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.models import TraceRegression
from fedrax.simulation import simulate


def test_moments_of_the_definition():
    dataset = load("matrix_sensing", dim=12, rank=3, clients=20, samples=50, test_samples=40, seed=1)
    assert dataset.train.x.shape == (1000, 12, 12) and dataset.train.x.dtype == np.float32
    assert len(dataset.test.y) == 40 and dataset.num_classes is None
    assert dataset.truth is not None
    np.testing.assert_array_equal(dataset.truth, np.diag([1] * 3 + [0] * 9))
    x, y = dataset.train
    assert x.mean() == pytest.approx(0.1, abs=0.01) and x.std() == pytest.approx(1, abs=0.01)
    noise = y - np.einsum("nij,ij->n", x, dataset.truth)
    assert noise.mean() == pytest.approx(0, abs=0.04) and noise.var() == pytest.approx(0.1, rel=0.2)
    federation = Federation.from_dataset(dataset, Natural(), 0)
    assert federation.sizes.tolist() == [50] * 20
    np.testing.assert_array_equal(federation.truth, dataset.truth)


def test_seeds_determine_the_data():
    one, again, other = (load("matrix_sensing", dim=3, rank=1, seed=s).train for s in (0, 0, 1))
    assert np.array_equal(one.x, again.x) and np.array_equal(one.y, again.y)
    assert not np.array_equal(one.x, other.x)


@pytest.mark.parametrize(
    "options", [{"rank": 0}, {"dim": 4, "rank": 5}, {"samples": 0}, {"noise": -0.1}, {"clients": 10**7}]
)
def test_impossible_options_are_rejected(options: dict):
    with pytest.raises(FedraxError):
        load("matrix_sensing", **options)


def test_metrics_rank_and_distance_from_the_truth():
    model = TraceRegression().build((6, 6), 1)
    truth = np.diag([1.0, 1.0, 0, 0, 0, 0])
    x = np.diag([1.0, 2.0, 0.5, 1.1e-3, 0.9e-3, 0.0]).astype(np.float32)
    task = regression(model, truth=truth)
    assert task.measures is not None
    found = task.measures({"matrix": x})
    assert int(found["rank"]) == 4
    assert float(found["frobenius_error"]) == pytest.approx(np.linalg.norm(x - truth))
    unknown = regression(model).measures
    assert unknown is not None and set(unknown({"matrix": x})) == {"rank"}
    samples = np.random.default_rng(0).normal(size=(5, 6, 6)).astype(np.float32)
    np.testing.assert_allclose(model.apply({"matrix": x}, samples), np.einsum("nij,ij->n", samples, x), rtol=1e-5)


def test_initializations():
    zero, drawn = (TraceRegression(deviation).build((30, 30), 1).init(jax.random.key(0)) for deviation in (0.0, 0.2))
    assert not np.any(zero["matrix"])
    assert np.std(drawn["matrix"]) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize(("shape", "outputs"), [((4,), 1), ((2, 3, 4), 1), ((3, 4), 2)])
def test_inputs_that_are_no_matrices_are_rejected(shape: tuple, outputs: int):
    with pytest.raises(FedraxError, match="has one output, not inputs"):
        TraceRegression().build(shape, outputs)


def nuclear_norm_minimum(x: np.ndarray, y: np.ndarray, weight: float) -> np.ndarray:
    """argmin of mean (<X, D> - y)^2 + weight |X|_* by accelerated proximal gradient descent in float64."""
    flat, d = x.reshape(len(x), -1).astype(np.float64), x.shape[1]
    step = 1 / (2 * np.linalg.norm(flat, 2) ** 2 / len(flat))
    now = ahead = np.zeros(d * d)
    for k in range(3000):
        u, s, vt = np.linalg.svd((ahead - step * 2 * flat.T @ (flat @ ahead - y) / len(flat)).reshape(d, d))
        new = ((u * np.maximum(s - step * weight, 0)) @ vt).ravel()
        now, ahead = new, new + k / (k + 3) * (new - now)
    return now.reshape(d, d)


def test_losac_prox_converges_to_the_minimum_with_the_exact_rank():
    """Clients have few samples each; the minimizer over all samples has the true rank."""
    table = {
        "data": {"name": "matrix_sensing", "dim": 6, "rank": 2, "clients": 8, "samples": 40, "test_samples": 0},
        "partition": {"name": "natural"},
        "model": {"name": "trace_regression"},
        "algorithm": {
            "name": "losac",
            "local": {"lr": 0.02, "steps": 5, "blocks": 4, "prox": {"name": "nuclear_norm", "weight": 0.5}},
        },
        "run": {"rounds": 400, "cohort_size": 4, "eval_every": 400, "devices": 1},
    }
    spec = experiment.from_table(table, "test")
    algorithm, task, federation = experiment.build(spec)
    result = simulate(algorithm, task, federation, spec.run)
    best = nuclear_norm_minimum(federation.train.x, federation.train.y, 0.5)
    np.testing.assert_allclose(result.params["matrix"], best, atol=1e-4)
    assert result.events[-1]["rank"] == 2
    assert federation.truth is not None
    assert result.events[-1]["frobenius_error"] == pytest.approx(np.linalg.norm(best - federation.truth), rel=1e-3)
