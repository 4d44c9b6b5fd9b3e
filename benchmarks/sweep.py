"""A grid of 16 step sizes and 4 seeds of a softmax regression: one compiled call, against one run after another.

``python -m benchmarks.sweep`` can be short because hyper-parameters with a decimal point are inputs of the
compiled program: ``vmap`` over step sizes and seeds turns a whole run into the whole grid. It checks that both
ways end at the same parameters, appends the times to ``results/sweep.jsonl`` and writes ``sweep.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environments import cache_directory
from benchmarks.make_arrays import ensure_arrays
from benchmarks.pages import markdown_table, write_page
from benchmarks.points import measure_point
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX

RAW = RESULTS / "sweep.jsonl"
# Up to the largest at which training is stable here: beyond it rounding errors grow and nothing can be compared.
STEP_SIZES = np.geomspace(1e-4, 0.02, 16).astype(np.float32)
SEEDS = range(4)
ROUNDS, COHORT, STEPS, BATCH = 100, 10, 20, 10
TOLERANCE = 1e-4  # largest difference of a parameter, relative to the largest parameter of its run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_directory(), help="where the arrays are kept")
    parser.add_argument("--max-wait", type=float, default=300, help="seconds to wait for a quiet machine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the page is written")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        way, arrays, directory = json.loads(arguments.point).values()
        print(RESULT_PREFIX + json.dumps(WAYS[way](arrays, Path(directory))))
        return
    arrays, scratch = str(ensure_arrays("W2", arguments.cache / "arrays")), arguments.cache / "sweep"
    scratch.mkdir(parents=True, exist_ok=True)
    session = Session.start(RAW)
    for way in WAYS:
        point = {"way": way, "arrays": arrays, "directory": str(scratch)}
        session.add({"way": way} | measure_point("benchmarks.sweep", point, arguments.max_wait))
        if "failed" in session.runs[-1]:
            raise SystemExit(f"error: {way} failed: {session.runs[-1]['failed']}")
    difference = largest_difference(scratch)
    page = write_page(arguments.out / "sweep.md", sections(session, difference))
    print(page.read_text())
    if not difference <= TOLERANCE:
        raise SystemExit(f"error: the two ways end up to {difference:.2g} apart")


def problem(arrays: str) -> tuple[Any, Any]:
    """(task, federation): softmax regression on the second workload's clients."""
    from benchmarks.fedrax_problems import federation_of, model_of
    from benchmarks.workloads import WORKLOADS, Arrays
    from fedrax import classification

    return classification(model_of(WORKLOADS["W2"])), federation_of(Arrays(arrays))


def algorithm(step_size: Any) -> Any:
    from fedrax import FedAvg, LocalSGD

    return FedAvg(local=LocalSGD(lr=step_size, steps=STEPS, batch_size=BATCH))


def in_turn(arrays: str, directory: Path) -> dict[str, float]:
    """Every point of the grid by a ``simulate`` of its own."""
    from fedrax import simulate

    task, federation = problem(arrays)
    final, after_first_round, begin = [], 0.0, time.perf_counter()
    for seed in SEEDS:
        for step_size in STEP_SIZES:
            result = simulate(
                algorithm(float(step_size)),
                task,
                federation,
                rounds=ROUNDS,
                cohort_size=COHORT,
                seed=seed,
                eval_every=ROUNDS,
            )
            final.append(flat(result.params))
            after_first_round += result.events[-1]["seconds"] - result.events[0]["seconds"]
    total = time.perf_counter() - begin
    np.save(directory / "in_turn.npy", np.array(final), allow_pickle=False)
    return {"seconds": total, "seconds_without_first_rounds": after_first_round}


