"""Flower server: a ServerApp that runs an algorithm's rounds over real clients."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Required, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrax.config.arguments import checked_arguments
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.checks import checked_init, require_finite_start
from fedrax.contract.client_data import Layout
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.devices import use_all_cores
from fedrax.errors import FedraxError, warn
from fedrax.flower.driver import RoundDriver
from fedrax.flower.evaluation import evaluate_on_both, evaluate_on_clients, evaluate_on_server
from fedrax.flower.executor import DeliveryState, ServerComputation
from fedrax.flower.loss_requests import LossRequests
from fedrax.flower.registry import ClientRegistry
from fedrax.flower.schema import message_schemas, needs_initial_parameters, placeholder_assignment, shapes_of_samples
from fedrax.participation.asynchronous import Asynchronous
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.privacy.ledger import Ledger
from fedrax.prng.keys import RUN, purpose_key
from fedrax.simulation.persistence.run_identity import of_frozen, of_method, of_participation
from fedrax.simulation.privacy_ledger import ledger_of
from fedrax.simulation.process import numeric_context
from fedrax.simulation.results.events import RunInfo, Sink
from fedrax.simulation.results.result import Result
from fedrax.simulation.round import RoundProgram
from fedrax.simulation.run import Callback
from fedrax.simulation.settings import FederationOptions, Settings
from fedrax.simulation.traffic import trace_round
from fedrax.simulation.validate import ValidatedRun, changed_settings, validate, warn_of_single_samples
from fedrax.tree import Tree
from fedrax.xla import CodeFingerprint, run_cached

_FEDERATION_SETTINGS = tuple(FederationOptions.__annotations__)
"""Names of the settings that apply to a federation; the others are for simulations."""
_KINDS = {
    "directory": ((str,), "a path"),
    "resume": ((bool,), "true or false"),
    "seed": ((int,), 'a whole number or "none"'),
    "wait": ((int, float), "seconds"),
    "timeout": ((int, float), "seconds"),
}
_IN_RUN_CONFIG = (*_FEDERATION_SETTINGS, *_KINDS)
"""Names of the arguments that a run config may replace; settings are checked where they are used."""


class FederateArguments(FederationOptions, total=False):
    """Keyword arguments of :func:`federate`."""

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


@checked_arguments
def server_app(
    algorithm: Algorithm,
    task: Task,
    settings: Settings | None = None,
    *,
    then: Callable[[Result], Any] | None = None,
    **arguments: Unpack[FederateArguments],
) -> ServerApp:
    """Make a Flower ServerApp that calls :func:`federate`; its clients run :func:`fedrax.flower.client_app`.

    The run config of the app, ``[tool.flwr.app.config]`` in its pyproject.toml or ``flwr run --run-config``, replaces
    arguments of the same name: the settings of the run, and ``directory``, ``resume``, ``seed``, ``wait`` and
    ``timeout``. The text "none" stands for None.

    Args:
        algorithm: the algorithm; the clients must be given the same.
        task: loss and metrics; the clients must be given the same.
        settings: settings of the run.
        then: function that is called with the result after the last round.
        **arguments: keyword arguments of :func:`federate`.

    Returns:
        The app, for ``flwr run`` or a SuperLink.

    Example:
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 3))
        >>> app = fedrax.flower.server_app(fedrax.FedAvg(), task, clients=2, rounds=5, cohort_size=2, then=print)
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        result = federate(grid, algorithm, task, settings, **(arguments | _in_run_config(context.run_config)))
        if then is not None:
            then(result)

    return app


def _in_run_config(config: Mapping[str, Any]) -> Any:
    """The arguments of :func:`federate` that a run config replaces; the app may have other keys of its own."""
    found = {name: None if config[name] == "none" else config[name] for name in _IN_RUN_CONFIG if name in config}
    for name, (kinds, words) in _KINDS.items():
        if (value := found.get(name)) is not None and type(value) not in kinds:
            raise FedraxError(f"{name} in the run config must be {words}, not {value!r:.80}")
    return found


