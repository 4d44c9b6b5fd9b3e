"""The source of a number that is not finite: a round is repeated client by client, for a limited time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from fedrax import xla
from fedrax.background_thread import run_in_background
from fedrax.contract.algorithm import Algorithm, Info
from fedrax.signals import StopFlag
from fedrax.simulation.executors.compiled import Engine, RoundState
from fedrax.simulation.executors.debug import CheckedRunner, DebugExecutor, NonFiniteError, require_finite
from fedrax.simulation.executors.loop import CompiledSteps
from fedrax.simulation.executors.phase import PhaseState
from fedrax.simulation.placement.planner import merge_devices
from fedrax.simulation.process import numeric_context
from fedrax.simulation.round import (
    ClientKeys,
    ClientResult,
    PhaseResult,
    RoundInputs,
    client_inputs,
    run_client,
    run_round,
)
from fedrax.tree import Tree

SEARCH_SECONDS = 20.0
"""The longest search. One client is compiled, which takes about as long as compiling the run; then a client takes as
long as in the run. Too short, and large models are not compiled in it; the run has failed, and its user waits."""
_PAUSE = 0.1
"""Seconds between two looks at the search."""


class DivergenceSearch:
    """Repeats a round on one device, client by client, until a tensor is not finite.

    The search has a thread of its own: a compilation can be neither interrupted nor limited. One that is given up ends
    after the client that it is at.

    Args:
        engine: of the run.
        algorithm: the method.
        carry: the state before the round.
        key: random key of the run.
        inputs: of a block of rounds.
        r: the round in the block.
        dtype: of the run.
    """

    def __init__(
        self,
        engine: Engine,
        algorithm: Algorithm,
        carry: RoundState,
        key: Array,
        inputs: RoundInputs,
        r: int,
        dtype: str,
    ):
        self.algorithm, self.key, self.dtype = algorithm, key, dtype
        self.program = engine.program._replace(chunk=0, sharded_samples=False, data_parallel_devices=0)
        self.mesh, self.samples = Mesh(engine.mesh.devices.flat[:1], engine.mesh.axis_names), engine.samples
        by_device = lambda rows: next((len(a) // engine.devices for a in jax.tree.leaves(rows)), 0)  # noqa: E731
        samples = by_device(engine.samples) if engine.program.sharded_samples else 0
        merged = merge_devices(inputs, r, by_device(carry.store), samples)
        slots = merged.assignments.slot
        positions = np.arange(len(slots), dtype=np.int32)
        self.inputs = merged._replace(assignments=merged.assignments._replace(slot=positions))
        on_host = lambda values: jax.tree.map(np.asarray, values)  # noqa: E731
        store = jax.tree.map(lambda a: np.asarray(a[slots]), carry.store)
        self.start = RoundState(on_host(engine.whole_server(carry)), on_host(carry.statistics), store)
        self.clients = len(slots) * len(algorithm.phases)
        """Clients of all phases."""
        self.checked = 0
        """Of these, those found to be finite so far."""
        self.given_up = threading.Event()
        self.cut_short: str | None = None
        """Why the search did not come to its end, if it did not."""

    def run(self, interrupted: StopFlag, progress: Callable[[str], None]) -> str | None:
        """The first non-finite tensor, in words; None if there is none, or not within ``SEARCH_SECONDS``.

        Args:
            interrupted: ends the search.
            progress: called with the state of the search, from time to time.
        """
        if not self.clients:  # of a Poisson cohort
            return None
        due, found = time.monotonic() + SEARCH_SECONDS, run_in_background(self._repeat)
        while self.cut_short is None:
            left = due - time.monotonic()
            progress(f"looking for its source: {self.checked} of {self.clients} clients, {max(left, 0):.0f} s left")
            if interrupted.is_set():
                self.cut_short = "was interrupted"
            elif left <= 0:
                self.cut_short = f"ended after {SEARCH_SECONDS:g} s"
            elif wait([found], timeout=_PAUSE).done:
                return found.result()
        self.given_up.set()
        return None

    def _repeat(self) -> str | None:
        """Repeat the round."""
        with numeric_context(self.dtype):
            try:
                samples = Engine(self.program, self.mesh, self.samples).samples
                samples = jax.tree.map(lambda a: a.addressable_shards[0].data, samples)
                start = jax.tree.map(jnp.asarray, self.start)
                run_round(SearchExecutor(self, samples), start.server, start.statistics)
            except NonFiniteError as error:
                return str(error)
            except _GivenUp:
                pass
            except (jax.errors.JaxRuntimeError, MemoryError):
                self.cut_short = "found no memory"  # for its copies; the run has failed for another reason
        return None


class _GivenUp(Exception):
    """The search has been given up."""


class SearchExecutor(DebugExecutor):
    """As plan ``debug``, with a compiled program for a client and one for the server."""

    def __init__(self, search: DivergenceSearch, samples: Tree):
        program = search.program
        super().__init__(program, search.algorithm, search.inputs, search.key, search.start.store, samples)
        self.search, self.compiled = search, CompiledSteps(program)

        self.one_client = cache(lambda p: xla.jit(partial(run_client, program, p)))

    def broadcast(self, p: int, server: Any) -> Tree:
        """As every executor, compiled."""
        return self.compiled.broadcast(p, self.algorithm, server)

    def runner(self, p: int, *inputs: Any) -> CheckedRunner:
        """A phase whose clients are compiled."""
        return _SearchRunner(self, p, *inputs)

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """As every executor, compiled; the new state must be finite."""
        server, info = self.compiled.server(p, self.algorithm, server, gathered, self.round_inputs, self.round_key)
        require_finite({"server": server}, self.where)
        return server, info


class _SearchRunner(CheckedRunner):
    """A phase of the search, which ends once it is given up."""

    def __init__(
        self,
        executor: SearchExecutor,
        p: int,
        message: Tree,
        statistics: Tree,
        samples: Tree,
        round_inputs: RoundInputs,
        keys: ClientKeys,
    ):
        program, algorithm = executor.program, executor.algorithm
        super().__init__(executor.where, program, algorithm, p, message, statistics, samples, round_inputs, keys)
        self.search = executor.search

        def one(client_record: Tree, k: Array) -> ClientResult:
            inputs = client_inputs(program, round_inputs, keys, k)
            return executor.one_client(p)(algorithm, message, client_record, statistics, samples, inputs)

        self.one = one

    def after(self, progress: PhaseState, at: Array, done: ClientResult, *how: Any) -> PhaseState:
        """As plan ``debug``."""
        progress = super().after(progress, at, done, *how)
        self.search.checked += 1
        if self.search.given_up.is_set():
            raise _GivenUp
        return progress
