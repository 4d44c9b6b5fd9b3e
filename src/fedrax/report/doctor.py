"""What a run's directory holds, what of it is damaged, and what can be saved. Nothing is ever thrown away."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedrax.errors import FedraxError
from fedrax.files import MAX_FILE, reading, replacing
from fedrax.report.runs import read_experiment
from fedrax.simulation.persistence import checkpoint, client_summary
from fedrax.simulation.persistence.client_summary import read_client_summary
from fedrax.simulation.persistence.resume import round_of
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE
from fedrax.simulation.results import events

_DEEPEST = 5
"""Folders between a run and the folder that is looked through for it: a comparison's, search, method, setting, seed."""


@dataclass(frozen=True)
class FileState:
    """What was found of a file."""

    name: str
    """The file, relative to the directory."""
    state: str
    """In words."""
    sound: bool
    rounds: int | None = None
    """Of events and checkpoints: how many are whole."""


@dataclass(frozen=True)
class Remedy:
    """What can be done, and doing it."""

    words: str
    act: Callable[[], None]


@dataclass
class Examination:
    """All findings, what helps, and whether the run can go on."""

    directory: Path
    findings: list[FileState] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)
    verdict: str = ""

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged or left over."""
        return not self.remedies and all(finding.sound for finding in self.findings)


def runs_below(directory: Path) -> str:
    """Where runs lie in a directory of several, such as a comparison's, in words."""
    depths = ("/".join("*" * depth) for depth in range(1, _DEEPEST + 1))
    below = sorted(path.parent for depth in depths for path in directory.glob(f"{depth}/experiment.toml"))
    return f"the first of {len(below)} below it is {below[0]}" if below else ""


def of_run(directory: Path) -> bool:
    """Whether anything of a run lies in the directory, the least of it included."""
    names = ("experiment.toml", events.FILE, CHECKPOINT, FAILURE)
    return any(os.path.lexists(directory / name) for name in names) or any(leftovers(directory))


def examine(directory: Path) -> Examination:
    """Read every byte of the run in ``directory`` and change nothing; the caller holds its lock."""
    made = Examination(directory)
    table = _experiment(made)
    found = _events(made)
    states = {name: _checkpoint(made, name, found) for name in (checkpoint.FILE, checkpoint.PREVIOUS)}
    _failure(made)
    _environment(made)
    _clients(made)
    usable = {name: state.rounds for name, state in states.items() if state is not None and state.rounds is not None}
    before = states[checkpoint.PREVIOUS]
    if checkpoint.FILE not in usable and checkpoint.PREVIOUS in usable:
        words = f"go back to the checkpoint before, of round {usable[checkpoint.PREVIOUS]}"
        made.remedies.append(Remedy(words, lambda: _go_back(directory)))
    elif checkpoint.FILE in usable and before is not None and not before.sound:
        path = directory / CHECKPOINT / checkpoint.PREVIOUS
        made.remedies.append(Remedy("set the damaged checkpoint before aside", lambda: _set_aside(path)))
    if not found.sound and found.rounds is not None:
        words = f"keep the first {found.rounds} lines of {events.FILE}, which are whole"
        made.remedies.append(Remedy(words, lambda: _cut(directory, found.rounds or 0)))
    for part in leftovers(directory):
        words = f"remove {part.relative_to(directory)}, which a write cut short has left"
        made.remedies.append(Remedy(words, part.unlink))
    made.verdict = _verdict(directory, table is not None, found.rounds or 0, states, usable)
    return made


def save(examination: Examination) -> None:
    """Do all that helps; damaged files are kept under another name. FedraxError where the disk does not let it."""
    for remedy in examination.remedies:
        try:
            remedy.act()
        except OSError as error:
            raise FedraxError(f"could not {remedy.words}: {error.strerror or error}") from error


def leftovers(directory: Path) -> Iterator[Path]:
    """What writes that were cut short have left: never the whole of anything."""
    for folder in (directory, directory / CHECKPOINT, directory / FAILURE):
        yield from (path for path in sorted(folder.glob(".*.part")) if path.is_symlink() or path.is_file())


# -- findings ------------------------------------------------------------------------------------------------------


def _experiment(made: Examination) -> dict | None:
    name = "experiment.toml"
    if not os.path.lexists(made.directory / name):
        made.findings.append(FileState(name, "missing", False))
        return None
    try:
        table = read_experiment(made.directory)
    except FedraxError as error:
        made.findings.append(FileState(name, f"damaged: {error}", False))
        return None
    words = f"whole: {table['algorithm'].get('name')}, {table['run']['rounds']} rounds, seed {table['run']['seed']}"
    made.findings.append(FileState(name, words, True))
    return table


