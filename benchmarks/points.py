"""Measuring fedrax itself at one point of a benchmark: in a fresh process, on a quiet machine.

No accelerator is used, and nothing has been compiled before: each process starts with an empty cache.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.quiet import run_quietly

REPOSITORY = Path(__file__).parents[1]


def measure_point(module: str, point: dict[str, Any], max_wait: float, timeout: float = 900) -> dict[str, Any]:
    """Runs ``python -m module --point JSON``, which prints one line of results; see ``run_quietly``."""
    path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-m", module, "--point", json.dumps(point)]
    with tempfile.TemporaryDirectory() as empty:
        ours = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "FEDRAX_CACHE": empty}
        return run_quietly(command, os.environ | ours, max_wait, timeout)
