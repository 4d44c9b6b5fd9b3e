"""Small federations, and comparisons of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedrax
from fedrax.models import Logistic
from fedrax.simulation.process import numeric_context
from fedrax.simulation.setup import prepare

FEATURES, CLASSES = 4, 3
SIZES = (3, 7, 4, 12, 6, 5, 9, 4)


def make_federation(sizes: tuple[int, ...] = SIZES, test_rows: int = 23) -> fedrax.Federation:
    """Clients of different sizes with random samples; test samples belong to no client."""
    rng = np.random.default_rng(3)
    rows = sum(sizes) + test_rows
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, rows)
    n = sum(sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    test = (x[n:], y[n:]) if test_rows else None
    return fedrax.Federation.from_arrays(x[:n], y[:n], offsets=offsets, test=test, num_classes=CLASSES)


TASK = fedrax.classification(Logistic().build((FEATURES,), CLASSES))
FEDERATION = make_federation()
LOCAL = fedrax.LocalSGD(lr=0.05, steps=3, batch_size=2)
SCAFFOLD = fedrax.Scaffold(local=LOCAL)
OFF_DEVICE: dict[str, Any] = {"samples": "streamed", "states": "spilled"}
MODEL_BYTES = 4 * (FEATURES * CLASSES + CLASSES)


def run(
    algorithm: fedrax.Algorithm | None = None, federation: fedrax.Federation = FEDERATION, **options: Any
) -> fedrax.Result:
    """A short run, by default of FedAvg."""
    defaults: dict[str, Any] = {"rounds": 4, "cohort_size": 3, "eval_every": 100}
    task = options.pop("task", TASK)
    return fedrax.simulate(algorithm or fedrax.FedAvg(local=LOCAL), task, federation, **(defaults | options))


def bytes_per_client(algorithm: fedrax.Algorithm, dtype: str = "float32") -> tuple[int, int]:
    """(bytes down, bytes up) of one client per round, computed from shapes without compilation."""
    with numeric_context(dtype):
        info = prepare(algorithm, TASK, FEDERATION, fedrax.Settings(cohort_size=3, dtype=dtype)).info
    return info.bytes_down, info.bytes_up


def without_times(events: list[dict]) -> list[dict]:
    """Events without durations."""
    return [{k: v for k, v in event.items() if not k.startswith("seconds")} for event in events]


def state_of(result: fedrax.Result, clients: int = len(SIZES)) -> list[np.ndarray]:
    """Arrays of the server state and of all client states."""
    return [np.asarray(a) for a in jax.tree.leaves((result.server, [result.client_state(i) for i in range(clients)]))]


def assert_identical(a: fedrax.Result, b: fedrax.Result) -> None:
    """Assert bitwise equal states, and equal events except for durations."""
    assert without_times(a.events) == without_times(b.events)
    for one, other in zip(state_of(a), state_of(b), strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


def assert_close(a: fedrax.Result, b: fedrax.Result, tolerance: float = 1e-5) -> None:
    """Assert equal states up to rounding."""
    for one, other in zip(state_of(a), state_of(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def read_files(directory: Path) -> dict[str, bytes]:
    """Contents of all files below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