@checked_arguments
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
    """Run an algorithm over the clients of a Flower federation, as :func:`fedrax.simulate` does on one machine.

    A client whose reply is late or malformed is treated as if it had not been sampled. A round without usable replies
    leaves the model unchanged, as does a round with too few clients for a method that needs a fixed cohort size. The
    epsilon of a private method uses no amplification by sampling, since the server does not control which clients are
    available.

    Cohorts of the default participation are drawn among the available clients. Other policies sample from all clients
    as in a simulation, and a sampled client that is not available is left out. Adaptive policies receive the reports of
    the replies; ``asynchronous`` raises.

    Frozen parameters (`fedrax.models.freeze`, `fedrax.models.lora`, `fedrax.models.from_torch`) are not sent: each
    client loads its own. A client whose frozen parameters have another digest than the server's is rejected, with a
    warning that names both.

    Args:
        grid: Flower's connection to the clients.
        algorithm: the algorithm; the clients must be given the same.
        task: loss and metrics; the clients must be given the same.
        settings: settings of the run; those of simulations only are rejected.
        clients: number of clients N; rounds begin when N clients are connected.
        test: test samples (x, y) of the server; by default the clients evaluate on theirs. Personal models and, with
            ``per_client``, statistics over clients are evaluated on the clients' in any case.
        params: starting parameters, by default those of ``task.init``.
        seed: draw starting parameters, cohorts and the server's noise as ``simulate`` does with this seed. By default
            they are drawn from a secret: noise that others can reproduce protects nothing.
        directory: where to write events, checkpoints and the latest model (``model.safetensors``).
        resume: continue from the checkpoint in ``directory``, if there is one; clients need a directory too.
        wait: seconds to wait for N clients at the start; a :class:`LocalGrid` has all of them and is not waited for.
        timeout: seconds to wait for replies, and for available clients where a round has too few.
        sinks: receivers of events, as in ``simulate``.
        callbacks: functions called after evaluations, as in ``simulate``.
        **options: settings by name: rounds, cohort size, weights, participation, evaluation, target, privacy budget,
            delta, dtype.

    Returns:
        The result, as of ``simulate``.

    Raises:
        FedraxError: for impossible settings and for clients whose samples have different shapes or dtypes.
        NonFiniteError: where the server's state or all replies are not finite; its ``result`` has the rounds before.

    Example:
        >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        >>> data = fedrax.Federation.from_arrays(x, y, client_ids=[0, 0, 1, 1], test=(x, y), num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> grid = fedrax.flower.LocalGrid(fedrax.flower.client_app(fedrax.FedAvg(), task, data), 2)
        >>> result = fedrax.flower.federate(
        ...     grid, fedrax.FedAvg(), task, clients=2, rounds=1, cohort_size=2, test=(x, y)
        ... )
        >>> result.events[-1]["clients"]
        2
    """
    if resume and directory is None:
        raise FedraxError("resume needs a directory: give the directory of the run to continue")
    settings = federation_settings(settings, options, seed)
    use_all_cores()
    registry = ClientRegistry(grid, timeout, of_frozen(task.frozen))
    registry.wait_for_clients(clients, wait)
    with numeric_context(settings.dtype):
        path = None if directory is None else Path(directory)
        driver = _prepare(registry, algorithm, task, settings, params, seed, test, path)
        return replace(driver, sinks=sinks, callbacks=callbacks, resume=resume).run()


def federation_settings(settings: Settings | None, options: FederationOptions, seed: int | None) -> Settings:
    """The run's settings with the given or a secret seed; raises FedraxError for settings of simulations only."""
    settings = changed_settings(settings, options)
    for one in fields(Settings):
        if one.name not in _FEDERATION_SETTINGS and getattr(settings, one.name) != one.default:
            hint = "use federate's argument seed" if one.name == "seed" else "leave it out"
            raise FedraxError(f"{one.name} is a setting of simulations, not of a federation: {hint}")
    if isinstance(settings.participation, Asynchronous):
        raise FedraxError(
            "participation asynchronous computes from a trace when uploads arrive, and clients of a federation reply"
            " when they do: choose another participation"
        )
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    return replace(settings, seed=drawn, amplification="none")


