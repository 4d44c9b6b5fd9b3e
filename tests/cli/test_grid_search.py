"""Hyper-parameters chosen on validation data, and methods compared at their best settings."""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedrax import FedraxError, tree
from fedrax.data import Federation, hold_out, load
from fedrax.data.partition import Shards
from fedrax.experiments import comparison, experiment, jobs, user_code
from fedrax.experiments.run_comparison import compare
from fedrax.experiments.search import trials
from fedrax.models import MLP
from fedrax.report.report_data import gather
from fedrax.report.search_plots import varied_paths
from fedrax.simulation import simulate
from fedrax.simulation.persistence.model_file import save_model
from tests.cli.conftest import TINY, Outcome

DIGITS = Federation.from_dataset(load("digits"), Shards(clients=4), seed=0)
GRID = (
    "seeds = [0, 1]\ngrid = { algorithm.local.lr = [0.01, 0.3] }\n"
    + TINY.replace("rounds = 4", "rounds = 2").replace('name = "fedavg"\n', "")
    + """
[[compare]]
name = "fedavg"
[[compare]]
name = "losac"
label = "LoSAC"
local = { blocks = 2 }
grid = { algorithm.local.lr = [0.3], algorithm.local.blocks = [2, 3] }
run = { rounds = 3 }
"""
)


