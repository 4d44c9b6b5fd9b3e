"""What is looked at before any run's first round: the method, what it needs, and where it starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.config.hyperparameters import check
from fedrax.config.user_errors import noted
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.checks import check_method
from fedrax.contract.initialization import start_of
from fedrax.contract.task import Task, Variables
from fedrax.errors import FedraxError
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.simulation.round import Kept
from fedrax.simulation.settings import Settings
from fedrax.tree import Tree


def check_run(algorithm: Algorithm, settings: Settings, sizes: np.ndarray) -> None:
    """Refuse what no run can be made of. sizes: of the clients [N]."""
    check(algorithm)
    check(settings, "run")
    check_method(algorithm)
    if algorithm.local_steps is not None:
        algorithm.local_steps.check_sizes(sizes)


def check_needs(algorithm: Algorithm, settings: Settings, sampler: CohortSampler, task: Task, statistics: Tree) -> None:
    """Refuse a run and a task that the method cannot take, by the name of the one that cannot: wrappers pass on what
    the method inside needs.
    """

    def unmet(method: Algorithm, name: str) -> FedraxError | None:
        try:
            method.traits.check_run(name, settings.weights, sampler.largest, sampler.varying)
            method.traits.check_task(name, task, statistics)
        except FedraxError as error:
            return error
        return None

    name = type(algorithm).__name__
    error = unmet(algorithm, name)
    if error is None:
        return
    inner = getattr(algorithm, "inner", None)
    while inner is not None and str(unmet(inner, name)) == str(error):
        name, inner, algorithm = type(inner).__name__, getattr(inner, "inner", None), inner
        error = unmet(algorithm, name) or error
    raise error


def start_and_statistics(
    task: Task, key: Array, given: Tree | None, dtype: str
) -> tuple[Callable[[], tuple[Tree, Tree]], Tree, Tree, str]:
    """(what waits for starting parameters and statistics, their shapes, words on types that are not kept)."""
    start = start_of(task, key, given)
    parted = partial(_parted, dtype=dtype)
    params, statistics = jax.eval_shape(parted, start.shapes)
    halves = sorted({str(x.dtype) for x in jax.tree.leaves(start.shapes) if x.dtype in (jnp.bfloat16, jnp.float16)})
    widened = f", parameters of {' and '.join(halves)} held as {dtype}" if halves else ""
    return lambda: parted(start.values()), params, statistics, widened


def at_first(algorithm: Algorithm, params: Tree, statistics: Tree) -> tuple[Kept, list[FedraxError]]:
    """(the shapes of what clients keep at first, nothing where that fails; what the failure was)."""
    broken: list[FedraxError] = []
    initial = Kept((), ())
    with noted(algorithm, broken):
        initial = jax.eval_shape(partial(Kept.at_first, algorithm), params, statistics)
    return initial, broken


def _parted(found: Tree, dtype: str) -> tuple[Tree, Tree]:
    """Parameters and statistics; floating numbers in the run's type."""

    def cast(x: Any) -> Array:
        x = jnp.asarray(x)
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    params, statistics = found if isinstance(found, Variables) else (found, ())
    if hasattr(statistics, "dtype"):
        raise FedraxError("running statistics are arrays by name: give Variables a dictionary of them, not an array")
    if not tree.num_bytes(params):
        raise FedraxError("the model has no parameters: there is nothing to train")
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params), jax.tree.map(cast, statistics)
