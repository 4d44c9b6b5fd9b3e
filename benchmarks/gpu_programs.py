"""``python -m benchmarks.gpu_programs``: what XLA makes of a round of G1 to G6 for an H100, without having one.

Each workload's round, all clients side by side, is compiled for the GPU described by `H100`, in each precision and with
the compiler passes that are disabled by default. The command needs JAX's CUDA packages (``pip install '.[cuda,flax]'``)
and no GPU. It times nothing: it records the memory that the program allocates beside fedrax's estimate, and the bytes
that its operations read and write, appends them to ``results/gpu_programs.jsonl`` and writes ``gpu_programs.md``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import processor
from benchmarks.pages import markdown_table, number, write_page
from benchmarks.sessions import RESULTS, Session
from benchmarks.workloads import GPU_WORKLOADS, SMALL_WORKLOADS, WORKLOADS, Workload

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""The device, in the form of XLA's target configurations."""
FORMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tensorfloat32", ()),
    ("tensorfloat32", ("implicit_gemm",)),
    ("bfloat16", ()),
    ("bfloat16", ("implicit_gemm",)),
    ("bfloat16", ("first_step", "implicit_gemm")),
)
"""Precision, and the passes that are enabled beside those of the default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, help="default: G1 to G6")
    parser.add_argument("--small", action="store_true", help="the networks of G1 to G6 with few and narrow layers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept and the page is written")
    parser.add_argument("--resume", action="store_true", help="continue the last session")
    parser.add_argument("--report", action="store_true", help="only write the last session's page again")
    arguments = parser.parse_args()
    raw = arguments.out / "gpu_programs.jsonl"
    if not arguments.report:
        device = topology_device()
        workloads = arguments.workloads or list(SMALL_WORKLOADS if arguments.small else GPU_WORKLOADS)
        session = Session.latest(raw) if arguments.resume else Session.start(raw, {"cpu": processor()}, **versions())
        done = {(run["workload"], run["precision"], tuple(run["passes"])) for run in session.runs}
        for workload in workloads:
            for precision, passes in FORMS:
                if (workload, precision, passes) not in done:
                    found = compiled_round(WORKLOADS[workload], precision, passes, device)
                    session.add({"workload": workload, "precision": precision, "passes": passes} | found)
                    print(session.runs[-1], flush=True)
    print(write_page(arguments.out / "gpu_programs.md", sections(Session.latest(raw))).read_text())


def versions() -> dict[str, str]:
    return {"jax": version("jax"), "flax": version("flax")}


def topology_device() -> Any:
    """A device that programs can be compiled for and not run on; exits without JAX's CUDA packages."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # which would ask the driver
    import jax
    from jax.experimental import topologies

    jax.devices("cpu")
    try:
        return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100).devices[0]
    except (NotImplementedError, RuntimeError) as error:
        sys.exit(f"error: programs for a GPU need JAX's CUDA packages, pip install '.[cuda]': {error}")


