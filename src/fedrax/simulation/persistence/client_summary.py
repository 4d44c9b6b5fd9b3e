"""Who holds how much of what, beside a run: ``clients.json``, from which a report draws the partition."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedrax.data import Federation, has_one_label, heterogeneity
from fedrax.errors import FedraxError
from fedrax.files import MAX_FILE, reading, write_text

FILE = "clients.json"
SHOWN, MAX_CLASSES = 50, 100
"""Clients that are listed one by one, and classes that are counted for each."""
MAX_MEASURED = 1_000_000
"""Clients times classes up to which distances of label distributions are computed: a run should not wait for them."""
_NAME = 80


@dataclass(frozen=True)
class ClientSummary:
    """The clients of a run, the first of them one by one."""

    data: str
    """The data set's name."""
    clients: int
    samples: int
    smallest: int
    median: float
    largest: int
    total_variation: float | None
    """Mean distance of the clients' label distributions to that of all, in [0, 1]; None where it was not computed."""
    names: tuple[str, ...]
    """Of the first clients."""
    sizes: tuple[int, ...]
    """Training samples of each of them."""
    classes: tuple[str, ...]
    """Empty where labels are not counted."""
    counts: tuple[tuple[int, ...], ...]
    """Training samples of each class at each of the first clients."""

    @classmethod
    def of(cls, federation: Federation) -> ClientSummary:
        """The clients of a federation."""
        sizes, classes = federation.sizes, federation.num_classes or 0
        shown = min(SHOWN, federation.num_clients)
        counted = has_one_label(federation) and classes <= MAX_CLASSES
        distance = None
        if counted and federation.num_clients * classes <= MAX_MEASURED:
            distance = heterogeneity(federation).total_variation
        names, ends = federation.class_names or tuple(map(str, range(classes))), federation.offsets
        owned = [federation.train.y[ends[i] : ends[i + 1]] for i in range(shown if counted else 0)]
        return cls(
            data=federation.name[:_NAME],
            clients=federation.num_clients,
            samples=int(sizes.sum()),
            smallest=int(sizes.min()),
            median=float(np.median(sizes)),
            largest=int(sizes.max()),
            total_variation=distance,
            names=tuple(federation.client_name(i)[:_NAME] for i in range(shown)),
            sizes=tuple(map(int, sizes[:shown])),
            classes=tuple(name[:_NAME] for name in names) if counted else (),
            counts=tuple(tuple(np.bincount(y, minlength=classes).tolist()) for y in owned),
        )


def write_client_summary(directory: Path, federation: Federation) -> None:
    """Write the file, whole or not at all."""
    write_text(directory / FILE, json.dumps(asdict(ClientSummary.of(federation))) + "\n")


def read_client_summary(directory: Path) -> ClientSummary | None:
    """What a run's file says, None where there is none; FedraxError for one that is damaged."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        with reading(path, MAX_FILE) as file:
            return _checked(json.loads(file.read().decode()))
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise FedraxError(f"{path} is not the list of a run's clients: {error}.") from error


def _checked(found: Any) -> ClientSummary:
    """ValueError, TypeError or LookupError for anything that ``write_client_summary`` does not write."""
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
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ValueError(f"{value!r:.40} is no number of samples or clients")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e18:
        raise ValueError(f"{value!r:.40} is no number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no name")
    return value
