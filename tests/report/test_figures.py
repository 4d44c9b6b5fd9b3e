"""Tables and figures of many methods."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedrax.data import Federation
from fedrax.data.plot import draw_label_counts
from fedrax.report.curves import legend_columns
from fedrax.report.runs import Statistic
from fedrax.report.search_plots import draw_grids
from fedrax.tuning.selection import SearchResult, Trial


@pytest.mark.parametrize("settings", [1, 3])
@pytest.mark.parametrize("label", ["fedavg", "a method of a longer name"])
def test_the_legend_of_many_methods_fits_the_picture(settings: int, label: str) -> None:
    points = [{f"algorithm.local.s{k}": lr for k in range(settings)} for lr in (0.1, 1.0)]
    trials = tuple(Trial(point, 0.5 + point["algorithm.local.s0"] / 10, 3) for point in points)
    figure = draw_grids({f"{label} {i}": SearchResult("accuracy", False, trials) for i in range(10)})
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    box, (legend,) = figure.bbox, figure.legends
    inside = legend.get_window_extent(renderer)
    assert box.x0 <= inside.x0 and inside.x1 <= box.x1 and box.y0 <= inside.y0


def test_losses_far_apart_are_on_a_logarithmic_axis() -> None:
    for lower, high, scale in ((True, 4e4, "log"), (True, 5.0, "linear"), (False, 4e4, "linear")):
        metric, values = "loss" if lower else "accuracy", (0.5, 0.7, high)
        trials = tuple(Trial({"local.lr": 10.0**k}, value, 3) for k, value in enumerate(values))
        (axes,) = draw_grids({"fedavg": SearchResult(metric, lower, trials)}).axes
        assert axes.get_yscale() == scale


def test_few_clients_of_many_classes_have_their_names() -> None:
    """Whose dots lie close together from class to class, and far apart from client to client."""
    y, owner = np.arange(86), np.array([f"region {i % 6}" for i in range(86)])
    many = tuple(f"département of a name that is long, {i}" for i in range(86))
    few = draw_label_counts(Federation.from_arrays(np.zeros((86, 1)), y, owner, class_names=many)).axes[0]
    assert [label.get_text() for label in few.get_xticklabels()] == [f"region {i}" for i in range(6)]
    assert len(few.get_yticklabels()) < 86
    named = draw_label_counts(Federation.from_arrays(np.zeros((86, 1)), y % 26, owner, class_names=many[:26])).axes[0]
    names = [label.get_text() for label in named.get_yticklabels()]
    assert len(names) == 26 and names[0] == "département of a name that is…"


def test_few_entries_stand_side_by_side() -> None:
    assert legend_columns(Figure(figsize=(10, 4)), ["fedavg", "scaffold"]) == 2


def test_values_that_are_alike_have_no_spread() -> None:
    """Whose mean, a sum over their number, may differ from them in the last digit."""
    assert Statistic.of([0.031199999999999995] * 3) == Statistic(0.031199999999999995, 0.0)
    assert Statistic.of([0.1] * 3) == Statistic(0.1, 0.0)
    assert Statistic.of([1.0, 2.0]) == Statistic(1.5, 0.5**0.5)
