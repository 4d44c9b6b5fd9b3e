"""Tables and pictures of one session of ``benchmarks.peers``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.make_arrays import source_text
from benchmarks.pages import markdown_table, number, save_picture, write_page
from benchmarks.sessions import Session
from benchmarks.simulators import OURS
from benchmarks.workloads import WORKLOADS

LOSS_TOLERANCE = 1e-3  # relative to the median; float32 sums in other orders differ by a third of this
ORDER = list(WORKLOADS)
FOREIGN_CPU_LIMIT = 0.25  # runs with more CPU use of other processes are excluded if quieter ones exist


@dataclass(frozen=True)
class Row:
    """One setting of one simulator on one workload, over its repeats. Times in seconds."""

    workload: str
    simulator: str
    setting: str
    round: float  # median over the repeats of each repeat's median
    fastest: float
    slowest: float
    first_round: float
    first_round_with_import: float
    peak_pss_mb: float
    loss: float
    used: int
    finished: int
    failed: int
    foreign_cpu: float

    @property
    def name(self) -> str:
        """Label in pivot tables: a peer is shown in its fastest setting, fedrax in all settings."""
        return f"{OURS}, {self.setting}" if self.simulator == OURS else self.simulator


def rows(session: Session) -> list[Row]:
    """A row for each workload, simulator and setting that finished at least once, fastest first."""
    groups: dict[tuple[str, str, str], list[dict]] = {}
    for run in session.runs:
        groups.setdefault((run["workload"], run["simulator"], run["setting"]), []).append(run)
    found = []
    for (workload, simulator, setting), runs in groups.items():
        finished = [run for run in runs if "failed" not in run]
        if not finished:
            continue
        quiet = [run for run in finished if run["foreign_cpu"] <= FOREIGN_CPU_LIMIT]
        used = quiet or finished

        def median(field: str, used: list[dict] = used) -> float:
            return statistics.median(run[field] for run in used)

        found.append(
            Row(
                workload=workload,
                simulator=simulator,
                setting=setting,
                round=median("round_median"),
                fastest=min(run["round_median"] for run in used),
                slowest=max(run["round_median"] for run in used),
                first_round=median("first_round"),
                first_round_with_import=median("first_round_with_import"),
                peak_pss_mb=median("peak_pss_mb"),
                loss=median("test_loss"),
                used=len(used),
                finished=len(finished),
                failed=len(runs) - len(finished),
                foreign_cpu=median("foreign_cpu"),
            )
        )
    return sorted(found, key=lambda row: (ORDER.index(row.workload), row.round))


def workloads_of(found: Iterable[Row]) -> list[str]:
    """The workloads' names, in order."""
    return sorted({row.workload for row in found}, key=ORDER.index)


def identity(run: dict) -> tuple[str, str, str, int]:
    """Key of a run; a failed run may be repeated under the same key."""
    return run["workload"], run["simulator"], run["setting"], run["repeat"]


def disagreements(session: Session, tolerance: Callable[[dict], float] = lambda run: LOSS_TOLERANCE) -> list[str]:
    """A sentence for each run that failed and for each run whose test loss differs from the median.

    tolerance: of a run's loss, relative to the median.
    """
    problems = []
    succeeded = {identity(run) for run in session.runs if "failed" not in run}
    for run in session.runs:
        if identity(run) not in succeeded:
            what = f"{run['simulator']} ({run['setting']}) failed on {run['workload']}, repeat {run['repeat']}"
            problems.append(what)
    for workload in WORKLOADS:
        finished = [run for run in session.runs if run["workload"] == workload and "failed" not in run]
        if not finished:
            continue
        agreed = statistics.median(run["test_loss"] for run in finished)
        for run in finished:
            if not abs(run["test_loss"] - agreed) <= tolerance(run) * abs(agreed):
                problems.append(
                    f"{run['simulator']} ({run['setting']}) ends {workload} at test loss "
                    f"{run['test_loss']:.4f}, the median is {agreed:.4f}: its work differs"
                )
    return problems


