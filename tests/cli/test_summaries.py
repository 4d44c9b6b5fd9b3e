"""Tables of runs that diverged, stopped early or have other metrics, and flags of one run among many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.attacks import Attack
from fedrax.attacks.observation import Observation
from fedrax.attacks.optimizers import GradientDescent
from fedrax.report.comparison_table import cells, legend
from fedrax.report.runs import MethodRuns, SavedRun, curve, group, summarize, target_of
from tests.cli.conftest import TINY, Outcome


def run(rounds: int, seed: int = 0, spent: bool = False, failure: str | None = None, **last: float) -> SavedRun:
    events = [
        {"round": r + 1, "clients": 1, "bytes_down": 0, "bytes_up": 0, "gradients": 0, "seconds": 0.0}
        for r in range(rounds)
    ]
    events[-1] |= last
    table: dict[str, Any] = {"run": {"seed": seed, "rounds": 40}, "algorithm": {"name": "x"}}
    return SavedRun(Path(f"seed-{seed}"), table, events, failure, spent)


def test_budgets_that_end_in_different_rounds():
    state = lambda *runs: summarize(MethodRuns("m", runs), None).state  # noqa: E731
    assert state(run(7, 0, spent=True), run(9, 1, spent=True)) == "budget spent in rounds 7 to 9"
    assert state(run(40, 0), run(9, 1, spent=True)) == "finished"
    assert state(run(40, 0), run(9, 1)) == "running"
    assert state(run(7, 0, spent=True), run(7, 1, spent=True)) == "budget spent in round 7"


def test_a_run_made_twice_is_one_seed(fedrax: Callable[..., Outcome], tmp_path: Path):
    (made,) = group([run(4, 0), run(40, 0), run(40, 1)])
    assert [len(one.events) for one in made.runs] == [40, 40]
    (tmp_path / "x.toml").write_text(TINY)
    assert [fedrax("run", "x.toml", "--quiet").status for _ in range(2)] == [0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert '"seeds": 1' in fedrax("show", "runs", "--json").out


def test_the_default_target_is_of_methods_that_did_not_diverge():
    good, lost = (
        MethodRuns("a", [run(40, test_accuracy=0.8)]),
        MethodRuns("b", [run(9, failure="x", test_accuracy=0.9)]),
    )
    assert target_of([good, lost]) == (0.76, False)
    assert target_of([lost]) == (0.85, False)
    assert target_of([MethodRuns("c", [run(40, test_accuracy=0.01)])]) == (None, False)


def test_a_target_of_a_loss_is_called_so():
    row = lambda **last: summarize(MethodRuns("m", [run(40, **last)]), 0.5)  # noqa: E731
    assert "until the test loss first" in legend(0.5, True, [row(test_loss=0.4)])
    assert "until the test accuracy first" in legend(0.5, True, [row(test_loss=0.4, test_accuracy=0.9)])


@pytest.mark.parametrize(
    ("loss", "says"), [(3.14159e-6, "3.142e-06"), (0.25, "0.25"), (12.3456, "12.35"), (1e30, "1e+30")]
)
def test_what_is_no_share_has_four_digits_whatever_its_size(loss: float, says: str):
    row = summarize(MethodRuns("m", [run(40, test_loss=loss, test_auc=0.75)]), None, "test_loss")
    shown = [text for text, _ in cells([row], None, "test_loss").rows[0]]
    assert {says, f"{says} (40)", "0.7500"} <= set(shown)


def test_seeds_without_a_metric_do_not_hide_the_others():
    table = curve(MethodRuns("m", [run(3, 0, test_auc=0.5), run(3, 1, test_auc=0.7), run(3, 2)]), "test_auc")
    assert table["round"].to_list() == [3] and table["mean"].to_list() == [pytest.approx(0.6)]
    apart = curve(MethodRuns("m", [run(2, 0, test_auc=0.5), run(3, 1, test_auc=0.7)]), "test_auc")
    assert table.columns == apart.columns and apart.is_empty()


@pytest.mark.parametrize(
    ("flag", "instead"), [("--algorithm", "--algorithms adds methods"), ("--run.seed", "--seeds gives several")]
)
def test_flags_of_one_run_do_not_pass_unnoticed(
    flag: str, instead: str, fedrax: Callable[..., Outcome], tmp_path: Path
):
    (tmp_path / "x.toml").write_text(TINY)
    for flags in ([flag, "7"], [f"{flag}=7"]):
        refused = fedrax("compare", "x.toml", *flags)
        assert refused.status == 2 and instead in refused.err


def test_a_start_that_is_no_number_does_not_replace_a_sound_one():
    def predict(known: Any, data: Any, classes: Any) -> Any:
        return ({"w": jnp.sqrt(data.x).sum(0)},)

    view = Observation(predict, (), ({"w": jnp.array([1.0])},))
    pairs = []
    for seed in range(12):
        attacks = (Attack(GradientDescent(0.01), 5, "squared", restarts=n) for n in (1, 2))
        pairs.append([attack.invert(view, (1, 1), y=[0], seed=seed).distance for attack in attacks])
    sound = [pair for pair in pairs if np.isfinite(pair[0])]
    assert sound and all(two <= one for one, two in sound)
