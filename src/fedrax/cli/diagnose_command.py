"""``fedrax diagnose``: a task and its partition measured."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from fedrax.cli.arguments import parse_experiment
from fedrax.experiments import experiment
from fedrax.report.tables import wide_console
from fedrax.simulation import use_all_cores
from fedrax.text import plain

DESCRIPTION = """A task and its partition measured: `fedrax diagnose [FILE.toml] [flags]`.

Along the rounds of a run of FedAvg with the experiment's local steps, at rounds 0, 1, 2, 4, 8 ... and the last: how far
clients' gradients and updates are apart, how noisy batches are, how curvature goes with the gradient; and the constants
of the methods' assumptions that fit; then what to try first, and how often that was right. Of more than 256 clients as
many are drawn. Flags are those of `fedrax run`."""


@dataclass
class DiagnoseOptions:
    """Options of ``fedrax diagnose``."""

    data_dir: Path | None = None
    """Where data files lie; by default $FEDRAX_DATA."""
    picture: Path | None = Path("diagnosis")
    """Where the picture goes, as .png and .svg; None for no picture."""
    json: bool = False
    """Print JSON."""


def main(args: list[str]) -> int:
    """Parse, measure, print, draw."""
    parsed = parse_experiment(DiagnoseOptions, args, "fedrax diagnose", DESCRIPTION, comparisons=True)
    spec, options = parsed.experiment, parsed.options
    use_all_cores()
    algorithm, task, federation = experiment.build(spec, options.data_dir)
    from fedrax.diagnosis import advice, diagnose, show

    def progress(done: int, of: int) -> None:
        if not options.json and sys.stderr.isatty():
            print(f"\r{done} of {of} points measured", end="\n" if done == of else "", file=sys.stderr, flush=True)

    made = diagnose(task, federation, spec.run, algorithm.local_steps, progress=progress)
    pictures: tuple[Path, ...] = ()
    if options.picture is not None:
        from fedrax.report.curves import save_curves

        path = options.picture.with_suffix("") if options.picture.suffix in (".png", ".svg") else options.picture
        pictures = save_curves(show.draw(made), path)
    if options.json:
        first = [dataclasses.asdict(one) for one in advice.advise(made)]
        print(json.dumps(made.to_dict() | {"advice": first, "pictures": [str(path) for path in pictures]}))
        return 0
    console = wide_console()
    about = f"{made.measured} of {made.clients} clients, {made.points[-1].round} rounds of FedAvg"
    console.print(f"{plain(federation.name)}: {about}", highlight=False, markup=False)
    console.print(show.points_table(made))
    for line in [*show.lines(made), *advice.lines(made)]:
        console.print(line, highlight=False, markup=False)
    for path in pictures:
        console.print(f"picture: {path}", highlight=False, markup=False)
    return 0
