"""Damaged directories of runs: shown, examined, saved without a loss, gone on with bit for bit or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from fedrax import Result
from fedrax.errors import FedraxError
from fedrax.files import write_text
from fedrax.report import doctor
from fedrax.report.html import page
from fedrax.report.report_data import gather
from fedrax.report.runs import read_run
from fedrax.simulation.persistence.run_directory import lock_directory
from tests.fuzz.damage import damaged
from tests.simulation.problems import SCAFFOLD, assert_identical, bytes_of, run

EXPERIMENT = "name = 'x'\n[algorithm]\nname = 'scaffold'\n[run]\nseed = 0\nrounds = 6\n"
ROUNDS, KEPT = 6, 4
"""Of the whole run, and of the one that is damaged."""
OFTEN = {"checkpoint_every": 2, "eval_every": 2}
OTHERS = ("folder", "fifo", "link", "device", "lost", "empty", "twice", "part")


@cache
def whole() -> dict[str, bytes]:
    """The files of a run that was interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        run(SCAFFOLD, **OFTEN, rounds=KEPT, directory=folder)
        write_text(Path(folder) / "experiment.toml", EXPERIMENT)
        return bytes_of(Path(folder))


@cache
def reference() -> Result:
    """The run that nobody damaged."""
    with tempfile.TemporaryDirectory() as folder:
        run(SCAFFOLD, **OFTEN, rounds=KEPT, directory=folder)
        return run(SCAFFOLD, **OFTEN, rounds=ROUNDS, directory=folder, resume=True)


@st.composite
def directories(draw: st.DrawFn) -> dict[str, bytes | str]:
    """What becomes of each file that does not stay as it is: other bytes, or something else in its place.

    Whole directories are among them: 5 of 150 damaged ones are sound, or none, for what Hypothesis draws depends on the
    constants of all modules that happen to be loaded.
    """
    changed = draw(st.lists(st.sampled_from(sorted(whole())), max_size=2, unique=True))
    return {name: draw(st.sampled_from(OTHERS) | damaged(whole()[name])) for name in changed}


def build(folder: Path, changes: dict[str, bytes | str]) -> None:
    """Write the run with its damage; links lead to ``victim``, beside the folder."""
    for name, content in whole().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match changes.get(name, content):
            case "folder":
                path.mkdir()
            case "fifo":
                os.mkfifo(path)
            case "link":
                path.symlink_to(folder.parent / "victim")
            case "device":
                path.symlink_to("/dev/zero")
            case "lost":
                pass
            case "empty":
                path.touch()
            case "twice":
                path.write_bytes(content * 2)
            case "part":
                path.write_bytes(content)
                path.with_name(f".{path.name}.part").symlink_to(folder.parent / "victim")
            case bytes() as other:
                path.write_bytes(other)


def check(changes: dict[str, bytes | str], deep: bool = False) -> bool:
    """Show, report, examine, repair; deep: and resume."""
    with tempfile.TemporaryDirectory() as outer:
        folder, victim = Path(outer) / "run", Path(outer) / "victim"
        folder.mkdir()
        victim.write_text("precious")
        build(folder, changes)
        with suppress(FedraxError):
            read_run(folder)
        with suppress(FedraxError):
            assert page(gather([folder])).endswith("</html>\n")
        before = kept(folder)
        with lock_directory(folder, resume=True):
            found = doctor.examine(folder)
            assert kept(folder) == before
            doctor.apply_repairs(found)
            again = doctor.examine(folder)
            assert not again.repairs, [repair.description for repair in again.repairs]
        left = list(kept(folder).values())
        assert all(content in left for name, content in before.items() if not name.endswith(".part"))
        goes_on = False
        if deep:
            with suppress(FedraxError):
                resumed = run(SCAFFOLD, **OFTEN, rounds=ROUNDS, directory=folder, resume=True)
                assert_identical(resumed, reference())
                goes_on = True
        assert victim.read_text() == "precious"
        shutil.rmtree(folder)
    return goes_on if deep else found.intact


def kept(folder: Path) -> dict[str, bytes]:
    """All plain files below a folder, links not followed."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
