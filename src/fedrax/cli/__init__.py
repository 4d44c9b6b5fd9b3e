"""The command line: ``fedrax run``, ``compare``, ``resume``, ``profile``, ``list``, ``partition``, ``show``.

Each command is a module of this package, imported when it is asked for, so that ``fedrax --help`` is instant.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from fedrax.errors import FedraxError

COMMANDS = {
    "run": "run one experiment: a TOML file, flags, or both",
    "compare": "run several algorithms, each at its best settings, with several seeds; a table and curves",
    "resume": "go on with an interrupted run",
    "show": "tables and curves of finished or running runs",
    "partition": "divide a data set among clients, count and draw it, measure its heterogeneity",
    "profile": "where a round's time goes, and what bounds it",
    "list": "list algorithms, data sets, models, optimizers, ...",
}

USAGE = """\
usage: fedrax COMMAND [ARGUMENTS]

Federated optimisation on heterogeneous clients: compare methods in simulation.

commands:
{commands}

`fedrax COMMAND --help` explains each. To begin:
  fedrax run --algorithm scaffold --data digits
  fedrax compare --algorithms fedavg scaffold --grid algorithm.local.lr=0.01,0.03,0.1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 where a method of a comparison diverged, 2 for input that cannot be
    used, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(arguments)
    except FedraxError as error:
        print(f"fedrax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedrax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has had enough
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"fedrax: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _dispatch(arguments: list[str]) -> int:
    if any("\0" in argument for argument in arguments):
        raise FedraxError("an argument holds a NUL character, which no name or path does.")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        lines = (f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
        print(USAGE.format(commands="\n".join(lines)), end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        from fedrax import __version__

        print(f"fedrax {__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        from fedrax.errors import unknown

        raise unknown("command", command, COMMANDS)
    return importlib.import_module(f"fedrax.cli.{command}_command").main(rest)
