"""A profile as a table for the terminal and as a picture."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from fedrax.files import write_bytes
from fedrax.profiling.profile import Part, Profile
from fedrax.report.curves import PALETTE

_BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEAST = 0.0005
"""Shares below are left out of the table."""


def label(part: Part) -> str:
    """The part's name, with its phase where there are several."""
    return part.name if part.phase is None else f"phase {part.phase}: {part.name}"


def bar(share: float) -> str:
    """A share as blocks, to an eighth of a character."""
    eighths = round(8 * _BAR * share)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def table(profile: Profile) -> Table:
    """The parts of a round."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    made.add_column("part of a round", no_wrap=True)
    for heading in ("ms", "share"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True, width=_BAR)
    made.add_column("operations", justify="right", no_wrap=True)
    for part in profile.parts:
        if part.share >= _LEAST:
            count = f"{part.operations:,.0f}" if part.operations else ""
            made.add_row(label(part), f"{part.ms:.3f}", f"{part.share:.1%}", f"[cyan]{bar(part.share)}[/]", count)
    made.add_section()
    made.add_row("all", f"{profile.ms:.3f}", "100.0%", "", f"{profile.operations:,.0f}" if profile.operations else "")
    return made


def lines(profile: Profile) -> list[str]:
    """What stands below the table, a sentence each."""
    made = [
        f"{profile.algorithm}, {profile.plan}; {profile.clients:g} clients and {profile.gradients:,.0f} gradients of"
        f" samples a round; {profile.rounds_timed} rounds timed."
    ]
    compiled = profile.compile_seconds + profile.evaluation_compile_seconds
    of = f" (rounds {profile.compile_seconds:.2f} s)" if profile.compile_seconds else ""
    made.append(
        f"compile     {compiled:.2f} s without the cache{of}; one evaluation takes {profile.evaluation_ms:.2f} ms"
    )
    if profile.operations:
        machine = profile.limits
        made += [
            f"arithmetic  {profile.gflops:.3g} GFLOP/s of matrix products, {profile.gflops / machine.gflops:.1%} of the"
            f" measured {machine.gflops:.3g}; {profile.gflops_in_products:.3g} while products run",
            f"memory      {profile.gigabytes:.3g} GB/s touched by operations (caches included); memory itself streams"
            f" {machine.gigabytes:.3g} GB/s",
            f"operations  {profile.operations:,.0f} a round on each device,"
            f" {profile.operation_microseconds:.2f} µs the mean one",
            "bounds      "
            + ", ".join(
                f"{kind} {ms / profile.ms:.0%}" for kind, ms in profile.kinds.items() if ms >= 0.005 * profile.ms
            ),
        ]
    return [*made, *profile.notes]


def show(profile: Profile, console: Console) -> None:
    """Print the profile."""
    first, *rest = lines(profile)
    console.print(first, markup=False)
    console.print(table(profile))
    for line in rest:
        console.print(line, markup=False)
    console.print(f"\n[bold]{profile.verdict.sentence}[/]")
    if profile.verdict.advice:
        console.print(profile.verdict.advice, markup=False)


def draw(profile: Profile) -> Figure:
    """One bar, stacked of the parts."""
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    axes, left = figure.subplots(), 0.0
    shown = [part for part in profile.parts if part.share >= _LEAST]
    for i, part in enumerate(shown):
        hatch = None if i < len(PALETTE) else "//"
        text = f"{label(part)} ({part.share:.0%})"
        axes.barh(0, part.ms, left=left, color=PALETTE[i % len(PALETTE)], label=text, hatch=hatch, edgecolor="white")
        left += part.ms
    axes.set_xlim(0, profile.ms)
    axes.set_yticks([])
    axes.set_xlabel("milliseconds a round")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{profile.algorithm}, {profile.plan}", fontsize="medium", loc="left")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def save(profile: Profile, path: Path) -> None:
    """Save the picture as PNG or SVG, by the name's ending, whole or not at all."""
    content, kind = io.BytesIO(), path.suffix.removeprefix(".")
    with mpl.rc_context({"svg.hashsalt": "fedrax"}):
        draw(profile).savefig(content, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {})
    write_bytes(path, content.getvalue())