def compiled_round(workload: Workload, precision: str, passes: Iterable[Any], device: Any) -> dict[str, float]:
    """Megabytes and operations of the program of one round in which all clients of the workload take part."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from fedrax import FedAvg, LocalSGD, Settings, classification
    from fedrax.simulation.executors.compiled import run_block
    from fedrax.simulation.persistence.resume import initial_state
    from fedrax.simulation.process import numeric_context
    from fedrax.simulation.run import make_block_loader
    from fedrax.simulation.setup import prepare
    from fedrax.xla import Options, use_options

    model, params, federation = cohort_of(workload)
    local = LocalSGD(lr=workload.learning_rate, epochs=workload.epochs, batch_size=workload.batch, order="stored")
    asked: dict[str, Any] = {"cohort_size": workload.cohort, "chunk": workload.cohort, "precision": precision}
    settings, own = Settings(rounds=2, plan="vmap", devices=1, **asked), jax.default_backend
    with numeric_context("float32"), use_options(Options(enabled=frozenset(passes))):
        jax.default_backend = lambda: "gpu"  # what fedrax asks when it chooses forms
        try:
            setup = prepare(FedAvg(local=local), classification(model), federation, settings, params)
            storage = make_block_loader(setup)
            state, block = initial_state(setup, storage), storage.next_block(0, 1)
            storage.close(failed=True)
            given = state, setup.engine.samples, setup.key, block.inputs, np.int32(1)
            place = SingleDeviceSharding(device)
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=place), given)
            traced = jax.jit(lambda *args: run_block(setup.engine.program, None, setup.algorithm, *args)).trace(*shapes)
            program = traced.lower(lowering_platforms=("cuda",)).compile()
        finally:
            jax.default_backend = own
    memory = program.memory_analysis()
    assert memory is not None
    counted = Counter(executions(program.as_text() or ""))
    return {
        "estimated": setup.traced.peak_bytes * workload.cohort,
        "allocated": memory.temp_size_in_bytes,
        "moved": sum(size * times for (_, size), times in counted.items()),
        "executed": sum(counted.values()),
        "own_kernels": sum(times for (kind, _), times in counted.items() if kind == "implicit_gemm"),
    }


def executions(text: str) -> dict[tuple[str, float], int]:
    """Executions of the operations of a program, by kind and by the bytes that one execution reads and writes.

    Operations in loops are counted as often as the loop is known to run, which the loop over local steps is.
    """
    from fedrax.profiling.hlo import ProgramText

    program, found = ProgramText(text), Counter[tuple[str, float]]()

    def times(computation: str) -> int:
        caller = program.caller.get(computation)
        if caller is None or caller.opcode not in ("while", "conditional", "call"):
            return int(caller is None)
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', caller.text)
        return times(caller.computation) * (int(known[1]) if known else 1)

    for name, operation in program.operations.items():
        size, repeats = program.cost(name).bytes, times(operation.computation)
        if size and repeats:
            own = operation.opcode == "custom-call" and "implicit_gemm" in operation.op_name
            found[("implicit_gemm" if own else operation.opcode, size)] += repeats
    return found


def cohort_of(workload: Workload) -> tuple[Any, Any, Any]:
    """(model, parameters, federation) of the clients of one round; samples of zeros, since only shapes matter."""
    from benchmarks.fedrax_problems import problem
    from benchmarks.runners.linen_models import sample_input
    from benchmarks.starting_weights import starting_weights
    from fedrax import Federation

    sample = sample_input(workload)
    x = np.zeros((workload.cohort * workload.samples, *sample.shape[1:]), sample.dtype)
    y = np.zeros(x.shape if workload.network == "CausalTransformer" else len(x), np.int32)
    offsets = np.arange(workload.cohort + 1) * workload.samples
    model, params = problem(workload, starting_weights(workload, np.random.default_rng(0)))
    classes = workload.sizes.get("classes", workload.sizes.get("symbols"))
    return model, params, Federation.from_arrays(x, y, offsets=offsets, num_classes=classes, shuffle=False)


def sections(session: Session) -> Iterable[str]:
    header = session.header
    yield "# Programs for a GPU"
    yield (
        f"Written by `python -m benchmarks.gpu_programs` on {header['date']} from session `{header['id']}` of "
        f"`gpu_programs.jsonl`, with JAX {header['jax']} and Flax {header['flax']}. A round of each workload of "
        "`benchmarks.gpu`, with all of its clients side by side, compiled for an H100 on a machine without one. "
        "Nothing was run or timed. *Estimated* is fedrax's estimate for the work of the clients, which decides how "
        "many of them are computed at a time; *allocated* is what the compiled program allocates for intermediate "
        "results, client weights and running sums included. *Read and written* are the operands and results of all "
        "operations, those of local steps as often as they are taken; the loops of recurrent layers are counted once, "
        "where XLA does not say how often they run. Caches are not modeled."
    )
    lines = []
    for run in session.runs:
        names = (run["workload"], run["precision"], ", ".join(f"`{name}`" for name in run["passes"]) or "default")
        sizes = (number(run["estimated"] / 1e6), number(run["allocated"] / 1e6))
        ratio = f"{run['allocated'] / run['estimated']:.2f}"
        lines.append(
            (*names, *sizes, ratio, number(run["moved"] / 1e9), f"{run['executed']:,}", f"{run['own_kernels']}")
        )
    sizes = ("estimated, MB", "allocated, MB", "of the estimate", "read and written, GB")
    yield markdown_table(("", "precision", "passes", *sizes, "operations executed", "of them `implicit_gemm`"), lines)


if __name__ == "__main__":
    main()