ONE_PROGRAM = (
    GRID[: GRID.index("[[compare]]")]
    + """
[[compare]]
name = "fedavg"
[[compare]]
name = "fedavg"
label = "other"
grid = { algorithm.local.lr = [0.3, 0.1] }
"""
)
"""The same numbers of methods and points, which differ in float fields only."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "g.toml"
    path.write_text(GRID)
    return path


@pytest.fixture
def one_program_file(tmp_path: Path) -> Path:
    path = tmp_path / "q.toml"
    path.write_text(ONE_PROGRAM)
    return path


@pytest.mark.slow
def test_methods_are_compared_at_their_best_points(fedrax: Callable[..., Outcome], file: Path, tmp_path: Path) -> None:
    """The search equals separate simulations on the held-out rows, the table equals runs on all rows."""
    outcome = fedrax("compare", file, "--out", "c")
    assert outcome.status == 0, outcome.err
    made = json.loads((tmp_path / "c/comparison.json").read_text())
    assert made["search"]["validation"] == 0.2 and made["search"]["seeds"] == [0]
    spec = comparison.read([file])
    _, task, federation = experiment.build(spec.methods[0])
    held = hold_out(federation, 0.2)
    for method in spec.methods:
        found = made["search"]["methods"][method.name]
        by_hand = [
            simulate(at.algorithm, task, held, at.run).metric("test_accuracy")[-1][1]
            for _, at in spec.candidates[method.name]
        ]
        assert [trial["value"] for trial in found["trials"]] == pytest.approx(by_hand, abs=0.004)  # one row of 288
        best = found["trials"][by_hand.index(max(by_hand))]["point"]
        assert found["best"] == best
        row = next(row for row in made["methods"] if row["label"] == method.name)
        settings = next(at for point, at in spec.candidates[method.name] if point == best)
        final = simulate(settings.algorithm, task, federation, settings.run, seed=1).metric("test_accuracy")[-1][1]
        on_disk = comparison.saved_methods(
            spec, tmp_path / "c", {k: v["best"] for k, v in made["search"]["methods"].items()}
        )
        mine = next(one for one in on_disk if one.label == method.name)
        assert mine.runs[1].events[-1]["test_accuracy"] == pytest.approx(final, abs=0.003)
        assert row["seeds"] == 2
    assert "local.lr 0.3" in outcome.out and "run.rounds 3" in (tmp_path / "c/table.md").read_text()
    assert "the best local.lr" in outcome.out  # of two values, one is always at an end of the grid
    assert "20 % of each client's training rows" in outcome.out
    assert (tmp_path / "c/grid.png").read_bytes().startswith(b"\x89PNG")
    shown = json.loads(fedrax("show", "c", "--json").out)  # trials on validation data are not runs of the comparison
    assert sorted(row["label"] for row in shown["methods"]) == ["LoSAC", "fedavg"]


def test_test_metrics_are_not_shown_while_a_grid_should_be_extended(
    fedrax: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Otherwise the user who extends it chooses its values by the test data."""
    two = TINY.replace("rounds = 4", "rounds = 2").replace('name = "fedavg"\n', "")
    two += '[[compare]]\nname = "fedavg"\n[[compare]]\nname = "scaffold"\ngrid = { algorithm.local.lr = [0.1] }\n'
    (tmp_path / "t.toml").write_text("seeds = [0]\ngrid = { algorithm.local.lr = [0.0001, 0.001] }\n" + two)
    searching = fedrax("compare", "t.toml", "--out", "c")
    assert searching.status == 0, searching.err
    made = json.loads((tmp_path / "c/comparison.json").read_text())
    values = [f"local.lr {t['point']['algorithm.local.lr']:g}: {t['value']:.4g}" for t in
              made["search"]["methods"]["fedavg"]["trials"]]  # fmt: skip
    assert all(value in searching.out for value in values) and "fedrax show c" in searching.out
    tested = [f"{row['accuracy']['mean']:.4f}" for row in made["methods"]]
    assert not any(value in searching.out + searching.err for value in tested) and "test accuracy" not in searching.err
    shown = fedrax("show", "c")
    assert all(value in shown.out for value in tested) and "the smallest of its grid" in shown.out
    assert "the smallest of its grid" in fedrax("show", "c", "--csv").err
    assert "different numbers of trials (fedavg 2, scaffold 1)" in searching.out
    for form, begins in (("markdown", "| method"), ("latex", "\\begin"), ("csv", "method,")):
        printed = fedrax("compare", "t.toml", "--out", "c", f"--{form}")
        assert printed.out.startswith(begins) and "different numbers of trials" not in printed.out
        assert "different numbers of trials" in printed.err and "the smallest of its grid" in printed.err
    assert any("different numbers of trials" in line for line in made["search"]["lines"])
    found = compare(tmp_path / "t.toml", directory=tmp_path / "c", progress=False)
    assert tested[0] not in repr(found) and tested[0] in found.to_markdown() and "```" in found._repr_markdown_()
    fedrax("report", "c")
    assert "different numbers of trials" in (tmp_path / "c/report.html").read_text()
    settled = fedrax(
        "compare",
        "t.toml",
        "--out",
        "d",
        "--run.rounds",
        20,
        "--run.cohort-size",
        8,
        "--grid",
        "algorithm.local.lr=1e-9,0.1,3e38",
    )
    assert settled.status == 0 and "at an end of its grid" not in settled.out, settled.err
    assert "test accuracy" in settled.err and "different numbers" not in settled.out


