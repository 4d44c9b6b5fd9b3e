"""Validation data: a share of each client's training rows, held out to choose by."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedrax.data.dataset import generator, split_test
from fedrax.data.federation import Federation, aligned, taken
from fedrax.errors import FedraxError


def hold_out(federation: Federation, share: float, seed: int = 0) -> Federation:
    """The federation with ``share`` of each client's training rows, rounded down, in place of the test data.

    Which rows they are is decided by ``seed`` (a random stream of its own). Raises FedraxError unless 0 < share < 1,
    and where no client has enough rows to lose one.
    """
    if not 0 < share < 1:
        raise FedraxError(f"the share of validation data must lie between 0 and 1, not be {share}.")
    clients = federation.num_clients
    owner = np.repeat(np.arange(clients), federation.sizes)
    kept, held = split_test(owner, share, generator(seed, "validation split"))
    if not len(held):
        raise FedraxError(
            f"the largest client of {federation.name!r} has {federation.sizes.max()} training rows, too few to hold"
            f" out {share:g} of them for validation: raise the share."
        )

    def offsets(rows: np.ndarray) -> np.ndarray:
        return aligned(np.concatenate([[0], np.cumsum(np.bincount(owner[rows], minlength=clients))]).astype(np.int64))

    return dataclasses.replace(
        federation,
        train=taken(federation.train, kept),
        offsets=offsets(kept),
        test=taken(federation.train, held),
        test_offsets=offsets(held),
    )
