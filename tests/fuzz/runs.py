"""Damaged run directories: shown, examined, repaired without loss, and resumed bit for bit or not at all."""

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
from tests.simulation.problems import SCAFFOLD, assert_identical, read_files, run

EXPERIMENT = "name = 'x'\n[algorithm]\nname = 'scaffold'\n[run]\nseed = 0\nrounds = 6\n"
ROUNDS, DAMAGED_ROUNDS = 6, 4
"""Rounds of the complete run, and of the one that is damaged."""
OFTEN = {"checkpoint_every": 2, "eval_every": 2}
REPLACEMENTS = ("folder", "fifo", "link", "device", "lost", "empty", "twice", "part")


@cache
def intact_files() -> dict[str, bytes]:
    """Files of an interrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        run(SCAFFOLD, **OFTEN, rounds=DAMAGED_ROUNDS, directory=folder)
        write_text(Path(folder) / "experiment.toml", EXPERIMENT)
        return read_files(Path(folder))


@cache
def reference() -> Result:
    """The run without damage."""
    with tempfile.TemporaryDirectory() as folder:
        run(SCAFFOLD, **OFTEN, rounds=DAMAGED_ROUNDS, directory=folder)
        return run(SCAFFOLD, **OFTEN, rounds=ROUNDS, directory=folder, resume=True)


@st.composite
def directories(draw: st.DrawFn) -> dict[str, bytes | str]:
    """Changes of some files: other bytes, or something else in their place.

    About 5 of 150 directories are unchanged. Hypothesis draws depend on the constants of all loaded modules, so that
    the number may also be zero.
    """
    changed = draw(st.lists(st.sampled_from(sorted(intact_files())), max_size=2, unique=True))
    return {name: draw(st.sampled_from(REPLACEMENTS) | damaged(intact_files()[name])) for name in changed}


def build(folder: Path, changes: dict[str, bytes | str]) -> None:
    """Write the run with its damage; links lead to ``victim``, beside the folder."""
    for name, content in intact_files().items():
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
    """Show, report, examine and repair the run; deep: also resume it."""
    with tempfile.TemporaryDirectory() as outer:
        folder, victim = Path(outer) / "run", Path(outer) / "victim"
        folder.mkdir()
        victim.write_text("precious")
        build(folder, changes)
        with suppress(FedraxError):
            read_run(folder)
        with suppress(FedraxError):
            assert page(gather([folder])).endswith("</html>\n")
        before = plain_files(folder)
        with lock_directory(folder, resume=True):
            found = doctor.examine(folder)
            assert plain_files(folder) == before
            doctor.apply_repairs(found)
            again = doctor.examine(folder)
            assert not again.repairs, [repair.description for repair in again.repairs]
        left = list(plain_files(folder).values())
        assert all(content in left for name, content in before.items() if not name.endswith(".part"))
        resumes = False
        if deep:
            with suppress(FedraxError):
                resumed = run(SCAFFOLD, **OFTEN, rounds=ROUNDS, directory=folder, resume=True)
                assert_identical(resumed, reference())
                resumes = True
        assert victim.read_text() == "precious"
        shutil.rmtree(folder)
    return resumes if deep else found.intact


def plain_files(folder: Path) -> dict[str, bytes]:
    """Regular files below a folder, links not followed."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
