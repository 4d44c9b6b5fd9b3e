"""Tables of runs that diverged, stopped early or have different metrics, and flags for single runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest

from fedrax.attacks import Attack
from fedrax.attacks.observation import Observation
from fedrax.attacks.optimizers import GradientDescent
from fedrax.experiments.run_comparison import compare
from fedrax.report import read_results
from fedrax.report.comparison_table import cells, legend
from fedrax.report.results import SavedResults
from fedrax.report.runs import MethodRuns, SavedRun, curve, group, summarize, summary_line, target_of
from tests.cli.conftest import TINY, Outcome


def run(rounds: int, seed: int = 0, spent: bool = False, failure: str | None = None, **last: float) -> SavedRun:
    events = [
        {"round": r + 1, "clients": 1, "bytes_down": 0, "bytes_up": 0, "gradients": 0, "seconds": 0.0}
        for r in range(rounds)
    ]
    events[-1] |= last
    table: dict[str, Any] = {"run": {"seed": seed, "rounds": 40}, "algorithm": {"name": "x"}}
    return SavedRun(Path(f"seed-{seed}"), table, events, failure, spent)


def test_privacy_budgets_that_end_in_different_rounds_are_shown():
    state = lambda *runs: summarize(MethodRuns("m", runs), None).state  # noqa: E731
    assert state(run(7, 0, spent=True), run(9, 1, spent=True)) == "budget spent in rounds 7 to 9"
    assert state(run(40, 0), run(9, 1, spent=True)) == "finished"
    assert state(run(40, 0), run(9, 1)) == "running"
    assert state(run(7, 0, spent=True), run(7, 1, spent=True)) == "budget spent in round 7"


def test_repeated_runs_count_as_one_seed(fedrax: Callable[..., Outcome], tmp_path: Path):
    (made,) = group([run(4, 0), run(40, 0), run(40, 1)])
    assert [len(one.events) for one in made.runs] == [40, 40]
    (tmp_path / "x.toml").write_text(TINY)
    assert [fedrax("run", "x.toml", "--quiet").status for _ in range(2)] == [0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert '"seeds": 1' in fedrax("show", "runs", "--json").out
    shown = fedrax("show", "runs").out
    assert shown.count("left out, because a run shown has the same settings and seed: runs/") == 1
    assert "more" not in shown.rpartition("left out")[2]


def test_default_target_ignores_diverged_methods():
    good, lost = (
        MethodRuns("a", [run(40, test_accuracy=0.8)]),
        MethodRuns("b", [run(9, failure="x", test_accuracy=0.9)]),
    )
    assert target_of([good, lost]) == (0.76, False)
    assert target_of([lost]) == (0.85, False)
    assert target_of([MethodRuns("c", [run(40, test_accuracy=0.01)])]) == (None, False)


def test_targets_of_losses_are_labeled():
    row = lambda **last: summarize(MethodRuns("m", [run(40, **last)]), 0.5)  # noqa: E731
    assert "until the test loss first" in legend(0.5, True, [row(test_loss=0.4)])
    assert "until the test accuracy first" in legend(0.5, True, [row(test_loss=0.4, test_accuracy=0.9)])


def test_differences_are_paired_by_seed():
    """Seeds differ by 0.1 and methods by 0.02 to 0.04: paired differences have the small deviation."""
    a = [run(40, seed, test_accuracy=0.5 + 0.1 * seed) for seed in range(3)]
    b = [run(40, seed, test_accuracy=0.5 + 0.1 * seed - loss) for seed, loss in enumerate((0.02, 0.04, 0.03))]
    lost = [run(9, seed, failure="x", test_accuracy=0.9) for seed in range(3)]
    other = [run(40, 7, test_accuracy=0.1)]  # no seed in common
    methods = [MethodRuns(name, runs) for name, runs in zip("abcd", (a, b, lost, other), strict=True)]
    results = SavedResults(methods)
    rows = {row.label: row for row in results.rows}
    found = rows["b"].difference
    assert found is not None and (round(found.mean, 12), round(found.std or 0, 12)) == (-0.03, 0.01)
    assert [rows[name].difference for name in "acd"] == [None] * 3
    assert "test accuracy minus that of a, paired by seed: b -0.0300 ± 0.0100." in results.legend()
    table = results.table()
    assert table["test_accuracy_difference"].round(12).to_list() == [None, -0.03, None, None]
    losses = SavedResults(
        [MethodRuns(n, [run(40, s, test_loss=v + s) for s in (0, 1)]) for n, v in (("e", 2), ("f", 1))]
    )
    assert "test loss minus that of f, paired by seed: e +1 ± 0." in losses.legend()


def test_methods_with_equal_printed_means_are_all_the_best():
    close = [MethodRuns(name, [run(40, test_accuracy=value)]) for name, value in (("a", 0.50001), ("b", 0.50002))]
    made = cells([summarize(method, None) for method in [*close, MethodRuns("c", [run(40, test_accuracy=0.4)])]], None)
    assert [row[1] for row in made.rows] == [("0.5000", True), ("0.5000", True), ("0.4000", False)]


def test_best_evaluations_are_explained_with_several_seeds():
    legend_of = lambda *seeds: SavedResults([MethodRuns("m", [run(40, s, test_accuracy=0.5) for s in seeds])]).legend()  # noqa: E731
    words = "of each run the best evaluation, then means over seeds"
    assert words in legend_of(0, 1) and words not in legend_of(0)


def test_guarantees_of_epsilon_are_printed():
    def legend_of(**guarantees: str) -> str:
        runs = {name: dataclasses.replace(run(40, epsilon=1.0), privacy=text) for name, text in guarantees.items()}
        return SavedResults([MethodRuns(name, [one]) for name, one in runs.items()]).legend()

    assert "epsilon: presence of a client; delta 1e-05." in legend_of(a="presence of a client; delta 1e-05")
    mixed = legend_of(a="presence of a client", b="presence of a sample", c="presence of a client")
    assert "cannot be ranked by it: of a, c: presence of a client; of b: presence of a sample." in mixed


def test_losses_that_rose_are_noted():
    def saved(first: float, last: float) -> SavedRun:
        made = run(40, test_loss=last)
        made.events[0]["test_loss"] = first
        return made

    methods = [MethodRuns(name, [saved(2.3, last)]) for name, last in (("good", 0.5), ("bad", 460.0), ("slow", 4.5))]
    legend = SavedResults(methods).legend()
    assert "warning: the test loss of bad ended at 200 times its first value." in legend
    assert "of good ended" not in legend and "of slow ended" not in legend


@pytest.mark.parametrize(
    ("loss", "message"), [(3.14159e-6, "3.142e-06"), (0.25, "0.25"), (12.3456, "12.35"), (1e30, "1e+30")]
)
def test_losses_have_four_significant_digits(loss: float, message: str):
    row = summarize(MethodRuns("m", [run(40, test_loss=loss, test_auc=0.75)]), None, "test_loss")
    shown = [text for text, _ in cells([row], None, "test_loss").rows[0]]
    assert {message, f"{message} (40)", "0.7500"} <= set(shown)


RESULTS = SavedResults(
    (
        MethodRuns(
            "A & B_1",
            [
                run(40, 0, test_accuracy=0.5, test_loss=2e-5, gradients=1200, seconds=0.5),
                run(40, 1, test_accuracy=0.7, test_loss=4e-5, gradients=1600, seconds=1.5),
            ],
        ),
        MethodRuns("50 %", [run(40, 0, test_accuracy=0.8, test_loss=1.5, gradients=300, seconds=0.25)], "local.lr 0.1"),
    ),
    0.4,
)


def test_latex_table():
    """Names are escaped, the best value is bold, deviations and powers of ten are typeset."""
    begin, *lines, end = RESULTS.to_latex().splitlines()
    assert (begin, end) == (r"\begin{tabular}{llrrrrrrrrr}  % \usepackage{booktabs}", r"\end{tabular}")
    assert (lines[0], lines[2], lines[-1]) == (r"\toprule", r"\midrule", r"\bottomrule")
    first, second = (line.removesuffix(r" \\").split(" & ") for line in lines[3:5])
    assert first == [
        r"A \& B\_1",
        "",
        r"0.6000 $\pm$ 0.1414",
        r"\textbf{$3 \times 10^{-5}$ $\pm$ $1.4 \times 10^{-5}$}",
        "0.6000 (40)",
        r"1,400 $\pm$ 283",
        r"\textbf{40 $\pm$ 0.0}",
        r"\textbf{0 $\pm$ 0}",
        r"1,400 $\pm$ 283",
        r"1 $\pm$ 0.71",
        "2",
    ]
    assert second[:4] == [r"50 \%", "local.lr 0.1", r"\textbf{0.8000}", "1.5"]
    running = SavedResults([MethodRuns("m", [run(7, test_loss=1.0)])]).to_latex().splitlines()
    assert running[0].startswith(r"\begin{tabular}{lrrrrl}") and running[4].endswith(r"& 1 & round 7 of 40 \\")


def test_methods_with_more_gradients_are_noted():
    work = lambda *counts: legend(  # noqa: E731
        None,
        False,
        [summarize(MethodRuns(name, [run(40, gradients=n)]), None) for name, n in zip("abc", counts, strict=True)],
    )
    assert work(1200, 100, 300) == "gradients: of single samples, by all clients; a computes 12 times those of b."
    assert work(150, 100, 0) == "gradients: of single samples, by all clients."


def test_csv_table_contains_numbers():
    table = RESULTS.table()
    first, second = table.rows(named=True)
    assert (first["method"], first["seeds"], second["settings"], second["state"]) == (
        "A & B_1",
        2,
        "local.lr 0.1",
        "finished",
    )
    assert first["test_accuracy"] == pytest.approx(0.6) and first["test_accuracy_std"] == pytest.approx(0.02**0.5)
    assert second["test_accuracy_std"] is None and second["gradients"] == second["gradients_to_target"] == 300
    assert (first["best_test_accuracy"], first["best_round"], first["seconds_to_target"]) == (pytest.approx(0.6), 40, 1)
    assert "epsilon" not in table.columns
    assert table.write_csv().startswith("method,settings,seeds,state,test_accuracy,test_accuracy_std,test_loss,")


def test_csv_rounds_contain_numbers():
    rounds = RESULTS.to_polars()
    assert len(rounds) == 120 and rounds.columns[:3] == ["method", "seed", "round"]
    last = rounds.filter(pl.col("test_loss").is_not_null())
    assert last.select("method", "seed", "round", "test_loss", "gradients").rows() == [
        ("A & B_1", 0, 40, 2e-5, 1200),
        ("A & B_1", 1, 40, 4e-5, 1600),
        ("50 %", 0, 40, 1.5, 300),
    ]
    own = SavedResults(
        [MethodRuns("m", [run(1, seed=3, method=7.0, test_loss=1)]), MethodRuns("n", [run(1, test_loss=0.5)])]
    )
    assert own.to_polars().select("method", "seed", "test_loss").rows() == [("m", 3, 1.0), ("n", 0, 0.5)]
    assert SavedResults([]).to_polars().is_empty()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """File and directory of a comparison with two seeds."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "x.toml").write_text("seeds = [0, 1]\n" + TINY.replace("rounds = 4", "rounds = 1"))
    compare(folder / "x.toml", directory=folder / "c")
    return folder / "x.toml", folder / "c"


