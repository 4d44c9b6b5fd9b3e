"""Takes a trace of device operations and reads it: how often each ran on each device, and for how long.

A device's time is parted among its operations without gaps: an operation is charged with the time from the end of
the one before it to its own end, so with the work of starting it too. Loops and calls, whose events contain those
of their bodies, are charged with what is left after their last operation. XLA:CPU computes some matrix products
beside the device's own thread, and their events end when they are handed over: the time before the first operation
that reads such a product is charged to the product, with the work of starting that operation in it. Waits through
loops and tuples are not seen. An execution far longer than its operation's median was interrupted by another program
and is charged with the median.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from fedrax.errors import FedraxError
from fedrax.profiling.hlo import ProgramText

_INTERRUPTION = 100_000
"""Nanoseconds: the operating system gives another program at least about as much."""


@dataclass
class Timeline:
    """One device's operations in the trace."""

    runs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Executions of each operation."""
    charged: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Nanoseconds from the end of the operation before."""
    meetings: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Nanoseconds of each execution of an operation that waits for the other devices."""
    span: int = 0
    """Nanoseconds from the start of the first operation to the end of the last."""


def record(run: Callable[[], Any], program: ProgramText, keep: Path | None = None) -> tuple[Any, list[Timeline]]:
    """(what ``run`` returns, a timeline for each device that executed operations of ``program``).

    keep: a directory for the raw trace, in the format of XProf, TensorBoard and Perfetto; by default it is not kept.
    """
    options: Any = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="fedrax-trace-") as scratch:
        where = Path(scratch) if keep is None else keep
        before = set(where.glob("**/*.xplane.pb"))
        try:
            with jax.profiler.trace(str(where), create_perfetto_trace=keep is not None, profiler_options=options):
                result = run()
        except (OSError, RuntimeError) as error:
            raise FedraxError(f"cannot write a trace into {where}: {error}") from error
        made = set(where.glob("**/*.xplane.pb")) - before
        if not made:
            raise FedraxError(f"no trace was written into {where}")
        return result, read(made.pop(), program)


def read(path: Path, program: ProgramText) -> list[Timeline]:
    """The timelines in a trace file, in the order of their devices."""
    events: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith("end: "):
                    continue
                stats = dict(event.stats)
                if "hlo_op" in stats and stats.get("hlo_module") == program.module:
                    device = stats.get("device_ordinal", plane.name)
                    start = event.start_ns
                    events[device].append((int(start + event.duration_ns), int(start), str(stats["hlo_op"])))
    return [_timeline(events[device], program) for device in sorted(events, key=str)]


def _timeline(events: list[tuple[int, int, str]], program: ProgramText) -> Timeline:
    made = Timeline()
    events.sort()
    first = last = min(start for _, start, _ in events)
    each: dict[str, list[int]] = defaultdict(list)
    delays: dict[str, list[int]] = defaultdict(list)  # by product
    read = {name: program.products_read(name) for name in {name for _, _, name in events}}
    products = set().union(*read.values())
    unread: list[str] = []  # products that have been handed over, the last one last
    for end, start, name in events:
        awaited = [product for product in unread if product in read[name]]
        if awaited and start > last:
            delays[awaited[-1]].append(start - last)
            last = start
        unread = [product for product in unread if product not in awaited]
        if name in products:
            unread = [product for product in unread if product != name] + [name]
        each[name].append(end - last)
        if program.is_collective(name):
            made.meetings[name].append(end - start)
        last = end
    for name, times in each.items():
        made.runs[name] = len(times)
        made.charged[name] = sum(times) if name in made.meetings else _undisturbed(times)
    for name, times in delays.items():
        made.charged[name] += _undisturbed(times)
    made.span = last - first
    return made


def _undisturbed(times: list[int]) -> int:
    """Their sum, each that is far longer than the median replaced by it; as they are if there are few."""
    if len(times) < 5:
        return sum(times)
    usual = int(statistics.median(times))
    limit = usual + max(_INTERRUPTION, 20 * usual)
    return sum(usual if t > limit else t for t in times)


def waits(timelines: list[Timeline]) -> list[dict[str, int]]:
    """For each device and operation the nanoseconds it waited for others: beyond the shortest wait at each meeting."""
    found: list[dict[str, int]] = [{} for _ in timelines]
    for name in timelines[0].meetings if len(timelines) > 1 else ():
        met = [timeline.meetings.get(name, []) for timeline in timelines]
        if len({len(times) for times in met}) == 1:
            shortest = [min(times) for times in zip(*met, strict=True)]
            for device, times in enumerate(met):
                found[device][name] = sum(times) - sum(shortest)
    return found
