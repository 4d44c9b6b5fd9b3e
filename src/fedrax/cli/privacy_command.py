"""``fedrax privacy``: what a private experiment will spend, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fedrax.cli.arguments import parse_experiment
from fedrax.cli.figures import save
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.report.comparison_table import wide_console
from fedrax.report.privacy_forecast import Forecast, ReleaseCost, draw, forecast
from fedrax.simulation import Settings, use_all_cores
from fedrax.simulation.setup import prepare

DESCRIPTION = """What a private experiment spends: `fedrax privacy [FILE.toml] [flags]`.

Without training, with the flags of `fedrax run`: epsilon after all rounds, of each release and of all together, by a
sound accountant and, where a method's paper claims another number, by the paper; the noise that another epsilon takes,
and the rounds that it has room for; a table and a curve. Of a comparison's file the [algorithm] is meant, or the one of
--algorithm."""


@dataclass
class PrivacyOptions:
    """Options of ``fedrax privacy``."""

    data_dir: Path | None = None
    """Where data files lie; by default $FEDRAX_DATA."""
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    """For which to say what noise they take, and how many rounds they have room for; the run's budget is added."""
    picture: Path | None = Path("privacy")
    """Where the curve goes, as .png and .svg; None for no curve."""
    json: bool = False
    """Print JSON, with every round."""


def main(args: list[str]) -> int:
    """Parse, compute, print, draw."""
    parsed = parse_experiment(PrivacyOptions, args, "fedrax privacy", DESCRIPTION, comparisons=True)
    spec, options = parsed.experiment, parsed.options
    if not all(epsilon > 0 for epsilon in options.epsilons):
        raise FedraxError(f"--epsilons must be greater than 0, not {' '.join(map(str, options.epsilons))}")
    use_all_cores()
    algorithm, task, federation = experiment.build(spec, options.data_dir)
    asked = sorted({*options.epsilons, *filter(None, [spec.run.epsilon_budget])})
    made = forecast(algorithm, spec.run, federation.sizes, asked)
    prepare(algorithm, task, federation, spec.run)  # of a method that lets out more than it says no number holds
    pictures, failed = save(lambda: draw(made, spec.run.epsilon_budget), options.picture)
    if options.json:
        print(json.dumps(made.to_dict() | {"pictures": [str(path) for path in pictures]}))
    else:
        _print(made, spec.run, spec.algorithm_name)
        for path in pictures:
            print(f"picture: {path}")
    if failed is not None:
        raise failed
    return 0


def _print(made: Forecast, run: Settings, name: str) -> None:
    console, spent = wide_console(), made.spent
    counted = "rounds, amplified by the draw of cohorts" if made.by_rounds else "rounds of the client with the most"
    console.print(f"{name}: {run.rounds} rounds; {spent.about}; delta {spent.delta:g}")
    console.print(f"counted: {spent.count} {counted}")
    if spent.empty_place:
        console.print("clients keep something from round to round: cohorts by poisson amplify, of a fixed size do not")
    console.print(_releases(made))
    if not math.isfinite(spent.epsilon):
        console.print("no finite epsilon holds, and no budget: a release has no noise that anything is proven of")
    if made.answers:
        console.print(_answers(made, run.rounds))
    for path, value in made.noise_fields.items():
        flags = [f"{a.epsilon:g}: {a.factor * value:.4g}" for a in made.answers if a.factor is not None]
        if flags:
            console.print(f"--algorithm.{path} for epsilon {', '.join(flags)}")


def _releases(made: Forecast) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    paper = made.spent.epsilon_paper is not None
    heads = ["release", "noise", "times", "of a", "neighbors", "batches", "seen by", "epsilon", "accountant"]
    for head in heads + ["epsilon by the paper"] * paper:
        table.add_column(head, justify="right" if head in ("noise", "times") or "epsilon" in head else "left")
    for number, part in enumerate(made.parts, 1):
        table.add_row(*_cells(str(number), part), *[_number(part.epsilon_paper)] * paper)
    spent = made.spent
    last = ["together", "", "", spent.unit, spent.neighbors, "", "", _number(spent.epsilon), spent.by]
    table.add_row(*last, *[_number(spent.epsilon_paper)] * paper, style="bold")
    return table


def _cells(number: str, part: ReleaseCost) -> Sequence[str]:
    r = part.release
    batches = f"poisson {r.rate:.4g}" if r.batches == "poisson" else r.batches
    noise = f"{float(r.noise):.4g}"
    return number, noise, str(r.times), r.unit, r.neighbors, batches, r.seen, _number(part.epsilon), part.by


def _answers(made: Forecast, rounds: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("epsilon", f"noise for {rounds} rounds", "rounds with this noise"):
        table.add_column(head, justify="right")
    for answer in made.answers:
        factor = "–" if answer.factor is None else f"{answer.factor:.4g} ×"
        table.add_row(f"{answer.epsilon:g}", factor, f"{answer.rounds}{' or more' if answer.more else ''}")
    return table


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}".replace("inf", "∞")
