"""A Markdown table in results/ and on the terminal."""

from __future__ import annotations

import argparse
import datetime
import os

from fedrax import files
from papers.losac.running import processor


def write_table(
    arguments: argparse.Namespace, name: str, title: str, note: str, columns: list[str], rows: list[list[str]]
) -> None:
    """Write ``name``.md, with the command that made it and the machine."""
    command = f"python -m papers.dlg {name}" + (f" --steps {arguments.steps}" if arguments.steps else "")
    command += f" --seeds {' '.join(map(str, arguments.seeds))}" if arguments.seeds else ""
    machine = f"{processor()}, {os.cpu_count()} cores, {datetime.date.today().isoformat()}"
    lines = [f"# {title}", "", f"{note} Written by `{command}` ({machine}).", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    text = "\n".join(lines) + "\n"
    files.write_text(arguments.results / f"{name}.md", text)
    print(text)
