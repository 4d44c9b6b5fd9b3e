"""Ablation of the compiler passes: the speedup of each pass on workloads and networks.

``python -m benchmarks.ablation`` runs fedrax on the workloads W1 to W10, on the networks of `benchmarks.networks`, and
on the methods of `benchmarks.ablation_cases`, with all passes and without each pass that changes the program of the
case (`fedrax.xla.applied_passes`), switched off by ``FEDRAX_DISABLED_PASSES``. The clocks are those of
`benchmarks.peers` and `benchmarks.networks`: a fresh process for each run, on a quiet machine, with nothing compiled
before. It appends the runs to ``results/ablation.jsonl`` and writes the table ``results/ablation.md``. An interrupted
command is resumed with ``--resume``. ``--quick`` measures one small workload and one network.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablation_cases import CASES as METHODS
from benchmarks.environments import cache_directory
from benchmarks.make_arrays import ensure_arrays
from benchmarks.network_cases import CASES
from benchmarks.pages import markdown_table, write_page
from benchmarks.points import REPOSITORY, measure_point
from benchmarks.quiet import run_quietly
from benchmarks.sessions import RESULTS, Session
from benchmarks.workloads import ON_A_CPU

RAW = RESULTS / "ablation.jsonl"
ALL = "all passes"
QUICK = "W1"
WORTH = 1.03
"""A pass that gains less than this on every case is a candidate for removal."""


def main() -> None:
    arguments = parse_arguments()
    session = Session.latest(RAW) if arguments.resume or arguments.report else Session.start(RAW)
    if not arguments.report:
        measure(session, arguments)
    print(write_page(arguments.out / "ablation.md", sections(Session.all(RAW))).read_text())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--workloads", nargs="*", choices=ON_A_CPU, default=list(ON_A_CPU), help="default: W1 to W10")
    add("--networks", nargs="*", choices=list(CASES), default=list(CASES), metavar="NAME", help="default: all")
    add("--methods", nargs="*", choices=list(METHODS), default=list(METHODS), metavar="NAME", help="default: all")
    add("--passes", nargs="+", choices=names(), default=names(), metavar="PASS", help="default: all")
    add("--quick", action="store_true", help="one small workload and one network, one run each")
    add("--repeats", type=int, default=3, help="runs of everything, in turn (default 3)")
    add("--resume", action="store_true", help="continue the last session")
    add("--report", action="store_true", help="only write the last session's page again")
    add("--cache", type=Path, default=cache_directory(), help="where the arrays are stored")
    add("--out", type=Path, default=RESULTS, help="where the page is written")
    add("--max-wait", type=float, default=300, help="seconds to wait for a quiet machine (default 300)")
    add("--timeout", type=float, default=900, help="seconds a run may take (default 900)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workloads, arguments.networks, arguments.methods = [QUICK], [next(iter(CASES))], []
        arguments.repeats = 1
    return arguments


def names() -> list[str]:
    """The passes that can be off on a CPU."""
    from fedrax.xla import PASSES

    return [one.name for one in PASSES if "cpu" in one.backends]


def measure(session: Session, arguments: argparse.Namespace) -> None:
    """Run what the session does not contain yet."""
    arrays = {name: ensure_arrays(name, arguments.cache / "arrays") for name in arguments.workloads}
    done = {identity(run) for run in session.runs if "failed" not in run}
    applied = {run["case"]: set(run["applied"]) for run in session.runs if run["disabled"] == ALL and "applied" in run}
    for repeat, case, disabled in schedule(arguments):
        if (case, disabled, repeat) in done or (disabled != ALL and disabled not in applied.get(case, ())):
            continue
        variables = {"FEDRAX_DISABLED_PASSES": "" if disabled == ALL else disabled}
        if case in arrays:
            result = run_workload(case, arrays[case], variables, arguments)
        else:
            module = "benchmarks.networks" if case in CASES else "benchmarks.ablation_cases"
            result = measure_point(module, {"name": case}, arguments.max_wait, arguments.timeout, **variables)
        session.add({"case": case, "disabled": disabled, "repeat": repeat} | result)
        if disabled == ALL and "applied" in result:
            applied[case] = set(result["applied"])
        print(case, disabled, result.get("failed", seconds(result)), flush=True)


def schedule(arguments: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """(repeat, case, disabled pass): all passes of a case in turn, so that they run under the same conditions."""
    for repeat in range(1, arguments.repeats + 1):
        for case in [*arguments.workloads, *arguments.networks, *arguments.methods]:
            for disabled in [ALL, *arguments.passes]:
                yield repeat, case, disabled


def run_workload(name: str, arrays: Path, variables: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    """A run of fedrax as in `benchmarks.peers`, with an empty compilation cache."""
    runner = ["--workload", name, "--arrays", str(arrays), "--forget", "1"]
    with tempfile.TemporaryDirectory() as empty:
        path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if part)
        ours = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "FEDRAX_CACHE": empty}
        return run_quietly(
            [sys.executable, "-m", "benchmarks.runners.run_fedrax", *runner],
            os.environ | ours | variables,
            arguments.max_wait,
            arguments.timeout,
        )


def identity(run: dict[str, Any]) -> tuple[str, str, int]:
    return run["case"], run["disabled"], run["repeat"]


def seconds(run: dict[str, Any]) -> float:
    """Seconds of a round: the median, for workloads without the warm-up round."""
    return run["round_median"] if "round_median" in run else run["round"]


def gains(sessions: Sequence[Session]) -> dict[str, dict[str, float]]:
    """Speedup by pass and case: median time of a round without the pass over the median time with all passes.

    Times are compared within a session; of several sessions the ratio is the median.
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    for session in sessions:
        times: dict[tuple[str, str], list[float]] = {}
        for run in session.runs:
            if "failed" not in run:
                times.setdefault((run["disabled"], run["case"]), []).append(seconds(run))
        for (disabled, case), measured in times.items():
            if disabled != ALL and (ALL, case) in times:
                ratio = statistics.median(measured) / statistics.median(times[ALL, case])
                ratios.setdefault((disabled, case), []).append(ratio)
    found: dict[str, dict[str, float]] = {}
    for (disabled, case), of_sessions in ratios.items():
        found.setdefault(disabled, {})[case] = statistics.median(of_sessions)
    return found


