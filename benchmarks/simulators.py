"""Simulators and settings of the comparison.

Which setting is fastest depends on the workload, so the tables show each simulator's fastest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environments import cache_directory
from benchmarks.machine import cores
from benchmarks.workloads import WORKLOADS

OURS = "fedrax"
REPOSITORY = Path(__file__).parents[1]
ALL = tuple(WORKLOADS)
LARGE = tuple(f"W{i}" for i in range(3, 10))
"""The workloads whose matrix products are large enough for a second thread to help."""
ZOO = ("W1", "W2", "W3", "W4")
"""The workloads with networks of fedrax's model zoo."""


@dataclass(frozen=True)
class Setting:
    """One way to run a simulator: its runner's options and environment variables."""

    simulator: str
    label: str
    runner: str
    environment: str | None  # None: the environment this command runs in
    options: tuple[str, ...] = ()
    processes: int = 1
    workloads: tuple[str, ...] = ALL
    variables: dict[str, str] = field(default_factory=dict)

    def command(self, workload: str, arrays: Path, bin_directory: Path) -> list[str]:
        if self.processes > 1:
            start = ["torchrun", "--standalone", "--nproc-per-node", str(self.processes), "-m"]
        else:
            start = ["python", "-m"]
        runner = f"benchmarks.runners.{self.runner}"
        arguments = ["--workload", workload, "--arrays", str(arrays), *self.options]
        return [str(bin_directory / start[0]), *start[1:], runner, *arguments]

    def process_environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BENCHMARK_")}
        path = os.pathsep.join(part for part in (str(REPOSITORY), inherited.get("PYTHONPATH")) if part)
        return inherited | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"} | self.variables


def settings() -> list[Setting]:
    n = min(cores(), 8)  # a cohort of ten cannot use more
    threads = ("--threads", str(n))
    jax_on_cpu = {"JAX_PLATFORMS": "cpu"}
    flower = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    ours = jax_on_cpu | {"FEDRAX_CACHE": str(cache_directory() / "fedrax")}
    found = [
        Setting(OURS, "nothing compiled before", "run_fedrax", None, ("--forget", "1"), variables=ours),
        Setting(OURS, "compiled before", "run_fedrax", None, variables=ours),
        Setting(OURS, "without the zoo's layers", "run_fedrax", None, ("--plain", "1"), workloads=ZOO, variables=ours),
        Setting("PyTorch loop", "1 thread", "run_torch", "torch"),
        Setting("PyTorch loop", f"{n} threads", "run_torch", "torch", threads, workloads=LARGE),
        Setting("pfl-research", "1 process", "run_pfl", "pfl"),
        Setting("pfl-research", f"1 process, {n} threads", "run_pfl", "pfl", threads, workloads=LARGE),
        Setting("pfl-research", f"{n} processes", "run_pfl", "pfl", processes=n),
        Setting("FedJAX", "jit", "run_fedjax", "fedjax", variables=jax_on_cpu),
        Setting("FedJAX", f"pmap, {n} devices", "run_fedjax", "fedjax", ("--devices", str(n)), variables=jax_on_cpu),
        Setting("FedLab", "1 thread", "run_fedlab", "fedlab"),
        Setting("FedLab", f"{n} threads", "run_fedlab", "fedlab", threads, workloads=LARGE),
        Setting(
            "Flower",
            f"{n} actors",
            "run_flower",
            "flower",
            ("--actors", str(n)),
            variables=flower | {"OMP_NUM_THREADS": "1"},
        ),
        Setting(
            "Flower",
            f"1 actor, {n} threads",
            "run_flower",
            "flower",
            ("--actors", "1", *threads),
            workloads=LARGE,
            variables=flower | {"OMP_NUM_THREADS": str(n)},
        ),
    ]
    return found if n > 1 else [setting for setting in found if setting.workloads == ALL]
