"""The cost of every algorithm relative to FedAvg, on W1: 1000 clients, cohort of 50, a 2NN.

``python -m benchmarks.methods`` runs every algorithm of fedrax with five local steps of twelve samples (or the single
step, or the blocks, that the method is defined for), each in a fresh process on a quiet machine. It appends the runs to
``results/methods.jsonl`` and writes ``methods.md``, ``methods.png`` and ``methods.svg``. The table also has the number
of per-sample gradients in a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environments import cache_directory
from benchmarks.make_arrays import ensure_arrays, source_of, source_text
from benchmarks.pages import markdown_table, number, save_picture, write_page
from benchmarks.points import measure_point
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX

if TYPE_CHECKING:
    from fedrax.contract.algorithm import Algorithm

RAW = RESULTS / "methods.jsonl"
REFERENCE = "fedavg"
WORKLOAD = "W1"
STEPS, BATCH, TIMED_ROUNDS = 5, 12, 20
CLIPPED = {"episode, clipped": ("episode", {"gamma": 1e-8}), "celgc": ("fedavg", {"local.clip": 1e-8})}
"""Methods with every step clipped: the algorithm, and the clipping bound by its field."""
OPTIONS: dict[str, dict[str, Any]] = {"scaffnew": {"p": 1 / STEPS}, "objectiveperturbation": {"guarantee": "none"}}
"""Settings that a method needs for this workload: the same mean number of local steps, and no guarantee for a model
that the theorem does not cover."""
LEARNING_RATE = 1e-4  # small, so that no method diverges: only the cost is measured


def main() -> None:
    arguments = parse_arguments()
    if arguments.point:
        print(RESULT_PREFIX + json.dumps(measure_here(**json.loads(arguments.point))))
        return
    if arguments.report:
        session = Session.latest(RAW)
    else:
        from fedrax.experiments.method_registry import algorithms

        known = [*algorithms(), *CLIPPED]
        names = [name for name in known if arguments.methods is None or name in arguments.methods]
        arrays = str(ensure_arrays(WORKLOAD, arguments.cache / "arrays"))
        session = Session.start(RAW, source=source_of(WORKLOAD))
        for repeat in range(1, arguments.repeats + 1):
            for name in dict.fromkeys([REFERENCE, *names]):
                point = {"name": name, "arrays": arrays}
                result = measure_point("benchmarks.methods", point, arguments.max_wait)
                session.add({"algorithm": name, "repeat": repeat} | result)
                print(one_line(session.runs[-1]), flush=True)
    measured = medians(session)
    print(table(measured))
    if arguments.methods is None and measured:
        print("wrote", *write_report(session, measured, arguments.out))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--methods", nargs="+", help="names of algorithms (default: all); FedAvg always runs")
    add("--repeats", type=int, default=3, help="runs of everything, in turn (default 3)")
    add("--max-wait", type=float, default=300, help="seconds to wait for a quiet machine (default 300)")
    add("--cache", type=Path, default=cache_directory(), help="where the arrays are kept")
    add("--out", type=Path, default=RESULTS, help="where the page and the pictures are written")
    add("--report", action="store_true", help="only write the last session's page and pictures again")
    add("--point", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_here(name: str, arrays: str) -> dict[str, Any]:
    """Time the rounds of one algorithm in this process; ``refused`` has the error of one that rejects the task."""
    from benchmarks.fedrax_clock import time_rounds
    from benchmarks.fedrax_problems import federation_of, model_of
    from benchmarks.workloads import WORKLOADS, Arrays
    from fedrax import FedraxError, classification

    workload, stored = WORKLOADS[WORKLOAD], Arrays(arrays, channels_last=True)
    try:
        clock, result = time_rounds(
            method(name),
            classification(model_of(workload)),
            federation_of(stored),
            TIMED_ROUNDS,
            cohort_size=workload.cohort,
        )
    except FedraxError as refusal:
        return {"refused": str(refusal)}
    events = result.events
    return clock.summary() | {"gradients": events[-1]["gradients"] / len(events)}


def method(name: str) -> Algorithm:
    """The algorithm of a name, one in ``CLIPPED`` included."""
    from fedrax.experiments.method_registry import find_algorithm

    kind, lengths = CLIPPED.get(name, (name, {}))
    algorithm = dataclasses.replace(adapted(find_algorithm(kind)()), **OPTIONS.get(kind, {}))  # type: ignore[call-arg]
    for field, length in lengths.items():
        owner, _, own = field.rpartition(".")
        change: dict[str, Any] = {own: length}
        if owner:
            change = {owner: dataclasses.replace(getattr(algorithm, owner), **change)}
        algorithm = dataclasses.replace(algorithm, **change)  # type: ignore[call-arg]
    return algorithm


def adapted(algorithm: Algorithm) -> Algorithm:
    """The algorithm with this benchmark's local work, if the method does not determine it."""
    if hasattr(algorithm, "inner"):
        return dataclasses.replace(algorithm, inner=adapted(algorithm.inner))  # type: ignore[call-arg]
    local = getattr(algorithm, "local", None)
    if local is None:
        return algorithm
    changes: dict[str, Any] = {"lr": LEARNING_RATE}
    if local.steps != 1 and "p" not in OPTIONS.get(type(algorithm).__name__.lower(), {}):
        changes |= {"steps": STEPS, "epochs": None}
    if local.blocks is None and local.batch_size != "full":
        changes |= {"batch_size": BATCH}
    return dataclasses.replace(algorithm, local=dataclasses.replace(local, **changes))  # type: ignore[call-arg]


