"""Records a trace of device operations and reads it: the times of each operation on each device.

An operation is charged with the time from the end of the previous one to its own end, which includes its launch. Loops
and calls, whose events contain those of their bodies, are charged with the time after their last operation. XLA:CPU
computes convolutions and some matrix products on other threads, and their events end when they are submitted: the time
before the first operation that reads such a product is charged to the product.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedrax.errors import FedraxError
from fedrax.profiling.hlo import ProgramText


@dataclass
class Timeline:
    """One device's operations in the trace."""

    charged: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Nanoseconds of each execution, from the end of the previous operation."""
    awaited: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Nanoseconds of waiting for the result of a product."""
    collectives: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Nanoseconds of each execution of an operation that waits for the other devices."""
    span: int = 0
    """Nanoseconds from the start of the first operation to the end of the last."""


def record(run: Callable[[], Any], program: ProgramText, keep: Path | None = None) -> tuple[Any, list[Timeline]]:
    """Trace a call.

    Args:
        run: The call.
        program: The program whose operations are traced.
        keep: Directory for the raw trace, in the format of XProf, TensorBoard and Perfetto; by default it is deleted.

    Returns:
        The result of ``run``, and a timeline for each device that executed operations of ``program``.
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
        for event in (event for line in plane.lines for event in line.events if not event.name.startswith("end: ")):
            stats = dict(event.stats)
            if "hlo_op" in stats and stats.get("hlo_module") == program.module:
                device, start = stats.get("device_ordinal", plane.name), event.start_ns
                events[device].append((int(start + event.duration_ns), int(start), str(stats["hlo_op"])))
    return [timeline(events[device], program) for device in sorted(events, key=str)]


def timeline(events: list[tuple[int, int, str]], program: ProgramText) -> Timeline:
    """The timeline of one device's events (end, start, operation), in nanoseconds."""
    made, unread = Timeline(), []  # unread: products that were submitted and not read yet, the latest one last
    events.sort()
    first = last = min(start for _, start, _ in events)
    reads = {name: program.products_read(name) for name in {name for _, _, name in events}}
    products = set().union(*reads.values())
    for end, start, name in events:
        awaited = [product for product in unread if product in reads[name]]
        if awaited and start > last:
            made.awaited[awaited[-1]].append(start - last)
            last = start
        unread = [product for product in unread if product not in awaited and product != name]
        if name in products:
            unread.append(name)
        made.charged[name].append(end - last)
        if program.is_collective(name):
            made.collectives[name].append(end - start)
        last = end
    made.span = last - first
    return made


def waits(timelines: list[Timeline]) -> dict[str, int]:
    """Nanoseconds that devices waited for others in each collective operation.

    The device that arrives last has the shortest execution; the excess of the others is waiting.
    """
    found = {}
    for name in timelines[0].collectives:
        met = [timeline.collectives[name] for timeline in timelines]
        if len({len(times) for times in met}) == 1:
            found[name] = int(np.sum(np.subtract(met, np.min(met, axis=0))))
    return found
