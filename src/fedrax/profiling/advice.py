"""What bounds a round, which operations are its heaviest, and what helps: all rules are here.

Every millisecond of a round is of one kind:

- ``products``: operations with matrix products or convolutions in them;
- ``exchange``: operations in which devices meet, without the waiting; ``waiting``: for the slowest device in them;
- ``small``: other operations whose executions take less than half a microsecond in the mean on a CPU, five on an
  accelerator, or that touch less than a kilobyte: much of that is starting them;
- ``gather``: longer ones, of any size, that read batches or compute their random order;
- ``memory``: all other operations: they pass over arrays, with little arithmetic for each number;
- ``evaluation``: the share of a round in the evaluations; ``host``: drawing cohorts, calling, making events;
- ``rounds``: calls of rounds that cannot be looked into.

The kind with the most time is the bound, except that compilation is if it takes longer than all rounds of the run.
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
"""Products that run at this share of the machine's limit or more are called bound by arithmetic."""
_LEAST, _AT_MOST = 0.02, 10
"""Share of a round from which on an operation is listed; and how many are."""
_ADVISED = 0.1
"""Share of a round from which on a kind of time gets advice, besides the one that bounds it."""
_SHORT, _NARROW = 20.0, 16
"""Microseconds of a product, and length of a side of it, below which it cannot reach the limit."""


@dataclass(frozen=True)
class Bottleneck:
    """The conclusion."""

    bound: str
    """``compile`` or one of the kinds."""
    sentence: str
    advice: str | None
    """What would help; None where nothing is sure to."""


@dataclass(frozen=True)
class HeavyOperation:
    """Operations of one layer that do the same, or of several whose names differ by numbers."""

    what: str
    layer: str
    """The path of modules and named scopes, else the part of the round; ``*`` stands for several numbers."""
    direction: str
    """``forward``, ``backward``, or empty outside of gradients."""
    shapes: str
    """Operands of a product, else the largest array read and the result; of the one that takes most time."""
    ms: float
    share: float
    """Of the whole round."""
    executions: float
    """A round on each device."""
    achieved: float
    """GFLOP/s of products and convolutions, GB/s touched by others; all devices together."""
    unit: str
    of_limit: float
    """Caches let passes over arrays exceed that of memory."""
    advice: str | None