@pytest.mark.slow
def test_interrupted_grid_search_keeps_finished_trials(
    fedrax: Callable[..., Outcome], one_program_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only missing trials are run, and a larger grid runs only its new points."""
    seen: list[tuple[bool, int]] = []
    run = jobs.simulate

    def counting_simulate(*args: object, **options: object) -> object:
        seen.append((len(args[2].test.y) == 288, args[3].seed))  # type: ignore[attr-defined]
        if len(seen) == 4:
            raise KeyboardInterrupt
        return run(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "simulate", counting_simulate)
    monkeypatch.setattr("fedrax.experiments.search.trials.should_vectorize", lambda *_: False)
    assert fedrax("compare", one_program_file, "--out", "c").status == 130
    assert [validation for validation, _ in seen] == [True] * 4
    assert fedrax("compare", one_program_file, "--out", "c", "--quiet").status == 0
    assert [validation for validation, _ in seen[4:]] == [True] + [False] * 4
    del seen[:]
    larger = ("--grid", "algorithm.local.lr=0.01,0.3,1e30", "--grid", "algorithm.local.weight-decay=1.0,none")
    monkeypatch.setattr(jobs, "simulate", run)
    (tmp_path / "one.toml").write_text("seeds = [0]\n" + TINY.replace("rounds = 4", "rounds = 2"))
    assert fedrax("compare", "one.toml", *larger, "--out", "d", "--json").status == 0
    choice = json.loads((tmp_path / "d/comparison.json").read_text())["search"]["methods"]["fedavg"]
    assert len(choice["trials"]) == 6
    lost = [
        trial
        for trial in choice["trials"]
        if trial["point"] == {"algorithm.local.lr": 1e30, "algorithm.local.weight_decay": 1.0}
    ]
    assert lost[0]["value"] is None and choice["best"]["algorithm.local.lr"] < 1e30


@pytest.mark.slow
def test_grid_flags_apply_to_all_methods(
    fedrax: Callable[..., Outcome], one_program_file: Path, tmp_path: Path
) -> None:
    flags = ("--grid", "algorithm.local.weight-decay=none,0.5", "--algorithm.local.lr", "0.2", "--run.rounds", 1)
    assert fedrax("compare", one_program_file, *flags, "--seeds", 0, "--out", "c", "--quiet").status == 0
    runs = [experiment.read(path) for path in (tmp_path / "c").rglob("experiment.toml")]
    assert len(runs) == 6
    assert {(run.algorithm.local.lr, run.run.rounds) for run in runs} == {(0.2, 1)}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--grid", "algorithm.local.lr"], "write PATH=VALUE"),
        (["--grid", "algorithm.lcal.lr=1,2"], "unknown key 'lcal'; did you mean 'local'"),
        (["--grid", "algorithm.local.lr=0.1,-1"], "lr must be greater than 0"),
        (["--grid", "algorithm.local.lr=0.1,fast"], "must be"),
        (["--grid", "algorithm.local.lr=0.1,0.1"], "duplicate value"),
        (["--grid", "partition.clients=1,2"], "partition.clients cannot vary: a grid has settings of algorithm, run,"),
        (["--grid", "run.seed=1,2"], "set seeds instead"),
        (["--grid", "run.cohort_size=2,500"], r"\(run.cohort_size 500\): cannot sample 500 clients"),
        (["--grid", "algorithm.server_optimizer.momentum.x=1"], "must be a number"),
        (["--grid", "algorithm.local.batch_size.x=1"], "has no settings"),
        (["--grid", "algorithm.local.prox.weight=1"], "'name' is missing"),
        (["--grid", "run.rounds=" + ",".join(map(str, range(1, 1002)))], "too large"),
        (["--validation", "1.5"], "less than 1|must be"),
        (["--validation", "0.001"], "too few to hold"),
        (["--metric", "acuracy"], "did you mean 'accuracy'"),
        (["--algorithm.local.lrr", "1"], "unknown key 'lrr'"),
    ],
)
def test_malformed_grids_are_rejected(
    fedrax: Callable[..., Outcome], file: Path, tmp_path: Path, flags: list, words: str
) -> None:
    outcome = fedrax("compare", file, *flags, "--out", "c", "--quiet")
    assert outcome.status == 2 and len(outcome.err.splitlines()) == 1
    assert re.search(words, outcome.err), outcome.err
    assert not (tmp_path / "c").exists()


def test_grid_search_in_python(one_program_file: Path, tmp_path: Path) -> None:
    comparison_result = compare(
        one_program_file, grid={"algorithm.local.lr": (0.01, 0.3)}, seeds=[0], directory=tmp_path / "c", target=0.11
    )
    assert comparison_result.target == 0.11 and not comparison_result.diverged
    for choice in comparison_result.search_results.values():
        assert [dict(trial.point) for trial in choice.trials] == [{"algorithm.local.lr": lr} for lr in (0.01, 0.3)]
        assert choice.best.value == max(trial.value or 0 for trial in choice.trials)
    assert "| fedavg |" in comparison_result.to_markdown() and all(
        math.isfinite(row.loss.mean) for row in comparison_result.rows if row.loss
    )


def test_progress_counts_new_points(fedrax: Callable[..., Outcome], one_program_file: Path) -> None:
    rates = lambda *values: ("--grid", f"algorithm.local.lr={','.join(values)}")  # noqa: E731
    compare_with = lambda *values: fedrax("compare", one_program_file.name, "--seeds", "0", *rates(*values))  # noqa: E731
    first, second = compare_with("0.1", "0.3"), compare_with("0.1", "0.3", "0.2")
    assert "2 points of its grid in one program\n" in first.err + first.out, first
    assert "3 points of its grid in one program, 1 of them new\n" in second.err + second.out, second


def test_methods_without_personal_models_are_judged_by_the_global_model(tmp_path: Path) -> None:
    """Of clients with test rows of their own, which ``client_test`` holds out of the training rows."""
    text = TINY.replace("rounds = 4", "rounds = 1").replace('name = "tiny"', 'name = "tiny"\nclient_test = 0.3', 1)
    search = 'seeds = [0]\nsearch = { metric = "personal_accuracy", validation = 0.3 }\n'
    methods = '[[compare]]\nname = "fedavg"\n[[compare]]\nname = "ditto"\n'
    grid = "grid = { algorithm.local.lr = [0.1, 0.3] }\n"
    (tmp_path / "p.toml").write_text(search + grid + text + methods)
    result = compare(tmp_path / "p.toml", directory=tmp_path / "c")
    assert {label: found.metric for label, found in result.search_results.items()} == {
        "fedavg": "accuracy",
        "ditto": "personal_accuracy",
    }
    assert "fedavg: validation accuracy" in repr(result)
    rows = {row.label: row for row in result.rows}
    assert "test_personal_accuracy" in rows["ditto"].others and "test_personal_accuracy" not in rows["fedavg"].others


def test_grid_of_one_point_is_not_searched(one_program_file: Path, tmp_path: Path) -> None:
    """Methods run with the point, and a later search of other methods keeps these runs."""
    grid = {"algorithm.local.lr": [0.3], "algorithm.local.weight_decay": [0.5]}
    alone = compare(one_program_file, grid=grid, seeds=[0], directory=tmp_path / "c")
    assert not alone.search_results and not (tmp_path / "c/search").exists()
    assert [picture.name for picture in alone.pictures] == ["curves.png"] and not (tmp_path / "c/grid.png").exists()
    assert {method.settings for method in alone.methods} == {"local.lr 0.3, local.weight_decay 0.5"}
    local = alone.methods[0].runs[0].table["algorithm"]["local"]
    assert (local["lr"], local["weight_decay"]) == (0.3, 0.5)
    assert "local.lr 0.3" in repr(alone.comparison)

    first, second = alone.comparison.methods
    wider = comparison.grid.from_table(grid | {"algorithm.local.lr": [0.3, 0.1]}, "the grid")
    spec = dataclasses.replace(alone.comparison, grids={**alone.comparison.grids, second.name: wider})
    both = compare(spec, directory=tmp_path / "c")
    assert list(both.search_results) == [second.name] and not (tmp_path / "c/search" / first.name).exists()
    assert varied_paths(both.search_results) == ["algorithm.local.lr"]
    assert both.methods[0].runs[0].events == alone.methods[0].runs[0].events  # of the finished run, including durations


def test_methods_are_shown_once_after_a_second_search(
    fedrax: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings chosen last; earlier runs are kept beside them."""
    monkeypatch.setattr("fedrax.experiments.search.trials.should_vectorize", lambda *_: False)
    iid_text = TINY.replace('"shards"', '"iid"').replace("rounds = 4", "rounds = 1")
    (tmp_path / "w.toml").write_text(iid_text + '[[compare]]\nlabel = "mine"\n')
    for values in ("1e-12", "1e-12,0.1"):
        flags = ("--grid", f"algorithm.local.lr={values}", "--metric", "loss", "--seeds", 0)
        outcome = fedrax("compare", "w.toml", *flags, "--out", "c", "--quiet")
        assert outcome.status == 0, outcome.err
    made = json.loads((tmp_path / "c/comparison.json").read_text())
    assert made["search"]["methods"]["mine"]["best"] == {"algorithm.local.lr": 0.1}
    assert len(list((tmp_path / "c/mine").glob("*/seed-0"))) == 2
    (row,), (shown,) = made["methods"], json.loads(fedrax("show", "c", "--json").out)["methods"]
    assert shown["label"] == row["label"] == "mine" and shown["loss"] == row["loss"]
    (method,) = gather([tmp_path / "c"]).methods
    assert (method.label, method.settings, len(method.runs)) == ("mine", "local.lr 0.1", 1)


@pytest.mark.slow
def test_search_is_not_continued_on_changed_data(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    """The trials, vectorized in one program, have no checkpoints that could be compared."""
    data = ["a,b,label", *(f"{i % 7},{i % 5},{i % 2}" for i in range(60))]
    (tmp_path / "d.csv").write_text("\n".join(data))
    (tmp_path / "s.toml").write_text(
        'data = { name = "csv", path = "d.csv" }\nmodel = "logistic"\nseeds = [0]\n'
        'partition = { name = "iid", clients = 3 }\nrun = { rounds = 2, cohort_size = 2 }\n'
        'algorithm = { name = "fedavg" }\ngrid = { algorithm.local.lr = [0.01, 0.1, 0.3] }\n'
    )
    assert fedrax("compare", tmp_path / "s.toml", "--out", "c").status == 0
    for kept in ("comparison.json", *(p.name for p in (tmp_path / "c").iterdir() if p.is_dir() and p.name != "search")):
        found = tmp_path / "c" / kept
        shutil.rmtree(found) if found.is_dir() else found.unlink()  # as if interrupted after the search
    (tmp_path / "d.csv").write_text("\n".join([*data[:-1], "9,9,1"]))
    outcome = fedrax("compare", tmp_path / "s.toml", "--out", "c")
    assert outcome.status != 0 and "holds the runs of a search, and its data differ" in outcome.err


OWN = """
import jax.numpy as jnp
from fedrax.models import Model

def model(input_shape, num_outputs):
    def apply(params, x, key=None):
        return jnp.{function}(x.reshape(len(x), -1) @ params["w"])
    return Model(lambda key: {{"w": jnp.ones((64, num_outputs))}}, apply)
"""


@pytest.mark.slow
def test_search_is_not_continued_with_a_changed_program(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        "seeds = [0]\ngrid = { algorithm.local.lr = [0.01, 0.1] }\n"
        + TINY.replace('"logistic"', '"own.py:model"').replace("rounds = 4", "rounds = 1")
    )

    def compared(code: str) -> Outcome:
        (tmp_path / "own.py").write_text(code)
        user_code._executed_files.clear()  # as in a new process
        shutil.rmtree(tmp_path / "c/fedavg", ignore_errors=True)  # as if interrupted after the search
        return fedrax("compare", "s.toml", "--out", "c", "--quiet")

    assert compared(OWN.format(function="tanh")).status == 0
    assert compared("# other words\n" + OWN.format(function="tanh")).status == 0
    (tmp_path / "s.toml").write_text((tmp_path / "s.toml").read_text().replace("[0.01, 0.1]", "[0.001, 0.01, 0.1]"))
    assert compared(OWN.format(function="tanh")).status == 0
    rejected = compared(OWN.format(function="sin"))
    assert rejected.status == 2 and "and the program of fedavg differs" in rejected.err
    (tmp_path / "c/search/.rows.json").unlink()
    assert (
        "holds the runs of a search, and it was written by another version" in compared(OWN.format(function="sin")).err
    )


@pytest.mark.slow
def test_interrupted_vectorized_trials_are_repeated_together(
    fedrax: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while the last trial is written; all are repeated, because a single one would differ by rounding."""
    (tmp_path / "s.toml").write_text(
        "seeds = [0]\ngrid = { algorithm.local.lr = [0.01, 0.1] }\n" + TINY.replace("rounds = 4", "rounds = 1")
    )
    last, kept = tmp_path / "c/search/fedavg/local.lr=0.1/seed-0", trials.EventFile

    def interrupt_last_write(directory: Path, events: list) -> Any:
        if directory == Path("c/search/fedavg/local.lr=0.1/seed-0"):
            raise KeyboardInterrupt
        return kept(directory, events)

    monkeypatch.setattr(trials, "EventFile", interrupt_last_write)
    assert fedrax("compare", "s.toml", "--out", "c", "--quiet").status == 130
    assert last.exists()
    monkeypatch.setattr(trials, "EventFile", kept)
    assert fedrax("compare", "s.toml", "--out", "c", "--quiet").status == 0
    assert len(json.loads((tmp_path / "c/comparison.json").read_text())["search"]["methods"]["fedavg"]["trials"]) == 2
    shutil.rmtree(tmp_path / "c")
    last.mkdir(parents=True)
    (tmp_path / "away").mkdir()
    (last / "failure").symlink_to(tmp_path / "away")
    outcome = fedrax("compare", "s.toml", "--out", "c", "--quiet")
    assert outcome.status == 2 and "is a symbolic link" in outcome.err
    for place in ("search", "search/fedavg", "search/fedavg/local.lr=0.1/seed-0", "fedavg", "fedavg/local.lr=0.1"):
        shutil.rmtree(tmp_path / "c")
        (tmp_path / "c" / place).parent.mkdir(parents=True)
        (tmp_path / "c" / place).symlink_to(tmp_path / "away")
        outcome = fedrax("compare", "s.toml", "--out", "c", "--quiet")
        assert outcome.status == 2 and f"{Path('c') / place} is a link, which runs do not create" in outcome.err
        assert not list((tmp_path / "away").iterdir())


FINETUNED = (
    "seeds = [0]\ngrid = { finetuning.rank = [1, 3], algorithm.local.lr = [0.05, 0.3] }\n"
    + TINY.replace("rounds = 4", "rounds = 2")
    .replace('"logistic"', '"mlp"\nhidden = [6]')
    .replace('name = "fedavg"\n', "")
    + """
[finetuning]
name = "lora"
weights = "base/model.safetensors"
trainable = ["output/*"]
[[compare]]
name = "fedavg"
label = "LoRA"
[[compare]]
name = "fedavg"
label = "B-alone"
finetuning = { train_a = false }
grid = { finetuning.rank = [2] }
[[compare]]
name = "fedavg"
label = "all"
finetuning = "none"
grid = { model.hidden = [[4], [6]] }
"""
)


@pytest.mark.slow
def test_grids_and_methods_vary_the_model_and_the_fine_tuning(
    fedrax: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points with other ranks have other tasks; runs are those of their own experiment files, and are not repeated."""
    pretraining = TINY.replace('"logistic"', '"mlp"\nhidden = [6]').replace("rounds = 4", "rounds = 1")
    (tmp_path / "base.toml").write_text(pretraining)
    assert fedrax("run", "base.toml", "--out", "base").status == 0
    (tmp_path / "f.toml").write_text(FINETUNED)
    first = fedrax("compare", "f.toml", "--out", "c")
    assert first.status == 0, first.err
    searched = json.loads((tmp_path / "c/comparison.json").read_text())["search"]["methods"]
    points = [trial["point"] for trial in searched["LoRA"]["trials"]]
    assert points == [{"finetuning.rank": rank, "algorithm.local.lr": lr} for rank in (1, 3) for lr in (0.05, 0.3)]
    assert [trial["point"] for trial in searched["all"]["trials"]] == [{"model.hidden": [4]}, {"model.hidden": [6]}]
    uploads: dict[str, list[int]] = {}
    for path in sorted(tmp_path.glob("c/**/seed-0/experiment.toml")):
        spec = experiment.read(path, "none")
        algorithm, task, federation = experiment.build(spec)
        wanted = simulate(algorithm, task, federation, spec.run).events[-1]
        found = [json.loads(line) for line in (path.parent / "events.jsonl").read_text().splitlines()][-1]
        assert found["test_accuracy"] == pytest.approx(wanted["test_accuracy"], abs=0.01)
        assert found["bytes_up"] == wanted["bytes_up"]
        uploads.setdefault(spec.name, []).append(found["bytes_up"])
    assert len(uploads["LoRA"]) == 5 and len(set(uploads["LoRA"])) == 2, "a run for each rank, and the chosen one"
    assert max(uploads["B-alone"]) < max(uploads["LoRA"]) < min(uploads["all"])
    monkeypatch.setattr(jobs, "_run", lambda *a: pytest.fail("a finished run is repeated"))
    assert fedrax("compare", "f.toml", "--out", "c").status == 0


def test_fine_tuning_table_makes_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainable parameters are the named ones, its frozen ones those of the file, also in the data directory."""
    model = MLP(hidden=(6,)).build((8, 8, 1), 10)
    params = model.init(jax.random.key(3))
    save_model(tmp_path / "base.safetensors", params)
    table: dict[str, Any] = {"model": {"name": "mlp", "hidden": [6]}}
    lora = {"name": "lora", "weights": "base.safetensors", "rank": 2, "trainable": ["output/*"]}
    freeze = {"name": "freeze", "weights": "base.safetensors", "trainable": ["*/bias"]}
    wanted = {
        "lora": ["lora/dense1/weight/a", "lora/dense1/weight/b", "trainable/output/bias", "trainable/output/weight"],
        "freeze": ["dense1/bias", "output/bias"],
    }
    for options in (lora, freeze):
        spec = experiment.from_table(table | {"finetuning": options}, "x", tmp_path)
        assert experiment.from_table(experiment.to_table(spec), "x") == spec
        assert f"fine-tuned by {options['name']}" in repr(spec)
        task = experiment.make_task(spec, DIGITS)
        assert tree.leaf_names(task.init(jax.random.key(0))) == wanted[str(options["name"])]
        np.testing.assert_array_equal(task.frozen[1]["dense1/weight"], params["dense1"]["weight"])
    (tmp_path / "data").mkdir()
    (tmp_path / "base.safetensors").rename(tmp_path / "data" / "base.safetensors")
    monkeypatch.delenv("FEDRAX_DATA", raising=False)
    with pytest.raises(FedraxError, match=r"finetuning.weights: there is no .*base.safetensors, and no data directory"):
        experiment.make_task(spec, DIGITS)
    experiment.make_task(spec, DIGITS, tmp_path / "data")
    monkeypatch.setenv("FEDRAX_DATA", str(tmp_path / "data"))
    experiment.make_task(spec, DIGITS)
    for options, words in (
        ({"name": "lora"}, "the key 'weights' is missing"),
        (lora | {"rank": 0}, "finetuning.rank must be at least 1, not 0"),
        (lora | {"ranks": 4}, "unknown key 'ranks'; did you mean 'rank'"),
        ({"name": "lore", "weights": "w"}, "unknown fine-tuning 'lore'; did you mean 'lora'"),
        (freeze | {"trainable": ["haed/*"]}, r"trainable: no parameter has the name 'haed/\*'"),
    ):
        with pytest.raises(FedraxError, match=words):
            experiment.make_task(experiment.from_table(table | {"finetuning": options}, "x", tmp_path), DIGITS)
