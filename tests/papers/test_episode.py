"""Figure 3 of the EPISODE paper: the task against NumPy, and the command on fewer seeds."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fedrax import Batch, FedraxError
from fedrax.contract.task import objective
from fedrax.data import load
from fedrax.models import Polynomial
from papers.episode import __main__ as episode


@pytest.mark.parametrize("heterogeneity", [1, 8])
def test_the_pair_is_the_papers_with_noise_of_mean_zero(heterogeneity: int) -> None:
    data = load("quartic_pair", heterogeneity=heterogeneity, samples=50)
    task = objective(Polynomial().build((4,), 1))
    x, h = 1.3, heterogeneity
    want = [x**4 - 3 * x**3 + h * x**2 + x, x**4 - 3 * x**3 - 2 * h * x**2 + x]
    key = jax.random.key(0)
    at = {"x": np.float32(x)}
    np.testing.assert_allclose(task.loss(at, Batch(*data.test), key), want, rtol=1e-5)
    of_client = np.asarray(task.loss(at, Batch(*data.train), key)).reshape(2, 50)
    np.testing.assert_allclose(of_client.mean(1), want, rtol=1e-5)
    gradients = jax.vmap(jax.grad(lambda x, s: task.loss({"x": x}, Batch(s[None], s[:1]), key)[0]), (None, 0))
    noise = np.asarray(gradients(x, data.train.x)).reshape(2, 50) - [
        [4 * x**3 - 9 * x**2 + c * h * x + 1] for c in (2, -4)
    ]
    np.testing.assert_allclose(np.sort(noise[0]), (2 * np.arange(50) + 1) / 50 - 1, atol=1e-4)
    assert data.truth is not None
    line = np.linspace(-2, 6, 80_001)
    assert abs(line[episode.objective(h, line).argmin()] - data.truth[0]) < 1e-3


def test_impossible_pairs_are_refused() -> None:
    for options in ({"heterogeneity": -1}, {"heterogeneity": float("nan")}, {"samples": 0}):
        with pytest.raises(FedraxError):
            load("quartic_pair", **options)
    with pytest.raises(FedraxError, match="coefficients"):
        Polynomial().build((4, 2), 1)


def test_episode_arrives_and_celgc_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "HETEROGENEITY", (8,))
    command = ["episode", "fig3", "--seeds", "5", "--rounds", "60", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert episode.main() == 0
    rows = [line.split("|") for line in (tmp_path / "fig3.md").read_text().splitlines() if line.startswith("| 8 ")]
    apart = {row[3].strip(): [float(cell.split("±")[0]) for cell in row[4:6]] for row in rows}
    assert max(apart["EPISODE"]) < 0.03
    assert 1.5 < apart["CELGC"][1] < 2.3
    assert (tmp_path / "fig3.png").stat().st_size > 10_000
