"""Validation before the first round: arguments, settings, the method, the task, and scripts.

:func:`validate` is the one place where a run is checked; it works on shapes alone and computes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.config.hyperparameters import check
from fedrax.config.user_errors import collecting_errors
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.checks import check_method
from fedrax.contract.initialization import initial_parameters_in_background, shapes_of
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.model import with_statistics
from fedrax.contract.task import Task, Variables
from fedrax.contract.task_checks import check_task, constant_statistic
from fedrax.data import Federation
from fedrax.errors import FedraxError, unknown, warn, warnings_about
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.participation.policies import WeightedBySamples
from fedrax.prng.keys import INITIALIZATION, purpose_key
from fedrax.simulation.evaluation import warn_of_direction
from fedrax.simulation.round import ClientRecord
from fedrax.simulation.settings import Script, Settings, cohort_sampler
from fedrax.tree import Tree


class ValidatedRun(NamedTuple):
    """A validated combination of method, task, clients and settings; states are given by their shapes."""

    draw_start: Callable[[], tuple[Tree, Tree]]
    """Computes the initial parameters and running statistics."""
    params: Tree
    """The shapes of the starting parameters."""
    statistics: Tree
    """The shapes of the model's running statistics; an empty tuple where it has none."""
    cast_note: str
    """Note for the description of the run about parameters in a wider dtype than the model's; may be empty."""
    initial: ClientRecord
    """The shapes of a client's initial record."""
    broken: list[FedraxError]
    """Errors in the method's initial client state; tracing a round finds further errors."""
    sampler: CohortSampler
    """Draws the cohorts."""
    given: dict[str, np.ndarray]
    """Work of the clients of each round that a script defines, [R, S, ...] by name."""
    by_samples: bool
    """Whether clients with more samples have more work."""


def validate(
    algorithm: Algorithm,
    task: Task,
    settings: Settings,
    sizes: np.ndarray,
    samples: Any,
    federation: Federation,
    params: Tree | None = None,
    script: Script | None = None,
) -> ValidatedRun:
    """Check that a method, a task, clients and settings fit each other.

    Args:
        algorithm: the method.
        task: the task.
        settings: the settings of the run.
        sizes: number of training samples of each client, int [N].
        samples: the training samples, or their shapes.
        federation: the clients' data, for checks of labels; of a deployed federation one sample like theirs.
        params: starting parameters, in place of the task's.
        script: given cohorts and local work.

    Returns:
        What the checks have found out; raises FedraxError for what cannot be run.
    """
    check(algorithm)
    check(settings, "run")
    with warnings_about(type(algorithm).__name__):
        return _validated(algorithm, task, settings, sizes, samples, federation, params, script)


def _validated(
    algorithm: Algorithm,
    task: Task,
    settings: Settings,
    sizes: np.ndarray,
    samples: Any,
    federation: Federation,
    params: Tree | None,
    script: Script | None,
) -> ValidatedRun:
    """The checks of :func:`validate` after those of each object by itself."""
    check_method(algorithm)
    if algorithm.local_steps is not None:
        algorithm.local_steps.check_sizes(sizes)
    key = purpose_key(settings.seed, INITIALIZATION)
    draw_start, start, statistics, cast_note = initial_model(task, key, params, settings.dtype)
    variables = with_statistics(start, statistics)
    check_task(task, variables, samples, federation)
    initial, broken = initial_client_state(algorithm, start, statistics)
    sampler = cohort_sampler(settings, sizes, script)
    _warn_of_settings(settings, sampler, task)
    _check_traits(algorithm, settings, sampler, task, statistics)
    algorithm.traits.check_parts(task, variables, samples.x)
    given = scripted_work(script, sampler, algorithm.local_steps) | sampler.delays
    longest = int(given["delay"].max()) if "delay" in given else 0
    if sampler.arrivals is not None and algorithm.traits.max_staleness:
        longest = sampler.arrivals.longest_delay_in_run
    _check_delays(algorithm, longest)
    local = algorithm.local_steps
    by_samples = bool(sizes.min() != sizes.max()) and (local is None or local.steps is None)
    return ValidatedRun(draw_start, start, statistics, cast_note, initial, broken, sampler, given, by_samples)