def sections(sessions: Sequence[Session]) -> list[str]:
    """Sections of the page."""
    from fedrax.xla import PASSES

    found = gains(sessions)
    rows = [(one.name, one.matches, one.becomes, *describe(found.get(one.name, {}))) for one in PASSES]
    failed = [
        f"- {run['case']} without {run['disabled']} failed: {run['failed']}"
        for session in sessions
        for run in session.runs
        if "failed" in run
    ]
    started = ", ".join(f"{session.header['date']} (`{session.header['id']}`)" for session in sessions)
    text = (
        f"Written by `python -m benchmarks.ablation` from the sessions of `ablation.jsonl`: {started}. The gain of a "
        "pass is the time of a round without it, divided by the time with all passes; medians over repeats, then over "
        "sessions. A pass is measured in the cases whose program it changes, and has no gain here where no session "
        f"measured it. A pass below {WORTH:.2f} everywhere does not pay for its code, unless it serves correctness or "
        f"memory. Single runs of the same program differ by some percent.\n\n{sessions[-1].machine_text()} No "
        "accelerator is used."
    )
    head = ("pass", "what it matches", "what it becomes", "largest gain", f"cases above {WORTH:.2f}", "smallest gain")
    return ["# Ablation of the compiler passes", text, markdown_table(head, rows), *failed]


def describe(ratios: dict[str, float]) -> Sequence[str]:
    """(largest gain and where, the cases that gain, smallest gain and where)."""
    if not ratios:
        return "–", "–", "–"
    best, worst = max(ratios, key=lambda case: ratios[case]), min(ratios, key=lambda case: ratios[case])
    worth = sorted(case for case, ratio in ratios.items() if ratio >= WORTH)
    return f"{ratios[best]:.2f} ({best})", ", ".join(worth) or "none", f"{ratios[worst]:.2f} ({worst})"


if __name__ == "__main__":
    main()
