"""Tables of Upcycled-FL's commands, with the command that made them."""

from __future__ import annotations

import argparse
import copy

from papers.losac.running import write_table

ROUNDS, SEEDS = 80, [0, 1, 2, 3]


def write(arguments: argparse.Namespace, title: str, note: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table under the command's name; flags that have their defaults are not written."""
    told = copy.copy(arguments)
    told.rounds = None if arguments.rounds == ROUNDS else arguments.rounds
    told.seeds = None if arguments.seeds == SEEDS else arguments.seeds
    flags = ""
    for option in ("data", "methods"):
        if values := getattr(arguments, option, None):
            flags += f" --{option} " + " ".join(f'"{v}"' if " " in v else v for v in values)
    write_table(told, arguments.what, title, note, columns, rows, "papers.upcycled", flags)
