"""The server's end: a ServerApp of Flower that leads an algorithm's rounds over real clients."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Required, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.checks import checked_init, require_finite_start
from fedrax.contract.client_data import Layout
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.devices import use_all_cores
from fedrax.errors import FedraxError, warn
from fedrax.flower.driver import RoundDriver
from fedrax.flower.evaluation import evaluate_on_clients, evaluate_on_server
from fedrax.flower.executor import DeliveryState, ServerComputation
from fedrax.flower.registry import ClientRegistry
from fedrax.flower.schema import message_schemas, needs_initial_parameters, placeholder_assignment, shapes_of_samples
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.privacy.ledger import Ledger
from fedrax.prng.seeds import RUN, seeded
from fedrax.simulation.persistence.run_identity import of_method
from fedrax.simulation.privacy_ledger import ledger_of
from fedrax.simulation.process import arithmetic
from fedrax.simulation.results.events import RunInfo, Sink
from fedrax.simulation.results.result import Result
from fedrax.simulation.round import Program
from fedrax.simulation.run import Callback
from fedrax.simulation.settings import FederationOptions, Settings
from fedrax.simulation.traffic import trace_round
from fedrax.simulation.validate import changed_settings, check_lists, validate
from fedrax.tree import Tree
from fedrax.xla import CodeFingerprint, run_cached

_OURS = tuple(FederationOptions.__annotations__)
"""Settings that mean something here; the others are a simulator's."""


class FederateArguments(FederationOptions, total=False):
    """The keyword arguments of :func:`federate`."""

    clients: Required[int]
    test: tuple[Any, Any] | None
    params: Tree | None
    seed: int | None
    directory: Path | str | None
    resume: bool
    wait: float
    timeout: float
    sinks: Sequence[Sink]
    callbacks: Sequence[Callback]


