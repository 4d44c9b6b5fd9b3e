"""The heaviest operations of a round, and the rules of the advice.

Every millisecond of a round has a kind:

- ``products``: operations that contain matrix products or convolutions;
- ``exchange``: collective operations between devices, without waiting; ``waiting``: for the slowest device in them;
- ``small``: other operations whose mean execution takes less than half a microsecond on a CPU, five on an accelerator,
  or that read and write less than a kilobyte: much of that time is launch overhead;
- ``gather``: longer ones that read mini-batches or compute their random order;
- ``memory``: all others: passes over arrays with little arithmetic per element;
- ``evaluation``: the share of a round in the evaluations; ``host``: sampling cohorts, dispatch, events;
- ``rounds``: calls of whole rounds under plans that are not one compiled program.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.client_data import is_wide
from fedrax.contract.local_training import LocalSGD
from fedrax.profiling.attribution import NAMES, OperationTime
from fedrax.profiling.machine_limits import MachineLimits
from fedrax.simulation.setup import Setup

NEAR_LIMIT = 0.5
"""Share of the machine's limit above which a product is called bound by arithmetic."""
_LEAST, _AT_MOST = 0.02, 10
"""Smallest share of a round of a listed operation, and the largest number of them."""
_ADVISED = 0.1
"""Share of a round above which a kind of time gets advice."""
_SHORT, _NARROW = 20.0, 16
"""Microseconds of a product, and length of a side of it, below which it cannot reach the machine's limit."""


@dataclass(frozen=True)
class HeavyOperation:
    """The time of one kind of operation in one layer, or in layers whose names differ only by numbers.

    Example:
        >>> where = {"what": "product", "layer": "dense", "direction": "forward", "shapes": "10×20 · 20×5"}
        >>> time = {"ms": 1.5, "share": 0.3, "executions": 50.0, "advice": None}
        >>> rate = {"achieved": 20.0, "unit": "GFLOP/s", "of_limit": 0.2}
        >>> fedrax.profiling.HeavyOperation(**where, **time, **rate).share
        0.3
    """

    what: str
    """Kind of operation: product, convolution, reduction, ..."""
    layer: str
    """Path of modules and named scopes, otherwise the part of the round; ``*`` stands for several numbers."""
    direction: str
    """``forward``, ``backward``, or empty outside of gradients."""
    shapes: str
    """Operands of a product, otherwise the largest input and the result; of the heaviest of them."""
    ms: float
    """Milliseconds in a round."""
    share: float
    """Share of the round."""
    executions: float
    """Executions in a round on each device."""
    achieved: float
    """GFLOP/s of products and convolutions, GB/s of memory traffic of others; all devices together."""
    unit: str
    """GFLOP/s or GB/s."""
    of_limit: float
    """``achieved`` relative to the machine's limit; above 1 for arrays that stay in caches."""
    advice: str | None
    """What to do, None where nothing is sure to help."""


def heaviest(
    setup: Setup, spent: Iterable[OperationTime], total: float, machine: MachineLimits
) -> list[HeavyOperation]:
    """The operations with at least 2 % of the round's ``total`` milliseconds, at most ten, the heaviest first.

    Operations of one layer are summed; where they are too light, or more than ten, those of layers whose names differ
    only by numbers.
    """
    known = [s for s in spent if s.about.what and s.kind != "exchange"]
    exact, heavy = _grouped(known, str), lambda group: sum(s.ms for s in group) >= _LEAST * total
    light = [s for group in exact if not heavy(group) for s in group]
    groups = list(filter(heavy, [*filter(heavy, exact), *_grouped(light, _without_numbers)]))
    if len(groups) > _AT_MOST:
        groups = list(filter(heavy, _grouped(known, _without_numbers)))
    rows = [_row(setup, group, total, machine) for group in groups]
    return sorted(rows, key=lambda row: -row.ms)[:_AT_MOST]


def _grouped(spent: Iterable[OperationTime], name: Callable[[str], str]) -> list[list[OperationTime]]:
    """Group times of one part, kind of operation, direction and ``name`` of the layer."""
    groups: dict[tuple, list[OperationTime]] = defaultdict(list)
    for s in spent:
        groups[s.part, s.about.what, name(s.about.layer), s.about.direction, s.about.looped].append(s)
    return list(groups.values())


def _without_numbers(layer: str) -> str:
    """The name of a layer with ``*`` for numbers."""
    return re.sub(r"\d+", "*", layer)


def _row(setup: Setup, group: list[OperationTime], total: float, machine: MachineLimits) -> HeavyOperation:
    """The summed times of a group."""
    most, ms = max(group, key=lambda s: s.ms), sum(s.ms for s in group)
    about, executions = most.about, sum(s.executions for s in group)
    layer = about.layer if len({s.about.layer for s in group}) == 1 else _without_numbers(about.layer)
    flops, size = sum(s.flops for s in group), sum(s.bytes for s in group)
    unit, work, limit = ("GFLOP/s", flops, machine.gflops) if flops else ("GB/s", size, machine.gigabytes)
    achieved, each = work / ms / 1e6, 1e3 * ms / executions
    advice = _of_operation(setup, most, layer, each, achieved / limit)
    where = (about.what, layer or most.part, about.direction, about.shapes)
    return HeavyOperation(*where, ms, ms / total, executions, achieved, unit, achieved / limit, advice)


