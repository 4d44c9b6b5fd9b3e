"""Choosing how and where a round is executed, and saying what was chosen."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from fedrax import tree
from fedrax.compiled.blocks import has_blocks
from fedrax.compiled.layers import loops_in
from fedrax.compiled.pieces import AXIS, cuts_in
from fedrax.errors import FedraxError
from fedrax.simulation.account import Account
from fedrax.simulation.settings import Settings
from fedrax.tree import Tree


def choose_plan(settings: Settings, mesh: Any, params: Tree, cohort: int, account: Account) -> tuple[str, int]:
    """(plan, clients side by side): one after another on CPU cores, as many as have room side by side on accelerators.

    Never by timing: plans differ in rounding, and a run must not depend on how busy the machine was.
    """
    device = mesh.devices.flat[0]
    plan = settings.plan if settings.plan != "auto" else "scan" if device.platform == "cpu" else "vmap"
    if plan != "vmap":
        return plan, 0
    share = -(-cohort // mesh.devices.size)
    if settings.chunk is not None:
        return plan, min(settings.chunk, share)
    return plan, min(share, account.side_by_side(tree.num_bytes(params)))


def describe(
    mesh: Any,
    plan: str,
    chunk: int,
    program: core.ClosedJaxpr,
    streamed: bool = False,
    spilled: bool = False,
    joining: bool = False,
) -> str:
    """The plan in words: 'scan: one client after another on each of 2 CPU cores, samples streamed'.

    program: a round, traced. joining: whether devices ever work together.
    """
    piece = max((cut.rows for cut in cuts_in(program)), default=0)
    turns = " or ".join(map(str, sorted(set(loops_in(program)))))  # a round may take several gradients
    blocks = has_blocks(program)
    devices = list(mesh.devices.flat)
    kind = {"cpu": "CPU core", "gpu": "GPU", "tpu": "TPU"}.get(devices[0].platform, devices[0].platform)
    where = f"one {kind}" if len(devices) == 1 else f"each of {len(devices)} {kind}s"
    how = {
        "scan": "one client after another",
        "vmap": f"{chunk} clients side by side",
        "loop": "one compiled call a client",
        "debug": "step by step without compilation",
    }[plan]
    if plan == "debug":  # what was written, batches whole
        piece, turns, blocks = 0, "", False
    extra = ", clients left over on all of them together" * joining
    extra += f", gradients of {piece} samples at a time, which fit its cache" if piece else ""
    extra += f", {turns} layers of one shape in a loop" if turns else ""
    extra += ", attention in blocks of rows" * blocks
    extra += ", samples streamed" * streamed + ", client states on disk" * spilled
    return f"{plan}: {how} on {where}{extra}"


def make_mesh(devices: int | None) -> Mesh:
    """A mesh of the first ``devices`` devices (all of them by default) along the clients axis."""
    found = jax.devices()
    if devices is not None and devices > len(found):
        raise FedraxError(f"{devices} devices are asked for, but JAX has {len(found)} ({found[0].platform})")
    if jax.process_count() > 1 and len({d.process_index for d in found[:devices]}) < jax.process_count():
        raise FedraxError("a run over several processes takes devices of all of them: leave devices and plan out")
    return Mesh(np.array(found[:devices]), (AXIS,))
