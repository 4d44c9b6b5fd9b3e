"""Identity of a run: digests of everything that determines its numbers.

The code of a method and of a task is part of it by the traced programs, that of a participation policy by its bytecode.

A checkpoint stores the identity of its run, and a run is resumed only where its own identity is the same.
"""

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
from fedrax.simulation.persistence.checkpoint import FORMAT
from fedrax.simulation.settings import Script, Settings
from fedrax.tree import Tree
from fedrax.xla import CodeFingerprint, constants_in

_WHOLE = 1 << 28
"""Bytes up to which all of an array is hashed. A larger one may be mapped from disk: only samples of it are hashed."""
_PIECES, _PIECE = 64, 1 << 20
"""Number of samples of a large array, evenly spread, and bytes of each."""
_FREE = ("rounds", "checkpoint_every", "samples", "states", "epsilon_budget")
"""Settings that a resumed run may change."""
_SETTING = "setting "
"""Prefix of the other settings in the identity."""


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
    """The identity of a run. Runs of the same identity have the same numbers on the same devices.

    Args:
        algorithm: the method with its hyper-parameters.
        settings: the run's settings; some of them may differ (see ``_FREE``).
        federation: the data.
        script: the scripted cohorts and local work, if any.
        from_file: the content of the trace file that ``settings.participation`` names; its path does not matter.
        program: the traced round.
        evaluation: the traced evaluation.
        start: the starting parameters.

    Returns:
        A digest for each part, by the part's name.
    """
    given = () if script is None else (str(jax.tree.structure(vars(script))), *jax.tree.leaves(vars(script)))
    if from_file:
        settings = dataclasses.replace(settings, participation=dataclasses.replace(settings.participation, trace=""))
    return {
        **of_data(federation),
        "method": of_method(algorithm),
        **{_SETTING + f.name: _digest([repr(_plain(getattr(settings, f.name)))]) for f in _deciding(settings)},
        f"{_SETTING}script": _digest(given),
        **({"participation trace": _digest(from_file)} if from_file else {}),
        "participation code": _digest([CodeFingerprint(_plain(settings.participation)).describe()]),
        "starting parameters": _digest(jax.tree.leaves(start)),
        "program": _of_programs([program]),
        "evaluation": _digest([evaluation.words, _of_programs(evaluation.programs)]),
    }


def _of_programs(programs: Sequence[ClosedJaxpr]) -> str:
    """A digest of traced programs and their constants."""
    return _digest(part for program in programs for part in (_text(program), *constants_in(program)))


def _deciding(settings: Settings) -> list[dataclasses.Field]:
    """The settings that determine a run's numbers."""
    return [field for field in dataclasses.fields(settings) if field.name not in _FREE]


def _plain(value: Any) -> Any:
    """A setting with NumPy scalars and lists replaced by Python numbers and tuples, whose ``repr`` is stable."""
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
    """The part of the identity that all runs on these data share: versions and a digest of the samples."""
    sets = (*federation.train, *federation.test)
    digest = _digest([*sets, federation.offsets, *jax.tree.leaves(federation.test_offsets)])
    return {"versions": _versions(), "data": digest}


def settings_in(identity: dict[str, str]) -> str:
    """The part of an identity that all runs with the same settings share."""
    return " ".join(digest for name, digest in identity.items() if name.startswith(_SETTING))


def form_of(algorithm: Algorithm) -> str:
    """A digest of the method without its float hyper-parameters, which are inputs of the compiled program."""
    return _digest([_without_places(str(jax.tree.structure(algorithm)))])


def difference(kept: Any, now: dict[str, str]) -> str | None:
    """Describe how a stored identity differs from that of this run; None where they are equal."""
    if not isinstance(kept, dict):
        return "it was written by another version of fedrax"
    if kept.get("versions") != now["versions"]:
        return f"it was computed by {kept.get('versions')}, and here is {now['versions']}"
    differing = [name for name, digest in now.items() if kept.get(name) != digest]
    parts = [name for name in differing if not name.startswith(_SETTING)]
    if settings := [name.removeprefix(_SETTING) for name in differing if name.startswith(_SETTING)]:
        parts.append(f"settings ({', '.join(settings)})")
    differ = "differs" if parts in (["method"], ["participation code"], ["program"], ["evaluation"]) else "differ"
    return f"its {' and '.join(parts)} {differ}" if parts else None


def _versions() -> str:
    """The versions that computed a run; the format tells unreleased versions of one number apart."""
    return f"fedrax {version.VERSION} (format {FORMAT}) with jax {jax.__version__}"


def _text(program: ClosedJaxpr) -> str:
    """The program as text, without the terminal colors that JAX may add."""
    return _without_places(re.sub(r"\x1b\[[0-9;]*m", "", str(program.jaxpr)))


def _without_places(text: str) -> str:
    """The text without memory addresses of Python objects."""
    return re.sub(r"0x[0-9a-f]+", "", text)


def _digest(parts: Iterable[Any]) -> str:
    """A digest of strings, arrays and random keys."""
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