def server_app(
    algorithm: Algorithm,
    task: Task,
    settings: Settings | None = None,
    *,
    then: Callable[[Result], Any] | None = None,
    **arguments: Unpack[FederateArguments],
) -> ServerApp:
    """A ServerApp that leads a federation of ``algorithm`` and ``task`` over the clients of
    :func:`fedrax.flower.client_app`; arguments as of :func:`federate`.

    then: called with the result, once all rounds are over.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        result = federate(grid, algorithm, task, settings, **arguments)
        if then is not None:
            then(result)

    return app


def federate(
    grid: Grid,
    algorithm: Algorithm,
    task: Task,
    settings: Settings | None = None,
    *,
    clients: int,
    test: tuple[Any, Any] | None = None,
    params: Tree | None = None,
    seed: int | None = None,
    directory: Path | str | None = None,
    resume: bool = False,
    wait: float = 600.0,
    timeout: float = 600.0,
    sinks: Sequence[Sink] = (),
    callbacks: Sequence[Callback] = (),
    **options: Unpack[FederationOptions],
) -> Result:
    """Run ``algorithm`` on ``task`` over the clients of a Flower federation, as ``fedrax.simulate`` does on a machine.

    settings, options: of :class:`fedrax.Settings` the rounds, the cohort's size, weights, evaluation, target, privacy
    budget and delta, and dtype. clients: N, how many there are; rounds begin when so many are there. test: the server's
    own test samples (x, y); without them the clients evaluate on theirs. params: starting parameters, instead of
    ``task.init``. seed: start, cohorts and the server's noise as ``simulate`` draws them; by default they are secret,
    for what others can draw, too, protects nothing. directory: where to keep events, a checkpoint and the model as of
    the last round (``model.safetensors``). resume: go on from the directory's checkpoint, if it has one, over
    clients that have a directory, too. wait: seconds to wait for the clients at the start. timeout: seconds to wait for
    answers, and for clients where too few are there for a round. Clients that do not answer in that time, or nothing
    that makes sense, are left out of the round as if they had not been asked; a round that nobody answers changes
    nothing, as does one with too few clients for a method that needs the same number in each. sinks, callbacks: as of
    ``simulate``.

    A private method's epsilon takes nothing from the draw of cohorts, since who is there is not for the server to draw.

    Raises FedraxError for impossible settings, and where clients do not fit together; NonFiniteError, whose ``result``
    holds the rounds before, when a number of the server's or of all clients' answers stops being finite.
    """
    check_lists(sinks=sinks, callbacks=callbacks)
    if resume and directory is None:
        raise FedraxError("there is no directory to resume a run from")
    settings = _settings(settings, options, seed)
    use_all_cores()
    nodes = ClientRegistry(grid, timeout)
    nodes.gather(clients, wait)
    with arithmetic(settings.dtype):
        path = None if directory is None else Path(directory)
        run = _prepare(nodes, algorithm, task, settings, params, seed, test, path)
        return replace(run, sinks=sinks, callbacks=callbacks, resume=resume).finish()


def _settings(settings: Settings | None, options: FederationOptions, seed: int | None) -> Settings:
    """The settings, their seed the given one or a secret; FedraxError for one that only simulations have."""
    settings = changed_settings(settings, options)
    for one in fields(Settings):
        if one.name not in _OURS and getattr(settings, one.name) != one.default:
            hint = ": give it to federate itself" if one.name == "seed" else ""
            raise FedraxError(f"{one.name} is a setting of simulations, not of a federation{hint}")
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    return replace(settings, seed=drawn, amplification="none")


def _prepare(
    nodes: ClientRegistry,
    algorithm: Algorithm,
    task: Task,
    settings: Settings,
    params: Tree | None,
    seed: int | None,
    test: Any,
    directory: Path | None,
) -> RoundDriver:
    """Check everything as ``simulate`` does, and lay out what the rounds need."""
    samples = shapes_of_samples(nodes.samples)
    valid = validate(algorithm, task, settings, nodes.sizes, samples, _one_sample(samples), params)
    sampler, start, statistics = valid.sampler, valid.params, valid.statistics
    program = Program(task, Layout.of(nodes.sizes), nodes.num_clients, chunk=0, code=CodeFingerprint(algorithm, task))
    program = program._replace(expected=float(sampler.largest))
    traced = trace_round(
        program, algorithm, start, statistics, valid.initial, samples, placeholder_assignment(), valid.broken
    )
    phases = message_schemas(program, algorithm, start, statistics, samples)
    ledger = _ledger(algorithm, settings, sampler, seed)
    wanted = needs_initial_parameters(algorithm, start, statistics)
    start, statistics = valid.draw_start()
    traffic = DeliveryState()
    traffic.begin((start, statistics) if wanted else ())
    server = run_cached(lambda params: algorithm.init(params, nodes.num_clients), start)
    checked_init(algorithm, start, server)
    require_finite_start(algorithm, server)
    here = None if test is None else evaluate_on_server(task, test, samples)
    return RoundDriver(
        nodes=nodes,
        algorithm=algorithm,
        task=task,
        settings=settings,
        sampler=sampler,
        arithmetic=ServerComputation(program, phases),
        traffic=traffic,
        key=seeded(seed, RUN) if seed is not None else _secret_key(),
        server=server,
        statistics=statistics,
        evaluate=here or evaluate_on_clients(task, nodes, traffic, settings.per_client),
        ledger=ledger,
        known_by={"method": of_method(algorithm), "number of clients": str(nodes.num_clients), "task": task.name},
        info=RunInfo(
            algorithm=type(algorithm).__name__,
            plan=f"Flower, {nodes.num_clients} clients",
            rounds=settings.rounds,
            first_round=0,
            cohort_size=sampler.largest,
            num_clients=nodes.num_clients,
            bytes_down=traced.bytes_down,
            bytes_up=traced.bytes_up,
            parameters=sum(x.size for x in jax.tree.leaves(start)),
            directory=directory,
        ),
    )


def _one_sample(samples: Batch) -> Federation:
    """A federation of one sample like those of the clients, of which the server has none."""
    x, y = (np.zeros(a.shape, a.dtype) for a in samples)
    return Federation.from_arrays(x, y, [0], num_classes=1)


def _ledger(algorithm: Algorithm, settings: Settings, sampler: CohortSampler, seed: int | None) -> Ledger | None:
    """Of a private method whose promises hold here; else nothing."""
    if any(release.apart > 1 for release in algorithm.releases()):
        raise FedraxError(
            "noise in bands is for clients that take part so many rounds apart, which is not for the server to promise"
            " where clients come and go: set bands to 1"
        )
    ledger = ledger_of(algorithm, settings, sampler)
    if ledger is not None and seed is not None:
        warn("the noise of a private method is drawn from the seed, which whoever knows it can do, too: leave seed out")
    return ledger


def _secret_key() -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(os.urandom(8), np.uint32)))
