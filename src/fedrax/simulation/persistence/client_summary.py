"""Summary of a run's clients, ``clients.json``: sizes and label counts, from which reports draw the partition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedrax.data import Federation, has_one_label, measure_heterogeneity
from fedrax.errors import FedraxError
from fedrax.files import MAX_FILE, open_regular_file, write_text

FILE = "clients.json"
SHOWN, MAX_CLASSES = 50, 100
"""Clients that are listed individually, and the most classes that are counted for each of them."""
MAX_MEASURED = 1_000_000
"""Clients times classes up to which distances of label distributions are computed, so that a run does not wait for
them."""
_NAME = 80
"""Characters of a name that are kept."""


@dataclass(frozen=True)
class ClientSummary:
    """Sizes and label counts of a run's clients; the first ``SHOWN`` of them are listed individually."""

    data: str
    """The data set's name."""
    clients: int
    """Number of clients."""
    samples: int
    """Training samples of all clients."""
    smallest: int
    """Training samples of the smallest client."""
    median: float
    """Median of the clients' training samples."""
    largest: int
    """Training samples of the largest client."""
    total_variation: float | None
    """Mean total variation distance of the clients' label distributions to the global one, in [0, 1]; None where it
    was not computed."""
    names: tuple[str, ...]
    """Names of the first clients."""
    sizes: tuple[int, ...]
    """Training samples of each of the first clients."""
    classes: tuple[str, ...]
    """Names of the classes; empty where labels are not counted."""
    counts: tuple[tuple[int, ...], ...]
    """Training samples of each class at each of the first clients."""

    @classmethod
    def of(cls, federation: Federation) -> ClientSummary:
        """Summarize a federation."""
        sizes, classes = federation.sizes, federation.num_classes or 0
        shown = min(SHOWN, federation.num_clients)
        counted = has_one_label(federation) and classes <= MAX_CLASSES
        distance = None
        if counted and federation.num_clients * classes <= MAX_MEASURED:
            distance = measure_heterogeneity(federation).total_variation
        names, ends = federation.class_names or tuple(map(str, range(classes))), federation.offsets
        owned = [federation.train.y[ends[i] : ends[i + 1]] for i in range(shown if counted else 0)]
        return replace(
            cls.of_sizes(federation.name, sizes, tuple(federation.client_name(i)[:_NAME] for i in range(shown))),
            total_variation=distance,
            classes=tuple(name[:_NAME] for name in names) if counted else (),
            counts=tuple(tuple(np.bincount(y, minlength=classes).tolist()) for y in owned),
        )

    @classmethod
    def of_sizes(cls, data: str, sizes: np.ndarray, names: Sequence[str] = ()) -> ClientSummary:
        """Summarize clients of which only the numbers of samples, int [N], are known, and the first ones' names."""
        return cls(
            data=data[:_NAME],
            clients=len(sizes),
            samples=int(sizes.sum()),
            smallest=int(sizes.min()),
            median=float(np.median(sizes)),
            largest=int(sizes.max()),
            total_variation=None,
            names=tuple(names) or tuple(map(str, range(min(SHOWN, len(sizes))))),
            sizes=tuple(map(int, sizes[:SHOWN])),
            classes=(),
            counts=(),
        )


def write_client_summary(directory: Path, summary: ClientSummary) -> None:
    """Write ``clients.json`` atomically."""
    write_text(directory / FILE, json.dumps(asdict(summary)) + "\n")


def read_client_summary(directory: Path) -> ClientSummary | None:
    """Read ``clients.json``; None where it is missing. Raises FedraxError for a damaged file."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        with open_regular_file(path, MAX_FILE) as file:
            return _checked(json.loads(file.read().decode()))
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise FedraxError(f"{path} is not the summary of a run's clients: {error}.") from error


def _checked(found: Any) -> ClientSummary:
    """Parse the file; ValueError, TypeError or LookupError for other content."""
    whole = {name: _whole(found[name]) for name in ("clients", "samples", "smallest", "largest")}
    names, classes = (tuple(map(_text, found[name])) for name in ("names", "classes"))
    sizes, counts = tuple(map(_whole, found["sizes"])), tuple(tuple(map(_whole, row)) for row in found["counts"])
    rows = len(names) if classes else 0
    if len(sizes) != len(names) or len(counts) != rows or any(len(row) != len(classes) for row in counts):
        raise ValueError("its columns are of different lengths")
    if len(names) > SHOWN or len(classes) > MAX_CLASSES:
        raise ValueError("it is too long")
    distance = found["total_variation"]
    return ClientSummary(
        data=_text(found["data"]),
        **whole,
        median=_number(found["median"]),
        total_variation=None if distance is None else _number(distance),
        names=names,
        sizes=sizes,
        classes=classes,
        counts=counts,
    )


def _whole(value: Any) -> int:
    """Check a count."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ValueError(f"{value!r:.40} is not a number of samples or clients")
    return value


def _number(value: Any) -> float:
    """Check a float."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e18:
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)


def _text(value: Any) -> str:
    """Check a name."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a name")

    return value
