"""Import of user code that a file or the command line names, if it is trusted.

Importing runs code, and experiment files may come from other users. A name in a file may therefore only refer to a
Python file in the folder of that file or below, or to a package that registers an entry point of the group ``fedrax``.
A name on the command line may refer to any file. While a file is imported, it can import the modules in its folder. The
experiment of a run directory imports no code without ``--trust``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from fedrax.errors import FedraxError, unknown
from fedrax.files import resolve_path

Trust = Literal["typed", "beside", "none"]
"""typed: code from anywhere. beside: from the folder of the file and from registered packages. none: no code."""
RUN_FILES = ("events.jsonl", "checkpoint", "environment.json")
"""Files beside experiment.toml by which a run directory is recognized."""
_allowed: set[str] = set()
"""Code that has been trusted in this process, since an experiment may be read several times."""
_modules: set[str] = set()
"""Names of the modules of user code."""
_executed_files: dict[Path, types.ModuleType] = {}
"""Modules of executed files, each executed once."""
_folder_modules: dict[Path, dict[str, types.ModuleType]] = {}
"""Modules that user code has imported from its own folder, by folder."""
_importing = threading.RLock()
"""Workers run in threads, and ``sys.path`` belongs to the process."""
_CALLED = re.compile(r"([\w.<>]+)\(\) (takes|missing|got) ")
"""Python's message for a call with wrong arguments, which has no frame in the called function."""
_FRAMES = 4
"""Frames of user code shown in a traceback."""


def import_named(name: str, folder: Path, trust: Trust = "beside") -> tuple[str, Any]:
    """Import ``path/to/file.py:attribute`` or ``module:attribute``.

    Args:
        name: The name; a path is relative to ``folder``.
        folder: Folder of the file that names the code.
        trust: Which code may run.

    Returns:
        The name with an absolute path, and the object.

    Raises:
        FedraxError: For code that ``trust`` does not cover or that cannot be imported.
    """
    source, _, attribute = name.rpartition(":")
    path = resolve_path(folder, source) if source.endswith(".py") else None
    source = source if path is None else str(path)
    if source not in _allowed:
        _check_trust(source, path, folder.resolve(), trust)
        _allowed.add(source)
    try:
        module = importlib.import_module(source) if path is None else _import_file(path)
    except FedraxError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
        at = f", line {lines[-1]}," if lines else ""
        raise FedraxError(f"{source}{at} cannot be imported: {type(error).__name__}: {error}.") from error
    _modules.add(module.__name__)
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise unknown(f"name in {source}:", attribute, public)
    return f"{source}:{attribute}", getattr(module, attribute)


def files_imported_by(folder: Path) -> list[Path]:
    """The files that user code in a folder has imported from it so far."""
    found = [getattr(module, "__file__", None) for module in _folder_modules.get(folder, {}).values()]
    return [Path(file) for file in found if isinstance(file, str) and Path(file).is_relative_to(folder)]


def was_executed(file: Path) -> bool:
    """Whether a file is user code that this process has executed."""
    return file.resolve() in {path.resolve() for path in _executed_files}


def was_imported() -> bool:
    """Whether this process has imported user code."""
    return bool(_modules)


def traceback_of(error: BaseException) -> str | None:
    """A message with the place in user code where an error was raised; None where it was raised elsewhere."""
    modules = [module for name in _modules if (module := sys.modules.get(name)) is not None]
    files = {str(getattr(module, "__file__", None)) for module in modules}
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not own:
        called = _CALLED.match(str(error)) if isinstance(error, TypeError) else None
        theirs = [module for module in modules if called and hasattr(module, called[1].partition(".")[0])]
        return f"your code raised an error, a function in {theirs[0].__file__}: {error}" if theirs else None
    places = "".join(traceback.format_list(own[-_FRAMES:]))
    where = f"{Path(own[-1].filename).name} in line {own[-1].lineno}"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()) if note.startswith("fedrax: "))
    return f"your code raised an error, {where}:\n{places}{type(error).__name__}: {error}{notes}"


def _check_trust(source: str, path: Path | None, folder: Path, trust: Trust) -> None:
    """Raise FedraxError for code that is not trusted."""
    if trust == "typed":
        return
    if trust == "none":
        raise FedraxError(
            f"the experiment of a run directory names code, {source}, that may be of another user: read it, then add"
            " --trust to fedrax resume, or copy experiment.toml into the folder of the code and run that file"
        )
    if path is None:
        registered = {point.value.partition(":")[0].partition(".")[0] for point in entry_points(group="fedrax")}
        if source.partition(".")[0] not in registered:
            raise FedraxError(
                f"{source} is not a package that registers an entry point of the group 'fedrax': name a Python file"
                " beside the experiment, or give the name on the command line"
            )
    elif not path.is_relative_to(folder):
        raise FedraxError(f"{path} is outside of {folder}: move it there, or give the name on the command line")


@contextmanager
def _folder_importable(folder: Path) -> Iterator[None]:
    """Let user code import the modules in its folder while it is imported.

    Modules of other folders with the same names are removed from ``sys.modules`` meanwhile.
    """
    others = {name for place, modules in _folder_modules.items() if place != folder for name in modules}
    aside = {name: sys.modules.pop(name) for name in others if name in sys.modules and _has_module(name, folder)}
    sys.modules.update(_folder_modules.get(folder, {}))
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):  # the code may have removed it
            sys.path.remove(str(folder))
        new = [name for name in set(sys.modules) - before if _is_in(name, folder)]
        _modules.update(new)
        _folder_modules.setdefault(folder, {}).update((name, sys.modules[name]) for name in new)
        sys.modules.update(aside)


def _has_module(name: str, folder: Path) -> bool:
    """Whether a folder has a module of this name, or its package."""
    top = name.partition(".")[0]
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def _is_in(name: str, folder: Path) -> bool:
    """Whether a module, or its package, is directly in a folder."""
    module = sys.modules.get(name.partition(".")[0])
    places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
    return any(isinstance(place, str) and Path(place).resolve().parent == folder for place in places)


def _import_file(path: Path) -> types.ModuleType:
    """Import a file, or return the module if it was imported before."""
    with _importing:
        if path not in _executed_files:
            _executed_files[path] = _executed(path)
        return _executed_files[path]


def _executed(path: Path) -> types.ModuleType:
    """Execute a file as a module."""
    if not path.is_file():
        raise FedraxError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"fedrax_own_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise FedraxError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with _folder_importable(path.parent):
        spec.loader.exec_module(module)
    return module


def trust_in(file: Path) -> Trust:
    """Which code an experiment's file may name: none in a run directory, which may come from another user.

    A run directory is recognized by the name of the file and the files beside it.
    """
    in_run = file.name == "experiment.toml" and any(os.path.lexists(file.parent / name) for name in RUN_FILES)
    return "none" if in_run else "beside"
