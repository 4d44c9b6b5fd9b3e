"""What the commands share: running a comparison, reading its runs back, writing a table."""

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

from fedrax import files
from fedrax.cli import main as fedrax_main
from fedrax.report.runs import Method, find_runs


def run(file: Path, out: Path, arguments: argparse.Namespace, *flags: str) -> list[Method]:
    """``fedrax compare`` on a file, and the runs it left."""
    command = [str(file), *flags, "--out", str(out), "--quiet"]
    if arguments.rounds:
        command += ["--run.rounds", str(arguments.rounds)]
    if arguments.seeds:
        command += ["--seeds", *map(str, arguments.seeds)]
    if arguments.data_dir:
        command += ["--data-dir", arguments.data_dir]
    status = fedrax_main(["compare", *command])
    if status > 1:  # 1: a method diverged, which its row says
        sys.exit(status)
    return stored(out)


def stored(out: Path) -> list[Method]:
    """The methods of a comparison directory, in its order."""
    order = [row["label"] for row in json.loads((out / "comparison.json").read_text())["methods"]]
    found: dict[str, list] = {label: [] for label in order}
    for one in find_runs(out):
        found[str(one.table["name"])].append(one)
    return [Method(label, runs) for label, runs in found.items()]


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation."""
    if not values:
        return "-"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{form}} ± {deviation:{form}}"


def write_table(
    arguments: argparse.Namespace,
    name: str,
    title: str,
    note: str,
    columns: list[str],
    rows: list[list[str]],
    package: str = "papers.losac",
) -> None:
    """A Markdown table in results/ and on the terminal; ``python -m package name`` with the flags given made it."""
    command = f"python -m {package} {name}"
    for flag in ("rounds", "steps"):
        command += f" --{flag} {value}" if (value := getattr(arguments, flag, None)) else ""
    command += f" --seeds {' '.join(map(str, arguments.seeds))}" if arguments.seeds else ""
    machine = f"{processor()}, {os.cpu_count()} cores, {datetime.date.today().isoformat()}"
    lines = [f"# {title}", "", f"{note} Written by `{command}` ({machine}).", ""]
    lines += markdown("|".join(columns), rows)
    text = "\n".join(lines) + "\n"
    files.write_text(arguments.results / f"{name}.md", text)
    print(text)


def markdown(columns: str, rows: list[list[str]]) -> list[str]:
    """A Markdown table's lines; columns are divided by |."""
    names = columns.split("|")
    head = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
