"""``python -m papers.dlg lenet|methods``: reconstruct data from messages, as published and for all methods."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedrax.devices import use_all_cores
from papers.arguments import Different, command, count, folders, seed
from papers.dlg.lenet import lenet
from papers.dlg.methods import methods
from papers.ending import in_a_sentence


@in_a_sentence("papers.dlg")
def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m papers.dlg", description=__doc__)
    commands = {"lenet": lenet, "methods": methods}
    parser.add_argument("what", choices=list(commands))
    parser.add_argument("--out", type=Path, help="where what is done is kept; by default runs/dlg")
    parser.add_argument("--data-dir", help="where data files lie; by default $FEDRAX_DATA")
    where = "where tables go; by default beside this command, or with what is kept where --steps or --seeds are given"
    parser.add_argument("--results", type=Path, help=where)
    parser.add_argument("--seeds", type=seed, nargs="+", action=Different, help="other seeds than the command's own")
    parser.add_argument("--steps", type=count, help="other numbers of steps, to try the command out")
    arguments = parser.parse_args()
    arguments.command = command(parser, arguments)
    folders(arguments, "dlg", tried=bool(arguments.steps or arguments.seeds))
    use_all_cores()
    return commands[arguments.what](arguments)


if __name__ == "__main__":
    sys.exit(main())