def one_line(run: dict) -> str:
    name = f"{run['algorithm']:20s} {run['repeat']}"
    if "failed" in run:
        return f"{name}  FAILED: {run['failed'][-300:]}"
    if "refused" in run:
        return f"{name}  refused: {run['refused']}"
    return (
        f"{name}  {run['round_median'] * 1e3:8.2f} ms a round, {run['gradients']:.0f} gradients, "
        f"first {run['first_round_with_import']:5.2f} s, {run['peak_pss_mb']:6.0f} MB, "
        f"foreign CPU {run['foreign_cpu']:.2f}"
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """Medians over an algorithm's repeats, in seconds and MB; gradients: of one sample, a round."""

    name: str
    round: float
    gradients: float
    first_round_with_import: float
    peak_pss_mb: float
    foreign_cpu: float


def medians(session: Session) -> list[Measured]:
    """The algorithms that ran, the cheapest first."""
    fields = ("round_median", "gradients", "first_round_with_import", "peak_pss_mb", "foreign_cpu")
    found = []
    for name in dict.fromkeys(run["algorithm"] for run in session.runs):
        runs = [run for run in session.runs if run["algorithm"] == name and "round_median" in run]
        if runs:
            found.append(Measured(name, *(statistics.median(run[field] for run in runs) for field in fields)))
    return sorted(found, key=lambda measured: measured.round)


def table(measured: list[Measured]) -> str:
    reference = next((m for m in measured if m.name == REFERENCE), None)
    lines = [
        (
            m.name,
            number(m.round * 1e3),
            f"{m.round / reference.round:.2f}" if reference else "",
            f"{m.gradients / reference.gradients:.2f}" if reference else "",
            f"{m.first_round_with_import:.2f}",
            f"{m.peak_pss_mb:.0f}",
            f"{m.foreign_cpu:.2f}",
        )
        for m in measured
    ]
    head = (
        "algorithm",
        "ms a round",
        "× FedAvg",
        "gradients × FedAvg",
        "first round s",
        "peak MB",
        "foreign CPU",
    )
    return markdown_table(head, lines)


def write_report(session: Session, measured: list[Measured], out: Path) -> list[Path]:
    introduction = (
        f"Written by `python -m benchmarks.methods` on {session.header['date']} from session "
        f"`{session.header['id']}` of `methods.jsonl`. W1 of `benchmarks/README.md`: 1000 clients with 60 samples, a "
        f"cohort of 50, the 2NN; {STEPS} local steps on batches of {BATCH}, unless the method fixes another "
        f"number. {source_text(session.header.get('source'))} Gradients are per-sample gradients in a round. The peak "
        "memory includes client states.\n\n"
        f"{session.machine_text()} No accelerator is used."
    )
    refused = {run["algorithm"]: run["refused"] for run in session.runs if "refused" in run}
    failed = {run["algorithm"] for run in session.runs if "failed" in run}
    sections = [
        "# Cost of every algorithm",
        introduction,
        table(measured),
        "![Cost of every algorithm](methods.svg)",
        *(f"- {name} rejects this task: {reason}" for name, reason in refused.items()),
        *(f"- **{name} failed**" for name in sorted(failed)),
    ]
    return [write_page(out / "methods.md", sections), *draw(measured, out / "methods")]


def draw(measured: list[Measured], path: Path) -> list[Path]:
    """A dot for each algorithm's time and a mark for its number of gradients, both relative to FedAvg."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    reference = next((m for m in measured if m.name == REFERENCE), measured[0])
    figure, axis = plt.subplots(figsize=(7, 0.26 * len(measured) + 1.2))
    heights = range(len(measured))
    times = [m.round / reference.round for m in measured]
    work = [m.gradients / reference.gradients for m in measured]
    axis.hlines(heights, 1, times, color="tab:orange", alpha=0.4, linewidth=1)
    axis.plot(times, heights, "o", color="tab:orange", markersize=5, label="time")
    axis.plot(work, heights, "|", color="black", markersize=9, label="evaluations of gradients")
    axis.set_yticks(heights, [m.name for m in measured], fontsize=8)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.axvline(1, color="gray", linewidth=0.8)
    axis.set_ylim(-1, len(measured))
    axis.set_xlabel("relative to FedAvg")
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
    plt.close(figure)
    return save_picture(figure, path)


if __name__ == "__main__":
    main()
