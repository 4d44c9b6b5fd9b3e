"""Heterogeneity measures against values computed by hand, and their plots."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image
from scipy.spatial.distance import jensenshannon

from fedrax.data import DirichletClasses, Federation, label_counts, load, measure_heterogeneity
from fedrax.data.plot import draw_label_counts, save_label_counts
from fedrax.errors import FedraxError


def federation(labels, ids, **more):
    return Federation.from_arrays(np.zeros((len(labels), 1)), np.array(labels), np.array(ids), **more)


def test_counts_and_distances_by_hand():
    measured = federation([0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 2, 2], num_classes=3)
    assert label_counts(measured).tolist() == [[2, 1, 0], [0, 1, 0], [0, 2, 0]]
    result = measure_heterogeneity(measured)
    # global (1/3, 2/3, 0); local (2/3, 1/3, 0), (0, 1, 0), (0, 1, 0): distance 1/3 each
    assert result.total_variation == pytest.approx(1 / 3)
    assert (result.clients, result.samples, result.smallest, result.median, result.largest) == (3, 6, 1, 2, 3)
    assert result.size_deviation == pytest.approx(np.std([3, 1, 2]) / 2)
    assert result.classes_per_client == pytest.approx(4 / 3)


def test_jensen_shannon_agrees_with_scipy():
    measured = Federation.from_dataset(load("digits"), DirichletClasses(15, 0.2), 0)
    counts = label_counts(measured)
    expected = [jensenshannon(row / row.sum(), counts.sum(0) / counts.sum(), base=2) for row in counts]
    assert measure_heterogeneity(measured).jensen_shannon == pytest.approx(np.mean(expected), rel=1e-9)


def test_equal_clients_are_at_distance_zero_and_disjoint_ones_at_half():
    same = measure_heterogeneity(federation([0, 1, 0, 1], [0, 0, 1, 1]))
    assert same.total_variation == 0 and same.jensen_shannon == 0
    apart = measure_heterogeneity(federation([0, 0, 1, 1], [0, 0, 1, 1]))
    assert apart.total_variation == pytest.approx(0.5)


def test_regression_has_client_sizes_only():
    measured = federation([0.5, 1.5], [0, 1])
    assert measure_heterogeneity(measured).total_variation is None and measure_heterogeneity(measured).largest == 1
    with pytest.raises(FedraxError, match="regression"):
        label_counts(measured)


def test_too_large_table_of_counts_is_rejected():
    big = federation(np.arange(20_001), np.arange(20_001))
    with pytest.raises(FedraxError, match="too large"):
        label_counts(big)


def test_picture_shows_the_counts():
    figure = draw_label_counts(federation([0, 0, 0, 0, 1], [0, 0, 0, 0, 1], class_names=("cat", "dog")))
    dots = figure.axes[0].collections[0]
    assert dots.get_offsets().tolist() == [[0, 0], [1, 1]]
    areas = dots.get_sizes()
    assert areas[0] == pytest.approx(4 * areas[1])
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["cat", "dog"]
    assert figure.axes[0].get_title(loc="left") == "arrays: 2 clients"


def test_picture_is_saved_in_two_formats_and_names_omitted_clients(tmp_path):
    measured = Federation.from_dataset(load("digits"), DirichletClasses(60, 0.2), 0)
    png, svg = save_label_counts(measured, tmp_path / "new" / "labels.png", clients=50)
    with Image.open(png) as image:
        assert image.width > 800 and len(image.convert("L").getcolors(256) or ()) > 10
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "first 50 of 60 clients" in svg.read_text()
    before = svg.read_bytes()
    save_label_counts(measured, tmp_path / "new" / "labels", clients=50)
    assert svg.read_bytes() == before
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["labels.png", "labels.svg"]


def test_unwritable_picture_leaves_no_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedraxError, match="cannot write"):
        save_label_counts(federation([0, 1], [0, 1]), tmp_path / "file" / "labels")
    (tmp_path / "victim").write_text("whole")
    for suffix in ("png", "svg"):
        (tmp_path / f".labels.{suffix}.part").symlink_to(tmp_path / "victim")
    save_label_counts(federation([0, 1], [0, 1]), tmp_path / "labels")
    assert (tmp_path / "victim").read_text() == "whole"
    with pytest.raises(FedraxError, match="at least 1 client"):
        draw_label_counts(federation([0, 1], [0, 1]), clients=0)