@pytest.mark.parametrize("flag", ["--csv", "--latex", "--markdown", "--json"])
def test_show_and_compare_support_all_formats(flag: str, fedrax: Callable[..., Outcome], comparison: tuple[Path, Path]):
    file, directory = comparison
    results = read_results(directory)
    shown = fedrax("show", directory, flag)
    made = {"--csv": results.table().write_csv, "--latex": results.to_latex, "--markdown": results.to_markdown}
    assert flag == "--json" or shown == Outcome(0, made[flag](), "")
    if flag != "--markdown":
        again = fedrax("compare", file, "--out", directory, flag)
        assert again.status == 0 and again.err == "" and (flag == "--json" or again.out == shown.out)
    rejected = fedrax("show", directory, flag, "--json" if flag != "--json" else "--csv")
    assert rejected.status == 2 and "are both given: choose one" in rejected.err


def test_undefined_metrics_are_labeled_and_defined_seeds_are_averaged():
    nothing: dict[str, Any] = {"test_auc": None, "test_accuracy": 0.5}
    some = MethodRuns("m", [run(40, **nothing), run(40, 1, test_auc=0.75)])
    for methods, text in ((some, "0.7500"), (MethodRuns("n", [run(40, **nothing)]), "undefined")):
        table = cells([summarize(methods, None)], None)
        assert table.rows[0][table.headings.index("test auc")][0] == text
    assert summary_line(run(40, **nothing).events).startswith("test accuracy 0.5, test auc undefined after")
    assert curve(some, "test_auc")["mean"].to_list() == [0.75]
    assert SavedResults([MethodRuns("n", [run(40, **nothing)])]).table()["test_auc"].to_list() == [None]