def advise(setup: Setup, kinds: Mapping[str, float], compile_seconds: float) -> list[str]:
    """What would shorten a round, for the kind with the most time and every kind above a tenth of the round.

    Args:
        setup: The run.
        kinds: Milliseconds of each kind in a round.
        compile_seconds: Seconds of compilation.

    Returns:
        Sentences, the most important first; empty where nothing is sure to help.
    """
    total, most = sum(kinds.values()), max(kinds, key=lambda kind: kinds[kind])
    heavy = [kind for kind, ms in kinds.items() if kind == most or ms >= _ADVISED * total]
    advice = [text for kind in heavy if (text := _of_kind(setup, kind))]
    if compile_seconds > total * setup.settings.rounds / 1e3:
        advice.insert(
            0,
            f"Compiling takes {compile_seconds:.1f} s, longer than all rounds of the run. A second run with the same"
            " shapes finds the program in the compilation cache.",
        )
    return list(dict.fromkeys(advice))


# --- Rules ------------------------------------------------------------------------------------------------

_OPERATION_ADVICE = {
    "depthwise convolution": "Depthwise convolutions have little arithmetic for each number read; an earlier stride"
    " makes the arrays smaller.",
    "pooling": "Pooling reads every entry of every window; a strided convolution does not.",
    "sort": "Sorting is slow; if the largest few entries are enough, jax.lax.top_k takes much less time.",
    "scatter": "The gradient of an embedding has the size of its table, whatever the batch size.",
}
_SCALAR_ADVICE = (
    "Far slower than memory bandwidth: it is computed one element at a time, as some windows and exponentials are."
)
_SCALAR_BELOW = 0.25
"""Share of the memory bandwidth below which an operation is called computed one element at a time."""
_NO_PASSES = ("Fourier transform", "library call")
"""Operations whose time does not depend on bytes alone."""
_NORM = re.compile(r"norm|(?:^|/)[bgl]n(?:[_\d/]|$)", re.IGNORECASE)
_NORM_ADVICE = (
    "A norm reads its activations several times, whatever the batch size; fewer norms, or an earlier stride, help."
)


def _of_operation(setup: Setup, most: OperationTime, layer: str, each: float, of_limit: float) -> str | None:
    """Advice by the first rule that matches. each: microseconds of an execution."""
    about, batch = most.about, _batch(setup)
    product = about.what in ("product", "convolution")
    if product and of_limit >= NEAR_LIMIT:
        return "Near the machine's limit: only less arithmetic takes less time."
    if about.looped and each < _SHORT:
        return "The steps of a sequence run one after another and each is small: use a larger batch or fewer steps."
    if product and each < _SHORT:
        return batch and f"{each:.1f} µs are too short to reach the limit. {batch}"
    if product:
        narrow = "Fewer than 16 channels, units or samples in a batch are too few to reach the machine's limit."
        return narrow if about.side < _NARROW else None
    if about.what in _OPERATION_ADVICE:
        return _OPERATION_ADVICE[about.what]
    if _NORM.search(layer):
        return _NORM_ADVICE
    if most.kind == "gather":
        return _of_kind(setup, "gather")
    if most.kind == "small" or most.part == NAMES[None]:
        return batch
    slow = about.direction and about.what not in _NO_PASSES and of_limit < _SCALAR_BELOW and each > _SHORT
    return _SCALAR_ADVICE if slow else None


def _of_kind(setup: Setup, kind: str) -> str | None:
    """Advice for a kind of time."""
    settings, local, layout = setup.settings, setup.algorithm.local_steps, setup.engine.program.layout
    devices = setup.engine.mesh.devices.size
    if kind == "small":
        return _batch(setup)
    if kind == "gather" and isinstance(local, LocalSGD) and local.order != "stored" and _are_slices(setup, local):
        return (
            f'Batches in stored order ({_local(setup)}.order = "stored") are read as slices; they are then not'
            " shuffled, and the same in every epoch."
        )
    if kind == "exchange":
        return "Exchange less often: use more clients in a round, or more local steps."
    if kind == "waiting" and setup.info.cohort_size % devices:
        return f"Use a cohort size that is a multiple of {devices}: all devices then have the same number of clients."
    if kind == "waiting" and not layout.equal:
        return "Clients have different sizes: with larger cohorts (run.cohort_size) the load of devices is more even."
    if kind in ("evaluation", "host") and settings.evaluation_interval < settings.rounds:
        return "Evaluate less often (run.eval_every): rounds between two evaluations run in one call."
    if kind == "rounds" and setup.plan != "scan":
        return "The plan scan compiles all rounds into one program (run.plan)."
    return None


def _are_slices(setup: Setup, local: LocalSGD) -> bool:
    """Whether mini-batches in stored order would be slices: whole batches of large samples.

    And whether a round would use all samples of a client, since stored order starts each round with the same ones.
    """
    if local.batch_size == "full" or local.blocks is not None:
        return False
    layout = setup.engine.program.layout
    whole = layout.divisor % min(local.batch_size, layout.largest) == 0 and is_wide(setup.samples)
    return whole and (local.steps is None or local.steps * local.batch_size >= layout.largest)


def _batch(setup: Setup) -> str | None:
    """Advice to use larger mini-batches, None for methods without mini-batches or with the largest possible ones."""
    local = setup.algorithm.local_steps
    if not isinstance(local, LocalSGD) or local.batch_size == "full" or local.blocks is not None:
        return None
    if local.batch_size >= setup.engine.program.layout.largest:
        return None
    return f"A larger mini-batch ({_local(setup)}.batch_size) does more work in each operation."


def _local(setup: Setup) -> str:
    """The key of the local steps in the experiment file; a wrapper's are those of its inner method."""
    key, algorithm = "algorithm", setup.algorithm
    while not hasattr(algorithm, "local") and isinstance(getattr(algorithm, "inner", None), Algorithm):
        key, algorithm = f"{key}.inner", algorithm.inner  # type: ignore[attr-defined]
    return f"{key}.local"
