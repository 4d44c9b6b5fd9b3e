"""``figure3`` and ``figure4``: tables and figures of the measurements of :mod:`papers.upcycled.private`."""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure
import numpy as np

from fedrax import FedraxError, files
from fedrax.privacy.printed_bounds import objective_perturbation, output_perturbation
from fedrax.report import curves
from papers.losac.running import markdown, spread, written_by
from papers.upcycled.grid import Point, federation_of
from papers.upcycled.private import (
    DELTA,
    FIGURES,
    MEASURED,
    METHODS,
    MU,
    Figure,
    Found,
    kinds_of,
    measured,
    spent,
)

WAYS: dict[str, tuple[str, Callable[[Point], bool]]] = {
    "plain": ("plain", lambda point: True),
    "half the rounds": ("upcycled", lambda point: point["a"] == 0),
    "upcycled": ("upcycled", lambda point: point["a"] > 0),
    "server step": ("server step", lambda point: True),
}
"""Compared variants, by the kind whose grid contains them; all except the first have the same epsilon."""
STRONGER = 2.0
"""Number of standard errors from which on a difference counts."""


class Sweeps(NamedTuple):
    """Measurements of a method on a set, by variant."""

    test: dict[str, Found]
    held_out: dict[str, Found]
    sizes: np.ndarray
    """Training samples of each device."""
    largest: float
    """Share of the larger class in the test rows, in percent: the accuracy of a constant prediction."""

    def chosen(self, way: str, by: str, held_out: bool, **fixed: float) -> tuple[Point, np.ndarray, np.ndarray]:
        """The best point, with its losses and accuracies on test rows [seeds, MEASURED]."""
        index = (self.held_out if held_out else self.test)[way].best(by, **fixed)
        found = self.test[way]
        return found.points[index], found.loss[index], found.accuracy[index]


Every = dict[tuple[str, str], Sweeps]


def figure(arguments: argparse.Namespace) -> None:
    """Run missing sweeps, and write tables and figure after each method."""
    if other := [method for method in arguments.methods if method not in METHODS]:
        raise FedraxError(f"the figures' methods are {', '.join(METHODS)}, and not {', '.join(other)}")
    if arguments.rounds % (2 * MEASURED):
        raise FedraxError(f"--rounds: take a multiple of {2 * MEASURED}, not {arguments.rounds}")
    every: Every = {}
    text = ""
    for data in arguments.data:
        for method in arguments.methods:
            began = time.monotonic()
            found = sweeps_of(arguments, data, method)
            if found is not None:
                every[data, method] = found
            if found is not None and not arguments.only_write:
                print(f"{data}, {method}: {time.monotonic() - began:.0f} s", flush=True)
                text = write(arguments, every)
    if not every:
        raise FedraxError(f"there are no sweeps of {arguments.what} below {arguments.out} yet: leave --only-write out")
    print(write(arguments, every) if arguments.only_write else text)


def sweeps_of(arguments: argparse.Namespace, data: str, method: str) -> Sweeps | None:
    """Sweeps of a method on a set; None if one is missing and none is to be run."""
    options = {"out": arguments.out, "seeds": arguments.seeds, "rounds": arguments.rounds}
    options |= {"data_dir": arguments.data_dir, "only_kept": arguments.only_write}
    parts: list[dict[str, Found]] = []
    for part in ("test", "held out"):
        kinds = {kind: measured(arguments.what, data, method, kind, part, **options) for kind in kinds_of(method)}
        there = {kind: found for kind, found in kinds.items() if found is not None}
        if len(there) < len(kinds):
            return None
        parts.append({way: there[kind].only(allowed) for way, (kind, allowed) in WAYS.items() if kind in there})
    federation = federation_of(data, "test", arguments.data_dir)
    labels = np.zeros(1, int) if federation.test is None else np.asarray(federation.test[1])
    test, held_out = parts
    return Sweeps(test, held_out, federation.sizes, 100 * np.bincount(labels).max() / len(labels))


# -- tables --------------------------------------------------------------------------------------------------------


