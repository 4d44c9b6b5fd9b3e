"""``fedrax partition``: the partition of a data set over clients, and its heterogeneity."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table

from fedrax.analysis import gradient_dissimilarity
from fedrax.analysis.dissimilarity import describe_dissimilarity, relative_distance, shuffled_over_clients
from fedrax.cli.arguments import parse_experiment
from fedrax.cli.figures import save
from fedrax.cli.run_command import print_notes
from fedrax.data import Federation, has_one_label, label_counts, measure_heterogeneity
from fedrax.errors import FedraxError
from fedrax.escaping import printable_line
from fedrax.experiments import experiment
from fedrax.report.comparison_table import wide_console
from fedrax.simulation import use_all_cores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DESCRIPTION = """Partition a data set over clients: `fedrax partition [FILE.toml] [flags]`.

Prints the number of samples of each class at each client and measures of heterogeneity, and draws the partition
(classes against clients; the area of a dot is the number of samples). The gradient dissimilarity is
B = sqrt(mean_i |grad f_i|^2) / |grad f| at the initial parameters of the model, as in `fedrax diagnose`: 1 if all
clients have the same gradient. Means over clients use `weights` of the file's [run]."""

_MAX_COLUMNS = 20
"""Number of classes up to which the table has a column for each, so that it fits a terminal."""


@dataclass
class PartitionOptions:
    """Options of ``fedrax partition``."""

    data_dir: Path | None = None
    """Directory of data files; by default $FEDRAX_DATA."""
    picture: Path | None = Path("partition")
    """Where to save the figure, as .png and .svg; None for no figure."""
    show: int = 50
    """Number of clients to print and draw."""
    json: bool = False
    """Print JSON with all clients."""


def main(args: list[str]) -> int:
    """Parse, partition, print, draw."""
    parsed = parse_experiment(
        PartitionOptions, args, "fedrax partition", DESCRIPTION, ("data", "partition", "model", "task")
    )
    options = parsed.options
    if options.show < 1:
        raise FedraxError(f"--show must be at least 1, not {options.show}.")
    use_all_cores()
    federation = experiment.load_federation(parsed.experiment, options.data_dir)
    task = experiment.make_task(parsed.experiment, federation)
    measures = dataclasses.asdict(measure_heterogeneity(federation))
    run = parsed.experiment.run
    dissimilarity = gradient_dissimilarity(task, federation, seed=run.seed, weights=run.weights)
    mixed = shuffled_over_clients(federation, run.seed)
    shuffled = mixed and gradient_dissimilarity(task, mixed, seed=run.seed, weights=run.weights)
    counts = label_counts(federation) if has_one_label(federation) else None

    def drawn() -> Figure:
        from fedrax.data.plot import draw_label_counts  # importing Matplotlib takes about a second

        return draw_label_counts(federation, options.show)

    pictures, failed = save(drawn, None if counts is None else options.picture)
    if options.json:
        print_notes(federation.notes, warnings_only=True)
        table: dict[str, Any] = {
            "sizes": federation.sizes.tolist(),
            "counts": None if counts is None else counts.tolist(),
        }
        table["clients"] = [federation.client_name(i) for i in range(federation.num_clients)]
        measures |= {"gradient_dissimilarity": dissimilarity, "gradient_dissimilarity_shuffled": shuffled}
        print(json.dumps({"measures": measures, **table, "pictures": [str(path) for path in pictures]}))
    else:
        for note in federation.notes:
            print(printable_line(note))
        _print(federation, counts, measures, options.show)
        print(printable_line(describe_dissimilarity(dissimilarity, parsed.experiment.model_name)))
        if shuffled is not None and math.isfinite(shuffled):
            distance = relative_distance(shuffled)
            print(f"at random      that distance is {distance:.2g} with these samples shuffled over the clients")
        for path in pictures:
            print(f"picture: {path}")
    if failed is not None:
        raise failed
    return 0


def _print(federation: Federation, counts: np.ndarray | None, measures: dict[str, Any], show: int) -> None:
    """Print the table of clients and the measures of heterogeneity."""
    console = wide_console()
    title = f"{printable_line(federation.name)}: training samples of each client"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("client", justify="left" if federation.client_names else "right", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    columns, cells = _by_class(federation, counts)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for client in range(min(show, federation.num_clients)):
        table.add_row(printable_line(federation.client_name(client)), str(federation.sizes[client]), *cells(client))
    console.print(table)
    if show < federation.num_clients:
        console.print(f"... and {federation.num_clients - show:,} more clients (--show, --json)")
    summary = Table(title="heterogeneity", title_justify="left", show_header=False, box=None)
    for name, value in measures.items():
        text = "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
        summary.add_row(name.replace("_", " "), text)
    console.print(summary)


def _by_class(federation: Federation, counts: np.ndarray | None) -> tuple[list[str], Callable[[int], list[str]]]:
    """Headings, and a function for a client's cells: samples of each class, or the number of classes if many."""
    if counts is None:
        return [], lambda client: []
    if counts.shape[1] > _MAX_COLUMNS:
        return ["classes"], lambda client: [str((counts[client] > 0).sum())]
    names = federation.class_names or tuple(map(str, range(counts.shape[1])))
    return [printable_line(name) for name in names], lambda client: [str(n) if n else "·" for n in counts[client]]
