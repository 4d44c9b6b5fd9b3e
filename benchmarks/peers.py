"""Comparison of fedrax with other simulators on the same workloads.

``python -m benchmarks.peers`` creates an environment for each simulator and the workloads' arrays, measures the
machine, and runs every simulator on every workload in turn, each in a fresh process on a quiet machine. It checks that
all of them end at the same test loss, appends every run to ``results/peers.jsonl`` and writes the tables and figures
``results/peers.md``, ``peers.png`` and ``peers.svg``. A command limited to some workloads or peers prints its table and
does not write these files. ``--resume`` continues an interrupted command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.environments import cache_directory, ensure_environment, packages
from benchmarks.make_arrays import ensure_arrays
from benchmarks.peers_report import disagreements, identity, table, write_report
from benchmarks.quiet import run_quietly
from benchmarks.sessions import RESULTS, Session
from benchmarks.simulators import Setting, settings
from benchmarks.workloads import ON_A_CPU, WORKLOADS, Arrays, flop_per_round, steps_per_round

RAW = RESULTS / "peers.jsonl"


def main() -> int:
    arguments = parse_arguments()
    if arguments.report:
        return conclude(Session.latest(RAW), arguments.out)
    chosen = [setting for setting in settings() if not arguments.peers or setting.simulator in arguments.peers]
    arrays = {name: ensure_arrays(name, arguments.cache / "arrays") for name in arguments.workloads}
    bins = {setting.environment: environment_of(setting, arguments.envs) for setting in chosen}
    if arguments.resume:
        session = Session.latest(RAW)
    else:
        workloads = {name: facts(name, path) for name, path in arrays.items()}
        installed = {name or "fedrax": packages(bin_directory) for name, bin_directory in bins.items()}
        session = Session.start(RAW, workloads=workloads, packages=installed)
    done = {identity(run) for run in session.runs if "failed" not in run}
    for repeat, workload, setting in schedule(chosen, arguments.workloads, arguments.repeats):
        if (workload, setting.simulator, setting.label, repeat) in done:
            continue
        result = run_quietly(
            setting.command(workload, arrays[workload], bins[setting.environment]),
            setting.process_environment(),
            max_wait=arguments.max_wait,
            timeout=arguments.timeout,
        )
        names = {
            "workload": workload,
            "simulator": setting.simulator,
            "setting": setting.label,
            "repeat": repeat,
        }
        session.add(names | result)
        print(one_line(session.runs[-1]), flush=True)
    complete = not arguments.peers and set(arguments.workloads) == set(ON_A_CPU)
    return conclude(session, arguments.out if complete else None)


def parse_arguments() -> argparse.Namespace:
    simulators = list(dict.fromkeys(setting.simulator for setting in settings()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(ON_A_CPU), help="default: W1 to W10")
    add("--peers", nargs="+", choices=simulators, help="default: all")
    add("--repeats", type=int, default=3, help="runs of everything, in turn (default 3)")
    add("--cache", type=Path, default=cache_directory(), help="where the arrays are stored")
    add("--envs", type=Path, help="where the environments are stored (default: in the cache)")
    add("--out", type=Path, default=RESULTS, help="where tables and pictures are written")
    add("--max-wait", type=float, default=300, help="seconds to wait for a quiet machine (default 300)")
    add("--timeout", type=float, default=900, help="seconds a run may take (default 900)")
    add("--resume", action="store_true", help="continue the last session of results/peers.jsonl")
    add("--report", action="store_true", help="only write the last session's tables and pictures again")
    arguments = parser.parse_args()
    arguments.envs = arguments.envs or arguments.cache / "envs"
    return arguments


def schedule(chosen: list[Setting], workloads: list[str], repeats: int) -> Iterator[tuple[int, str, Setting]]:
    """Repeats are the outermost loop, so that slow drifts of the machine affect all simulators equally."""
    for repeat in range(1, repeats + 1):
        for workload in workloads:
            for setting in chosen:
                if workload in setting.workloads:
                    yield repeat, workload, setting


def environment_of(setting: Setting, directory: Path) -> Path:
    if setting.environment is None:
        return Path(sys.executable).parent
    return ensure_environment(setting.environment, directory)


def facts(name: str, path: Path) -> dict[str, str | float]:
    """Facts of a workload for the tables."""
    arrays, workload = Arrays(path), WORKLOADS[name]
    if arrays.source == "gaussian":
        print(f"{name} uses Gaussian classes: no MNIST under $FEDRAX_DATA/mnist", flush=True)
    return {
        "source": arrays.source,
        "flop": flop_per_round(workload, arrays.offsets, arrays.cohorts),
        "steps": steps_per_round(workload, arrays.offsets, arrays.cohorts),
    }


def one_line(run: dict) -> str:
    name = f"{run['workload']} {run['simulator']:14s} {run['setting']:22s} {run['repeat']}"
    if "failed" in run:
        return f"{name}  FAILED: {run['failed'][-300:]}"
    return (
        f"{name}  {run['round_median'] * 1e3:8.1f} ms a round, "
        f"first {run['first_round_with_import']:5.2f} s, {run['peak_pss_mb']:6.0f} MB, "
        f"loss {run['test_loss']:.4f}, foreign CPU {run['foreign_cpu']:.2f}"
    )


def conclude(session: Session, out: Path | None) -> int:
    """Prints the table, writes the report under ``out``; the exit status says whether all losses agree."""
    print(table(session))
    if out and session.runs:
        print("wrote", *write_report(session, out))
    problems = disagreements(session)
    for problem in problems:
        print("error:", problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