def warn_of_single_samples(
    algorithm: Algorithm, task: Task, params: Tree, statistics: Tree, samples: Any, sizes: np.ndarray
) -> None:
    """Warn of batches of one sample, of which batch norm makes constants; it computes the statistics of such batches.

    Args:
        algorithm: the method.
        task: the task.
        params: the starting parameters.
        statistics: the model's running statistics; an empty tuple where it has none.
        samples: the training samples, or their shapes.
        sizes: number of training samples of each client, int [N].
    """
    local = algorithm.local_steps
    if not statistics or local is None or not isinstance(local.batch_size, int) or local.blocks is not None:
        return
    alone, largest = np.flatnonzero(sizes == 1), min(local.batch_size, int(sizes.max()))
    cause, remedy = "", "set it to 2 or more"
    if local.batch_size == 1:
        cause = "local.batch_size is 1"
    elif 1 < largest <= local.microbatches:
        cause, remedy = f"local.microbatches = {local.microbatches} cuts batches into single samples", "set it lower"
    elif len(alone):
        more = f", as {len(alone) - 1} more" if len(alone) > 1 else ""
        cause, remedy = f"client {alone[0]} has a single sample{more}", "leave such clients out"
    if not cause or (name := constant_statistic(task, with_statistics(params, statistics), samples)) is None:
        return
    with warnings_about(type(algorithm).__name__):
        warn(
            f"{cause}, so that batch norm has one value for each feature: its variance ({name}) is zero and its outputs"
            f" do not depend on the sample: {remedy}, or use group norm instead of batch norm"
        )


def check_target(settings: Settings, task: Task, federation: Federation) -> None:
    """Raise FedraxError for a target accuracy that the run cannot measure."""
    if settings.target is not None and not (len(federation.test[1]) and "accuracy" in task.metrics):
        raise FedraxError("a target is a test accuracy: it needs test data and a task with the metric accuracy")


def check_processes(stateful: bool, adaptive: bool, directory: Path | None) -> None:
    """Raise FedraxError for what a run over several processes cannot do."""
    if jax.process_count() == 1:
        return
    if directory is not None and stateful:
        raise FedraxError("a run over several processes stores no client states on disk: leave directory out")
    if adaptive:
        raise FedraxError("an adaptive participation policy needs a run of a single process")


def check_resume(directory: Path | None, trajectory: Any, record: Any) -> None:
    """Raise FedraxError for a resumed run without a directory, or with results that a checkpoint does not contain."""
    if directory is None:
        raise FedraxError("there is no directory to resume a run from")
    if trajectory or record is not None:
        what, option = ("parameters", "trajectory") if trajectory else ("messages", "record")
        raise FedraxError(f"a checkpoint does not contain the {what} of earlier rounds: leave {option} out")


def _warn_of_settings(settings: Settings, sampler: CohortSampler, task: Task) -> None:
    """Warn of settings that give numbers that are probably not meant."""
    sampled = isinstance(settings.participation, WeightedBySamples) and sampler.uses_sample_counts
    if sampled and settings.weights == "samples" and sampler.largest < sampler.num_clients:
        warn(
            "numbers of samples are counted twice: participation weighted_by_samples samples larger clients more often,"
            " and weights = 'samples' gives their updates larger weights; set one of them to 'uniform'"
        )
    known = sampler.varying and not sampler.adaptive and not sampler.independent and sampler.arrivals is None
    if empty := [r + 1 for r in range(sampler.rounds if known else 0) if not len(sampler.cohort(r))]:
        warn(
            f"{len(empty)} of {sampler.rounds} rounds have no client and change nothing; the first is round {empty[0]}"
        )
    for name in task.metrics if settings.per_client else ():
        warn_of_direction(task, name)  # it decides which client is the worst


def _check_traits(
    algorithm: Algorithm, settings: Settings, sampler: CohortSampler, task: Task, statistics: Tree
) -> None:
    """Raise FedraxError for a run or a task that the method does not support, naming the innermost method at fault."""

    def unmet(method: Algorithm, name: str) -> FedraxError | None:
        try:
            method.traits.check_run(name, settings.weights, sampler.largest, sampler.varying)
            method.traits.check_task(name, task, statistics)
        except FedraxError as error:
            return error
        return None

    name = type(algorithm).__name__
    if sampler.unbiased:
        _check_inverse_probabilities(algorithm, type(settings.participation).__name__, statistics)
    error = unmet(algorithm, name)
    if error is None:
        return
    inner = getattr(algorithm, "inner", None)
    while inner is not None and str(unmet(inner, name)) == str(error):
        name, inner, algorithm = type(inner).__name__, getattr(inner, "inner", None), inner
        error = unmet(algorithm, name) or error
    raise error


