"""Saves the figure of a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedrax.errors import FedraxError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(draw: Callable[[], Figure], path: Path | None) -> tuple[tuple[Path, ...], FedraxError | None]:
    """Draw and save a figure as ``path``.png and .svg; None for no figure.

    Returns:
        The files, and the error if saving failed. The command raises it after printing its results, which may have
        taken minutes to compute.
    """
    if path is None:
        return (), None
    from fedrax.report.curves import save_curves

    try:
        return save_curves(draw(), path.with_suffix("") if path.suffix in (".png", ".svg") else path), None
    except FedraxError as error:
        return (), error
