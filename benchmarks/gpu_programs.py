"""``python -m benchmarks.gpu_programs``: what XLA makes of a round of G1 to G6 for an H100, without having one.

Each workload's round, all clients side by side, is compiled for the GPU described by `H100`, in each precision and with
the compiler passes that are disabled by default. The command needs JAX's CUDA packages (``pip install '.[cuda,flax]'``)
and no GPU. It times nothing: it records the memory that the program allocates beside fedrax's estimate, the bytes that
its operations read and write, the share of those that touch the scores of attention, and the operations of a local step
and of a time step, appends them to ``results/gpu_programs.jsonl`` and writes ``gpu_programs.md``.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
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
OF_NETWORKS = {"CausalTransformer": (), "CharacterLSTM": ("recurrent", "remat")}
"""The passes, among those that are disabled by default, that apply to a network; the others have convolutions."""


FIELDS = ("moved", "executed", "own_kernels", "scores", "local_step", "time_step")
"""What is counted in a program."""


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
        (device,) = topology_devices()
        workloads = arguments.workloads or list(SMALL_WORKLOADS if arguments.small else GPU_WORKLOADS)
        session = Session.latest(raw) if arguments.resume else Session.start(raw, {"cpu": processor()}, **versions())
        done = {(run["workload"], run["precision"], tuple(run["passes"])) for run in session.runs}
        for workload in workloads:
            for precision, passes in forms(WORKLOADS[workload]):
                if (workload, precision, passes) not in done:
                    found = compiled_round(WORKLOADS[workload], precision, passes, device)
                    session.add({"workload": workload, "precision": precision, "passes": passes} | found)
                    print(session.runs[-1], flush=True)
    print(write_page(arguments.out / "gpu_programs.md", sections(Session.latest(raw))).read_text())


def forms(workload: Workload) -> list[tuple[str, tuple[str, ...]]]:
    """Precisions, and the passes that are enabled beside those of the default."""
    own = OF_NETWORKS.get(workload.network, ("implicit_gemm",))
    shorter = (("bfloat16", passes) for passes in ((), own, ("first_step", *own)))
    return list(dict.fromkeys((("tensorfloat32", ()), ("tensorfloat32", own), *shorter)))


def versions() -> dict[str, str]:
    return {"jax": version("jax"), "flax": version("flax")}


def topology_devices(number: int = 1) -> list[Any]:
    """Devices that programs can be compiled for and not run on; exits without JAX's CUDA packages."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # which would ask the driver
    import jax
    from jax.experimental import topologies

    jax.devices("cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # a stored program cannot be loaded without its device
    try:
        return topologies.get_topology_desc(platform="cuda", topology=f"1x1x{number}", target_config=H100).devices
    except (NotImplementedError, RuntimeError) as error:
        sys.exit(f"error: programs for a GPU need JAX's CUDA packages, pip install '.[cuda]': {error}")


def compiled_round(workload: Workload, precision: str, passes: Iterable[Any], device: Any) -> dict[str, float]:
    """Bytes and operations of the program of one round in which all clients of the workload take part."""
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
    estimated, tokens = setup.traced.peak_bytes * workload.cohort, workload.sizes.get("tokens", 0)
    return {"estimated": estimated, "allocated": memory.temp_size_in_bytes} | counts(program.as_text() or "", tokens)


def counts(text: str, tokens: int = 0) -> dict[str, float]:
    """Bytes and numbers of the operations of a program, each of which is a kernel, a library call or a copy.

    Operations in loops are counted as often as the loop is known to run. The outermost of these is the loop over local
    steps, a loop of ``tokens`` iterations inside it is one over time steps. Arrays that end in [tokens, tokens] are
    scores of attention.

    Returns:
        ``moved`` and ``executed`` bytes and operations of a round; ``own_kernels``: those of ``implicit_gemm``;
        ``scores``: bytes of operations that read or write scores; ``local_step``: operations of one local step;
        ``time_step``: those of one time step, in all loops over time steps together.
    """
    from fedrax.profiling.hlo import ProgramText

    program = ProgramText(text)
    found: dict[str, float] = dict.fromkeys(FIELDS, 0)

    def loops(computation: str) -> tuple[int, ...] | None:
        """Known iterations of the loops that a computation runs in, from the outermost; None inside of operations."""
        caller = program.caller.get(computation)
        if caller is None or caller.opcode not in ("while", "conditional", "call"):
            return () if caller is None else None
        known, outside = re.search(r'known_trip_count":\{"n":"(\d+)"', caller.text), loops(caller.computation)
        return outside if outside is None or known is None else (*outside, int(known[1]))

    for name, operation in program.operations.items():
        size, around = program.cost(name).bytes, loops(operation.computation)
        if not size or around is None:
            continue
        times = math.prod(around)
        arrays = [operation, *map(program.operations.__getitem__, operation.operands)]
        arrays += [inside for called in operation.calls for inside in program.computations[called]]
        is_own = operation.opcode == "custom-call" and "implicit_gemm" in operation.op_name
        on_scores = any(shape[-2:] == (tokens, tokens) for array in arrays for _, shape in array.shapes)
        found["moved"] += size * times
        found["executed"] += times
        found["own_kernels"] += times * is_own
        found["scores"] += size * times * on_scores
        found["local_step"] += math.prod(around[1:]) * (around != ())
        found["time_step"] += tokens in around[1:]
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
        "operations, those in loops as often as they are executed. Caches are not modeled. *On scores* is the share of "
        "this traffic that belongs to operations that read or write the scores of attention or their gradients, their "
        "other operands included: fused attention cannot save more. An *operation* is a fused kernel, a library call "
        "or a copy: what a local step, and each time step of all loops over time together, launch."
    )
    lines = []
    for run in session.runs:
        names = (run["workload"], run["precision"], ", ".join(f"`{name}`" for name in run["passes"]) or "default")
        sizes = (number(run["estimated"] / 1e6), number(run["allocated"] / 1e6))
        ratio = f"{run['allocated'] / run['estimated']:.2f}"
        share = f"{run['scores'] / run['moved']:.1%}" if run["scores"] else ""
        operations = (run[name] for name in ("executed", "own_kernels", "local_step", "time_step"))
        shown = (f"{count:,}" if count else "" for count in operations)
        lines.append((*names, *sizes, ratio, number(run["moved"] / 1e9), share, *shown))
    sizes = ("estimated, MB", "allocated, MB", "of the estimate", "read and written, GB", "on scores")
    operations = ("operations", "of them `implicit_gemm`", "of a local step", "of a time step")
    yield markdown_table(("", "precision", "passes", *sizes, *operations), lines)


if __name__ == "__main__":
    main()
