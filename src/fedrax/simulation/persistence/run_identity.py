"""What decides a run's numbers, by which a checkpoint is known again: a digest of each part."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from fedrax import version
from fedrax.contract.algorithm import Algorithm
from fedrax.data import Federation
from fedrax.simulation.evaluation import TracedEvaluation
from fedrax.simulation.settings import Script, Settings
from fedrax.tree import Tree
from fedrax.xla import constants_in

_WHOLE = 1 << 28
"""Bytes of an array that are read as they are; of a larger one, which may lie on disk, pieces spread over all of it."""
_PIECES, _PIECE = 64, 1 << 20
_FREE = ("rounds", "checkpoint_every", "samples", "states", "epsilon_budget")
"""Settings that a resumed run may change."""
_SETTING = "setting "
"""Before the names of the others."""


def identify(
    algorithm: Algorithm,
    settings: Settings,
    federation: Federation,
    script: Script | None,
    from_file: Sequence[np.ndarray],
    program: ClosedJaxpr,
    evaluation: TracedEvaluation,
    start: Tree,
) -> dict[str, str]:
    """A digest by what it is of. Equal ones mean equal numbers, on equal devices.

    from_file: what the file holds that the settings name for who takes part; where it lies decides nothing.
    """
    given = () if script is None else (str(jax.tree.structure(vars(script))), *jax.tree.leaves(vars(script)))
    if from_file:
        settings = dataclasses.replace(settings, participation=dataclasses.replace(settings.participation, trace=""))
    return {
        **of_data(federation),
        "method": of_method(algorithm),
        **{_SETTING + f.name: _digest([repr(_plain(getattr(settings, f.name)))]) for f in _deciding(settings)},
        f"{_SETTING}script": _digest(given),
        **({"trace of who takes part": _digest(from_file)} if from_file else {}),
        "starting parameters": _digest(jax.tree.leaves(start)),
        "program": _of_programs([program]),
        "evaluation": _digest([evaluation.words, _of_programs(evaluation.programs)]),
    }


def _of_programs(programs: Sequence[ClosedJaxpr]) -> str:
    return _digest(part for program in programs for part in (_text(program), *constants_in(program)))


def _deciding(settings: Settings) -> list[dataclasses.Field]:
    """Those that decide a run's numbers."""
    return [field for field in dataclasses.fields(settings) if field.name not in _FREE]


def _plain(value: Any) -> Any:
    """A setting of Python's own numbers and tuples, whatever somebody has counted with."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def of_method(algorithm: Algorithm) -> str:
    """A digest of a method and its hyper-parameters."""
    return _digest([_without_places(repr(algorithm)), *jax.tree.leaves(algorithm)])


def of_data(federation: Federation) -> dict[str, str]:
    """The part that all runs on these samples share."""
    sets = (*federation.train, *federation.test)
    digest = _digest([*sets, federation.offsets, *jax.tree.leaves(federation.test_offsets)])
    return {"versions": _versions(), "data": digest}


def settings_in(identity: dict[str, str]) -> str:
    """The part that all runs with these settings share."""
    return " ".join(digest for name, digest in identity.items() if name.startswith(_SETTING))


def form_of(algorithm: Algorithm) -> str:
    """A digest of the method but for its floats, which are inputs of its program."""
    return _digest([_without_places(str(jax.tree.structure(algorithm)))])


def difference(kept: Any, now: dict[str, str]) -> str | None:
    """What a checkpoint's identity differs in, in words; None if in nothing."""
    if not isinstance(kept, dict):
        return "it was written by another version of fedrax"
    if kept.get("versions") != now["versions"]:
        return f"it was computed by {kept.get('versions')}, and here is {now['versions']}"
    differing = [name for name, digest in now.items() if kept.get(name) != digest]
    parts = [name for name in differing if not name.startswith(_SETTING)]
    if settings := [name.removeprefix(_SETTING) for name in differing if name.startswith(_SETTING)]:
        parts.append(f"settings ({', '.join(settings)})")
    differ = "differs" if parts in (["method"], ["program"], ["evaluation"]) else "differ"
    return f"its {' and '.join(parts)} {differ}" if parts else None


def _versions() -> str:
    return f"fedrax {version.VERSION} with jax {jax.__version__}"


def _text(program: ClosedJaxpr) -> str:
    """The program as text, without the colors that it has on a terminal."""
    return _without_places(re.sub(r"\x1b\[[0-9;]*m", "", str(program.jaxpr)))


def _without_places(text: str) -> str:
    """The text without the places of Python objects in memory."""
    return re.sub(r"0x[0-9a-f]+", "", text)


def _digest(parts: Iterable[Any]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, str):
            made.update(part.encode())
            continue
        is_key = isinstance(part, jax.Array) and jnp.issubdtype(part.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(part) if is_key else part)
        made.update(f"{array.dtype}{array.shape}".encode())
        if array.nbytes <= _WHOLE:
            made.update(np.ascontiguousarray(array).data if array.size else b"")
            continue
        rows = np.unique(np.linspace(0, len(array) - 1, _PIECES).astype(int))
        size = max(1, _PIECE * len(array) // array.nbytes)
        for row in rows:
            made.update(np.ascontiguousarray(array[row : row + size]).data)
    return made.hexdigest()
