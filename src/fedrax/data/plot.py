"""Plot of the label counts of clients: classes against clients, with dot areas proportional to sample counts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedrax.config.arguments import checked_arguments
from fedrax.data.federation import Federation
from fedrax.data.heterogeneity import label_counts
from fedrax.errors import FedraxError
from fedrax.escaping import escape_matplotlib
from fedrax.files import write_figure

COLOR = "#1f5a94"
LINE = 0.125
"""Line spacing of small text in inches."""


@checked_arguments
def draw_label_counts(federation: Federation, clients: int = 50) -> Figure:
    """Plot the label counts of the first clients, as in GradMA's figure 8.

    The area of a dot is proportional to the count; the largest count shown fills its cell.

    Args:
        federation: A federation with one class label per sample.
        clients: Number of clients to show, at least 1.

    Returns:
        A matplotlib figure.

    Raises:
        FedraxError: Labels cannot be counted (see `label_counts`), or ``clients`` is below 1.

    Example:
        >>> federation = fedrax.data.Federation.from_arrays(np.zeros((4, 2)), [0, 1, 1, 1], client_ids=[0, 0, 1, 1])
        >>> fedrax.data.draw_label_counts(federation).axes[0].get_xlabel()
        'client'
    """
    if clients < 1:
        raise FedraxError(f"a plot needs at least 1 client, not {clients}.")
    counts = label_counts(federation)[:clients]
    shown, classes = counts.shape
    cell = min(0.25, 14 / shown, 10 / classes)  # inches
    width, height = max(shown * cell, 2.6), max(classes * cell, 1.6)
    figure = Figure(figsize=(width + 2.2, height + 1.3), layout="constrained")
    axes = figure.add_subplot()
    client, label = np.nonzero(counts)
    number = counts[client, label]
    largest = number.max()
    diameter = 0.95 * cell * 72  # points
    axes.scatter(client, label, s=diameter**2 * number / largest, color=COLOR, linewidths=0)

    axes.set(xlabel="client", ylabel="class", xlim=(-0.8, shown - 0.2), ylim=(-0.8, classes - 0.2))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=max(2, min(shown, 12)), min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(classes, 12), min_n_ticks=1))
    if federation.client_names and width / shown >= LINE:
        axes.set_xticks(range(shown), _short(federation.client_names[:shown]), rotation=90, fontsize=8)
    if federation.class_names and height / classes >= LINE:
        size = None if height / classes >= 1.5 * LINE else 8
        axes.set_yticks(range(classes), _short(federation.class_names), fontsize=size)
    axes.grid(axis="y", color="0.93", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    of_all = f"first {shown:,} of " if shown < federation.num_clients else ""
    plural = "s" if federation.num_clients > 1 else ""
    title = f"{escape_matplotlib(federation.name)}: {of_all}{federation.num_clients:,} client{plural}"
    axes.set_title(title, loc="left", fontsize="medium")
    for value in sorted({int(largest), max(int(largest) // 4, 1), max(int(largest) // 16, 1)}, reverse=True):
        axes.scatter([], [], s=diameter**2 * value / largest, color=COLOR, linewidths=0, label=f"{value:,}")
    figure.legend(loc="outside right upper", title="samples", frameon=False, alignment="left")
    return figure


def _short(names: Sequence[str]) -> list[str]:
    """Names as tick labels of at most 30 characters."""
    return [escape_matplotlib(name if len(name) <= 30 else f"{name[:29]}…") for name in names]


@checked_arguments
def save_label_counts(federation: Federation, path: str | Path, clients: int = 50) -> tuple[Path, Path]:
    """Save the plot of `draw_label_counts` as PNG and SVG.

    Each file is written atomically.

    Args:
        federation: A federation with one class label per sample.
        path: Path of both files without their suffix; a suffix .png or .svg is removed.
        clients: Number of clients to show, at least 1.

    Returns:
        The paths of the PNG and the SVG file.

    Raises:
        FedraxError: Labels cannot be counted, or ``clients`` is below 1.

    Example:
        >>> federation = fedrax.data.Federation.from_arrays(np.zeros((4, 2)), [0, 1, 1, 1], client_ids=[0, 0, 1, 1])
        >>> [path.name for path in fedrax.data.save_label_counts(federation, "labels")]
        ['labels.png', 'labels.svg']
    """
    figure = draw_label_counts(federation, clients)
    path = Path(path)
    stem = path.name.removesuffix(".png").removesuffix(".svg")
    png, svg = (write_figure(path.with_name(f"{stem}.{kind}"), figure) for kind in ("png", "svg"))
    return png, svg
