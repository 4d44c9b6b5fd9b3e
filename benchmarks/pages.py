"""Markdown tables, pages and pictures, as all benchmarks write them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedrax.files import write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def number(value: float) -> str:
    """Three significant digits, or all digits before the decimal point."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def markdown_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_page(path: Path, sections: Iterable[str]) -> Path:
    """Write the sections, separated by empty lines, and replace the page atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("\n\n".join(sections) + "\n")
    os.replace(part, path)
    return path


def save_picture(figure: Figure, path: Path) -> list[Path]:
    """Save ``path``.png and ``path``.svg."""
    figure.tight_layout()
    return [write_figure(path.with_suffix(suffix), figure) for suffix in (".png", ".svg")]
