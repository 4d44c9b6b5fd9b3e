"""The user's own code, named in a file or on the command line: found, trusted or refused, imported.

Importing runs code, and files come from anywhere. So a name in a file may only mean a Python file in the file's own
folder or below, or a package that has registered itself (an entry point of the group ``fedrax``); what is typed on the
command line may lie anywhere. Such a file may import, while it is imported, what lies in its folder. The experiment of
a run's directory, which somebody may have sent, runs no code at all unless this user made it (a keyed digest beside it
says so) or says to trust it.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import importlib.util
import os
import re
import secrets
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
from fedrax.files import MAX_FILE, below, cache_directory, reading, write_text

Trust = Literal["typed", "beside", "none"]
"""Code from anywhere; from the folder of the file that names it and from registered packages; none."""
SEAL = "own-code.seal"
_allowed: set[str] = set()
"""What has been trusted in this process: an experiment is read more than once."""
_modules: set[str] = set()
"""Names of the modules imported here."""
_files: dict[Path, types.ModuleType] = {}
"""Files of own code that have been executed, once each."""
_beside_them: dict[Path, dict[str, types.ModuleType]] = {}
"""By folder, the modules that own code in it has imported from there."""
_importing = threading.RLock()
"""Workers run in threads, and what can be imported is the process's."""
_CALLED = re.compile(r"([\w.<>]+)\(\) (takes|missing|got) ")
"""How Python refuses to call a function with other arguments than it has, before a line of it runs."""
_FRAMES = 4
"""Of the user's own, in a traceback."""


def import_named(name: str, folder: Path, trust: Trust = "beside") -> tuple[str, Any]:
    """What ``path/to/file.py:attribute`` or ``module:attribute`` names, and that name with the path made absolute.

    The path is relative to ``folder``. Importing runs the code; FedraxError for what ``trust`` does not cover.
    """
    source, _, attribute = name.rpartition(":")
    path = below(folder, source) if source.endswith(".py") else None
    source = source if path is None else str(path)
    if source not in _allowed:
        _check_trust(source, path, folder.resolve(), trust)
        _allowed.add(source)
    try:
        module = importlib.import_module(source) if path is None else _import_file(path)
    except FedraxError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
        at = f", line {lines[-1]}," if lines else ""
        raise FedraxError(f"{source}{at} cannot be imported: {type(error).__name__}: {error}.") from error
    _modules.add(module.__name__)
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise unknown(f"name in {source}:", attribute, public)
    return f"{source}:{attribute}", getattr(module, attribute)


def traceback_of(error: BaseException) -> str | None:
    """That the error comes from the user's own code, and where, or None where it does not."""
    modules = [module for name in _modules if (module := sys.modules.get(name)) is not None]
    files = {str(getattr(module, "__file__", None)) for module in modules}
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not own:
        called = _CALLED.match(str(error)) if isinstance(error, TypeError) else None
        theirs = [module for module in modules if called and hasattr(module, called[1].partition(".")[0])]
        return f"your own code ended this, a function in {theirs[0].__file__}: {error}" if theirs else None
    places = "".join(traceback.format_list(own[-_FRAMES:]))
    where = f"{Path(own[-1].filename).name} in line {own[-1].lineno}"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()) if note.startswith("fedrax: "))
    return f"your own code ended this, {where}:\n{places}{type(error).__name__}: {error}{notes}"


def _check_trust(source: str, path: Path | None, folder: Path, trust: Trust) -> None:
    if trust == "typed":
        return
    if trust == "none":
        raise FedraxError(
            f"it runs code of its own, {source}, and was not made by you on this machine: read that code,"
            " then add --trust (fedrax resume)"
        )
    if path is None:
        registered = {point.value.partition(":")[0].partition(".")[0] for point in entry_points(group="fedrax")}
        if source.partition(".")[0] not in registered:
            raise FedraxError(
                f"{source} is not a package that registers an entry point of the group 'fedrax': name a Python file"
                " beside the experiment, or give the name on the command line"
            )
    elif not path.is_relative_to(folder):
        raise FedraxError(f"{path} lies outside of {folder}: move it there, or give the name on the command line")


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """While own code is imported, it can import the modules in its folder.

    Those that code in other folders has imported under the names of some that lie here are set aside for so long.
    """
    others = {name for place, modules in _beside_them.items() if place != folder for name in modules}
    aside = {name: sys.modules.pop(name) for name in others if name in sys.modules and _is_there(name, folder)}
    sys.modules.update(_beside_them.get(folder, {}))
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):  # the code may have done so itself
            sys.path.remove(str(folder))
        new = [name for name in set(sys.modules) - before if _lies_in(name, folder)]
        _modules.update(new)
        _beside_them.setdefault(folder, {}).update((name, sys.modules[name]) for name in new)
        sys.modules.update(aside)


def _is_there(name: str, folder: Path) -> bool:
    """Whether a folder has a module of that name, or of its package's."""
    top = name.partition(".")[0]
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def _lies_in(name: str, folder: Path) -> bool:
    """Whether a module, or the package that it is of, lies in a folder and not further in."""
    module = sys.modules.get(name.partition(".")[0])
    places = [getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ())]
    return any(isinstance(place, str) and Path(place).resolve().parent == folder for place in places)


def _import_file(path: Path) -> types.ModuleType:
    with _importing:
        if path not in _files:
            _files[path] = _executed(path)
        return _files[path]


def _executed(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise FedraxError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"fedrax_own_{abs(hash(path))}", path)
    if spec is None or spec.loader is None:
        raise FedraxError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with _beside(path.parent):
        spec.loader.exec_module(module)
    return module


def seal(directory: Path) -> None:
    """Say that the experiment in ``directory`` is this user's own."""
    write_text(directory / SEAL, _digest(directory) + "\n")


def is_sealed(directory: Path) -> bool:
    """Whether ``seal`` said so of the experiment as it is now."""
    try:
        with reading(directory / SEAL, MAX_FILE) as file:
            kept = file.read().decode("ascii").strip()
    except (FedraxError, OSError, UnicodeDecodeError):
        return False
    return hmac.compare_digest(kept, _digest(directory))


def trust_in(file: Path) -> Trust:
    """Which code an experiment's file may name: none in the directory of a run, unless its user made it here."""
    if file.name != "experiment.toml" or not any(os.path.lexists(file.parent / name) for name in _OF_RUNS):
        return "beside"
    return "typed" if is_sealed(file.parent) else "none"


_OF_RUNS = ("events.jsonl", "checkpoint", "environment.json")


def _digest(directory: Path) -> str:
    with reading(directory / "experiment.toml", MAX_FILE) as file:
        content = os.fsencode(directory.resolve()) + b"\0" + file.read()
    return hmac.new(_key(), content, hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's secret, made once: whole or not at all, for seals of half a key could be made by others."""
    path = cache_directory() / "key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size != _KEY_BYTES:
            _make_key(path)
        key = path.read_bytes()
    except OSError as error:
        raise FedraxError(
            f"cannot keep a key in {path}: {error.strerror or error}; set FEDRAX_CACHE to a folder that can be written"
        ) from error
    if len(key) != _KEY_BYTES:
        raise FedraxError(f"the key {path} is not one that fedrax has made: remove it")
    return key


_KEY_BYTES = 32


def _make_key(path: Path) -> None:
    """Of processes that make one at the same time, the first one's is everybody's."""
    made = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        if path.exists() and path.stat().st_size != _KEY_BYTES:
            os.replace(made, path)  # what a full disk has left
        else:
            with suppress(FileExistsError):
                os.link(made, path)
    finally:
        made.unlink(missing_ok=True)
