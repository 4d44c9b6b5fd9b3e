"""Traits of a method: what it needs of a run, a task and a model, and what it declares about its states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from fedrax import tree, xla
from fedrax.contract.task_checks import MANY, shape_of_batch, traced
from fedrax.errors import FedraxError, known_fields_only, warn
from fedrax.inputs import describe_inputs, map_inputs


@known_fields_only
@dataclass(frozen=True)
class Traits:
    """What a method requires and declares, as one frozen record: the class attribute ``Algorithm.traits``.

    The defaults require nothing. ``a | b`` are the traits of a wrapper ``b`` around a method ``a``: what either
    requires is required.

    Example:
      >>> traits = fedrax.contract.Traits(uniform_weights=True) | fedrax.contract.Traits(features=True)
      >>> traits.uniform_weights, traits.features, traits.blocks
      (True, True, False)
    """

    uniform_weights: bool = False
    """The method is defined for uniform aggregation weights only."""
    normalized_weights: bool = False
    """The method needs aggregation weights that sum to one in each round, which inverse probabilities do not."""
    fixed_cohort: bool = False
    """The method converges to a wrong point when the cohort size varies between rounds."""
    largest_cohort: int | None = None
    """The largest supported cohort size; None: no limit."""
    features: bool = False
    """The task must provide penultimate features (``Task.features``)."""
    blocks: bool = False
    """The task must provide its network as a sequence of blocks (``Task.blocks``)."""
    per_sample_losses: bool = False
    """The task's loss must be one number for each sample, not one for each batch."""
    no_statistics: bool = False
    """Models with running statistics (batch norm) are not supported."""
    plain_sum: bool = False
    """The server must aggregate exactly what clients sent, because noise is calibrated to that sum: a wrapper outside
    must not decode uploads or inspect them one by one."""
    own_models: bool = False
    """Clients start from their own models and not from the broadcast message: no layer of one can stay at a client."""
    control_variates: tuple[str, ...] = ()
    """Fields of the server state and the client states that are control variates, which a wrapper may extrapolate:
    Upcycled-FL moves them with the model in its rounds without clients. Only such wrappers use these names."""
    personal_statistics: bool = False
    """Each client keeps its own running statistics (FedBN); otherwise their mean is part of the global model."""
    stacked_uploads: bool = False
    """The server sees the uploads one by one, in ``cohort.uploads``, beside their mean."""
    max_staleness: int = 0
    """How many rounds late an upload may arrive (``data.delay``); 0: the server waits for all uploads of a round. An
    upload that arrives after the last round may be later than that and must be ignored."""
    unsent_state: bool = False
    """What clients keep between rounds does not influence what they upload."""

    def __or__(self, other: Traits) -> Traits:
        limits = [size for size in (self.largest_cohort, other.largest_cohort) if size is not None]
        stacked = other.stacked_uploads  # by a wrapper, which expects all uploads of a round to be there
        combined = {name: getattr(self, name) or getattr(other, name) for name in self.__dataclass_fields__} | {
            "largest_cohort": min(limits, default=None),
            "control_variates": tuple(dict.fromkeys((*self.control_variates, *other.control_variates))),
            "max_staleness": 0 if stacked else max(self.max_staleness, other.max_staleness),
            "unsent_state": self.unsent_state and other.unsent_state,
        }
        return Traits(**combined)

    def check_run(self, name: str, weights: str, cohort_size: int, varying_cohort: bool) -> None:
        """Check that the method supports the aggregation weights and the participation of a run.

        Args:
            name: the name of the method, for messages.
            weights: the aggregation weights, as in the settings of a run.
            cohort_size: the largest number of clients in a round.
            varying_cohort: whether the cohort size varies between rounds.

        Raises:
            FedraxError: if the method does not support one of them.
        """
        if self.uniform_weights and weights != "uniform":
            raise FedraxError(f"{name} is defined for uniform aggregation weights only: set weights to 'uniform'")
        if self.fixed_cohort and varying_cohort:
            raise FedraxError(f"{name} converges to a wrong point when the cohort's size varies between rounds")
        if self.largest_cohort is not None and cohort_size > self.largest_cohort:
            raise FedraxError(
                f"{name} stores a vector for every client of the cohort: a memory of {self.largest_cohort} clients is"
                f" smaller than a cohort of {cohort_size}"
            )

    def check_task(self, name: str, task: Any, statistics: tree.Tree) -> None:
        """Check that a task provides what the method requires.

        Args:
            name: the name of the method, for messages.
            task: the task.
            statistics: the running statistics of the model, a pytree; empty where it has none.

        Raises:
            FedraxError: if the task lacks features or blocks, or has running statistics that are not supported.
        """
        if self.features and task.features is None:
            raise FedraxError(f"{name} needs a model with features: give Model(..., features=...)")
        if self.blocks and not getattr(task, "blocks", None):
            raise FedraxError(f"{name} needs a model made of blocks: give Model(..., blocks=...)")
        names = tree.leaf_names(statistics)
        if self.no_statistics and names:
            what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            raise FedraxError(
                f"{name} does not support running statistics, and the model has {what}: use group norm instead of batch"
                " norm, and plain arrays for constants"
            )

    def check_parts(self, task: Any, variables: tree.Tree, x: Any) -> None:
        """Check by tracing that the required features and blocks can be computed, and warn if they have no effect.

        Args:
            task: the task.
            variables: parameters or `Variables`, as the task's functions take them.
            x: inputs [n, ...]; only their shapes and dtypes are used.

        Raises:
            FedraxError: if features or blocks cannot be traced.
        """
        key = jax.random.key(0)
        some = map_inputs(lambda a: shape_of_batch(a, MANY), x)
        about = describe_inputs(some)
        if self.features:
            traced("features", about, task.features, variables, some, key)
            if not xla.dependent_leaves(task.features, variables, some):
                warn(
                    "the method compares features, but those of the model do not depend on its parameters: the"
                    " method has no effect"
                )
        if self.blocks:
            given = some
            for number, block in enumerate(task.blocks, 1):
                given = traced(f"block {number}", about, block, variables, given, key)
            if len(task.blocks) == 1:
                warn("the method combines blocks of networks, but the model has one block: the method has no effect")