def _check_inverse_probabilities(algorithm: Algorithm, policy: str, statistics: Tree) -> None:
    """Raise FedraxError for methods and models that need weights which sum to one."""
    name, traits = type(algorithm).__name__, algorithm.traits
    if traits.uniform_weights:
        raise FedraxError(
            f"{policy} weights uploads by inverse probabilities, and {name} is defined for uniform aggregation weights"
            " only: choose another participation"
        )
    if traits.normalized_weights:
        raise FedraxError(
            f"{policy} weights uploads by inverse probabilities, whose sum varies, and {name} needs weights that sum to"
            " one: choose another participation"
        )
    if jax.tree.leaves(statistics) and not traits.personal_statistics:
        raise FedraxError(
            f"{policy} weights uploads by inverse probabilities, whose sum varies, and running statistics need a mean:"
            " use group norm instead of batch norm, or choose another participation"
        )


def _check_delays(algorithm: Algorithm, longest: int) -> None:
    """Raise FedraxError for uploads that arrive later than the method allows."""
    if longest <= algorithm.traits.max_staleness:
        return
    if not algorithm.traits.max_staleness:
        inner = getattr(algorithm, "inner", None)
        while inner is not None and not inner.traits.max_staleness:
            inner = getattr(inner, "inner", None)
        instead = "FedBuff" if inner is None else f"{type(inner).__name__} without it"
        raise FedraxError(
            f"{type(algorithm).__name__} waits for all uploads of a round, and here some arrive {longest} rounds later:"
            f" take {instead}, or another participation"
        )
    raise FedraxError(
        f"an upload arrives {longest} rounds late, but {type(algorithm).__name__} supports delays up to"
        f" {algorithm.traits.max_staleness}: set max_delay to {longest}"
    )


def initial_model(
    task: Task, key: Array, given: Tree | None, dtype: str
) -> tuple[Callable[[], tuple[Tree, Tree]], Tree, Tree, str]:
    """(function that computes the initial values, shapes of parameters and of statistics, note on changed dtypes)."""
    start = initial_parameters_in_background(task, key, given)
    parted = partial(_parted, dtype=dtype)
    params, statistics = jax.eval_shape(parted, start.shapes)
    halves = sorted({str(x.dtype) for x in jax.tree.leaves(start.shapes) if x.dtype in (jnp.bfloat16, jnp.float16)})
    widened = f", parameters of {' and '.join(halves)} held as {dtype}" if halves else ""
    return lambda: parted(start.values()), params, statistics, widened


def model_shapes(task: Task, dtype: str) -> tuple[Tree, Tree]:
    """The shapes of parameters and of running statistics, without the values that :func:`initial_model` computes."""
    return jax.eval_shape(partial(_parted, dtype=dtype), shapes_of(task))


def initial_client_state(
    algorithm: Algorithm, params: Tree, statistics: Tree
) -> tuple[ClientRecord, list[FedraxError]]:
    """(the shapes of clients' initial records, empty if computing them fails; the error)."""
    broken: list[FedraxError] = []
    initial = ClientRecord((), ())
    with collecting_errors(algorithm, broken):
        initial = jax.eval_shape(partial(ClientRecord.at_first, algorithm), params, statistics)
    return initial, broken


def _parted(found: Tree, dtype: str) -> tuple[Tree, Tree]:
    """Parameters and running statistics, cast to the type of the run."""

    def cast(x: Any) -> Array:
        x = jnp.asarray(x)
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    params, statistics = found if isinstance(found, Variables) else (found, ())
    if hasattr(statistics, "dtype"):
        raise FedraxError("running statistics are arrays by name: give Variables a dictionary of them, not an array")
    if not tree.num_bytes(params):
        raise FedraxError("the model has no parameters: there is nothing to train")
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params), jax.tree.map(cast, statistics)


# -- arguments --------------------------------------------------------------------------------------------------------


def changed_settings(settings: Settings | None, options: Mapping[str, object]) -> Settings:
    """``settings`` with single fields replaced; raises FedraxError with the nearest name for an unknown field."""
    known = [field.name for field in dataclasses.fields(Settings)]
    for name in options:
        if name not in known:
            raise unknown("setting", name, known)
    return dataclasses.replace(settings or Settings(), **options)


