"""Settings of a simulation, scripts, and the sampler of cohorts that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import numpy as np

from fedrax.config.hyperparameters import Bound, Fraction, NonNegativeInt, Positive, PositiveInt
from fedrax.errors import FedraxError, known_fields_only, warn
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.participation.policies import UNIFORM, Participation
from fedrax.participation.policy import Population
from fedrax.privacy.accounting import Amplification
from fedrax.xla import OperandFormat

EVALUATIONS = 20
"""Evaluations of a run by default, without that of the first round: enough for a curve, and for most models and test
sets a small part of the time of training."""
Seed = Annotated[int, Bound(ge=0, lt=2**32)]


@known_fields_only
@dataclass(frozen=True)
class Settings:
    """The settings of a run: everything that is neither the algorithm, the task nor the data.

    They are the ``[run]`` table of an experiment file.

    Example:
        >>> fedrax.Settings(rounds=50, cohort_size=20, participation=fedrax.participation.Poisson()).rounds
        50
    """

    rounds: NonNegativeInt = 100
    """R, communication rounds. 0 evaluates the initial parameters only."""
    cohort_size: PositiveInt = 10
    """S, the number of clients that are sampled in a round: the most under an availability trace, the expectation under
    Poisson sampling. By default 10, or all clients if there are fewer."""
    seed: Seed = 0
    """Seed of the starting parameters, cohorts, stragglers and mini-batches, which are the same for every algorithm,
    and of the noise of private methods, which everybody who knows the seed can subtract."""
    weights: Literal["uniform", "samples"] = "uniform"
    """Aggregation weights p_i: equal, or proportional to the clients' numbers of samples."""
    participation: Participation = UNIFORM
    """How the cohort of a round is sampled."""
    stragglers: Fraction = 0.0
    """The share of each cohort that are stragglers. A straggler does a fraction of its local work, drawn uniformly from
    (0, 1], in whole steps or epochs, rounded up."""
    eval_every: PositiveInt | None = None
    """Rounds between evaluations; the last round is always evaluated. By default a twentieth of ``rounds``, rounded up,
    and the first round is evaluated, too. A resumed run may have another interval, from there on."""
    eval_first: bool = False
    """Whether to evaluate the initial parameters, too, as an event of round 0."""
    eval_train: bool = False
    """Whether to evaluate on all training data, too: ``train_loss`` in events is then the loss on these, and the mean
    loss along the local steps of a round is called ``local_loss``."""
    per_client: bool = False
    """Whether to report the distribution of metrics over clients, too: the worst client with its number of samples,
    percentiles, mean and standard deviation."""
    finetune: PositiveInt | None = None
    """If set, also report metrics of the global model after each client has fine-tuned it for so many epochs of its
    local steps, at the learning rate of the first round."""
    target: Annotated[float, Bound(gt=0, le=1)] | None = None
    """Stop once the test accuracy reaches this."""
    epsilon_budget: Positive | None = None
    """For private methods: stop before the round whose epsilon, at ``delta``, would exceed this."""
    delta: Annotated[float, Bound(gt=0, lt=1)] = 1e-5
    """The delta of the (epsilon, delta) guarantee of private methods; it should be less than one over the number of
    protected clients or samples."""
    amplification: Amplification = "auto"
    """Privacy amplification by cohort sampling: "auto" uses what is proven for the run's participation policy, "none"
    nothing. "poisson" and "fixed" raise if the policy samples otherwise."""
    plan: Literal["auto", "scan", "vmap", "loop", "debug"] = "auto"
    """How a round is executed: one client after another in a compiled loop (scan), side by side (vmap), one compiled
    call a client (loop), or without compilation and with checks (debug). The numbers agree up to rounding."""
    samples: Literal["auto", "resident", "streamed"] = "auto"
    """Where training samples are stored: on the devices, or on the host, from where those of each block of rounds are
    copied. By default on the devices unless they would take more than half of the free memory."""
    states: Literal["auto", "resident", "spilled"] = "auto"
    """Where client states are stored: on the devices, or in temporary files on disk. By default on the devices unless
    they would take more than half of the memory that the samples leave free."""
    devices: PositiveInt | None = None
    """Number of devices over which the clients of a round are distributed; all by default."""
    chunk: PositiveInt | None = None
    """Number of clients in one vmap (plan vmap); by default as many as fit into memory."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of parameters and arithmetic. Parameters that the model has in a shorter type are cast to it."""
    precision: OperandFormat = "highest"
    """Format of the operands of matrix products and convolutions in local gradients: float32, or a shorter one that
    accelerators multiply faster; in bfloat16 also that of their results, except gradients of weights. Sums, parameters,
    the server and evaluation stay in ``dtype``. On CPU numbers are rounded in the same way, without a gain in speed."""
    checkpoint_every: PositiveInt | None = None
    """Number of rounds between checkpoints; by default one about every 30 seconds and one at the end."""

    @staticmethod
    def _remedy(value: object) -> str:
        """How to give settings that ``value`` stands for."""
        return "pass single settings by name, or fedrax.Settings(...)"

    def check(self) -> None:
        """Raise FedraxError for a short format with float64; warn if ``chunk`` is ignored."""
        if self.chunk is not None and self.plan not in ("auto", "vmap"):
            warn(f"chunk is ignored under plan {self.plan}: it belongs to plan vmap")
        if self.dtype == "float64" and self.precision != "highest":
            raise FedraxError(f"precision {self.precision} rounds float32 numbers: set dtype to float32")

    @property
    def evaluation_interval(self) -> int:
        """Rounds between evaluations: ``eval_every``, or its default."""
        return self.eval_every or max(-(-self.rounds // EVALUATIONS), 1)

    def evaluates(self, round: int) -> bool:
        """Tell whether a round ends with an evaluation.

        Args:
            round: its number, from 1.

        Returns:
            True for the last round and every ``evaluation_interval``-th one, and by default for the first.
        """
        first = round == 1 and self.eval_every is None
        return first or round % self.evaluation_interval == 0 or round == self.rounds

    def rounds_to_evaluation(self, done: int) -> int:
        """Return the number of rounds until the next evaluation, which may be beyond the last round.

        Args:
            done: rounds already done.

        Returns:
            The number, at least 1.
        """
        first = done == 0 and self.eval_every is None
        return 1 if first else self.evaluation_interval - done % self.evaluation_interval


class FederationOptions(TypedDict, total=False):
    """The fields of :class:`Settings` that also apply to a deployed federation, as keyword arguments."""

    rounds: NonNegativeInt
    cohort_size: PositiveInt
    weights: Literal["uniform", "samples"]
    participation: Participation
    eval_every: PositiveInt | None
    eval_first: bool
    per_client: bool
    target: Annotated[float, Bound(gt=0, le=1)] | None
    epsilon_budget: Positive | None
    delta: Annotated[float, Bound(gt=0, lt=1)]
    dtype: Literal["float32", "float64"]


class SettingsOptions(FederationOptions, total=False):
    """The fields of :class:`Settings` as keyword arguments, for ``**options: Unpack[SettingsOptions]``."""

    seed: Seed
    stragglers: Fraction
    eval_train: bool
    finetune: PositiveInt | None
    amplification: Amplification
    plan: Literal["auto", "scan", "vmap", "loop", "debug"]
    samples: Literal["auto", "resident", "streamed"]
    states: Literal["auto", "resident", "spilled"]
    devices: PositiveInt | None
    chunk: PositiveInt | None
    precision: OperandFormat
    checkpoint_every: PositiveInt | None


@dataclass(frozen=True, eq=False)
class Script:
    """Given cohorts and local work in place of random draws, to compare a run exactly with another implementation.

    All are integers that count from 0. R is the number of rounds, S the largest cohort, T the largest number of local
    steps and B the rows of a mini-batch. What is given for local steps applies to every pass of local steps of a client
    in a round, e.g. also to those of Ditto's personal models. Starting parameters are an argument of ``simulate``;
    ``trajectory=True`` returns the parameters after every round.

    Example:
        >>> fedrax.simulation.Script(cohorts=[[0, 2], [1, 3]]).cohorts
        [[0, 2], [1, 3]]
    """

    cohorts: Sequence[Sequence[int] | np.ndarray] | np.ndarray | None = None
    """The cohort of each round."""
    steps: np.ndarray | None = None
    """[R, S]: the number of local steps T_i of each client."""
    blocks: np.ndarray | None = None
    """[R, S, T]: the block of each local step (methods with M fixed blocks)."""
    batches: np.ndarray | None = None
    """[R, S, T, B]: the rows of each local step's mini-batch among the client's rows. Negative entries are ignored, for
    batches of different sizes; batch norm, which uses whole batches, sees the client's first row in their place."""
    delay: np.ndarray | None = None
    """[R, S]: the staleness of each upload in rounds, for methods that support it (FedBuff)."""
    fresh: np.ndarray | None = None
    """[R, S, B]: the rows of the extra mini-batch beside those of the local steps (for EPISODE's G_i); [R, S], its
    block, if ``local.blocks`` is set."""


def cohort_sampler(settings: Settings, sizes: np.ndarray, script: Script | None = None) -> CohortSampler:
    """The sampler of a run's cohorts and stragglers.

    Args:
        settings: of the run; the default cohort size is cut to the number of clients.
        sizes: number of training samples of each client, int [N].
        script: its cohorts, if it has some, replace those of the participation policy.

    Returns:
        The sampler; raises FedraxError for a cohort size, a policy or cohorts that do not fit the clients.
    """
    size = settings.cohort_size
    if size == Settings.cohort_size:
        size = min(size, len(sizes))
    population = Population(sizes, size, max(settings.rounds, 1), settings.seed, settings.weights)
    given = None if script is None or not settings.rounds else script.cohorts
    return CohortSampler(settings.participation, population, settings.stragglers, given)
