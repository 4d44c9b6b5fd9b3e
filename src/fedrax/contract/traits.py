"""What a method needs of a run, a task and a model: one value, which wrappers combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from fedrax import tree
from fedrax.contract.task_checks import MANY, traced
from fedrax.errors import FedraxError, known_fields_only, warn
from fedrax.xla.tracing import dependent


@known_fields_only
@dataclass(frozen=True)
class Requirements:
    """The defaults need nothing. ``a | b`` needs what either does."""

    uniform_weights: bool = False
    """Defined for uniform aggregation weights only."""
    fixed_cohort: bool = False
    """The fixed point is wrong when the cohort's size varies between rounds."""
    largest_cohort: int | None = None
    """The most clients a round may have; None where any number is right."""
    features: bool = False
    """The task must offer penultimate features."""
    blocks: bool = False
    """The task must offer its network as a list of blocks."""
    per_sample_losses: bool = False
    """The loss must be one number a sample, not one a batch."""
    no_statistics: bool = False
    """Running statistics would not go the way that the method prescribes for what leaves a client."""

    plain_sum: bool = False
    """What is summed on the server must be what clients sent, for noise is measured by it: no wrapper outside may
    decode uploads, or look at them one by one."""

    own_models: bool = False
    """Clients go on from models of their own, not from what they are sent: no part of one can stay at home."""

    def __or__(self, other: Requirements) -> Requirements:
        limits = [size for size in (self.largest_cohort, other.largest_cohort) if size is not None]
        either = {
            name: getattr(self, name) or getattr(other, name)
            for name in self.__dataclass_fields__
            if name != "largest_cohort"
        }
        return Requirements(**either, largest_cohort=min(limits, default=None))

    def check_run(self, name: str, weights: str, cohort_size: int, varying_cohort: bool) -> None:
        """Refuse aggregation weights or participation (``cohort_size`` clients at most) that ``name`` cannot take."""
        if self.uniform_weights and weights != "uniform":
            raise FedraxError(f"{name} is defined for uniform aggregation weights only: set weights to 'uniform'")
        if self.fixed_cohort and varying_cohort:
            raise FedraxError(f"{name} converges to a wrong point when the cohort's size varies between rounds")
        if self.largest_cohort is not None and cohort_size > self.largest_cohort:
            limit = f"a memory of {self.largest_cohort} clients is smaller than a cohort of {cohort_size}"
            raise FedraxError(f"{name} remembers every client of the cohort: {limit}")

    def check_task(self, name: str, task: Any, statistics: tree.Tree) -> None:
        """Refuse a task that lacks what ``name`` needs of it. statistics: the model's, empty where it has none."""
        if self.features and task.features is None:
            raise FedraxError(f"{name} needs a model with features: give Model(..., features=...)")
        if self.blocks and not getattr(task, "blocks", None):
            raise FedraxError(f"{name} needs a model made of blocks: give Model(..., blocks=...)")
        kept = tree.leaf_names(statistics)
        if self.no_statistics and kept:
            what = kept[0] if len(kept) == 1 else f"{kept[0]} and {len(kept) - 1} more"
            raise FedraxError(
                f"{name} takes no care of running statistics, and the model keeps {what}: use group norm instead of"
                " batch norm, and plain arrays for what never moves"
            )

    def check_parts(self, task: Any, variables: tree.Tree, x: Any) -> None:
        """Refuse features and blocks that cannot be computed, and warn of those that leave nothing to do.

        variables: what the task's functions take; x: samples [n, ...]. Nothing is computed.
        """
        kind, key = jax.dtypes.canonicalize_dtype(x.dtype), jax.random.key(0)
        some = jax.ShapeDtypeStruct((MANY, *x.shape[1:]), kind)
        about = f"x {some.dtype} {list(some.shape[1:])}"
        if self.features:
            traced("features", about, task.features, variables, some, key)
            if not dependent(task.features, variables, some):
                warn(
                    "the method compares features, and the model's are made of the samples alone, whatever its"
                    " parameters are: there is nothing to compare"
                )
        if self.blocks:
            given = some
            for number, block in enumerate(task.blocks, 1):
                given = traced(f"block {number}", about, block, variables, given, key)
            if len(task.blocks) == 1:
                warn("the method puts networks together, and the model has one block: there is nothing to put together")
