"""Scaling of the cost of a round with the size of the problem, one axis at a time.

``python -m benchmarks.scaling`` measures FedAvg on a 2NN (random bytes as 28x28 images) against the number of clients
with a fixed cohort, the cohort size, the width of the model and the number of devices; each point in a fresh process on
a quiet machine. It fits cost ~ size^e on each axis (0: constant, 1: proportional), appends the runs to
``results/scaling.jsonl`` and writes ``scaling.md``, ``scaling.png`` and ``scaling.svg``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.machine import cores
from benchmarks.pages import markdown_table, number, save_picture, write_page
from benchmarks.points import measure_point
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX

RAW = RESULTS / "scaling.jsonl"
STEPS, CLASSES, TIMED_ROUNDS = 5, 10, 20


@dataclass(frozen=True)
class Point:
    """One federation and model. Every client takes five steps over its samples."""

    clients: int = 1000
    samples: int = 60  # of each client
    batch: int = 12
    cohort: int = 50
    width: int = 200  # of both hidden layers
    devices: int | None = None  # all

    @property
    def parameters(self) -> int:
        return 784 * self.width + self.width**2 + self.width * CLASSES + 2 * self.width + CLASSES


@dataclass(frozen=True)
class Axis:
    """One field of a point that varies while the others are fixed."""

    field: str
    values: tuple[int, ...]
    base: Point
    label: str
    expected: str

    def points(self) -> list[Point]:
        return [replace(self.base, **{self.field: value}) for value in self.values]

    def size(self, point: Point) -> int:
        return point.parameters if self.field == "width" else getattr(point, self.field)


def axes() -> dict[str, Axis]:
    few_samples = Point(samples=2, batch=2)  # so that a million clients fit into memory
    devices = tuple(sorted({1, 2, cores()} & set(range(1, cores() + 1))))
    found = (
        Axis("clients", (1_000, 10_000, 100_000, 1_000_000), few_samples, "clients N, cohort of 50", "0"),
        Axis("cohort", (10, 30, 100, 300, 1000), Point(), "cohort S of 1000 clients", "1"),
        Axis("width", (50, 100, 200, 400, 800), Point(), "parameters", "1 for large ones"),
        Axis("devices", devices, Point(), "CPU devices", "-1"),
    )
    return {axis.field: axis for axis in found}


def main() -> None:
    arguments = parse_arguments()
    if arguments.point:
        print(RESULT_PREFIX + json.dumps(measure_here(Point(**json.loads(arguments.point)))))
        return
    chosen = [axes()[name] for name in arguments.axes]
    if arguments.report:
        session = Session.latest(RAW)
    else:
        session = Session.start(RAW)
        for repeat in range(1, arguments.repeats + 1):
            for axis in chosen:
                for point in axis.points():
                    result = measure_point("benchmarks.scaling", asdict(point), arguments.max_wait)
                    session.add({"axis": axis.field, "point": asdict(point), "repeat": repeat} | result)
                    print(one_line(session.runs[-1]), flush=True)
    measured = medians(session)
    print(table(measured))
    if set(arguments.axes) == set(axes()) and all(measured.values()):
        print("wrote", *write_report(session, measured, arguments.out))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--axes", nargs="+", choices=axes(), default=list(axes()), help="default: all")
    add("--repeats", type=int, default=3, help="runs of everything, in turn (default 3)")
    add("--max-wait", type=float, default=300, help="seconds to wait for a quiet machine (default 300)")
    add("--out", type=Path, default=RESULTS, help="where the page and the pictures are written")
    add("--report", action="store_true", help="only write the last session's page and pictures again")
    add("--point", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_here(point: Point) -> dict:
    """Times the point's rounds in this process."""
    from benchmarks.fedrax_clock import time_rounds
    from benchmarks.fedrax_problems import random_images
    from fedrax import FedAvg, LocalSGD, classification
    from fedrax.models import MLP

    federation = random_images(point.clients, point.samples, CLASSES)
    model = MLP(hidden=(point.width, point.width)).build((28, 28), CLASSES)
    task = classification(model, federation.preprocess())
    algorithm = FedAvg(local=LocalSGD(lr=0.01, steps=STEPS, batch_size=point.batch))
    clock, _ = time_rounds(algorithm, task, federation, TIMED_ROUNDS, cohort_size=point.cohort, devices=point.devices)
    return clock.summary()