def table(session: Session) -> str:
    """Milliseconds a round of each simulator's fastest setting, and the speedup over the best peer."""
    found = rows(session)
    best = best_peers(found)

    def cell(row: Row) -> str:
        disturbed = "*" if row.foreign_cpu > FOREIGN_CPU_LIMIT else ""
        ratio = f" ({best[row.workload] / row.round:.2f}×)" if row.workload in best else ""
        return f"{number(row.round * 1e3)}{disturbed}{ratio}"

    return pivot(found, cell)


def best_peers(found: Iterable[Row]) -> dict[str, float]:
    """Workload -> seconds a round of the fastest simulator that is not fedrax."""
    best: dict[str, float] = {}
    for row in found:
        if row.simulator != OURS:
            best[row.workload] = min(row.round, best.get(row.workload, row.round))
    return best


def pivot(found: list[Row], cell: Callable[[Row], str]) -> str:
    """A row for each simulator, a column for each workload; ``cell(row)`` of its fastest setting."""
    fastest = fastest_settings(found)
    workloads = workloads_of(found)
    names = list(dict.fromkeys(row.name for row in sorted(found, key=lambda row: row.simulator != OURS)))
    lines = []
    for name in names:
        picked = [fastest.get((workload, name)) for workload in workloads]
        lines.append([name, *(cell(row) if row else "" for row in picked)])
    return markdown_table(["", *workloads], lines)


def fastest_settings(found: Iterable[Row]) -> dict[tuple[str, str], Row]:
    fastest: dict[tuple[str, str], Row] = {}
    for row in found:
        key = (row.workload, row.name)
        if key not in fastest or row.round < fastest[key].round:
            fastest[key] = row
    return fastest


def write_report(session: Session, out: Path) -> list[Path]:
    """Writes ``peers.md``, ``peers.png`` and ``peers.svg`` under ``out``."""
    return [write_page(out / "peers.md", sections(session)), *draw(rows(session), out / "peers")]


MILLISECONDS_NOTE = (
    "Each simulator in its fastest setting; in parentheses, the speedup over the fastest other simulator on that "
    "workload. `*`: all runs were disturbed by other processes."
)
SETTING_COLUMNS = (
    "simulator",
    "setting",
    "ms a round",
    "range",
    "× best peer",
    "GFLOP/s",
    "% of peak",
    "µs a step",
    "first round s",
    "with import s",
    "peak MB",
    "test loss",
    "runs",
    "foreign CPU",
)


def sections(session: Session) -> list[str]:
    found = rows(session)
    problems = disagreements(session)
    agreement = "All runs finished, and all test losses agree" if not problems else "**Runs failed or disagree**"
    return [
        "# Comparison with other simulators",
        introduction(session),
        "## Milliseconds a round",
        MILLISECONDS_NOTE,
        table(session),
        "![Milliseconds a round](peers.svg)",
        "## Seconds from process start to the end of the first round",
        "The time until a user sees the first round: imports, reading the arrays, starting workers, compilation, and "
        "one round.",
        pivot(found, lambda row: f"{row.first_round_with_import:.2f}"),
        "## Peak memory, MB",
        "Proportional set size of the whole process tree (shared pages counted once), sampled.",
        pivot(found, lambda row: f"{row.peak_pss_mb:.0f}"),
        "## Every setting",
        *(workload_section(name, session, found) for name in workloads_of(found)),
        "## Agreement",
        f"{agreement} (tolerance {LOSS_TOLERANCE:g}, relative to the median of a workload's runs).",
        *(f"- {problem}" for problem in problems),
        "## Versions",
        versions(session),
    ]


def introduction(session: Session) -> str:
    w1 = session.header["workloads"].get("W1")
    note = f" {source_text(w1['source'])}" if w1 else ""
    return (
        f"Written by `python -m benchmarks.peers` on {session.header['date']} from session "
        f"`{session.header['id']}` of `peers.jsonl`. All simulators train the same models from the same "
        "initial weights on the same arrays, cohorts and batches, with aggregation weights proportional to samples. "
        "Each run is a fresh process on a quiet machine. Times are medians over repeats of each repeat's median; the "
        "first round is reported separately. For W1 to W4 fedrax uses models of its zoo and, in a separate setting, "
        "the plain functions that FedJAX uses; for W5 to W10 both use the same Flax Linen modules. "
        f"All other simulators use PyTorch modules.{note}\n\n"
        f"{session.machine_text()} No accelerator is used."
    )