def _prepare(
    registry: ClientRegistry,
    algorithm: Algorithm,
    task: Task,
    settings: Settings,
    params: Tree | None,
    seed: int | None,
    test: Any,
    directory: Path | None,
) -> RoundDriver:
    """Check all arguments as ``simulate`` does, and make the round driver."""
    samples = shapes_of_samples(registry.samples)
    valid = validate(algorithm, task, settings, registry.sizes, samples, _placeholder_data(samples), params)
    sampler, start, statistics = valid.sampler, valid.params, valid.statistics
    program = RoundProgram(
        task,
        Layout.of(registry.sizes),
        registry.num_clients,
        chunk=0,
        client_info=sampler.adaptive,
        code=CodeFingerprint(algorithm, task),
    )
    program = program._replace(expected_cohort_size=float(sampler.expected or sampler.largest))
    traced = trace_round(
        program, algorithm, start, statistics, valid.initial, samples, placeholder_assignment(), valid.broken
    )
    phases = message_schemas(program, algorithm, start, statistics, samples)
    ledger = _ledger(algorithm, settings, sampler, seed)
    send_start = needs_initial_parameters(algorithm, start, statistics)
    start, statistics = valid.draw_start()
    warn_of_single_samples(algorithm, task, start, statistics, samples, registry.sizes)
    delivery = DeliveryState()
    delivery.set_start((start, statistics) if send_start else ())
    server = run_cached(lambda params: algorithm.init(params, registry.num_clients), start)
    checked_init(algorithm, start, server)
    require_finite_start(algorithm, server)
    on_server = None if test is None else evaluate_on_server(task, test, samples)
    if on_server is not None and (settings.per_client or _has_personal_models(algorithm, valid)):
        on_server = evaluate_on_both(on_server, task, registry, delivery, settings.per_client)
    return RoundDriver(
        registry=registry,
        algorithm=algorithm,
        task=task,
        settings=settings,
        sampler=sampler,
        computation=ServerComputation(program, phases),
        delivery=delivery,
        key=purpose_key(seed, RUN) if seed is not None else _secret_key(),
        server=server,
        statistics=statistics,
        evaluate=on_server or evaluate_on_clients(task, registry, delivery, settings.per_client),
        ledger=ledger,
        identity={
            **of_method(algorithm),
            **of_participation(settings.participation),
            "number of clients": str(registry.num_clients),
            "task": task.name,
            "frozen parameters": registry.frozen,
        },
        described={name: getattr(settings, name) for name in _FEDERATION_SETTINGS} | {"seed": seed},
        ask=LossRequests(task, registry, delivery, settings.dtype) if sampler.asks else None,
        info=RunInfo.of(
            algorithm,
            sampler,
            traced,
            start,
            f"Flower, {registry.num_clients} clients",
            rounds=settings.rounds,
            directory=directory,
            runtime="federation",
        ),
    )


def _has_personal_models(algorithm: Algorithm, valid: ValidatedRun) -> bool:
    """Whether the method's clients have models of their own."""
    return jax.eval_shape(algorithm.personal, valid.params, valid.initial.state) is not None


def _placeholder_data(samples: Batch) -> Federation:
    """A federation of one zero sample with the shapes of the clients' samples, which the server does not have."""
    x, y = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), samples)
    return Federation.from_arrays(x, y, [0], num_classes=1)


def _ledger(algorithm: Algorithm, settings: Settings, sampler: CohortSampler, seed: int | None) -> Ledger | None:
    """The privacy ledger of a private method, None for others; raises FedraxError where its guarantee cannot hold."""
    if any(release.apart > 1 for release in algorithm.releases()):
        raise FedraxError(
            "banded noise needs a minimum number of rounds between participations of a client, which a server cannot"
            " guarantee if clients may be unavailable: set bands to 1"
        )
    ledger = ledger_of(algorithm, settings, sampler)
    if ledger is not None and seed is not None:
        warn("the noise of a private method can be reproduced by anyone who knows the seed: leave seed out")

    return ledger


def _secret_key() -> jax.Array:
    """A random key from the operating system's entropy."""
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(os.urandom(8), np.uint32)))
