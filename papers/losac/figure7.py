"""Figure 7: low-rank matrix sensing, and a search for the constants that the paper does not print."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomlkit

from fedrax import files
from fedrax.report import curves
from fedrax.report.runs import MethodRuns, SavedRun, last_values
from papers.losac.panels import draw
from papers.losac.running import run, spread, write_table

FILE = Path(__file__).with_name("figure7.toml")
RANKS = (32, 16, 8, 4, 2)
METRICS = {"frobenius_error": "distance from the true matrix", "rank": "rank"}
VARIED: dict[str, tuple] = {
    "lambda": (0.1, 0.5, 1.0),
    "n_i": (25, 50, 200),
    "T": (1, 10),
    "start": (0.1, 1.0),
    "losses": ("sum",),
}
"""Varied one at a time from the values of the file: lambda 0.2, n_i 100, T 5, zero initialization, mean losses."""


def figure(arguments: argparse.Namespace) -> int:
    """Every method at every rank; error and rank over rounds, as in the figure, and final values."""
    found, rows = {}, []
    for rank in RANKS:
        flags = ["--data.rank", str(rank)]
        found[rank] = run(FILE, arguments.out / "figure7" / f"rank={rank}", arguments, *flags)
        rows += [[str(rank), method.label, *outcome(method, rank)] for method in found[rank]]
    columns = ["true rank", "method", "rank", "exact from round", "error", "diverged"]
    note = (
        "Figure 7 prints curves, no numbers. Mean ± standard deviation over seeds of the last evaluation; 'exact from "
        "round': from which evaluation on all runs had the true rank."
    )
    write_table(arguments, "figure7", "LoSAC, Figure 7 (low-rank matrix sensing)", note, columns, rows)
    drawn = draw({f"true rank {rank}": methods for rank, methods in found.items()}, METRICS, RANKS)
    curves.save_curves(drawn, arguments.results / "figure7")
    return 0


def search(arguments: argparse.Namespace) -> int:
    """The methods at rank 4 with one constant changed at a time; the table is written after each."""
    columns = ["constants", "method", "rank", "exact from round", "error", "diverged"]
    note = "True rank 4, one seed; one constant at a time differs from those of `figure7.toml`."
    rows = []
    for what, value in settings():
        name = "the file's" if what is None else f"{what} = {value}"
        table = changed(files.read_toml(FILE), what, value)
        table["seeds"] = table["seeds"][:1]
        out = arguments.out / "figure7-search" / ("base" if what is None else f"{what}={value}")
        files.write_text(out / "comparison.toml", tomlkit.dumps(table))
        rank = table["data"]["rank"]
        for method in run(out / "comparison.toml", out, arguments):
            rows.append([name, method.label, *outcome(method, rank)])
        write_table(arguments, "figure7-search", "LoSAC's Figure 7: what the paper does not say", note, columns, rows)
    return 0


def settings() -> Iterator[tuple[str | None, Any]]:
    """The changed constant and its value, beginning with no change."""
    yield None, None
    for what, values in VARIED.items():
        for value in values:
            yield what, value


def changed(table: dict[str, Any], what: str | None, value: Any) -> dict[str, Any]:
    """The experiment's table with one constant changed."""
    if what == "lambda":
        base = table["compare"][0]["local"]["prox"]["weight"]
        for entry in table["compare"]:  # the weight of each method is a multiple of lambda
            prox = entry["prox"] if "prox" in entry else entry["local"]["prox"]
            prox["weight"] *= value / base
    elif what == "n_i":
        table["data"]["samples"] = value
    elif what == "T":
        table["algorithm"]["local"]["steps"] = value
    elif what == "start":
        table["model"]["deviation"] = value
    elif what == "losses":
        table["algorithm"]["local"]["reduction"] = value
    return table


def outcome(method: MethodRuns, rank: int) -> list[str]:
    """Text of the final rank, the round from which it was correct, the final error and the number of diverged runs."""
    whole = [one for one in method.runs if one.failure is None]
    last = [last_values(one.events) for one in whole]
    since = [exact_from(one, rank) for one in whole]
    exact = [r for r in since if r is not None]
    return [
        spread([end["rank"] for end in last], ".1f"),
        str(max(exact)) if exact and len(exact) == len(method.runs) else "-",
        spread([end["frobenius_error"] for end in last], ".4f"),
        str(len(method.runs) - len(whole)),
    ]


def exact_from(one: SavedRun, rank: int) -> int | None:
    """The first evaluation from which on the rank was correct until the end; None if it was wrong at the end."""
    since = None
    for event in one.events:
        if "rank" in event:
            since = None if event["rank"] != rank else since or event["round"]
    return since