def trajectory_rounds(trajectory: bool | Collection[int], rounds: int) -> Collection[int]:
    """The rounds after which ``trajectory`` asks for the parameters."""
    if isinstance(trajectory, bool):
        return range(1, rounds + 1) if trajectory else ()
    if wrong := [r for r in trajectory if r not in range(1, rounds + 1)]:
        raise FedraxError(
            f"the trajectory of {rounds} rounds is that after rounds 1 to {rounds}, not after {wrong[0]!r}"
        )
    return frozenset(trajectory)


# -- scripts ----------------------------------------------------------------------------------------------------------


GIVEN = ("steps", "blocks", "batches", "delay", "fresh")
"""The fields of a Script that hold something for each client of each round: [R, S, ...]."""


def scripted_work(script: Script | None, sampler: CohortSampler, local: LocalSGD | None) -> dict[str, np.ndarray]:
    """The work of clients that a script gives, by name; raises FedraxError where it does not fit the run."""
    given = {name: getattr(script, name, None) for name in GIVEN}
    arrays = {name: np.asarray(value) for name, value in given.items() if value is not None}
    if not arrays:
        return {}
    if local is None:
        raise FedraxError(f"{next(iter(arrays))} are given, but the algorithm has no local steps")
    if "blocks" in arrays and local.blocks is None:
        raise FedraxError("blocks are given, but the algorithm has no local.blocks and local.steps")
    rounds, clients = sampler.rounds, sampler.largest
    for name, array in arrays.items():
        if name == "blocks" and array.dtype.kind in "iu":
            continue  # checked below
        enough = array.ndim >= 2 and array.shape[0] >= rounds and array.shape[1] >= clients
        if not enough or array.dtype.kind not in "iu":
            shape = f"[{rounds} rounds, {clients} clients, ...]"
            raise FedraxError(f"the given {name} must be whole numbers of shape {shape} or more, not {array.shape}")
    for name in arrays.keys() & {"steps", "delay"}:
        least = 1 if name == "steps" else 0
        if arrays[name].ndim != 2 or arrays[name].min() < least:
            raise FedraxError(
                f"the given {name} must be one whole number, {least} or more, for each client of each round"
            )
    if "blocks" in arrays:
        _check_blocks(arrays["blocks"], (rounds, clients, _most_steps(arrays, local)), local.blocks or 0)
    if "batches" in arrays:
        steps = _most_steps(arrays, local)
        _check_rows(arrays["batches"], 4, "batches", sampler, local)
        if arrays["batches"].shape[2] < steps:
            raise FedraxError(f"batches are given for {arrays['batches'].shape[2]} local steps of {steps}")
    if "fresh" in arrays:
        if local.blocks is None:
            _check_rows(arrays["fresh"], 3, "fresh", sampler, local)
        elif arrays["fresh"].ndim != 2 or arrays["fresh"].min() < 0 or arrays["fresh"].max() >= local.blocks:
            raise FedraxError(f"the given fresh blocks must be one of 0 to {local.blocks - 1} a client of each round")
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def _most_steps(arrays: dict[str, np.ndarray], local: LocalSGD) -> int:
    steps = int(arrays["steps"].max()) if "steps" in arrays else local.steps
    if steps is None:
        raise FedraxError("the script sets the data of local steps but not their number: set Script(steps=...)")
    return steps


def _check_blocks(blocks: np.ndarray, need: tuple[int, ...], most: int) -> None:
    if blocks.ndim != 3 or any(a < b for a, b in zip(blocks.shape, need, strict=True)):
        raise FedraxError(f"the given blocks must be whole numbers [rounds, clients, steps] of shape {need} or more")
    if blocks.min() < 0 or blocks.max() >= most:
        raise FedraxError(f"the given blocks must be from 0 to {most - 1}")


def _check_rows(rows: np.ndarray, axes: int, name: str, sampler: CohortSampler, local: LocalSGD) -> None:
    if local.blocks is not None or local.batch_size == "full":
        raise FedraxError(f"{name} are given, but the local steps take no batches: set local.batch_size to a number")
    if rows.ndim != axes:
        raise FedraxError(f"the given {name} must have {axes} axes, the last over a batch's rows, not {rows.ndim}")
    for r in range(sampler.rounds):
        cohort = sampler.cohort(r)
        inside = rows[r, : len(cohort)] < sampler.sizes[cohort].reshape(-1, *[1] * (axes - 2))
        if not inside.all():
            client = cohort[np.argmin(inside.reshape(len(cohort), -1).all(1))]
            raise FedraxError(f"the given {name} of round {r} name a row that client {client} does not have")
