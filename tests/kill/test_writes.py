"""After any write a run can be resumed to the same end, or has not begun."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from fedrax.cli import main
from tests.kill.writes import EXPERIMENT, at_every_write, continuing_command, outcome

NUM_STATES = 8
"""Number of tested states of the directory; those before the end of the first round are a third of all."""


def contents(folder: Path) -> dict[str, bytes | None]:
    """Files, and folders (None), below a folder."""
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def restore(folder: Path, kept: dict[str, bytes | None]) -> None:
    """Write these files and folders."""
    for name, content in kept.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).write_bytes(content)


@pytest.mark.usefixtures("shared_tasks")
def test_run_can_be_resumed_after_any_write(tmp_path: Path):
    experiment, folder = tmp_path / "x.toml", tmp_path / "r"
    experiment.write_text(EXPERIMENT)
    seen: list[dict[str, bytes | None]] = []

    def look() -> None:
        now = contents(folder)
        if now not in seen[-1:]:
            seen.append(now)

    with at_every_write(look):
        assert main(["run", str(experiment), "--out", str(folder), "--quiet"]) == 0
    assert len(seen) > 60
    kinds = {name for kept in seen for name in kept if name.endswith(".part")}
    names = ("experiment.toml", "events.jsonl", "environment.json", "clients.json", "run.json", "model.safetensors")
    files = (*names, "checkpoint/state.npz")
    assert kinds == {str(Path(name).with_name(f".{Path(name).name}.part")) for name in files}
    expected, rng = outcome(folder), random.Random(0)
    first = next(i for i, kept in enumerate(seen) if "experiment.toml" in kept)
    tried = [*range(first + 2)][:: max(1, first // 3)] + rng.sample(range(first + 2, len(seen)), NUM_STATES - 4)
    for number in tried:
        shutil.rmtree(folder)
        restore(folder, seen[number])
        folder.mkdir(exist_ok=True)
        assert main(continuing_command(folder, experiment)) == 0, (number, sorted(seen[number]))
        assert outcome(folder) == expected, (number, sorted(seen[number]))
        assert not [path for path in folder.rglob("*") if path.name.endswith(".part")]