def heaviest(
    setup: Setup, spent: Iterable[OperationTime], total: float, machine: MachineLimits
) -> list[HeavyOperation]:
    """The operations of at least 2 % of the round's ``total`` milliseconds, ten at most.

    Those of one layer are taken together; where they are too light, or more than ten, those of layers whose names
    differ by numbers.
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
    groups: dict[tuple, list[OperationTime]] = defaultdict(list)
    for s in spent:
        groups[s.part, s.about.what, name(s.about.layer), s.about.direction, s.about.looped].append(s)
    return list(groups.values())


def _without_numbers(layer: str) -> str:
    return re.sub(r"\d+", "*", layer)


def _row(setup: Setup, group: list[OperationTime], total: float, machine: MachineLimits) -> HeavyOperation:
    most, ms = max(group, key=lambda s: s.ms), sum(s.ms for s in group)
    about, executions = most.about, sum(s.executions for s in group)
    layer = about.layer if len({s.about.layer for s in group}) == 1 else _without_numbers(about.layer)
    flops, size = sum(s.flops for s in group), sum(s.bytes for s in group)
    unit, work, limit = ("GFLOP/s", flops, machine.gflops) if flops else ("GB/s", size, machine.gigabytes)
    achieved, each = work / ms / 1e6, 1e3 * ms / executions
    advice = _of_operation(setup, most, layer, each, achieved / limit)
    where = (about.what, layer or most.part, about.direction, about.shapes)
    return HeavyOperation(*where, ms, ms / total, executions, achieved, unit, achieved / limit, advice)


def judge(setup: Setup, kinds: Mapping[str, float], *, products_of_limit: float, compile_seconds: float) -> Bottleneck:
    """kinds: milliseconds a round."""
    total, bound = sum(kinds.values()), max(kinds, key=lambda kind: kinds[kind])
    sentence = SENTENCES[bound].format(share=f"{kinds[bound] / total:.0%} of the time", limit=products_of_limit)
    if bound == "products" and products_of_limit >= NEAR_LIMIT:
        sentence += " Arithmetic bounds the round."
    advised = [kind for kind, ms in kinds.items() if kind == bound or ms >= _ADVISED * total]
    advice = [text for kind in advised if (text := _of_kind(setup, kind))]
    seconds, rounds = total * setup.settings.rounds / 1e3, setup.settings.rounds
    if compile_seconds > seconds:
        longer = f"Compiling takes {compile_seconds:.1f} s, longer than the run's {rounds} rounds ({seconds:.1f} s)."
        bound, sentence = "compile", f"{longer} {sentence}"
        advice.insert(0, "A second run with the same shapes finds the program in the cache and starts at once.")
    return Bottleneck(bound, sentence, " ".join(dict.fromkeys(advice)) or None)


# --- Rules ------------------------------------------------------------------------------------------------

SENTENCES = {
    "products": "Matrix products take {share}; they run at {limit:.0%} of the machine's limit.",
    "small": "Starting small operations bounds the round: those below 0.5 µs (5 µs on accelerators) or 1 kB"
    " take {share}.",
    "memory": "Passing over arrays bounds the round: operations with little arithmetic for each number take {share}.",
    "gather": "Gathering batches bounds the round: it takes {share}.",
    "exchange": "Joining the devices' sums bounds the round: it takes {share}.",
    "waiting": "Devices wait for the slowest: {share}.",
    "evaluation": "Evaluation bounds the run: it takes {share}.",
    "host": "The host bounds the round: drawing cohorts, calling and making events take {share}.",
    "rounds": "The calls of rounds take {share}; what bounds them is not known under this plan.",
}
_OF_WHAT = {
    "depthwise convolution": "Each channel alone is little arithmetic for each number read; an earlier stride makes the"
    " arrays smaller.",
    "pooling": "Pooling looks at every entry of every window; a stride of the convolution does without.",
    "sort": "Sorting compares number with number; where the largest few are enough, jax.lax.top_k takes much less.",
    "scatter": "The gradient of an embedding is as large as its table, whatever the batch.",
}
_FAR = "Far slower than memory: number by number, as some windows, transpositions and exponentials are."
_FAR_BELOW = 0.25
_NO_PASSES = ("Fourier transform", "call of a library")
"""Whose arithmetic the bytes say nothing about."""
_NORM = re.compile(r"norm|(?:^|/)[bgl]n(?:[_\d/]|$)", re.IGNORECASE)
_NORM_ADVICE = (
    "A norm passes over its activations several times, whatever the batch; fewer norms, or an earlier stride, help."
)


def _of_operation(setup: Setup, most: OperationTime, layer: str, each: float, of_limit: float) -> str | None:
    """The first rule that holds. each: microseconds of an execution."""
    about, batch = most.about, _batch(setup)
    product = about.what in ("product", "convolution")
    if product and of_limit >= NEAR_LIMIT:
        return "Near the machine's limit: only less arithmetic takes less time."
    if about.looped and each < _SHORT:
        return "The steps of a sequence follow one another and each does little: a larger batch, or fewer steps, help."
    if product and each < _SHORT:
        return batch and f"{each:.1f} µs are too short to reach the limit. {batch}"
    if product:
        narrow = "Fewer than 16 channels, units or samples of a batch side by side are too few to reach the limit."
        return narrow if about.side < _NARROW else None
    if about.what in _OF_WHAT:
        return _OF_WHAT[about.what]
    if _NORM.search(layer):
        return _NORM_ADVICE
    if most.kind == "gather":
        return _of_kind(setup, "gather")
    if most.kind == "small" or most.part == NAMES[None]:
        return batch
    slow = about.direction and about.what not in _NO_PASSES and of_limit < _FAR_BELOW and each > _SHORT
    return _FAR if slow else None


def _of_kind(setup: Setup, kind: str) -> str | None:
    """What helps against a kind of time, whichever its operations are."""
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
        return "More clients a round, or more local steps, make the exchange rarer."
    if kind == "waiting" and setup.info.cohort_size % devices:
        return f"A cohort size that {devices} divides gives all devices as many clients."
    if kind == "waiting" and not layout.equal:
        return "Clients are of unequal size; with more of them a round (run.cohort_size) the devices' work evens out."
    if kind in ("evaluation", "host") and settings.eval_every < settings.rounds:
        return "Evaluate more rarely (run.eval_every): rounds between two evaluations run in one call."
    if kind == "rounds" and setup.plan != "scan":
        return "The plan scan compiles all rounds into one program (run.plan)."
    return None


def _are_slices(setup: Setup, local: LocalSGD) -> bool:
    """Whether batches in stored order would be read as slices: all of them whole, and of samples that are large.

    And whether a round would come to all of a client's samples: it begins with the same.
    """
    if local.batch_size == "full" or local.blocks is not None:
        return False
    layout = setup.engine.program.layout
    whole = layout.divisor % min(local.batch_size, layout.largest) == 0 and is_wide(setup.samples)
    return whole and (local.steps is None or local.steps * local.batch_size >= layout.largest)


def _batch(setup: Setup) -> str | None:
    """A larger batch does more for each operation and each pass over the parameters, where there are batches."""
    local = setup.algorithm.local_steps
    if not isinstance(local, LocalSGD) or local.batch_size == "full" or local.blocks is not None:
        return None
    if local.batch_size >= setup.engine.program.layout.largest:
        return None
    return f"A larger batch ({_local(setup)}.batch_size) does more work with each operation."


def _local(setup: Setup) -> str:
    """The key of the local steps in the experiment's file: those of wrappers are their inner method's."""
    key, algorithm = "algorithm", setup.algorithm
    while not hasattr(algorithm, "local") and isinstance(getattr(algorithm, "inner", None), Algorithm):
        key, algorithm = f"{key}.inner", algorithm.inner  # type: ignore[attr-defined]
    return f"{key}.local"
