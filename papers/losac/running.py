"""Shared code of the commands: running a comparison, reading its runs, writing a table."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from fedrax import files
from fedrax.cli import main as fedrax_main
from fedrax.report.runs import MethodRuns, SavedRun, find_runs, last_values
from fedrax.simulation import use_all_cores
from fedrax.simulation.results.result import cost_to_target

TARGET = 0.85
"""Target accuracy of Table 2."""
SEEDS = 3
"""Number of seeds in the files."""


def run(file: Path, out: Path, arguments: argparse.Namespace, *flags: str) -> list[MethodRuns]:
    """``fedrax compare`` on a file, and the resulting runs."""
    command = [str(file), *flags, "--out", str(out), "--quiet"]
    if arguments.rounds:
        command += ["--run.rounds", str(arguments.rounds)]
    if arguments.seeds:
        command += ["--seeds", *map(str, arguments.seeds)]
    if arguments.data_dir:
        command += ["--data-dir", arguments.data_dir]
    status = fedrax_main(["compare", *command])
    if status > 1:  # 1: a method diverged, as shown in its row
        sys.exit(status)
    return stored(out)


def stored(out: Path) -> list[MethodRuns]:
    """Methods and seeds of the latest comparison in a directory, in its order; it may contain other runs."""
    made = json.loads((out / "comparison.json").read_text())
    found: dict[str, list[SavedRun]] = {row["label"]: [] for row in made["methods"]}
    for one in find_runs(out):
        if str(one.table["name"]) in found and one.seed in made["seeds"]:
            found[str(one.table["name"])].append(one)
    return [MethodRuns(label, runs) for label, runs in found.items()]


def final(method: MethodRuns) -> tuple[list[float], list[float], list[float]]:
    """Rounds to the target, final test loss and accuracy of all finished runs."""
    events = [one.events for one in method.runs if one.failure is None]
    reached = [cost_to_target(e, "test_accuracy", TARGET) for e in events]
    last = [last_values(e) for e in events]
    return [t["rounds"] for t in reached if t], [v["test_loss"] for v in last], [v["test_accuracy"] for v in last]


def summary(method: MethodRuns) -> list[str]:
    """Text of rounds to the target, loss, accuracy and number of diverged runs."""
    rounds, loss, accuracy = final(method)
    reached = f"{spread(rounds, '.0f')}" + ("" if len(rounds) == len(method.runs) else f" ({len(rounds)} runs)")
    diverged = sum(one.failure is not None for one in method.runs)
    return [reached if rounds else "-", spread(loss, ".4f"), spread([100 * a for a in accuracy], ".2f"), str(diverged)]


def few_seeds(methods: Sequence[MethodRuns]) -> str:
    """A sentence for the note of a table, after a blank, if methods have fewer seeds than the files."""
    seeds = sorted({one.seed for method in methods for one in method.runs})
    if len(seeds) >= SEEDS:
        return ""
    named = " and ".join(map(str, seeds))
    return f" One seed only ({named})." if len(seeds) < 2 else f" Two seeds only ({named})."


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation; a single value without deviation."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):{form}}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):{form}}"


def write_table(
    arguments: argparse.Namespace,
    name: str,
    title: str,
    note: str,
    columns: list[str],
    rows: list[list[str]],
    more: Sequence[str] = (),
) -> None:
    """Write a Markdown table, and lines after it, to results/ and print both."""
    lines = [f"# {title}", "", f"{note} {written_by(arguments)}", ""]
    lines += [*markdown("|".join(columns), rows), *more]
    text = "\n".join(lines) + "\n"
    files.write_text(arguments.results / f"{name}.md", text)
    print(text)


def written_by(arguments: argparse.Namespace) -> str:
    """The command, the machine and the day, as the last sentence of a table's note."""
    machine = f"{processor()}, {os.cpu_count()} cores, {datetime.date.today().isoformat()}"
    return f"Written by `{arguments.command}` ({machine})."


def markdown(columns: str, rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table; columns are separated by |."""
    names = columns.split("|")
    head = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def processor() -> str:
    """Name of JAX's accelerator, or of the CPU."""
    use_all_cores()  # the call below starts JAX
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