def test_metrics_missing_in_some_seeds_are_shown():
    table = curve(MethodRuns("m", [run(3, 0, test_auc=0.5), run(3, 1, test_auc=0.7), run(3, 2)]), "test_auc")
    assert table["round"].to_list() == [3] and table["mean"].to_list() == [pytest.approx(0.6)]
    apart = curve(MethodRuns("m", [run(2, 0, test_auc=0.5), run(3, 1, test_auc=0.7)]), "test_auc")
    assert table.columns == apart.columns and apart.is_empty()


@pytest.mark.parametrize(
    ("flag", "instead"), [("--algorithm", "--algorithms adds methods"), ("--run.seed", "--seeds gives several")]
)
def test_flags_of_single_runs_are_rejected(flag: str, instead: str, fedrax: Callable[..., Outcome], tmp_path: Path):
    (tmp_path / "x.toml").write_text(TINY)
    for flags in ([flag, "7"], [f"{flag}=7"]):
        rejected = fedrax("compare", "x.toml", *flags)
        assert rejected.status == 2 and instead in rejected.err


def test_failed_prediction_of_a_search_value_is_skipped():
    def predict(known: Any, data: Any, classes: Any) -> Any:
        return ({"w": jnp.sqrt(data.x).sum(0)},)

    view = Observation(predict, (), ({"w": jnp.array([1.0])},))
    pairs = []
    for seed in range(12):
        attacks = (Attack(GradientDescent(0.01), 5, "squared", restarts=n) for n in (1, 2))
        pairs.append([attack.invert(view, (1, 1), y=[0], seed=seed).distance for attack in attacks])
    sound = [pair for pair in pairs if np.isfinite(pair[0])]
    assert sound and all(two <= one for one, two in sound)
