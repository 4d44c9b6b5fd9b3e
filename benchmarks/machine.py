"""Speed of this machine: float32 matrix products and copies, on one thread and on all cores.

``python -m benchmarks.machine`` measures for about half a minute, prints one JSON object and writes it to
``benchmarks/results/machine.json``. The other benchmarks repeat the measurement and store its figures with their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"
GEMM_SIZES = (1024, 2048, 4096)
COPY_BYTES = 2**29


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    threads = parser.parse_args().worker
    if threads:
        print(json.dumps(measure_here(threads)))
        return
    machine = describe() | measure()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")
    print(json.dumps(machine, indent=2))


def describe() -> dict[str, str | int | float]:
    """Hardware and software of the machine, without its host name."""
    return {
        "cpu": processor(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def measure() -> dict[str, float]:
    """GEMM peak in GFLOP/s and copy bandwidth (read plus write) in GB/s, each the best of several seconds.

    The peak is the faster of NumPy's BLAS and XLA, which differ by a factor of two if one of them does not recognize
    the processor. Each thread count is measured in a separate process, because libraries read it when they are loaded.
    """
    figures = {}
    for label, threads in (("1_thread", 1), ("all_cores", cores())):
        limit = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "OPENBLAS", "MKL", "BLIS")}
        limit |= {"VECLIB_MAXIMUM_THREADS": str(threads), "JAX_NUM_CPU_DEVICES": str(threads)}
        limit |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
        command = [sys.executable, "-m", "benchmarks.machine", "--worker", str(threads)]
        printed = subprocess.run(command, env=os.environ | limit, check=True, capture_output=True, text=True)
        for name, value in json.loads(printed.stdout).items():
            figures[f"{name}_{label}"] = value
    return figures


def measure_here(threads: int) -> dict[str, float]:
    """The figures in this process, whose BLAS is configured for ``threads``."""
    if hasattr(os, "sched_setaffinity"):  # otherwise XLA would use other cores for a product on one device
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    gflops = max(blas_gflops(), xla_gflops(threads))
    # Ones: unwritten pages of zeros are all mapped to one page, which stays in the cache.
    source, target = np.ones(COPY_BYTES // 4, np.float32), np.ones(COPY_BYTES // 4, np.float32)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        copy = best_seconds(lambda: list(pool.map(lambda part: np.copyto(*part), parts)))
    return {"gemm_gflops": round(gflops, 1), "copy_gb_per_second": round(2 * COPY_BYTES / copy / 1e9, 1)}


def blas_gflops() -> float:
    """Large square matrix products of NumPy."""
    fastest = 0.0
    for n in GEMM_SIZES:
        a = np.random.default_rng(0).standard_normal((n, n), dtype=np.float32)
        out = np.empty_like(a)
        fastest = max(fastest, 2 * n**3 / best_seconds(lambda a=a, out=out: np.matmul(a, a, out=out)) / 1e9)
    return fastest


def xla_gflops(threads: int) -> float:
    """Large square matrix products of XLA, one on each of ``threads`` single-threaded devices."""
    from fedrax.profiling import machine_limits
    from fedrax.simulation.executors.execution_plan import make_mesh

    return machine_limits.measure(make_mesh(threads), budget=2.0).gflops


def best_seconds(run: Callable[[], object], budget: float = 2.0) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    details = {name.strip(): value.strip() for name, value in fields.items()}
    vectors = (
        "AVX-512" if "avx512f" in details.get("flags", "") else "AVX2" if "avx2" in details.get("flags", "") else ""
    )
    family = f"family {details['cpu family']}" if "cpu family" in details else ""
    return ", ".join(part for part in (details.get("model name", "unknown"), family, vectors) if part)


if __name__ == "__main__":
    main()
