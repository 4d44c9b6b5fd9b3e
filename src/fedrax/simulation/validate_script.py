"""What a script gives of the clients' work, checked against the run."""

from __future__ import annotations

import numpy as np

from fedrax.contract.local_training import LocalSGD
from fedrax.errors import FedraxError
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.simulation.settings import Script

GIVEN = ("steps", "blocks", "batches", "delay", "fresh")
"""The fields of a Script, and of a Place, that hold something for each client of each round: [R, S, ...]."""


def given_work(script: Script | None, sampler: CohortSampler, local: LocalSGD | None) -> dict[str, np.ndarray]:
    """What a script gives of the clients' work, by name; FedraxError where it does not fit the run."""
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
            continue  # has a sentence of its own
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
        raise FedraxError("what local steps work on is given, but not how many there are: give Script(steps=...)")
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