def _events(made: Examination) -> FileState:
    """How many lines are events."""
    rounds: int | None = 0
    try:
        if not os.path.lexists(made.directory / events.FILE):
            words, sound = "missing: no round is over", True
        else:
            found, wrong = events.read_whole_events(made.directory)
            rounds, sound = len(found), wrong is None
            words = f"whole: {rounds} rounds" if wrong is None else f"damaged in line {rounds + 1}: {wrong}"
    except FedraxError as error:
        words, sound, rounds = f"damaged: {error}", False, None
    made.findings.append(FileState(events.FILE, words, sound, rounds))
    return made.findings[-1]


def _checkpoint(made: Examination, name: str, found: FileState) -> FileState | None:
    """A checkpoint, which has rounds where the run can go on from it: where the events before it are there, too."""
    path, shown = made.directory / CHECKPOINT / name, f"{CHECKPOINT}/{name}"
    if not os.path.lexists(path):
        return None
    try:
        meta = checkpoint.verify(path)
        rounds = round_of(meta, path.parent)
        if rounds > (found.rounds or 0):
            finding = FileState(shown, f"whole: round {rounds}, but the events before it are not all there", False)
        elif events.digest_of(events.read_whole_events(made.directory)[0][:rounds]) != meta.get("events"):
            finding = FileState(shown, f"whole: round {rounds}, but the events before it have been changed", False)
        else:
            finding = FileState(shown, f"whole: round {rounds}", True, rounds)
    except checkpoint.CheckpointFormatError as error:
        finding = FileState(shown, f"another version's: {error}", False)
    except FedraxError as error:
        finding = FileState(shown, f"damaged: {error}", False)
    made.findings.append(finding)

    return finding


def _failure(made: Examination) -> None:
    folder = made.directory / FAILURE
    if not os.path.lexists(folder):
        return
    aside = lambda: _set_aside(folder)  # noqa: E731
    if not checkpoint.exists(folder):
        made.findings.append(FileState(FAILURE, "empty: there was no room for the state", True))
        made.remedies.append(Remedy(f"set {FAILURE} aside, in which nothing is", aside))
        return
    try:
        said = str(checkpoint.verify(folder / checkpoint.FILE).get("error"))
    except FedraxError as error:
        made.findings.append(FileState(FAILURE, f"damaged: {error}", False))
        made.remedies.append(Remedy(f"set {FAILURE} aside, so that the run can be shown", aside))
    else:
        made.findings.append(FileState(FAILURE, f"whole: {said}", True))


def _environment(made: Examination) -> None:
    name = "environment.json"
    if not os.path.lexists(made.directory / name):
        return
    try:
        with reading(made.directory / name, MAX_FILE) as file:
            known = json.loads(file.read().decode())
        words = f"whole: fedrax {known['fedrax']}, jax {known['jax']}"
        made.findings.append(FileState(name, words, True))
    except (FedraxError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        made.findings.append(FileState(name, f"damaged: {error}; resuming writes it again", False))


def _clients(made: Examination) -> None:
    try:
        found = read_client_summary(made.directory)
        if found is not None:
            made.findings.append(FileState(client_summary.FILE, f"whole: {found.clients} clients", True))
    except FedraxError as error:
        made.findings.append(FileState(client_summary.FILE, f"damaged: {error}; resuming writes it again", False))


def _verdict(directory: Path, known: bool, written: int, states: dict, usable: dict) -> str:
    there = [name for name, finding in states.items() if finding is not None]
    if not there and not written:
        return "no round has been kept: run it anew"
    if not there:
        return f"no checkpoint was kept: resuming it begins again: fedrax resume {directory}"
    if not usable:
        again = f": run it anew with fedrax run {directory / 'experiment.toml'}" if known else ""
        return f"it cannot go on: no checkpoint is whole with all events before it{again}"
    best = next(iter(usable))
    if not known:
        return "its experiment is lost: it can go on from the program that made it alone (resume=True)"
    first = "" if best == checkpoint.FILE else "with --save, "
    return f"{first}it can go on from round {usable[best]}: fedrax resume {directory}"


# -- remedies ------------------------------------------------------------------------------------------------------


def _set_aside(path: Path) -> None:
    """Give the damaged file a name of its own."""
    if os.path.lexists(path):
        os.rename(path, _free(path))


def _free(path: Path) -> Path:
    """A name for the damaged file that nothing has."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged{'' if number == 1 else f'-{number}'}")):
        number += 1
    return aside


def _go_back(directory: Path) -> None:
    """The previous checkpoint takes the place of the last one. Cut short in between, it can be done again."""
    _set_aside(directory / CHECKPOINT / checkpoint.FILE)
    os.rename(directory / CHECKPOINT / checkpoint.PREVIOUS, directory / CHECKPOINT / checkpoint.FILE)


def _cut(directory: Path, lines: int) -> None:
    """Keep the first lines of the events; all of them stay beside."""
    path = directory / events.FILE
    with reading(path) as file:
        whole = [file.readline() for _ in range(lines)]
    with reading(path) as file, replacing(_free(path)) as aside:
        shutil.copyfileobj(file, aside)
    with replacing(path) as file:
        file.writelines(whole)
