"""``fedrax privacy``: the epsilon of a private experiment, without training."""

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
from fedrax.simulation.privacy_ledger import warn_of_statistics
from fedrax.simulation.setup import prepare

DESCRIPTION = """Compute the privacy loss of an experiment: `fedrax privacy [FILE.toml] [flags]`.

Does not train; takes the flags of `fedrax run`. Prints epsilon after all rounds, of each release and of their
composition, by a sound accountant and, if the method's paper claims another value, by the paper. For each of
--epsilons, prints the noise multiplier that it requires and the number of rounds that it permits. Draws epsilon against
rounds. The [[compare]] tables of a file are ignored: the method is that of [algorithm] or --algorithm."""


@dataclass
class PrivacyOptions:
    """Options of ``fedrax privacy``."""

    data_dir: Path | None = None
    """Directory of data files; by default $FEDRAX_DATA."""
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    """Values of epsilon for which to compute the noise and the number of rounds; the run's budget is added."""
    picture: Path | None = Path("privacy")
    """Where to save the curve, as .png and .svg; None for no curve."""
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
    warn_of_statistics(federation, made.spent.unit)
    prepare(algorithm, task, federation, spec.run)  # raises for a method whose messages are not all private
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
    """Print the guarantee, its releases, and the answers for other values of epsilon."""
    console, spent = wide_console(), made.spent
    counted = "rounds, amplified by sampling of cohorts" if made.by_rounds else "rounds of the most sampled client"
    console.print(f"{name}: {run.rounds} rounds; {spent.about}; delta {spent.delta:g}")
    console.print(f"guarantee: {spent.assumptions}")
    console.print(f"counted: {spent.count} {counted}")
    if spent.empty_place:
        console.print("clients keep state between rounds: Poisson sampling amplifies, cohorts of a fixed size do not")
    console.print(_releases(made))
    if made.by_poisson is not None:
        console.print(f"with --run.participation poisson, which amplifies more: epsilon {made.by_poisson:.4g}")
    if not math.isfinite(spent.epsilon):
        console.print("there is no finite epsilon, and no budget can be set: a release has no noise with a guarantee")
    if made.answers:
        console.print(_answers(made, run.rounds))
    for path, value in made.noise_fields.items():
        flags = [f"{a.epsilon:g}: {_rounded_up(a.factor * value)}" for a in made.answers if a.factor is not None]
        if flags:
            console.print(f"--algorithm.{path} for epsilon {', '.join(flags)}")


def _releases(made: Forecast) -> Table:
    """The table of releases and their composition."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    paper = made.spent.epsilon_paper is not None
    heads = ["release", "noise", "times", "unit", "neighbors", "batches", "seen by", "epsilon", "accountant"]
    for head in heads + ["epsilon by the paper"] * paper:
        table.add_column(head, justify="right" if head in ("noise", "times") or "epsilon" in head else "left")
    for number, part in enumerate(made.parts, 1):
        table.add_row(*_cells(str(number), part), *[_number(part.epsilon_paper)] * paper)
    spent = made.spent
    last = ["composed", "", "", spent.unit, spent.neighbors, "", "", _number(spent.epsilon), spent.by]
    table.add_row(*last, *[_number(spent.epsilon_paper)] * paper, style="bold")
    return table


def _cells(number: str, part: ReleaseCost) -> Sequence[str]:
    """The row of a release."""
    r = part.release
    batches = f"poisson {r.rate:.4g}" if r.batches == "poisson" else r.batches
    noise = f"{float(r.noise):.4g}"
    return number, noise, str(r.times), r.unit, r.neighbors, batches, r.seen, _number(part.epsilon), part.by


def _answers(made: Forecast, rounds: int) -> Table:
    """The table of the noise and the rounds for other values of epsilon."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("epsilon", f"factor on the noise for {rounds} rounds", "rounds with the noise as it is"):
        table.add_column(head, justify="right")
    for answer in made.answers:
        factor = "–" if answer.factor is None else f"{answer.factor:.4g} ×"
        table.add_row(f"{answer.epsilon:g}", factor, f"{answer.rounds}{' or more' if answer.more else ''}")
    return table


def _rounded_up(noise: float) -> str:
    """Four digits that are not below ``noise``: rounded to the nearest it could miss the epsilon."""
    unit = 10.0 ** (math.floor(math.log10(noise)) - 3)
    return f"{math.ceil(noise / unit) * unit:.4g}"


def _number(value: Any) -> str:
    """Four digits, or a dash for None."""
    return "–" if value is None else f"{value:.4g}".replace("inf", "∞")
