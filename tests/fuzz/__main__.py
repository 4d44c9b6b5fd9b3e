"""python -m tests.fuzz {configurations, arrays, files, runs} COUNT [SEED]: try COUNT cases and print a summary."""

from __future__ import annotations

import sys
import time
from functools import partial

import jax

from tests.compiler import set_fast_compilation
from tests.fuzz import arrays, configurations, files, runs
from tests.fuzz.harness import fuzz

KINDS = {
    "configurations": (configurations.tables, partial(configurations.check, deep=True)),
    "arrays": (arrays.samples, arrays.check),
    "files": (files.contents, files.check),
    "runs": (runs.directories, partial(runs.check, deep=True)),
}


def main(kind: str, count: str, seed: str = "0") -> None:
    """Try ``count`` cases of a kind."""
    cases, check = KINDS[kind]
    began = time.monotonic()
    counts = fuzz(cases(), check, int(count), int(seed))
    summary = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{kind}: {summary} in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    set_fast_compilation()
    main(*sys.argv[1:])
