"""Figure 3 of the EPISODE paper: the task against NumPy, and the command on fewer seeds."""

import sys
from pathlib import Path

import jax
import numpy as np
import polars as pl
import pytest
import tomlkit

from fedrax import FedraxError, files
from fedrax.contract import Batch
from fedrax.contract.task import objective
from fedrax.data import load
from fedrax.experiments import comparison
from fedrax.models import Polynomial
from papers.episode import __main__ as episode

HERE = Path(episode.__file__).parent


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


def test_impossible_pairs_are_rejected() -> None:
    with pytest.raises(FedraxError, match="0 or more"):
        load("quartic_pair", heterogeneity=-1)
    with pytest.raises(FedraxError, match="heterogeneity must be a finite number"):
        load("quartic_pair", heterogeneity=float("nan"))
    with pytest.raises(FedraxError, match="samples"):
        load("quartic_pair", samples=0)
    with pytest.raises(FedraxError, match="coefficients"):
        Polynomial().build((4, 2), 1)


@pytest.mark.slow
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


@pytest.mark.slow
def test_similarity_runs_a_file_at_each_similarity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snli").mkdir()
    for part in ("dev", "test"):
        columns = {"sentence1": ["a b", "c", "b"] * 8, "sentence2": ["b", "a", "c c"] * 8}
        labels = {"label": ["entailment", "neutral", "contradiction"] * 8}
        pl.DataFrame(columns | labels).write_parquet(tmp_path / "snli" / f"{part}.parquet")
    table = files.read_toml(HERE / "snli_small.toml")
    table["compare"] = table["compare"][1:]
    table["data"]["length"] = 3
    table["model"] |= {"hidden": 2, "classifier": 2, "embedding": 2}
    (tmp_path / "snli_small.toml").write_text(tomlkit.dumps(table))
    monkeypatch.setattr(episode, "HERE", tmp_path)
    monkeypatch.setattr(episode, "SIMILARITY", (10,))
    command = ["episode", "snli", "--small", "--rounds", "1", "--data-dir", str(tmp_path)]
    command += ["--out", str(tmp_path / "runs"), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert episode.main() == 0
    text = (tmp_path / "snli_small.md").read_text()
    assert "| 10 | CELGC | 73.3 | " in text
    assert "One seed only (0)" in text
    assert "`python -m papers.episode snli --small --rounds 1`" in text
    assert (tmp_path / "snli_small-s10.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["fig3", "snli", "snli_small", "cifar10", "cifar10_small"])
def test_the_experiment_files_are_sound(name: str) -> None:
    spec = comparison.read([HERE / f"{name}.toml"])
    spec.check()
    for method in spec.methods:
        local = method.algorithm.local  # type: ignore[attr-defined]
        assert local.steps == (4 if "snli" in name else 8)
        clip = getattr(method.algorithm, "gamma", None) or local.clip
        if clip is not None:
            assert clip / local.lr == pytest.approx({"fig3": 5, "cifar10": 0.5, "cifar10_small": 0.5}.get(name, 1))
