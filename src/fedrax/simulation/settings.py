"""How a simulation is run: everything that is neither the algorithm, the task nor the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import numpy as np

from fedrax.config.hyperparameters import Bound, Fraction, Positive, PositiveInt
from fedrax.errors import FedraxError, known_fields_only, warn
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.participation.policies import UNIFORM, Participation
from fedrax.participation.policy import Population
from fedrax.privacy.accounting import Amplification
from fedrax.xla import OperandFormat

Seed = Annotated[int, Bound(ge=0, lt=2**32)]


@known_fields_only
@dataclass(frozen=True)
class Settings:
    """Settings of `fedrax.simulate`; the ``[run]`` table of an experiment file."""

    rounds: PositiveInt = 100
    """R, communication rounds."""
    cohort_size: PositiveInt = 10
    """S, clients a round (at most, under an availability trace; in the mean, where each joins by chance); 10, or all
    clients where there are fewer."""
    seed: Seed = 0
    """Decides starting parameters, cohorts, stragglers and batches; the same for every algorithm."""
    weights: Literal["uniform", "samples"] = "uniform"
    """Aggregation weights p_i: equal, or in proportion to the clients' sample counts."""
    participation: Participation = UNIFORM
    """Who takes part."""
    stragglers: Fraction = 0.0
    """Share of each cohort that does only part of its local work: each a share drawn uniformly from (0, 1], in whole
    steps or epochs, rounded up."""
    eval_every: PositiveInt = 10
    """Rounds between evaluations; the last round is always evaluated."""
    eval_train: bool = False
    """Also evaluate on all clients' training data: ``train_loss`` in events is then of these, and the loss along a
    round's local steps is called ``local_loss``."""
    per_client: bool = False
    """Also report metrics per client: the worst, with its number of samples, percentiles, mean and standard deviation
    over clients."""
    finetune: PositiveInt | None = None
    """Also report metrics of each client's own copy of the global model after so many epochs of its local steps, at the
    step size of the first round."""
    target: Annotated[float, Bound(gt=0, le=1)] | None = None
    """Stop once the test accuracy reaches this."""
    epsilon_budget: Positive | None = None
    """Of a private method, stop before the round that would cost more than this epsilon, at ``delta``."""
    delta: Annotated[float, Bound(gt=0, lt=1)] = 1e-5
    """At which the epsilon of a private method is stated; less than one over the number of clients, or samples."""
    amplification: Amplification = "auto"
    """What a private method's epsilon takes from the draw of its cohorts: what is proven for how the run draws them, or
    nothing. The kinds "poisson" and "fixed" are refused where the run draws its cohorts otherwise."""
    plan: Literal["auto", "scan", "vmap", "loop", "debug"] = "auto"
    """How a round is executed; the numbers are the same."""
    samples: Literal["auto", "resident", "streamed"] = "auto"
    """Where training samples lie: all on the devices, or on the host, from where each block of rounds gets its own.
    By default on the devices unless they would take more than half of the memory left there."""
    states: Literal["auto", "resident", "spilled"] = "auto"
    """Where client states lie: on the devices, or in scratch files on disk. By default on the devices unless they
    would take more than half of the memory that samples leave there."""
    devices: PositiveInt | None = None
    """Devices to spread the clients over; all by default."""
    chunk: PositiveInt | None = None
    """Clients side by side in one vmap (plan vmap); chosen from the memory at hand by default."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters and arithmetic. A model's parameters of a shorter type are held in it, too, as the run's
    first line says."""
    precision: OperandFormat = "highest"
    """Operands of the matrix products and convolutions of local gradients: float32, or a shorter format that an
    accelerator multiplies faster. Sums, parameters, the server and evaluation stay in ``dtype``. On CPU operands are
    rounded in the same way, at no gain in speed."""
    checkpoint_every: PositiveInt | None = None
    """Rounds between checkpoints; by default about every 30 seconds and at the end."""

    def check(self) -> None:
        """Refuse a short format for products of long numbers; warn of a chunk where there are none."""
        if self.chunk is not None and self.plan not in ("auto", "vmap"):
            warn(f"chunk is plan vmap's, and counts for nothing under plan {self.plan}")
        if self.dtype == "float64" and self.precision != "highest":
            raise FedraxError(f"precision {self.precision} rounds float32 numbers: set dtype to float32")


class FederationOptions(TypedDict, total=False):
    """The fields of :class:`Settings` that also apply to a deployed federation, as keyword arguments."""

    rounds: PositiveInt
    cohort_size: PositiveInt
    weights: Literal["uniform", "samples"]
    eval_every: PositiveInt
    per_client: bool
    target: Annotated[float, Bound(gt=0, le=1)] | None
    epsilon_budget: Positive | None
    delta: Annotated[float, Bound(gt=0, lt=1)]
    dtype: Literal["float32", "float64"]


class SettingsOptions(FederationOptions, total=False):
    """The fields of :class:`Settings` as keyword arguments, for ``**options: Unpack[SettingsOptions]``."""

    seed: Seed
    participation: Participation
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
    """Given sequences in place of random draws, to compare a run number by number with another implementation.

    R rounds, S the largest cohort, T the most local steps, B rows of a batch; all whole numbers from 0. What is given
    of local steps holds for all that a client takes in a round, such as those of Ditto's own models, too. Starting
    parameters are an argument of ``simulate``, and ``trajectory=True`` returns the parameters after every round.
    """

    cohorts: Sequence[Sequence[int] | np.ndarray] | np.ndarray | None = None
    """The clients of each round, in order."""
    steps: np.ndarray | None = None
    """[R, S]: T_i of each client of the cohort."""
    blocks: np.ndarray | None = None
    """[R, S, T]: the block of each local step (methods with M fixed blocks)."""
    batches: np.ndarray | None = None
    """[R, S, T, B]: the rows of each local step's batch, counted from the client's first; negative ones do not
    count, for batches of unlike size; what looks at whole batches, as batch norm does, sees the first row there."""
    delay: np.ndarray | None = None
    """[R, S]: how many rounds after its own a client's upload arrives (methods that allow it: FedBuff)."""
    fresh: np.ndarray | None = None
    """[R, S, B]: the rows of the batch besides those of the steps (EPISODE's for G_i); [R, S], its block, where
    ``local.blocks`` are used."""


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
    population = Population(sizes, size, settings.rounds, settings.seed)
    given = None if script is None else script.cohorts
    return CohortSampler(settings.participation, population, settings.stragglers, given)
