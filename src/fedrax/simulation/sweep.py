"""Many runs that differ in float hyper-parameters and seeds, as one compiled program.

Float hyper-parameters are inputs of the program, so a grid of them is one ``vmap``: the runs of one seed share
cohorts and batches, which are then drawn once, and a data row is read once for the whole grid. Seeds follow one
another inside the same call; the grid is spread over the devices.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.simulation import backend
from fedrax.simulation.engine import AXIS, Carry, compiler_options, run_block
from fedrax.simulation.evaluate import sample_values
from fedrax.simulation.events import Event, events_of
from fedrax.simulation.interpreters import NonFiniteError
from fedrax.simulation.result import Result
from fedrax.simulation.run import Simulation, simulate
from fedrax.simulation.settings import Settings
from fedrax.tree import Tree

_SMALL = 60_000
"""Parameters up to which runs side by side are faster on CPU cores than runs in turn (benchmarks/sweep.py)."""
_EVALUATION_ROWS = 500


def sweep(
    algorithms: Sequence[Algorithm],
    task: Task,
    federation: Federation,
    seeds: Sequence[int] = (0,),
    settings: Settings | None = None,
    *,
    mode: Literal["auto", "together", "in turn"] = "auto",
    **changes: Any,
) -> list[list[Result]]:
    """Run every algorithm with every seed: results[i][j] is ``algorithms[i]`` with ``seeds[j]``.

    The algorithms must be of one kind: the same class and the same static fields, different floats.
    ``together`` runs them in one compiled call, ``in turn`` one after another; ``auto`` picks by model size and
    backend. A run that diverges ends where it did, with ``stopped = "diverged"``, and does not disturb the others.
    Runs together keep no directory (see ``fedrax compare`` for runs on disk), and the seconds of their events are
    those of all runs.

    Runs with samples streamed or client states on disk go in turn.

    Raises FedraxError if the algorithms cannot run together.
    """
    settings = dataclasses.replace(settings or Settings(), **changes)
    backend.use_all_cores()
    if not algorithms or not seeds:
        raise FedraxError("a sweep needs at least one algorithm and one seed")
    if settings.target is not None and mode == "together":
        raise FedraxError("runs together cannot stop at a target: leave the target out, or run them in turn")
    with jax.enable_x64(settings.dtype == "float64"), jax.default_matmul_precision("highest"):
        one = [dataclasses.replace(settings, seed=seed, devices=1) for seed in seeds]
        runs = [Simulation(algorithms[0], task, federation, each, None, None, None) for each in one]
        apart = runs[0].streamed or runs[0].spilled
        if apart and mode == "together":
            raise FedraxError("runs together keep samples and client states on the devices: run them in turn")
        if apart:
            mode = "in turn"
        elif mode == "auto":
            mode = "together" if _pays(algorithms, runs[0], settings) else "in turn"
        if mode == "together":
            return _Together(algorithms, runs).run()
    return [[_alone(a, task, federation, dataclasses.replace(settings, seed=s)) for s in seeds] for a in algorithms]


def _pays(algorithms: Sequence[Algorithm], run: Simulation, settings: Settings) -> bool:
    same = len({jax.tree.structure(a) for a in algorithms}) == 1
    on_cpu = jax.default_backend() == "cpu"
    return same and settings.target is None and (run.info.parameters <= _SMALL or not on_cpu)


def _alone(algorithm: Algorithm, task: Task, federation: Federation, settings: Settings) -> Result:
    try:
        return simulate(algorithm, task, federation, settings)
    except NonFiniteError:
        return Result(params=(), server=(), events=[], plan="in turn", stopped="diverged")


class _Together:
    """All runs as one program: seeds [Z] in turn, algorithms [G] side by side, G spread over the devices."""

    def __init__(self, algorithms: Sequence[Algorithm], runs: list[Simulation]):
        if len({jax.tree.structure(a) for a in algorithms}) != 1:
            raise FedraxError("algorithms that run together must differ in float hyper-parameters only")
        self.runs, self.count = runs, len(algorithms)
        self.settings = runs[0].settings
        mesh = backend.make_mesh(min(len(jax.devices()), self.count))
        devices = mesh.devices.size
        padded = list(algorithms) + [algorithms[-1]] * (-self.count % devices)
        self.stacked = _stack(padded)
        program, everywhere = runs[0].engine.program, NamedSharding(mesh, P())
        self.samples = jax.device_put(runs[0].engine.samples, everywhere)
        test = runs[0].evaluators.get("test")
        self.test = None if test is None else jax.device_put(test.samples, everywhere)
        lane = partial(run_block, program, None, stop=False)
        grid = jax.vmap(lane, in_axes=(0, 0, None, None, None, None))

        def on_device(algorithms: Algorithm, carry: Carry, samples: Tree, keys: Array, xs: Any, rounds: Array) -> tuple:
            one_seed = lambda c: grid(algorithms, c[0], samples, c[1], c[2], rounds)  # noqa: E731
            return jax.lax.map(one_seed, (carry, keys, xs))

        lanes = P(None, AXIS)
        sharded = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(P(AXIS), lanes, P(), P(), P(), P()),
            out_specs=(lanes, lanes),
            check_vma=False,
        )
        self._block = jax.jit(sharded, donate_argnums=(1,), compiler_options=compiler_options(mesh))
        evaluate = jax.vmap(jax.vmap(partial(dataset_means, runs[0].task), (0, None)), (0, None))
        evaluated = jax.shard_map(evaluate, mesh=mesh, in_specs=(lanes, P()), out_specs=lanes, check_vma=False)
        self._evaluate = jax.jit(evaluated)
        self.plan = f"together: {self.count} x {len(runs)} runs in one program on {devices} devices"

    def _fresh(self) -> Carry:
        def start(algorithm: Algorithm, params: Tree, client: Tree) -> Carry:
            rows = max(run.planner.capacity for run in self.runs)
            store = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), client)
            return Carry(algorithm.init(params, self.runs[0].info.num_clients), store)

        params = jax.tree.map(lambda *x: jnp.stack(x), *[run.start for run in self.runs])
        clients = jax.tree.map(lambda *x: jnp.stack(x), *[run.initial_client for run in self.runs])
        return jax.vmap(jax.vmap(start, (0, None, None)), (None, 0, 0))(self.stacked, params, clients)

    def run(self) -> list[list[Result]]:
        """All rounds of all runs, evaluated as the settings say."""
        carry, total = self._fresh(), self.settings.rounds
        keys = jnp.stack([run.key for run in self.runs])
        events: list[list[list[Event]]] = [[[] for _ in self.runs] for _ in range(self.count)]
        done = 0
        while done < total:
            began = time.monotonic()
            rounds = min(self.settings.eval_every - done % self.settings.eval_every, total - done, 64)
            blocks = [run.planner.block(done, rounds, 64) for run in self.runs]
            xs = jax.tree.map(lambda *x: np.stack(x), *blocks)
            carry, records = self._block(self.stacked, carry, self.samples, keys, xs, np.int32(rounds))
            done += rounds
            means = {}
            if self.test is not None and (done % self.settings.eval_every == 0 or done == total):
                means = {name: np.asarray(v) for name, v in self._evaluate(carry.server.params, self.test).items()}
            records = {name: np.asarray(value) for name, value in records.items()}
            took = time.monotonic() - began
            for z, run in enumerate(self.runs):
                for g in range(self.count):
                    mine = {name: value[z, g, :rounds] for name, value in records.items()}
                    evaluated = {name: float(value[z, g]) for name, value in means.items()}
                    self._extend(events[g][z], run, mine, blocks[z], took, evaluated)
        return [[self._result(events[g][z], carry, z, g) for z in range(len(self.runs))] for g in range(self.count)]

    def _extend(
        self, events: list[Event], run: Simulation, records: dict, xs: Any, took: float, means: dict[str, float]
    ) -> None:
        if events and events[-1].get("diverged"):
            return
        sound = records["sound"]
        kept = len(sound) if sound.all() else int(np.argmin(sound))
        new = events_of(run.info, {name: value[:kept] for name, value in records.items()}, xs.count, events, took)
        if kept == len(sound) and new:
            new[-1] |= {f"test_{name}": value for name, value in means.items()}
        events.extend(new)
        if kept < len(sound):
            events.append({"round": len(events) + 1, "diverged": True})

    def _result(self, events: list[Event], carry: Carry, z: int, g: int) -> Result:
        diverged = bool(events and events[-1].get("diverged"))
        server = jax.tree.map(lambda a: a[z, g], carry.server)
        return Result(
            params=server.params,
            server=server,
            events=events[:-1] if diverged else events,
            plan=self.plan,
            stopped="diverged" if diverged else "rounds",
            store=jax.tree.map(lambda a: a[z, g], carry.store),
            homes={client: row for client, (_, row) in self.runs[z].planner.home.items()},
            initial_client=self.runs[z].initial_client,
        )


def _stack(algorithms: Sequence[Algorithm]) -> Algorithm:
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf, float) for leaf in leaves]), *algorithms)


def dataset_means(task: Task, params: Tree, samples: Batch) -> dict[str, Array]:
    """Mean loss and metrics over a data set, inside compiled code."""
    rows = len(samples.y)
    chunk = min(_EVALUATION_ROWS, rows)
    chunks = -(-rows // chunk)

    def one(i: Array) -> dict[str, Array]:
        start = jnp.minimum(i * chunk, rows - chunk)
        part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk), samples)
        fresh = start + jnp.arange(chunk) >= i * chunk  # the last chunk overlaps the one before
        return {name: jnp.where(fresh, v, 0).sum() for name, v in sample_values(task, params, part).items()}

    return {name: sums.sum() / rows for name, sums in jax.lax.map(one, jnp.arange(chunks)).items()}
