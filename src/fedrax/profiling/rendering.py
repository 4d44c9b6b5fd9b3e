"""A profile as tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedrax.profiling.advice import HeavyOperation
from fedrax.profiling.profiler import Profile, RoundPart

_BAR = 24
"""Characters of a bar of 100 %."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEAST = 0.0005
"""Smallest share that is shown."""


def label(part: RoundPart) -> str:
    """The name of a part, with its phase if there are several."""
    return part.name if part.phase is None else f"phase {part.phase}: {part.name}"


def name(row: HeavyOperation) -> str:
    """Layer, kind and direction of an operation."""
    return " ".join(word for word in (row.layer, row.what, row.direction) if word)


def of_limit(row: HeavyOperation) -> str:
    """The share of the machine's limit; "in caches" if it is above the memory bandwidth."""
    return "in caches" if row.of_limit > 1 and row.unit == "GB/s" else f"{row.of_limit:.0%}"


def bar(share: float) -> str:
    """A bar of block characters, in eighths of a character."""
    eighths = round(8 * _BAR * share)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _table(*headings: str, left: tuple[str, ...]) -> Table:
    """An empty table; ``left``: columns that are aligned left."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading != headings[0])
    return made


def parts_table(profile: Profile) -> Table:
    """The parts of a round."""
    made = _table("part of a round", "ms", "share", "", "operations", left=("part of a round", ""))
    shown = [part for part in profile.parts if part.share >= _LEAST]
    for part in shown:
        blocks, count = Text(f"{bar(part.share):{_BAR}}", "cyan"), f"{part.operations:,.0f}" if part.operations else ""
        made.add_row(label(part), f"{part.ms:.3f}", f"{part.share:.1%}", blocks, count, end_section=part is shown[-1])
    made.add_row("all", f"{profile.ms:.3f}", "100.0%", "", f"{profile.operations:,.0f}" if profile.operations else "")
    return made


def heaviest_table(profile: Profile, advice: list[str]) -> Table:
    """The heaviest operations; the last column has the number of the advice below."""
    headings = ("heaviest operations", "shapes", "share", "times", "µs", "achieves", "of limit", "")
    made = _table(*headings, left=headings[:2])
    for row in profile.heaviest:
        time = f"{row.executions:,.0f}", f"{1e3 * row.ms / row.executions:,.1f}"
        number = f"({advice.index(row.advice) + 1})" if row.advice else ""
        achieved = f"{row.achieved:,.3g} {row.unit}"
        made.add_row(escape(name(row)), row.shapes, f"{row.share:.1%}", *time, achieved, of_limit(row), number)
    return made


def lines(profile: Profile) -> list[str]:
    """The lines below the tables."""
    compiled = profile.compile_seconds + profile.evaluation_compile_seconds
    of = f" (rounds {profile.compile_seconds:.2f} s)" if profile.compile_seconds else ""
    made = [f"compile   {compiled:.2f} s without the cache{of}; one evaluation takes {profile.evaluation_ms:.2f} ms"]
    if profile.allocated_bytes is not None:
        known = [f"{profile.estimated_bytes / 1e6:,.3g} MB estimated for the clients of a device at a time"]
        known.append(f"the program allocates {profile.allocated_bytes / 1e6:,.3g} MB")
        known += [f"peak of the device {profile.peak_bytes / 1e6:,.3g} MB"] if profile.peak_bytes is not None else []
        made.append(f"memory    {'; '.join(known)}")
    if profile.operations:
        machine, shares = profile.limits, {kind: ms / profile.ms for kind, ms in profile.kinds.items()}
        made += [
            f"limits    {machine.gflops:.3g} GFLOP/s in matrix products (this round: {profile.gflops_in_products:.3g});"
            f" {machine.gigabytes:.3g} GB/s of memory bandwidth",
            "kinds     " + ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items() if share >= 0.005),
        ]
    return [*made, *profile.notes]


def show(profile: Profile, console: Console) -> None:
    """Print the profile."""
    console.print(
        f"{profile.algorithm}, {profile.plan}; {profile.clients:g} clients and {profile.gradients:,.0f} gradients of"
        f" samples a round; {profile.rounds_timed} rounds timed.",
        markup=False,
    )
    console.print(parts_table(profile))
    advice = list(dict.fromkeys(row.advice for row in profile.heaviest if row.advice))
    if profile.heaviest:
        console.print(heaviest_table(profile, advice))
    for number, text in enumerate(advice, 1):
        console.print(f"({number}) {text}", markup=False)
    console.print()
    for line in lines(profile):
        console.print(line, markup=False)
    for text in profile.advice:
        console.print(f"advice    {text}", style="bold", markup=False)
