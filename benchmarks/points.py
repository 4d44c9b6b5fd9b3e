"""Measure fedrax at one point of a benchmark: in a fresh process, on a quiet machine.

No accelerator is used, and each process starts with an empty compilation cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.environments import cache_directory
from benchmarks.quiet import run_quietly
from benchmarks.sessions import RESULTS

REPOSITORY = Path(__file__).parents[1]


def point_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of a benchmark of single points; ``point`` is the JSON of the point to measure in this process."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_directory(), help="where the arrays are stored")
    parser.add_argument("--max-wait", type=float, default=300, help="seconds to wait for a quiet machine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the page is written")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    return parser


def measure_point(
    module: str, point: dict[str, Any], max_wait: float, timeout: float = 900, **variables: str
) -> dict[str, Any]:
    """Run ``python -m module --point JSON``, which prints one line of results; see ``run_quietly``.

    ``variables`` are added to its environment.
    """
    path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-m", module, "--point", json.dumps(point)]
    with tempfile.TemporaryDirectory() as empty:
        ours = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "FEDRAX_CACHE": empty}
        return run_quietly(command, os.environ | ours | variables, max_wait, timeout)
