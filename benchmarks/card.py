"""``python -m benchmarks.card``: what this device can do, by precision: matrix products and copies of memory.

``benchmarks.gpu`` runs it in a process of its own, so that no memory of the device stays in use.
"""

from __future__ import annotations

import json

from benchmarks.timing import RESULT_PREFIX

PRECISIONS = ("highest", "tensorfloat32", "bfloat16")


def main() -> None:
    from fedrax.profiling import machine_limits
    from fedrax.simulation.executors.execution_plan import make_mesh

    mesh = make_mesh(1)
    limits = {precision: machine_limits.measure(mesh, precision=precision, budget=1.0) for precision in PRECISIONS}
    found = {precision: {"gflops": round(each.gflops, 1)} for precision, each in limits.items()}
    found["copy"] = {"gigabytes": round(max(each.gigabytes for each in limits.values()), 1)}
    print(RESULT_PREFIX + json.dumps(found))


if __name__ == "__main__":
    main()
