"""Participation policies: how the cohort of a round is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedrax.config.hyperparameters import PositiveInt


@dataclass(frozen=True)
class Uniform:
    """Draw the cohort uniformly without replacement."""


@dataclass(frozen=True)
class WeightedBySamples:
    """Draw the cohort without replacement with chances in proportion to the clients' sample counts."""


@dataclass(frozen=True)
class Poisson:
    """Each client takes part with chance S / N, independently of all others and of all other rounds.

    S, ``cohort_size``, is then the number of clients in the mean, and a round may have none. It is the sampling that
    the tightest amplification of privacy is proven for.
    """


@dataclass(frozen=True)
class Availability:
    """Draw the cohort uniformly from the clients that a trace says are available in the round.

    The trace is a CSV file with columns ``round`` (from 0) and ``client``; it repeats after its last round.
    """

    trace: Path
    """The CSV file."""


@dataclass(frozen=True)
class Turns:
    """All clients in turn: once shuffled, then S in each round, from the first ones again after the last.

    A client's rounds are as far apart as they can be. The last cohort of a turn is smaller where S does not divide N.
    """


@dataclass(frozen=True)
class FixedList:
    """Draw the cohort uniformly from a list of clients; all of them take part where it is no longer than the cohort."""

    clients: tuple[int, ...]
    """The clients, by number."""


@dataclass(frozen=True)
class Asynchronous:
    """Clients work at their own pace, for methods whose uploads may arrive late (FedBuff).

    ``concurrency`` clients are at work at any time: who finishes is replaced at once by one drawn uniformly. A round is
    a step of the server, on the next ``cohort_size`` uploads to arrive. The trace is a CSV file with columns ``client``
    and ``seconds``, how long a client takes from its start to its upload's arrival; of several lines of a client the
    first is its first time, and they repeat. Events have the simulated ``clock``.
    """

    trace: Path
    """The CSV file."""
    concurrency: PositiveInt = 20
    """M, clients at work at any time."""


Participation = Uniform | WeightedBySamples | Poisson | Availability | FixedList | Turns | Asynchronous
UNIFORM = Uniform()
