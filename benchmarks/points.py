"""Measuring fedrax itself at one point of a benchmark: in a fresh process, on a quiet machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.quiet import run_quietly

REPOSITORY = Path(__file__).parents[1]


def measure_point(
    module: str, point: dict[str, Any], max_wait: float, timeout: float = 900
) -> dict[str, Any]:
    """Runs ``python -m module --point JSON``, which prints one line of results; see ``run_quietly``."""
    path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-m", module, "--point", json.dumps(point)]
    return run_quietly(command, os.environ | {"PYTHONPATH": path}, max_wait, timeout)
