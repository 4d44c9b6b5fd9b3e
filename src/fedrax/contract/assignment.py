"""The assignment of a client to a round: identity, location of its data and state, and given local work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedrax.tree import Tree


@dataclass(frozen=True)
class Layout:
    """Static bounds on the clients' sizes, known at compile time."""

    largest: int
    smallest: int
    divisor: int
    """Divides every client's size."""

    @classmethod
    def of(cls, sizes: np.ndarray) -> Layout:
        """The layout of a federation whose clients have these sizes."""
        return cls(int(sizes.max()), int(sizes.min()), int(np.gcd.reduce(sizes)))

    @property
    def equal(self) -> bool:
        """All clients have the same number of samples."""
        return self.largest == self.smallest


class ClientAssignment(NamedTuple):
    """The assignment of one client to a round: its identity, the location of its data and state, and scripted work.

    Scalars here; a simulation stacks them over rounds, devices and clients. Fields of a script are None where the
    script does not set them.
    """

    client: Any
    """int32; the client's number."""
    slot: Any
    """int32; the row of its state in its device's store."""
    offset: Any
    """int32; its first sample."""
    size: Any
    """int32; n_i, its samples."""
    weight: Any
    """p_i."""
    work: Any = None
    """The share of the local work that a straggler does, in (0, 1]."""
    steps: Any = None
    """int32; T_i, local steps."""
    blocks: Any = None
    """int32 [T]; the block of each local step."""
    batches: Any = None
    """int32 [T, B]; the rows of each local step's batch, counted from the client's first; negative: none."""
    delay: Any = None
    """int32; how many rounds after this one its upload arrives."""
    data_parallel: Any = None
    """bool; whether all devices of the run work on it together."""
    fresh: Any = None
    """int32 [B], or [] where blocks are used: the rows, or the block, of the batch besides those of the steps."""


class TrainState:
    """Mutable state of local training besides the parameters, shared by all copies of one client's data."""

    def __init__(self, statistics: Tree = (), optimizer: Tree = ()):
        """statistics: a model's running statistics. optimizer: the state of a local optimizer that outlives rounds."""
        self.statistics, self.optimizer = statistics, optimizer
        self.params: Tree | None = None
        """Where the last local steps ended, None before there were any: for wrappers."""
