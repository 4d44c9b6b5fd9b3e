"""Tables and figures of many methods."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedrax.data import Federation
from fedrax.data.plot import draw_label_counts
from fedrax.report.curves import draw_curves, legend_columns
from fedrax.report.runs import MethodRuns, SavedRun, Statistic
from fedrax.report.search_plots import draw_grids
from fedrax.report.svg import ChartCurve, chart
from fedrax.tuning.selection import SearchResult, Trial


@pytest.mark.parametrize("settings", [1, 3])
@pytest.mark.parametrize("label", ["fedavg", "a method of a longer name"])
def test_legend_of_many_methods_fits_the_figure(settings: int, label: str) -> None:
    points = [{f"algorithm.local.s{k}": lr for k in range(settings)} for lr in (0.1, 1.0)]
    trials = tuple(Trial(point, 0.5 + point["algorithm.local.s0"] / 10, 3) for point in points)
    figure = draw_grids({f"{label} {i}": SearchResult("accuracy", False, trials) for i in range(10)})
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    box, (legend,) = figure.bbox, figure.legends
    inside = legend.get_window_extent(renderer)
    assert box.x0 <= inside.x0 and inside.x1 <= box.x1 and box.y0 <= inside.y0


def test_losses_of_different_magnitude_have_a_logarithmic_axis() -> None:
    for lower, high, scale in ((True, 4e4, "log"), (True, 5.0, "linear"), (False, 4e4, "linear")):
        metric, values = "loss" if lower else "accuracy", (0.5, 0.7, high)
        trials = tuple(Trial({"local.lr": 10.0**k}, value, 3) for k, value in enumerate(values))
        (axes,) = draw_grids({"fedavg": SearchResult(metric, lower, trials)}).axes
        assert axes.get_yscale() == scale


LOSSES = ([30.0, 4.0, 1.0], [26.0, 0.1, 0.2])
"""Two runs with means 28, 2.05, 0.6 and deviations 2.83, 2.76, 0.57: the last lower edges are -0.7 and 0.03."""


@pytest.mark.parametrize("rounds", [2, 7, 20, 300])
def test_ticks_of_rounds_are_whole_numbers(rounds: int) -> None:
    events = [{"round": r, "test_loss": 1.0, "bytes_down": r, "bytes_up": 0} for r in range(1, rounds + 1)]
    figure = draw_curves([MethodRuns("m", [SavedRun(Path(), {}, events, None)])])
    FigureCanvasAgg(figure).draw()
    ticks = figure.axes[0].get_xticks()
    assert len(ticks) >= 2 and (ticks == np.round(ticks)).all()


def test_bands_on_a_logarithmic_axis_end_at_the_axis() -> None:
    runs = []
    for losses in LOSSES:
        events = [{"round": r, "test_loss": v, "bytes_down": r, "bytes_up": 0} for r, v in enumerate(losses)]
        runs.append(SavedRun(Path(), {}, events, None))
    axes = draw_curves([MethodRuns("fedavg", runs)]).axes[0]
    (band,) = axes.collections
    (outline,) = band.get_paths()
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log" and low == pytest.approx(0.6 / 1.25)
    edges = np.asarray(outline.vertices)[:, 1]
    assert edges.min() == low and edges.max() == pytest.approx(28 + 8**0.5) and edges.max() < high


def test_bands_on_a_logarithmic_axis_of_a_report_end_at_the_axis() -> None:
    mean, deviation = np.mean(LOSSES, axis=0), np.std(LOSSES, axis=0, ddof=1)
    points = [(float(i), float(mean[i]), float(deviation[i])) for i in range(3)]
    drawn = chart([ChartCurve("fedavg", 0, points)], "rounds", "test loss")
    (polygon,) = re.findall(r'class="band" points="([^"]*)"', drawn)
    heights = [float(point.partition(",")[2]) for point in polygon.split()]
    (axis,) = re.findall(r'class="axis" x1="46" x2="466" y1="([^"]*)"', drawn)  # the line below the chart
    assert max(heights) == float(axis) == heights[3] == heights[4]  # of the last two points
    assert min(heights) > 14  # upper edges are below the upper end of the axis


def test_few_clients_with_many_classes_are_labeled() -> None:
    """Points are dense along the classes and sparse along the clients."""
    y, owner = np.arange(86), np.array([f"region {i % 6}" for i in range(86)])
    many = tuple(f"département of a name that is long, {i}" for i in range(86))
    few = draw_label_counts(Federation.from_arrays(np.zeros((86, 1)), y, owner, class_names=many)).axes[0]
    assert [label.get_text() for label in few.get_xticklabels()] == [f"region {i}" for i in range(6)]
    assert len(few.get_yticklabels()) < 86
    named = draw_label_counts(Federation.from_arrays(np.zeros((86, 1)), y % 26, owner, class_names=many[:26])).axes[0]
    names = [label.get_text() for label in named.get_yticklabels()]
    assert len(names) == 26 and names[0] == "département of a name that is…"


def test_few_legend_entries_are_in_one_row() -> None:
    assert legend_columns(Figure(figsize=(10, 4)), ["fedavg", "scaffold"]) == 2


def test_equal_values_have_zero_deviation() -> None:
    """Although their mean may differ from them by rounding."""
    assert Statistic.of([0.031199999999999995] * 3) == Statistic(0.031199999999999995, 0.0)
    assert Statistic.of([0.1] * 3) == Statistic(0.1, 0.0)
    assert Statistic.of([1.0, 2.0]) == Statistic(1.5, 0.5**0.5)
