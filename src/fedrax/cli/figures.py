"""The picture of what a command prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedrax.errors import FedraxError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(draw: Callable[[], Figure], path: Path | None) -> tuple[tuple[Path, ...], FedraxError | None]:
    """A figure as ``path``.png and .svg, if there is to be one: the files, and why there are none.

    Such an error is raised once the command has printed what it found, which may have taken minutes.
    """
    if path is None:
        return (), None
    from fedrax.report.curves import save_curves

    try:
        return save_curves(draw(), path.with_suffix("") if path.suffix in (".png", ".svg") else path), None
    except FedraxError as error:
        return (), error
