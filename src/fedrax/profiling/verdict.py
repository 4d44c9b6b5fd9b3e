"""What bounds a round, by these rules.

Every millisecond of a round is of one kind:

- ``products``: operations with matrix products or convolutions in them;
- ``exchange``: operations in which devices meet, without the waiting; ``waiting``: for the slowest device in them;
- ``small``: other operations whose executions take less than half a microsecond in the mean on a CPU, five on an
  accelerator: much of that is starting them;
- ``gather``: longer ones that read batches or compute their random order;
- ``memory``: all other operations: they pass over arrays, with little arithmetic for each number;
- ``evaluation``: the share of a round in the evaluations; ``host``: drawing cohorts, calling, making events;
- ``rounds``: calls of rounds that cannot be looked into.

The kind with the most time is the bound, except that compilation is if it takes longer than all rounds of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedrax.contract.local import LocalSGD
from fedrax.simulation.setup import Setup

NEAR_LIMIT = 0.5
"""Products that run at this share of the machine's limit or more are called bound by arithmetic."""


@dataclass(frozen=True)
class Verdict:
    """The conclusion."""

    bound: str
    """``compile`` or one of the kinds."""
    sentence: str
    advice: str | None
    """What would help; None where nothing is sure to."""


def judge(
    setup: Setup,
    kinds: Mapping[str, float],
    *,
    products_of_limit: float,
    compile_seconds: float,
    microseconds: float,
) -> Verdict:
    """kinds: milliseconds a round. microseconds: the mean operation's time."""
    verdict = _of_round(setup, kinds, products_of_limit, microseconds)
    rounds = setup.settings.rounds
    seconds = sum(kinds.values()) * rounds / 1e3
    if compile_seconds <= seconds:
        return verdict
    longer = f"Compiling takes {compile_seconds:.1f} s, longer than the run's {rounds} rounds ({seconds:.1f} s)."
    advice = "A second run with the same shapes finds the program in the cache and starts at once."
    return Verdict("compile", f"{longer} {verdict.sentence}", advice)


def _of_round(setup: Setup, kinds: Mapping[str, float], products_of_limit: float, microseconds: float) -> Verdict:
    """What bounds a round, compilation aside."""
    total = sum(kinds.values())
    bound = max(kinds, key=lambda kind: kinds[kind])
    share = f"{kinds[bound] / total:.0%} of the time"
    if bound == "products":
        near = products_of_limit >= NEAR_LIMIT
        how = f"they run at {products_of_limit:.0%} of the machine's limit"
        more = "arithmetic bounds the round" if near else "each is too small, or of a shape too awkward, to reach it"
        return Verdict(bound, f"Matrix products take {share}; {how}: {more}.", None if near else _batch(setup))
    return Verdict(bound, SENTENCES[bound].format(share=share, microseconds=microseconds), _advice(setup, bound))


SENTENCES = {
    "small": "Starting small operations bounds the round: those below 0.5 µs (5 µs on accelerators) take {share}"
    " (the mean operation of all: {microseconds:.1f} µs).",
    "memory": "Passing over arrays bounds the round: operations with little arithmetic for each number take {share}.",
    "gather": "Gathering batches bounds the round: it takes {share}.",
    "exchange": "Joining the devices' sums bounds the round: it takes {share}.",
    "waiting": "Devices wait for the slowest: {share}.",
    "evaluation": "Evaluation bounds the run: it takes {share}.",
    "host": "The host bounds the round: drawing cohorts, calling and making events take {share}.",
    "rounds": "The calls of rounds take {share}; what bounds them is not known under this plan.",
}


def _advice(setup: Setup, bound: str) -> str | None:
    settings, local = setup.settings, setup.algorithm.local_steps
    devices = setup.engine.mesh.devices.size
    if bound in ("small", "memory"):
        return _batch(setup)
    if bound == "gather" and isinstance(local, LocalSGD) and local.order != "stored" and local.blocks is None:
        return 'Batches in stored order (algorithm.local.order = "stored") are read as slices.'
    if bound == "exchange":
        return "More clients a round, or more local steps, make the exchange rarer."
    if bound == "waiting" and setup.info.cohort_size % devices:
        return f"A cohort size that {devices} divides gives all devices as many clients."
    if bound in ("evaluation", "host") and settings.eval_every < settings.rounds:
        return "Evaluate more rarely (run.eval_every): rounds between two evaluations run in one call."
    if bound == "rounds" and setup.plan != "scan":
        return "The plan scan compiles all rounds into one program (run.plan)."
    return None


def _batch(setup: Setup) -> str | None:
    """A larger batch does more for each operation and each pass over the parameters, where there are batches."""
    local = setup.algorithm.local_steps
    if not isinstance(local, LocalSGD) or local.batch_size == "full" or local.blocks is not None:
        return None
    if local.batch_size >= setup.engine.program.layout.largest:
        return None
    return "A larger batch (algorithm.local.batch_size) does more work with each operation."