def one_line(run: dict) -> str:
    value = run["point"][run["axis"]]
    if "failed" in run:
        return f"{run['axis']} {value}: FAILED: {run['failed'][-300:]}"
    return (
        f"{run['axis']:8s} {value:8d}  {run['round_median'] * 1e3:8.2f} ms a round, "
        f"first {run['first_round_with_import']:5.2f} s, {run['peak_pss_mb']:6.0f} MB, "
        f"foreign CPU {run['foreign_cpu']:.2f}"
    )


@dataclass(frozen=True)
class Measured:
    """Medians over a point's repeats; seconds and MB."""

    point: Point
    round: float
    first_round_with_import: float
    peak_pss_mb: float
    foreign_cpu: float


def medians(session: Session) -> dict[str, list[Measured]]:
    """Axis -> its points in order."""
    found: dict[str, list[Measured]] = {}
    for name, axis in axes().items():
        found[name] = []
        for point in axis.points():
            runs = [
                run
                for run in session.runs
                if run["axis"] == name and run["point"] == asdict(point) and "failed" not in run
            ]
            if runs:
                fields = ("round_median", "first_round_with_import", "peak_pss_mb", "foreign_cpu")
                values = [statistics.median(run[field] for run in runs) for field in fields]
                found[name].append(Measured(point, *values))
    return found


def exponent(axis: Axis, points: list[Measured]) -> float:
    """The e of cost ~ size^e, by least squares in logarithms; not a number for a single point."""
    if len(points) < 2:
        return float("nan")
    sizes = np.log([axis.size(measured.point) for measured in points])
    return float(np.polyfit(sizes, np.log([measured.round for measured in points]), 1)[0])


def table(measured: dict[str, list[Measured]]) -> str:
    lines = []
    for name, points in measured.items():
        axis = axes()[name]
        for i, m in enumerate(points):
            lines.append(
                (
                    axis.label if i == 0 else "",
                    f"{axis.size(m.point):,}",
                    number(m.round * 1e3),
                    f"{m.round / points[0].round:.2f}",
                    f"{m.first_round_with_import:.2f}",
                    f"{m.peak_pss_mb:.0f}",
                    f"{exponent(axis, points):.2f} ({axis.expected})" if i == 0 else "",
                    f"{m.foreign_cpu:.2f}",
                )
            )
    head = (
        "axis",
        "size",
        "ms a round",
        "× first",
        "first round s",
        "peak MB",
        "exponent (ideal)",
        "foreign CPU",
    )
    return markdown_table(head, lines)


def write_report(session: Session, measured: dict[str, list[Measured]], out: Path) -> list[Path]:
    introduction = (
        f"Written by `python -m benchmarks.scaling` on {session.header['date']} from session "
        f"`{session.header['id']}` of `scaling.jsonl`. FedAvg, five local steps, a 2NN on random 28x28 "
        "images of bytes. Except for the quantity of the axis: 1000 clients with 60 samples, a cohort of 50, batches "
        "of 12, hidden layers of 200, all devices. On the first axis clients have two samples and "
        "batches of two. The time of the first round counts from process start and includes generating the data. "
        "Exponents e of cost ~ size^e are least-squares fits in logarithms.\n\n"
        f"{session.machine_text()} No accelerator is used."
    )
    sections = [
        "# Scaling with the size of the problem",
        introduction,
        table(measured),
        "![Cost of a round](scaling.svg)",
    ]
    return [write_page(out / "scaling.md", sections), *draw(measured, out / "scaling")]


def draw(measured: dict[str, list[Measured]], path: Path) -> list[Path]:
    """Milliseconds a round against size, a panel an axis, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(8, 6))
    for panel, (name, points) in zip(panels.flat, measured.items(), strict=True):
        axis = axes()[name]
        sizes, times = [axis.size(m.point) for m in points], [m.round * 1e3 for m in points]
        panel.loglog(sizes, times, "o-", color="tab:orange")
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7)
        for formatted in (panel.xaxis, panel.yaxis):
            formatted.set_minor_formatter("")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_xlabel(axis.label)
        panel.set_ylabel("ms a round")
        panel.set_title(f"exponent {exponent(axis, points):.2f}", fontsize=9, loc="left")
        panel.set_ylim(min(times) / 3, max(times) * 3)
        panel.grid(which="both", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    plt.close(figure)
    return save_picture(figure, path)


if __name__ == "__main__":
    main()