def epsilons(of: Figure, method: str, level: float, rounds: int, sizes: np.ndarray) -> tuple[list[str], list[str]]:
    """Text of (epsilon of the paper, sound epsilon) for the plain method at ``level`` and for the others."""
    some = {"lr": 1.0, "tau": 1.0}
    pairs = [
        spent(of.at(method, some | {of.level: share * level}), of_rounds, sizes)
        for share, of_rounds in ((1.0, rounds), (of.share, rounds // 2))
    ]
    text = lambda value: f"{value:.3g}" if np.isfinite(value) else "–"  # noqa: E731
    return [text(paper) for _, paper in pairs], [text(sound) for sound, _ in pairs]


def difference(new: np.ndarray, old: np.ndarray, form: str) -> str:
    """Mean ± standard deviation of the differences over equal seeds."""
    return spread((new - old).tolist(), "+" + form).replace("± +", "± ")


def printed_rows(arguments: argparse.Namespace, of: Figure) -> list[list[str]]:
    """The paper's epsilons of Syn(iid), and those of its theorems; empty without that set."""
    if "iid" not in arguments.data:
        return []
    with (Path(__file__).parent / "epsilons_printed.csv").open() as file:
        rows = [[f"printed, {r['where']}", float(r["plain"]), float(r["upcycled"])] for r in csv.DictReader(file)
                if int(r["figure"]) == of.number]  # fmt: skip
    federation = federation_of("iid", "test", arguments.data_dir)
    sizes, test = federation.sizes, len(federation.test[1]) if federation.test else 0
    mean, rounds = (int(sizes.sum()) + test) / len(sizes), arguments.rounds
    uploads = f"{rounds} and {rounds // 2} uploads"
    if of.number == 3:
        rule = lambda m, sigma, n, delta: output_perturbation(m, of.printed["tau"], sigma, n, delta)  # noqa: E731
        both = lambda sigma, n, delta: [rule(rounds, 1, n, delta), rule(rounds // 2, sigma, n, delta)]  # noqa: E731
        rows.append([f"Theorem 6.2, {mean:.0f} samples, delta 0.001, {uploads}", *both(0.8, mean, 1e-3)])
        squared = "the same with noise of deviation sigma^2, as the authors' program draws it"
        rows.append([squared, *both(0.64, mean, 1e-3)])
        means = np.mean([both(0.8, n, DELTA) for n in sizes], axis=0)
        rows.append([f"Theorem 6.2, mean over the devices' training samples, delta {DELTA:g}", *means.tolist()])
        sound = [spent(of.at("FedAvg", {"lr": 1, "tau": 1, of.level: z}), m, sizes)[0]
                 for z, m in ((0.1, rounds), (0.08, rounds // 2))]  # fmt: skip
        rows.append([f"sound, delta {DELTA:g}", *sound])
    else:
        both = lambda u1, u2, n: [  # noqa: E731
            objective_perturbation([alpha] * m, u1, u2, MU, n) for alpha, m in ((10.0, rounds), (20.0, rounds // 2))
        ]
        rows.append([f"Theorem 6.3, {mean:.0f} samples, u1 = 1, u2 = 1/4, {uploads}", *both(1, 0.25, mean)])
        means = np.mean([both(2**0.5, 0.5, n) for n in sizes], axis=0)
        rows.append(["Theorem 6.3 with a bias, mean over the devices' training samples", *means.tolist()])
    return [[str(name), f"{plain:.4g}", f"{up:.4g}", f"{up / plain:.3f}"] for name, plain, up in rows]


def noise_rows(arguments: argparse.Namespace, of: Figure, every: Every, held_out: bool) -> Iterator[list[str]]:
    """At the paper's noise: losses, accuracies and the points chosen by loss."""
    for (data, method), sweeps in every.items():
        level = of.printed[of.level]
        papers, sounds = epsilons(of, method, level, arguments.rounds, sweeps.sizes)
        found = {way: sweeps.chosen(way, "loss", held_out, **at(of, way, level, True)) for way in sweeps.test}
        losses = {way: loss[:, -1] for way, (_, loss, _) in found.items()}
        cell = lambda way, k, form: spread(found[way][k][:, -1].tolist(), form) if way in found else "–"  # noqa: E731, B023
        yield [
            data,
            method,
            *papers,
            *sounds,
            *(cell(way, 1, ".4f") for way in WAYS),
            difference(losses["upcycled"], losses["plain"], ".4f"),
            difference(losses["upcycled"], losses["half the rounds"], ".4f"),
            *(cell(way, 2, ".2f") for way in WAYS),
            shown(found["plain"][0]),
            shown(found["upcycled"][0]),
        ]


def at(of: Figure, way: str, level: float, as_printed: bool) -> Point:
    """Fixed values of a variant at a level of the plain method; as printed, also the accompanying ones."""
    own = level if WAYS[way][0] == "plain" else of.share * level
    return {**(of.printed if as_printed else {}), of.level: own}


def shown(point: Point) -> str:
    """Text of a point."""
    return ", ".join(f"{axis} {value:.3g}" for axis, value in point.items())


class Compared(NamedTuple):
    """Accuracies [seeds] at one level of a method on a set, by variant, at points chosen on held-out rows."""

    data: str
    method: str
    level: float
    largest: float
    """Share of the larger class."""
    found: dict[str, np.ndarray]

    def gain(self, over: str) -> np.ndarray | None:
        """Gain of the upcycled method [seeds]."""
        return self.found["upcycled"] - self.found[over] if over in self.found else None


def compared(of: Figure, every: Every) -> list[Compared]:
    """Comparison at every level."""
    made = []
    for (data, method), sweeps in every.items():
        for level in of.levels:
            best = {w: sweeps.chosen(w, "accuracy", True, **at(of, w, level, False)) for w in sweeps.test}
            found = {way: accuracy[:, -1] for way, (_, _, accuracy) in best.items()}
            made.append(Compared(data, method, level, sweeps.largest, found))
    return made


def level_rows(arguments: argparse.Namespace, of: Figure, every: Every) -> Iterator[list[str]]:
    """Accuracy against epsilon."""
    for one in compared(of, every):
        sizes = every[one.data, one.method].sizes
        papers, sounds = epsilons(of, one.method, one.level, arguments.rounds, sizes)
        cells = [spread(one.found[way].tolist(), ".2f") if way in one.found else "–" for way in WAYS]
        gains = [one.gain(over) for over in WAYS if over != "upcycled"]
        text = ["–" if gain is None else spread(gain.tolist(), "+.2f").replace("± +", "± ") for gain in gains]
        yield [one.data, one.method, f"{one.level:g}", *papers, *sounds, *cells, *text]


def summary_rows(of: Figure, every: Every) -> Iterator[list[str]]:
    """Gains of upcycling over all sets and levels at which the model learns."""
    cells = [one for one in compared(of, every) if max(a.mean() for a in one.found.values()) > one.largest]
    for method in dict.fromkeys(one.method for one in cells):
        for over in (way for way in WAYS if way != "upcycled"):
            gains = [g for one in cells if one.method == method and (g := one.gain(over)) is not None]
            if gains:
                errors = [max(statistics.stdev(g), 1e-9) / len(g) ** 0.5 if len(g) > 1 else np.inf for g in gains]
                above = sum(g.mean() > STRONGER * e for g, e in zip(gains, errors, strict=True))
                below = sum(-g.mean() > STRONGER * e for g, e in zip(gains, errors, strict=True))
                mean = statistics.mean(float(g.mean()) for g in gains)
                yield [method, over, f"{mean:+.2f}", str(len(gains)), str(above), str(below)]


def write(arguments: argparse.Namespace, every: Every) -> str:
    """Write the tables and the figure to results/."""
    of = FIGURES[arguments.what]
    curves.save_curves(draw(arguments, of, every), arguments.results / arguments.what)
    ways = "|".join(WAYS)
    heads = "set|method|eps, plain|eps, others|sound eps, plain|sound eps, others|"
    noise = heads + ways + f"|upcycled - plain|upcycled - half the rounds|{ways}|chosen, plain|chosen, upcycled"
    level = heads.replace("method|", f"method|{of.level}|") + ways + "|" + "|".join(
        f"upcycled - {way}" for way in WAYS if way != "upcycled"
    )  # fmt: skip
    lines = [
        f"# Upcycled-FL, Figure {of.number} ({of.mechanism}, synthetic sets)",
        "",
        note(arguments, of),
        "",
        "## The printed epsilons of Syn(iid)",
        "",
        *markdown("|plain|upcycled|upcycled / plain", printed_rows(arguments, of)),
        "",
        f"## At the paper's noise, chosen by test loss as the paper does\n\n{AT_NOISE}",
        "",
        *markdown(noise, list(noise_rows(arguments, of, every, False))),
        "",
        "## The same, chosen by the loss on held-out rows",
        "",
        *markdown(noise, list(noise_rows(arguments, of, every, True))),
        "",
        f"## Accuracy against epsilon\n\n{AGAINST}",
        "",
        *markdown("method|upcycled over|mean gain, %|sets and levels|above|below", list(summary_rows(of, every))),
        "",
        *markdown(level, list(level_rows(arguments, of, every))),
    ]
    text = "\n".join(lines) + "\n"
    files.write_text(arguments.results / f"{arguments.what}.md", text)
    return text


AT_NOISE = (
    "Test loss over all test rows, then accuracy in %, after the last round. 'eps' is the theorem's, the mean over "
    "devices; 'sound eps' what holds whatever the data. 'half the rounds' is the method itself, 'server step' FedAvg "
    "with a step tuned on the server: both with the noise and the rounds, and so the epsilon, of the upcycled method."
)
AGAINST = (
    "Test accuracy in % at points chosen by the accuracy on held-out rows (20 % of each device's training rows), "
    "differences over the same seeds. First over all sets and levels where one of the ways is better than the larger "
    "class's share of the rows, the dotted line of the picture: 'above' and 'below' count those where the gain is more "
    f"than {STRONGER:g} of its standard errors. Plain methods spend more than the others in every row."
)


def note(arguments: argparse.Namespace, of: Figure) -> str:
    """The settings of the runs, and the command."""
    return (
        f"The figure prints curves of the loss and no numbers. {len(arguments.seeds)} seeds, mean ± standard "
        f"deviation; all devices take part in each of {arguments.rounds} rounds, upcycled methods in "
        f"{arguments.rounds // 2} of as many iterations, with {of.share:g} of the plain ones' {of.level}; no "
        f"stragglers. delta = {DELTA:g}. 'own' sets are our generator's; sets and methods that are not in the tables "
        f"were not run. {written_by(arguments)}"
    )


# -- the figure ----------------------------------------------------------------------------------------------------

_DASHES = {"plain": "--", "half the rounds": ":", "upcycled": "-", "server step": "-."}


def draw(arguments: argparse.Namespace, of: Figure, every: Every) -> matplotlib.figure.Figure:
    """A column for each set: loss over iterations as printed, and accuracy over both epsilons."""
    sets = list(dict.fromkeys(data for data, _ in every))
    rows = 3 if of.number == 3 else 2
    sketch = matplotlib.figure.Figure(figsize=(1.2 + 3.9 * len(sets), 2.9 * rows + 0.8), layout="constrained")
    grid = sketch.subplots(rows, len(sets), squeeze=False)
    for column, data in enumerate(sets):
        _losses(grid[0, column], arguments, of, {m: s for (d, m), s in every.items() if d == data})
        grid[0, column].set_title(data)
        for row in range(1, rows):
            mine = [one for one in compared(of, every) if one.data == data]
            _accuracies(grid[row, column], arguments, of, mine, every, sound=row == 2)
    grid[0, 0].set_ylabel("test loss at the paper's noise")
    for axes in grid[1:, 0]:
        axes.set_ylabel("test accuracy, %")
    handles = {label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    sketch.legend(
        handles.values(),
        handles,
        loc="outside lower center",
        ncols=max(2, min(4, 2 * len(sets))),
        frameon=False,
        fontsize="small",
    )
    return sketch


def _losses(axes: Any, arguments: argparse.Namespace, of: Figure, methods: dict[str, Sweeps]) -> None:
    """Loss over iterations at points chosen by the loss."""
    at_iteration = arguments.rounds / MEASURED * np.arange(1, MEASURED + 1)
    for method, sweeps in methods.items():
        for way in ("plain", "upcycled"):
            _, loss, _ = sweeps.chosen(way, "loss", False, **at(of, way, of.printed[of.level], True))
            mean, deviation = loss.mean(0), loss.std(0, ddof=1) if len(loss) > 1 else 0 * loss[0]
            axes.plot(at_iteration, mean, **_style(method, way))
            axes.fill_between(at_iteration, mean - deviation, mean + deviation, alpha=0.15, color=_color(method))
    axes.set_xlabel("iterations")
    _tidy(axes)


def _accuracies(
    axes: Any, arguments: argparse.Namespace, of: Figure, mine: list[Compared], every: Every, sound: bool
) -> None:
    """Accuracy over epsilon, the sound one or that of the paper, if there is one."""
    lines: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for one in mine:
        papers, sounds = epsilons(of, one.method, one.level, arguments.rounds, every[one.data, one.method].sizes)
        for way, accuracy in one.found.items():
            text = (sounds if sound else papers)[0 if way == "plain" else 1]
            if text != "–":
                deviation = accuracy.std(ddof=1) if len(accuracy) > 1 else 0.0
                lines.setdefault((one.method, way), []).append((float(text), accuracy.mean(), deviation))
    for (method, way), points in lines.items():
        epsilon, mean, deviation = np.array(sorted(points)).T
        axes.errorbar(epsilon, mean, deviation, **_style(method, way), marker="o", markersize=3, elinewidth=0.8)
    axes.axhline(mine[0].largest, color="0.4", linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    axes.set_xscale("log")
    axes.set_xlabel(f"sound epsilon at delta {DELTA:g}" if sound else "epsilon by the paper, mean over devices")
    _tidy(axes)


def _color(method: str) -> str:
    return curves.PALETTE[list(METHODS).index(method)]


def _style(method: str, way: str) -> dict[str, Any]:
    return {"color": _color(method), "linestyle": _DASHES[way], "linewidth": 1.4, "label": f"{method}, {way}"}


def _tidy(axes: Any) -> None:
    axes.grid(color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
