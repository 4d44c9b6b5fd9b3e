"""Execution plan of a run: how clients are executed, on which devices, and the description of both."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from fedrax.errors import FedraxError
from fedrax.simulation.placement.memory_budget import MemoryBudget
from fedrax.simulation.settings import Settings
from fedrax.xla import (
    CLIENT_AXIS,
    batch_splits,
    equations_in,
    has_blockwise_attention,
    is_enabled,
    scanned_layers,
)


def resolve_plan(settings: Settings, mesh: Mesh) -> str:
    """The plan of the settings; by default scan on CPU and vmap on accelerators.

    It is not chosen by timing: plans differ in rounding, and results must not depend on the load of the machine.
    """
    if settings.plan != "auto":
        return settings.plan
    return "scan" if mesh.devices.flat[0].platform == "cpu" else "vmap"


def clients_per_vmap(settings: Settings, devices: int, cohort: int, budget: MemoryBudget, size: int) -> int:
    """Number of clients in one vmap (plan vmap), each of which needs ``size`` bytes while it trains.

    A device's part of the cohort is split evenly into as few chunks as fit into memory.
    """
    share = -(-cohort // devices)
    if settings.chunk is not None:
        return min(settings.chunk, share)
    chunks = -(-share // budget.clients_that_fit(size))
    return -(-share // chunks)


def describe_plan(
    mesh: Any,
    plan: str,
    chunk: int,
    program: core.ClosedJaxpr,
    streamed: bool = False,
    spilled: bool = False,
    joining: bool = False,
) -> str:
    """Describe the plan, e.g. 'scan: one client after another on each of 2 CPU cores, samples streamed'.

    program: the traced round. joining: whether devices share the batches of some clients.
    """
    microbatch = max((cut.rows for cut in batch_splits(program)), default=0)
    layers = " or ".join(map(str, sorted(set(scanned_layers(program)))))  # a round may take several gradients
    blocks = has_blockwise_attention(program)
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
        microbatch, layers, blocks = 0, "", False
    extra = ", clients left over on all of them together" * joining
    if chunk > 1 and devices[0].platform != "cpu" and _convolves(program):
        by_kernel = devices[0].platform == "gpu" and is_enabled("implicit_gemm")
        extra += f", their convolutions {'by implicit_gemm where it takes them' if by_kernel else 'as products'}"
    if chunk > 1 and devices[0].platform == "gpu" and is_enabled("first_step"):
        extra += ", their first local step as one batch"
    extra += f", gradients of {microbatch} samples at a time, which fit its cache" if microbatch else ""
    extra += f", {layers} layers of one shape in a loop" if layers else ""
    extra += ", attention in blocks of rows" * blocks
    extra += ", samples streamed" * streamed + ", client states on disk" * spilled
    return f"{plan}: {how} on {where}{extra}"


def _convolves(program: core.ClosedJaxpr) -> bool:
    return any(equation.primitive.name == "conv_general_dilated" for equation in equations_in(program))


def make_mesh(devices: int | None) -> Mesh:
    """A mesh of the first ``devices`` devices (all of them by default) along the clients axis."""
    found = jax.devices()
    if devices is not None and devices > len(found):
        raise FedraxError(f"{devices} devices are asked for, but JAX has {len(found)} ({found[0].platform})")
    if jax.process_count() > 1 and len({d.process_index for d in found[:devices]}) < jax.process_count():
        raise FedraxError("a run over several processes needs devices of all of them: leave devices and plan out")
    return Mesh(np.array(found[:devices]), (CLIENT_AXIS,))