def at_once(arrays: str, directory: Path) -> dict[str, float]:
    """The whole grid in one compiled call: the simulator's block of rounds under two ``vmap``s, the step sizes
    spread over the devices.
    """
    import jax
    from jax.sharding import PartitionSpec

    from fedrax.client_data import Layout
    from fedrax.simulation.backend import make_mesh, use_all_cores
    from fedrax.simulation.cohorts import Planner, Sampler
    from fedrax.simulation.engine import AXIS, Carry, Program, run_block
    from fedrax.simulation.settings import Settings
    from fedrax.task import Batch

    task, federation = problem(arrays)
    begin = time.perf_counter()
    use_all_cores()
    keys, servers, blocks = [], [], []
    for seed in SEEDS:
        settings = Settings(rounds=ROUNDS, cohort_size=COHORT, seed=seed)
        sampler = Sampler(settings, federation.sizes)
        planner = Planner(sampler, federation.offsets, devices=1, stateful=False, by_samples=False)
        blocks.append(planner.block(0, ROUNDS, ROUNDS))
        key = jax.random.key(seed)
        keys.append(jax.random.fold_in(key, 1))
        servers.append(algorithm(0.0).init(task.init(jax.random.fold_in(key, 0)), federation.num_clients))
    program = Program(task, Layout.of(federation.sizes), federation.num_clients, chunk=0)

    def run(step_size: Any, server: Any, key: Any, clients: Any, samples: Batch) -> Any:
        rounds = jax.numpy.int32(ROUNDS)
        block, carry = blocks[0]._replace(**clients), Carry(server, ())
        carry, _ = run_block(program, None, algorithm(step_size), carry, samples, key, block, rounds)
        return carry.server.params

    # Seeds differ in who takes part; numbers of rounds and clients are the same and stay outside the vmap.
    clients = {
        name: np.stack([getattr(block, name) for block in blocks])
        for name in ("client", "slot", "offset", "size", "weight")
    }
    stack = partial(jax.tree.map, lambda *leaves: jax.numpy.stack(leaves))
    inputs = (STEP_SIZES, stack(*servers), stack(*keys), clients, Batch(*federation.train))
    grid = jax.vmap(jax.vmap(run, (0, None, None, None, None)), (None, 0, 0, 0, None))
    mesh = make_mesh(math.gcd(len(jax.devices()), len(STEP_SIZES)))
    specs = (PartitionSpec(AXIS), *[PartitionSpec()] * 4)
    spread = jax.shard_map(grid, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(None, AXIS), check_vma=False)
    compiled = jax.jit(spread).lower(*inputs).compile()
    compile_seconds = time.perf_counter() - begin
    params = jax.block_until_ready(compiled(*inputs))
    total = time.perf_counter() - begin
    points = [
        flat(jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], params))
        for i in range(len(SEEDS))
        for j in range(len(STEP_SIZES))
    ]
    np.save(directory / "at_once.npy", np.array(points), allow_pickle=False)
    return {"seconds": total, "seconds_without_first_rounds": total - compile_seconds}


WAYS = {"in turn": in_turn, "at once": at_once}


def flat(params: Any) -> np.ndarray:
    import jax

    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def largest_difference(directory: Path) -> float:
    """Between the two ways' final parameters, relative to the largest parameter of each run."""
    one, other = (np.load(directory / f"{name}.npy", allow_pickle=False) for name in ("in_turn", "at_once"))
    os.remove(directory / "in_turn.npy")
    os.remove(directory / "at_once.npy")
    return float((np.abs(one - other).max(axis=1) / np.abs(one).max(axis=1)).max())


def sections(session: Session, difference: float) -> list[str]:
    runs = {run["way"]: run for run in session.runs}
    lines = [
        (
            way,
            f"{run['seconds']:.2f}",
            f"{run['seconds_without_first_rounds']:.2f}",
            f"{run['peak_pss_mb']:.0f}",
            f"{run['foreign_cpu']:.2f}",
        )
        for way, run in runs.items()
    ]
    ratio = runs["in turn"]["seconds"] / runs["at once"]["seconds"]
    text = (
        f"Written by `python -m benchmarks.sweep` on {session.header['date']} from session "
        f"`{session.header['id']}` of `sweep.jsonl`. {len(STEP_SIZES)} step sizes and {len(SEEDS)} seeds of "
        f"FedAvg: softmax regression 60-10 on synthetic(1,1), 30 clients, a cohort of {COHORT}, {STEPS} steps of "
        f"{BATCH}, {ROUNDS} rounds. In turn: a `simulate` for each point, in one process. At once: one compiled "
        f"call for the whole grid. The second column leaves out compilation and first rounds. At once is "
        f"{ratio:.1f} times as fast; final parameters differ by at most {difference:.1g}, relative to the "
        f"largest parameter of a run.\n\n{session.machine_text()} No accelerator is used."
    )
    head = ("", "seconds", "without first rounds", "peak MB", "foreign CPU")
    return ["# A grid of step sizes and seeds in one call", text, markdown_table(head, lines)]


if __name__ == "__main__":
    main()
