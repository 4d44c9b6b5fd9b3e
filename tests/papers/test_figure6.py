"""The commands for LoSAC's Figure 6 and for deep leakage from gradients, on the bundled digits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedrax
from fedrax.data import load
from fedrax.experiments.method_registry import algorithms
from papers.dlg import __main__ as dlg_main
from papers.dlg import lenet, methods
from papers.losac import __main__ as losac
from papers.losac import figure6, figure6_attacks


@pytest.fixture
def reduced_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods on four clients of the digits."""
    for module in (figure6, figure6_attacks):
        monkeypatch.setattr(module, "CLIENTS", 4)
        monkeypatch.setattr(module, "DATA", {"digits": ("digits", 4)})
    monkeypatch.setattr(figure6, "LEAKS", {"DSGD": True, "LoSAC": False})
    monkeypatch.setattr(figure6.attacked, "__defaults__", (5,))  # number of frames, in each of which images are matched
    every = figure6.methods
    chosen = lambda *of: {name: every(*of)[name] for name in ("DSGD", "LoSAC")}  # noqa: E731
    monkeypatch.setattr(figure6, "methods", chosen)
    monkeypatch.setattr(figure6_attacks, "methods", chosen)
    monkeypatch.setattr(figure6, "load", lambda name, data_dir: load(name))
    figure6._loaded.cache_clear()
    figure6._task.cache_clear()


def command(main: Any, what: str, results: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[list[str]]:
    """Rows of the table that a command writes."""
    arguments = [what, "--results", str(results), "--out", str(results / "runs"), "--seeds", "0", *more]
    monkeypatch.setattr(sys, "argv", ["papers", *arguments])
    assert main() == 0
    lines = (results / f"{what}.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


@pytest.mark.slow
@pytest.mark.usefixtures("reduced_problem")
def test_figure6_table_contains_measured_and_printed_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = command(losac.main, "figure6", tmp_path, monkeypatch)
    assert [row[1:3] for row in rows] == [["DSGD", "falls"], ["LoSAC", "rises"]]
    start, end, change = (float(rows[0][k].split(" ")[0]) for k in (3, 4, 5))
    assert change == pytest.approx(100 * (end / start - 1), abs=0.1)
    assert (tmp_path / "figure6.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("reduced_problem")
def test_search_counts_values_that_agree_with_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = command(losac.main, "figure6-search", tmp_path, monkeypatch)
    assert len(rows) == 2 * 2 * 2 * 3
    for row in rows:
        falls, rises = float(row[5]) < 0, float(row[6]) >= 0
        assert row[7] == f"{falls + rises} of 2"


@pytest.mark.slow
@pytest.mark.usefixtures("reduced_problem")
def test_server_attack_recovers_gradient_and_data_of_losac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        row[1]: [float(cell.split(" ")[0]) for cell in row[2:]]
        for row in command(losac.main, "figure6-attacks", tmp_path, monkeypatch, "--rounds", "2")
    }
    assert rows["DSGD"][0] < 1e-3 and rows["DSGD"][4] < 1e-2
    assert rows["LoSAC"][1] < 0.05 and rows["LoSAC"][4] < 0.05


@pytest.mark.slow
def test_attack_on_lenet_recovers_plain_but_no_private_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lenet, "load", lambda name, data_dir: load("digits"))
    monkeypatch.setattr(lenet, "STEPS", {"DLG": 2, "iDLG": 120, "inverting gradients": 2})
    monkeypatch.setattr(lenet, "ROUNDS", {name: lenet.ROUNDS[name] for name in ("FedSGD", "ClientDP, z = 1")})
    rows = {(row[0], row[2]): row for row in command(dlg_main.main, "lenet", tmp_path, monkeypatch)}
    assert rows["FedSGD", "iDLG"][-2:] == ["100 %", "1 of 1"]
    assert rows["FedSGD", "DLG"][-1] == "0 of 1"  # two steps
    assert rows["ClientDP, z = 1", "iDLG"][-1] == "0 of 1"
    assert (tmp_path / "lenet.png").stat().st_size > 10_000


@pytest.mark.slow
def test_methods_table_contains_messages_and_is_not_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        methods, "METHODS", {"FedSGD": fedrax.algorithms.FedSGD(), "SignSGD": methods.METHODS["SignSGD"]}
    )
    monkeypatch.setattr(methods, "SAMPLES", 1)
    rows = command(dlg_main.main, "methods", tmp_path, monkeypatch, "--steps", "120")
    numbers = 64 * 32 + 32 + 32 * 10 + 10
    assert rows[0][:2] == ["FedSGD", f"upload ({4 * numbers} B)"]
    assert all(float(cell) > 20 for cell in rows[0][2:5]) and rows[0][5] == "100 %"
    assert rows[1][1].endswith(f"({int(np.ceil(numbers / 8))} B)") and rows[1][4] == "-"
    monkeypatch.setattr(methods, "study", lambda *arguments: pytest.fail("it was run again"))
    assert command(dlg_main.main, "methods", tmp_path, monkeypatch, "--steps", "120") == rows


def test_methods_table_covers_all_algorithms() -> None:
    shown = {type(part).__name__ for method in methods.METHODS.values() for part in parts_of(method)}
    alike = [name for some in methods.ALIKE.values() for name in some]
    assert set(methods.ALIKE) <= set(methods.METHODS)
    assert not set(alike) & shown and len(set(alike)) == len(alike)
    assert {cls.__name__ for cls in algorithms().values()} == shown | set(alike)


def parts_of(method: fedrax.Algorithm) -> list[fedrax.Algorithm]:
    """A method and the methods it wraps."""
    inner = getattr(method, "inner", None)
    return [method, *([] if inner is None else parts_of(inner))]
