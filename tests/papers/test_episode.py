"""The commands of the EPISODE paper: tasks against NumPy, and small runs."""

import itertools
import json
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
from fedrax.data import Dataset, as_samples, load
from fedrax.experiments import comparison
from fedrax.models import Polynomial
from papers.episode import __main__ as episode
from papers.episode import synthetic, text, tweets
from papers.episode.runs import Kept
from papers.episode.silos import UserSilos

HERE = Path(episode.__file__).parent


@pytest.mark.parametrize("heterogeneity", [1, 8])
def test_pair_is_that_of_the_paper_with_zero_mean_noise(heterogeneity: int) -> None:
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
def test_figure3_shows_that_episode_converges_and_celgc_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_similarity_command_runs_the_file_at_each_similarity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(episode, "SIMILARITY", {"snli_small": (10,)})
    command = ["episode", "snli", "--small", "--rounds", "1", "--data-dir", str(tmp_path)]
    command += ["--out", str(tmp_path / "runs"), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert episode.main() == 0
    text = (tmp_path / "snli_small.md").read_text()
    assert "| 10 | CELGC | 73.3 | " in text
    assert "One seed only (0)" in text
    assert "`python -m papers.episode snli --small --rounds 1`" in text
    assert (tmp_path / "snli_small-s10.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["fig3", "snli", "snli_small", "cifar10", "cifar10_small", "cifar10_resnet20"])
def test_experiment_files_are_valid(name: str) -> None:
    spec = comparison.read([HERE / f"{name}.toml"])
    spec.check()
    for method in spec.methods:
        local = method.algorithm.local  # type: ignore[attr-defined]
        assert local.steps == (4 if "snli" in name else 8)
        clip = getattr(method.algorithm, "gamma", None) or local.clip
        if clip is not None:
            assert clip / local.lr == pytest.approx({"fig": 5, "cif": 0.5}.get(name[:3], 1))


def test_silos_contain_whole_users_sorted_by_their_share_of_positives() -> None:
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(40), rng.integers(1, 6, 40))
    y = (rng.random(len(users)) < (users % 10) / 10).astype(np.int32)
    samples = as_samples(np.zeros((len(users), 3), np.int32), y)
    dataset = Dataset("made", samples, samples, 2, train_clients=users)
    for percent in (0.0, 50.0, 100.0):
        indices, offsets = UserSilos(8, percent).assign(dataset, 1)
        silos = [users[part] for part in np.split(indices, offsets[1:-1])]
        assert sorted(indices) == list(range(len(users)))
        assert sum(len(np.unique(silo)) for silo in silos) == 40  # no user is in two silos
        assert [len(np.unique(silo)) for silo in silos] == [5] * 8
    indices, offsets = UserSilos(8, 0.0).assign(dataset, 1)
    share = np.bincount(users, y) / np.bincount(users)
    means = [share[np.unique(users[part])] for part in np.split(indices, offsets[1:-1])]
    assert all(before.max() <= after.min() for before, after in itertools.pairwise(means))
    with pytest.raises(FedraxError, match="no users"):
        UserSilos().assign(Dataset("made", samples, samples, 2), 0)


def write_text_files(folder: Path) -> None:
    """Write a few sentence pairs, tweets and word vectors."""
    for name in ("snli", "sent140", "glove"):
        (folder / name).mkdir()
    for part in ("dev", "test"):
        columns = {"sentence1": ["a b", "c", "b"] * 32, "sentence2": ["b", "a", "c c"] * 32}
        labels = {"label": ["entailment", "neutral", "contradiction"] * 32}
        pl.DataFrame(columns | labels).write_parquet(folder / "snli" / f"{part}.parquet")
    tweets = {"user": [f"u{i // 6}" for i in range(96)], "text": ["a b", "b"] * 48, "label": [0, 1] * 48}
    pl.DataFrame(tweets).write_parquet(folder / "sent140" / "leaf_k30_by_user.parquet")
    (folder / "glove" / "glove.6B.50d.subset.txt").write_text("a 1 0\nb 0 1\nc 1 1\n")


def test_table3_stores_its_runs_and_simulates_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text_files(tmp_path)
    table = files.read_toml(HERE / "table3.toml")
    table["data"]["length"] = 3
    table["model"] |= {"hidden": 2, "classifier": 2}
    printed = (HERE / "table3_printed.csv").read_text().splitlines()
    (tmp_path / "table3.toml").write_text(tomlkit.dumps(table))
    (tmp_path / "table3_printed.csv").write_text("\n".join(printed[:4]))
    (tmp_path / "table2_printed.csv").write_text((HERE / "table2_printed.csv").read_text())
    monkeypatch.setattr(text, "HERE", tmp_path)
    command = ["episode", "table3", "--rounds", "2", "--seeds", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--data-dir", str(tmp_path)])
    assert episode.main() == 0
    lines = [json.loads(line) for line in (tmp_path / "table3.jsonl").read_text().splitlines()]
    assert [(line["setting"], line["method"]) for line in lines] == [
        ("I = 1, s = 100 %", "NaiveParallelClip"),
        ("I = 2, s = 30 %", "CELGC"),
        ("I = 2, s = 30 %", "EPISODE"),
    ]
    assert lines[2]["megabytes"] == pytest.approx(2 * lines[1]["megabytes"], rel=0.05)
    shown = (tmp_path / "table3.md").read_text()
    assert "| 2 | 30 | EPISODE | 0.361 | " in shown and " | 82.3 | " in shown
    assert "| 1 | 100 | NaiveParallelClip | 37.30 | " in (tmp_path / "table2.md").read_text()
    record = {"rounds": [10, 20], "megabytes": 16.0}
    seconds = text.seconds_of({"method": "EPISODE", "I": "4"}, record, 0.5)
    np.testing.assert_allclose(seconds, np.array([10, 20]) * (5 * 0.5 + 8 * 1e5 / 1e9 + 2e-3))
    before = (tmp_path / "table3.jsonl").read_text()
    assert episode.main() == 0
    assert (tmp_path / "table3.jsonl").read_text() == before  # stored, not run again
    monkeypatch.setattr(sys, "argv", [*command, "--data-dir", str(tmp_path), "--rounds", "3"])
    assert episode.main() == 1


def test_tuning_names_the_best_points_by_accuracy_and_by_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(HERE / "table3.toml", tmp_path / "tuning.jsonl", None, None, text.VALIDATION)
    lines = []
    for gamma, threshold, accuracy, loss in ((0.01, 1.0, 0.40, 0.9), (0.1, 0.1, 0.35, 0.5), (0.1, 10.0, 0.35, 0.8)):
        record = {"setting": f"gamma = {gamma:g}, gamma / eta = {threshold:g}", "method": "CELGC", "seed": 0}
        record |= {"test_accuracy": [0.9, accuracy], "test_loss": [0.1, loss], "clipped": 12.0, "diverged": False}
        record |= {"experiment": kept._digest(text.grid_changes(gamma, threshold), "CELGC", 0)}
        lines.append(json.dumps(record | {"processor": "this one", "date": "2026-01-01"}) + "\n")
    kept.kept.write_text("".join(lines))
    monkeypatch.setattr(sys, "argv", ["episode", "tuning", "--only-write", "--results", str(tmp_path)])
    assert episode.main() == 0
    shown = (tmp_path / "tuning.md").read_text()
    assert "as the rule says: gamma = 0.01, gamma / eta = 1; by loss: gamma = 0.1, gamma / eta = 0.1." in shown
    assert "| 0.1 | 10 | 0.01 | 35.00 | 0.8000 | 12 |" in shown and shown.count("| 12 |") == 3


@pytest.mark.slow
def test_tweets_run_at_each_similarity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text_files(tmp_path)
    table = files.read_toml(HERE / "sent140.toml")
    table["data"] |= {"length": 3, "min_count": 1}
    table["model"] |= {"hidden": 2}
    (tmp_path / "sent140.toml").write_text(tomlkit.dumps(table))
    (tmp_path / "silos.py").write_text((HERE / "silos.py").read_text())
    monkeypatch.setattr(tweets, "HERE", tmp_path)
    command = ["episode", "sent140", "--rounds", "2", "--seeds", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--data-dir", str(tmp_path)])
    assert episode.main() == 0
    shown = (tmp_path / "sent140.md").read_text()
    assert "| 20 | NaiveParallelClip | " in shown and "| 0 | EPISODE | " in shown


@pytest.mark.parametrize("what", ["points", "speedup", "proposition1"])
def test_commands_on_polynomials(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "HETEROGENEITY", (8,))
    monkeypatch.setattr(synthetic, "CLIENTS", (2, 4))
    monkeypatch.setattr(synthetic, "NOISES", (1.0,))
    monkeypatch.setattr(synthetic, "RATES", (0.01,))
    command = ["episode", what, "--rounds", "60", "--seeds", "2", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert episode.main() == 0
    rows = [line.split(" | ") for line in (tmp_path / f"{what}.md").read_text().splitlines() if line.startswith("| ")]
    if what == "points":
        apart = {row[1]: float(row[5]) for row in rows[1:]}  # eta = 0.01, gamma / eta = 5, as in Figure 3
        assert apart["EPISODE"] < 0.05 < 1.5 < apart["CELGC"]
    if what == "speedup":
        assert [row[1] for row in rows[1:]] == ["2", "4"]
    if what == "proposition1":
        assert [row[-1] for row in rows[1:]] == ["yes |"] * 6
