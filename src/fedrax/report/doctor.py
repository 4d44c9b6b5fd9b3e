"""Check of a run directory: the state of its files, and repairs. Damaged files are renamed, never deleted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedrax.errors import FedraxError
from fedrax.files import MAX_FILE, atomic_write, open_regular_file
from fedrax.report.runs import directories_of_runs, how_to_resume, read_table
from fedrax.simulation.persistence import checkpoint, client_summary, run_description
from fedrax.simulation.persistence.client_summary import read_client_summary
from fedrax.simulation.persistence.resume import round_of
from fedrax.simulation.persistence.run_description import EXPERIMENT, read_description
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE
from fedrax.simulation.results import events

_MAX_DEPTH = 5
"""Levels below a directory that are searched for runs: comparison, search, method, setting, seed."""


@dataclass(frozen=True)
class FileState:
    """State of one file of a run."""

    name: str
    """The file, relative to the directory."""
    state: str
    """Description of its state."""
    intact: bool
    rounds: int | None = None
    """Number of rounds with intact events, or the round of an intact checkpoint."""
    lines: int = 0
    """Number of intact lines of the events."""


@dataclass(frozen=True)
class Repair:
    """A repair."""

    description: str
    """What it does, in the imperative."""
    apply: Callable[[], None]


@dataclass
class Examination:
    """The states of all files, possible repairs, and whether the run can be resumed."""

    directory: Path
    files: list[FileState] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    conclusion: str = ""
    """Whether and how the run can be resumed."""

    @property
    def intact(self) -> bool:
        """Whether no file is damaged or left over."""
        return not self.repairs and all(file.intact for file in self.files)


def runs_below(directory: Path) -> str:
    """Text that names the first run below a directory, such as that of a comparison; "" if there is none."""
    below = directories_of_runs(directory, ["/".join("*" * depth) for depth in range(1, _MAX_DEPTH + 1)])
    return f"the first of {len(below)} below it is {below[0]}" if below else ""


def is_run_directory(directory: Path) -> bool:
    """Whether a directory has any file of a run, leftovers included."""
    names = (EXPERIMENT, run_description.FILE, events.FILE, CHECKPOINT, FAILURE)
    return any(os.path.lexists(directory / name) for name in names) or any(leftovers(directory))


def examine(directory: Path) -> Examination:
    """Read every byte of the run in ``directory`` without changing it; the caller holds its lock."""
    made = Examination(directory)
    known = _check_experiment(made)
    found = _check_events(made)
    states = {name: _check_checkpoint(made, name, found) for name in (checkpoint.FILE, checkpoint.PREVIOUS)}
    _check_failure(made)
    _check_environment(made)
    _check_clients(made)
    usable = {name: state.rounds for name, state in states.items() if state is not None and state.rounds is not None}
    before = states[checkpoint.PREVIOUS]
    if checkpoint.FILE not in usable and checkpoint.PREVIOUS in usable:
        description = f"restore the previous checkpoint, of round {usable[checkpoint.PREVIOUS]}"
        made.repairs.append(Repair(description, lambda: _restore_previous(directory)))
    elif checkpoint.FILE in usable and before is not None and not before.intact:
        path = directory / CHECKPOINT / checkpoint.PREVIOUS
        made.repairs.append(Repair("rename the damaged previous checkpoint", lambda: _rename_damaged(path)))
    if not found.intact and found.rounds is not None:
        description = f"keep the first {found.lines} lines of {events.FILE}, which are intact"
        made.repairs.append(Repair(description, lambda: _truncate_events(directory, found.lines)))
    for part in leftovers(directory):
        description = f"remove {part.relative_to(directory)}, left by an interrupted write"
        made.repairs.append(Repair(description, part.unlink))
    made.conclusion = _conclusion(directory, known, found.rounds or 0, states, usable)
    return made


def apply_repairs(examination: Examination) -> None:
    """Make all repairs; raises FedraxError for one that fails on disk."""
    for repair in examination.repairs:
        try:
            repair.apply()
        except OSError as error:
            raise FedraxError(f"could not {repair.description}: {error.strerror or error}") from error


def leftovers(directory: Path) -> Iterator[Path]:
    """Temporary files of interrupted writes, which are never complete."""
    for folder in (directory, directory / CHECKPOINT, directory / FAILURE):
        yield from (path for path in sorted(folder.glob(".*.part")) if path.is_symlink() or path.is_file())


# -- state of files -------------------------------------------------------------------------------------------------


def _check_experiment(made: Examination) -> bool:
    """Check experiment.toml and run.json; whether what they describe can be run again."""
    name, described = run_description.FILE, None
    try:
        described = read_description(made.directory)
    except FedraxError as error:
        made.files.append(FileState(name, f"damaged: {error}; resuming the run rewrites it", False))
    by_file = described is None or described.experiment is None or os.path.lexists(made.directory / EXPERIMENT)
    if by_file and described is not None:
        made.files.append(FileState(name, f"intact: {described.runtime}", True))
    name = EXPERIMENT if by_file else name
    if not os.path.lexists(made.directory / name):
        made.files.append(FileState(name, "missing", False))
        return False
    try:
        table = read_table(made.directory)
    except FedraxError as error:
        made.files.append(FileState(name, f"damaged: {error}", False))
        return False
    run = table["run"]
    of = "" if described is None or by_file else f"{described.runtime}, "
    state = f"intact: {of}{table['algorithm'].get('name')}, {run['rounds']} rounds, seed {run['seed']}"
    made.files.append(FileState(name, state, True))
    return True


def _check_events(made: Examination) -> FileState:
    """Check events.jsonl; count the intact events before the first damaged one."""
    rounds: int | None = 0
    lines = 0
    try:
        if not os.path.lexists(made.directory / events.FILE):
            state, intact = "missing: no round has finished", True
        else:
            found, wrong = events.read_whole_events(made.directory)
            lines, rounds, intact = len(found), events.rounds_done(found), wrong is None
            state = f"intact: {rounds} rounds" if wrong is None else f"damaged in line {lines + 1}: {wrong}"
    except FedraxError as error:
        state, intact, rounds = f"damaged: {error}", False, None
    made.files.append(FileState(events.FILE, state, intact, rounds, lines))
    return made.files[-1]


def _digest_until(directory: Path, rounds: int) -> str:
    """The digest of the intact events up to a round."""
    return events.digest_of(events.events_until(events.read_whole_events(directory)[0], rounds))


def _check_checkpoint(made: Examination, name: str, found: FileState) -> FileState | None:
    """Check a checkpoint; ``rounds`` is set if the run can be resumed from it: if all events before it are intact."""
    path, shown = made.directory / CHECKPOINT / name, f"{CHECKPOINT}/{name}"
    if not os.path.lexists(path):
        return None
    try:
        meta = checkpoint.verify(path)
        rounds = round_of(meta, path.parent)
        if rounds > (found.rounds or 0):
            finding = FileState(shown, f"intact: round {rounds}, but events before it are missing", False)
        elif _digest_until(made.directory, rounds) != meta.get("events"):
            finding = FileState(shown, f"intact: round {rounds}, but events before it were changed", False)
        else:
            finding = FileState(shown, f"intact: round {rounds}", True, rounds)
    except checkpoint.CheckpointFormatError as error:
        finding = FileState(shown, f"written by another version: {error}", False)
    except FedraxError as error:
        finding = FileState(shown, f"damaged: {error}", False)
    made.files.append(finding)
    return finding


def _check_failure(made: Examination) -> None:
    """Check the state that a diverged run saved."""
    folder = made.directory / FAILURE
    if not os.path.lexists(folder):
        return
    if not checkpoint.exists(folder):
        made.files.append(FileState(FAILURE, "empty: the disk had no space for the state", True))
        made.repairs.append(Repair(f"rename {FAILURE}, which is empty", lambda: _rename_damaged(folder)))
        return
    try:
        message = str(checkpoint.verify(folder / checkpoint.FILE).get("error"))
    except FedraxError as error:
        made.files.append(FileState(FAILURE, f"damaged: {error}", False))
        made.repairs.append(Repair(f"rename {FAILURE}, so that the run can be shown", lambda: _rename_damaged(folder)))
    else:
        made.files.append(FileState(FAILURE, f"intact: {message}", True))


def _check_environment(made: Examination) -> None:
    """Check environment.json."""
    name = "environment.json"
    if not os.path.lexists(made.directory / name):
        return
    try:
        with open_regular_file(made.directory / name, MAX_FILE) as file:
            known = json.loads(file.read().decode())
        state = f"intact: fedrax {known['fedrax']}, jax {known['jax']}"
        made.files.append(FileState(name, state, True))
    except (FedraxError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        made.files.append(FileState(name, f"damaged: {error}; resuming the run rewrites it", False))


def _check_clients(made: Examination) -> None:
    """Check clients.json."""
    try:
        found = read_client_summary(made.directory)
        if found is not None:
            made.files.append(FileState(client_summary.FILE, f"intact: {found.clients} clients", True))
    except FedraxError as error:
        made.files.append(FileState(client_summary.FILE, f"damaged: {error}; resuming the run rewrites it", False))


def _conclusion(directory: Path, known: bool, written: int, states: dict, usable: dict) -> str:
    """Whether and how the run can be resumed; known: whether the files that describe it are intact."""
    existing = [name for name, state in states.items() if state is not None]
    if not existing and not written:
        return "there is no finished round: run the experiment again"
    if not existing:
        return f"there is no checkpoint: resuming starts from the beginning: {how_to_resume(directory)}"
    if not usable:
        by_file = known and (directory / EXPERIMENT).exists()
        again = f": run it again with fedrax run {directory / EXPERIMENT}" if by_file else ""
        return f"cannot be resumed: no checkpoint is intact with all events before it{again}"
    best = next(iter(usable))
    if not known:
        return "experiment.toml is lost: only the Python program that started the run can resume it (resume=True)"
    first = "" if best == checkpoint.FILE else "with --repair, "
    return f"{first}can be resumed from round {usable[best]}: {how_to_resume(directory)}"


# -- repairs -------------------------------------------------------------------------------------------------------


def _rename_damaged(path: Path) -> None:
    """Rename a damaged file to a free name."""
    if os.path.lexists(path):
        os.rename(path, _free_name(path))


def _free_name(path: Path) -> Path:
    """``path`` with the suffix .damaged, numbered if that exists."""
    number = 1
    while os.path.lexists(renamed := path.with_name(f"{path.name}.damaged{'' if number == 1 else f'-{number}'}")):
        number += 1
    return renamed


def _restore_previous(directory: Path) -> None:
    """Replace the last checkpoint by the previous one; can be repeated after an interruption."""
    _rename_damaged(directory / CHECKPOINT / checkpoint.FILE)
    os.rename(directory / CHECKPOINT / checkpoint.PREVIOUS, directory / CHECKPOINT / checkpoint.FILE)


def _truncate_events(directory: Path, lines: int) -> None:
    """Keep the first lines of the events, and a copy of the whole damaged file."""
    path = directory / events.FILE
    with open_regular_file(path) as file:
        kept = [file.readline() for _ in range(lines)]
    with open_regular_file(path) as file, atomic_write(_free_name(path)) as copy:
        shutil.copyfileobj(file, copy)
    with atomic_write(path) as file:
        file.writelines(kept)