def workload_section(name: str, session: Session, found: list[Row]) -> str:
    workload, facts = WORKLOADS[name], session.header["workloads"][name]
    data = workload.data if facts["source"] != "gaussian" else workload.data.replace("MNIST", "Gaussian classes")
    peak = session.header["machine"]["gemm_gflops_all_cores"]
    best = best_peers(found)
    local = f"{workload.epochs} epoch{'s' * (workload.epochs > 1)} in batches of {workload.batch}"
    text = (
        f"{data}; {workload.clients} clients, {workload.cohort} a round, {local}, "
        f"learning rate {workload.learning_rate}; {facts['flop'] / 1e9:.3g} GFLOP and {facts['steps']:.0f} "
        "SGD steps a round."
    )
    lines = []
    for row in found:
        if row.workload != name:
            continue
        gflops = facts["flop"] / row.round / 1e9
        cells = (
            row.simulator,
            row.setting,
            number(row.round * 1e3),
            f"{number(row.fastest * 1e3)}–{number(row.slowest * 1e3)}",
            f"{best[name] / row.round:.2f}" if name in best else "",
            number(gflops),
            number(100 * gflops / peak),
            number(row.round / facts["steps"] * 1e6),
            f"{row.first_round:.2f}",
            f"{row.first_round_with_import:.2f}",
            f"{row.peak_pss_mb:.0f}",
            f"{row.loss:.4f}",
            f"{row.used} of {row.finished}" + (f", {row.failed} failed" if row.failed else ""),
            f"{row.foreign_cpu:.2f}",
        )
        lines.append(cells)
    return f"### {name}: {workload.model}\n\n{text}\n\n{markdown_table(SETTING_COLUMNS, lines)}"


def versions(session: Session) -> str:
    lines = dict.fromkeys(
        f"- {run['simulator']}: " + ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        for run in session.runs
        if "failed" not in run
    )
    return "\n".join(lines) + "\n\nThe session's line of `peers.jsonl` lists every package of every environment."


def draw(found: list[Row], path: Path) -> list[Path]:
    """One panel for each workload, in two columns if there are more than four."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    workloads = workloads_of(found)
    columns = 1 if len(workloads) <= 4 else 2
    lines = -(-len(workloads) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(7 * columns, 1.9 * lines), squeeze=False)
    for axis, workload in zip(axes.ravel(), workloads, strict=False):
        draw_workload(axis, workload, [row for row in found if row.workload == workload])
    for axis in axes.ravel()[len(workloads) :]:
        axis.set_visible(False)
    for axis in axes.ravel()[max(0, len(workloads) - columns) : len(workloads)]:
        axis.set_xlabel("milliseconds a round (log scale; smaller is better)")
    plt.close(figure)
    return save_picture(figure, path)


def draw_workload(axis: Any, workload: str, settings: list[Row]) -> None:
    """A dot for each simulator's fastest setting and a line for the range of its repeats."""
    settings = sorted(settings, key=lambda row: -row.round)
    shown = list({row.simulator: row for row in settings}.values())  # of each, the last is the fastest
    shown.sort(key=lambda row: -row.round)
    for height, row in enumerate(shown):
        color = "tab:orange" if row.simulator == OURS else "tab:gray"
        axis.plot([row.fastest * 1e3, row.slowest * 1e3], [height, height], color=color, linewidth=2)
        axis.plot(row.round * 1e3, height, "o", color=color)
        axis.annotate(
            number(row.round * 1e3),
            (row.round * 1e3, height),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    axis.set_yticks(range(len(shown)), [row.simulator for row in shown], fontsize=8)
    axis.set_ylim(-0.6, len(shown) - 0.2)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.set_title(f"{workload}: {WORKLOADS[workload].model}", fontsize=9, loc="left")
    axis.grid(axis="x", which="both", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
