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

from fedrax import tree, version
from fedrax.config.annotations import fields_of
from fedrax.contract.algorithm import Algorithm
from fedrax.data import Federation
from fedrax.escaping import printable_line
from fedrax.inputs import by_key
from fedrax.participation.policy import ParticipationPolicy
from fedrax.simulation.evaluation import TracedEvaluation
from fedrax.simulation.persistence.checkpoint import FORMAT
from fedrax.simulation.settings import Script, Settings
from fedrax.tree import Tree
from fedrax.xla import CodeFingerprint, constants_in

_WHOLE = 1 << 28
"""Bytes up to which all of an array is hashed. A larger one may be mapped from disk: only samples of it are hashed."""
_PIECES, _PIECE = 64, 1 << 20
"""Number of samples of a large array, evenly spread, and bytes of each."""
_FREE = ("rounds", "eval_every", "eval_first", "checkpoint_every", "samples", "states", "epsilon_budget")
"""Settings that a resumed run may change."""
_SETTING, _OPTION = "setting ", "option "
"""Prefixes of the other settings, and of the hyper-parameters of the method, in the identity."""
_FOLLOWING = ("starting parameters", "program", "evaluation")
"""Parts that follow from the others. Alone they differ where other parameters are given, or the code is changed."""
_DIGEST = re.compile(r"\b[0-9a-f]{32}\b")
_READABLE = 60
"""Most characters of a value that the identity stores as text; of a longer one it stores a digest."""


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
        For each part, by its name, a digest; of settings and hyper-parameters their values as text.
    """
    given = () if script is None else (str(jax.tree.structure(vars(script))), *jax.tree.leaves(vars(script)))
    if from_file:
        settings = dataclasses.replace(settings, participation=dataclasses.replace(settings.participation, trace=""))
    plain = _plain(settings)
    return {
        **of_data(federation),
        **of_method(algorithm),
        **{_SETTING + f.name: _text_of(getattr(plain, f.name)) for f in _deciding(plain)},
        f"{_SETTING}script": _digest(given),
        **({"participation trace": _digest(from_file)} if from_file else {}),
        **of_participation(plain.participation),
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
    """A setting with numbers as Python's of the field's type, and lists as tuples: what has one ``repr``."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {name: field.python_value(getattr(value, name)) for name, field in fields_of(type(value)).items()}
        return dataclasses.replace(value, **{name: _plain(item) for name, item in items.items()})
    return value


def of_method(algorithm: Algorithm) -> dict[str, str]:
    """The part of the identity about the method: a digest, and its hyper-parameters as text to show what differs."""
    digest = _digest([_without_places(repr(algorithm)), *jax.tree.leaves(algorithm)])
    return {"method": digest, **{_OPTION + path: text for path, text in _options(algorithm).items()}}


def of_frozen(frozen: Tree) -> str:
    """A digest of frozen parameters with their names; empty without any."""
    leaves = jax.tree.leaves(frozen)
    return _digest([*tree.leaf_names(frozen), *leaves]) if leaves else ""


def _options(config: Any, path: str = "") -> dict[str, str]:
    """The class of a method and its hyper-parameters as text by their paths, those of nested objects included."""
    found = {path or "class": type(config).__name__}
    for field in dataclasses.fields(config):
        value, inside = getattr(config, field.name), f"{path}.{field.name}" if path else field.name
        nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        found |= _options(value, inside) if nested else {inside: _text_of(value)}
    return found


def _text_of(value: Any) -> str:
    """A value as text; a digest of a long text."""
    text = _without_places(repr(value))
    return text if len(text) <= _READABLE else _digest([text])


def of_participation(policy: ParticipationPolicy) -> dict[str, str]:
    """The part of the identity about the participation policy: its fields as text, and a digest of its code."""
    plain = _plain(policy)
    code = _digest([CodeFingerprint(plain).describe()])
    return {f"{_SETTING}participation": _text_of(plain), "participation code": code}


def of_data(federation: Federation) -> dict[str, str]:
    """The part of the identity that all runs on these data share: versions and a digest of the samples."""
    sets = [*federation.train.arrays, *federation.test.arrays, *by_key(federation.train.x)]
    digest = _digest([*sets, federation.offsets, *jax.tree.leaves(federation.test_offsets)])
    return {"versions": _versions(), "data": digest}


def settings_in(identity: dict[str, str]) -> str:
    """The part of an identity that all runs with the same settings share."""
    return _digest(f"{text} " for name, text in identity.items() if name.startswith(_SETTING))


def form_of(algorithm: Algorithm) -> str:
    """A digest of the method without its float hyper-parameters, which are inputs of the compiled program."""
    return _digest([_without_places(str(jax.tree.structure(algorithm)))])


def difference(kept: Any, now: dict[str, str]) -> str | None:
    """Describe how a stored identity differs from that of this run; None where they are equal."""
    if not isinstance(kept, dict):
        return "it was written by another version of fedrax"
    if kept.get("versions") != now.get("versions"):
        return f"it was computed by {kept.get('versions')}, and here is {now['versions']}"
    differing = {name: _both(kept.get(name, "unset"), value) for name, value in now.items() if kept.get(name) != value}
    parts = {name: both for name, both in differing.items() if not name.startswith((_SETTING, _OPTION))}
    for kind, part in ((_OPTION, "method"), (_SETTING, "settings")):
        names = [name for name in differing if name.startswith(kind)]
        if kind == _OPTION:  # others are of another class, which differs as well
            names = [name for name in names if name in kept and part in parts]
        if names:
            parts[part] = "; ".join(f"{name.removeprefix(kind)} {differing[name]}".strip() for name in names)
    if parts.keys() - set(_FOLLOWING):
        parts = {name: both for name, both in parts.items() if name not in _FOLLOWING}
    differ = "differ" if len(parts) > 1 or parts.keys() & {"data", "settings", "starting parameters"} else "differs"
    named = " and ".join(f"{name} ({both})" if both else name for name, both in parts.items())
    return f"its {named} {differ}" if parts else None


def _both(before: object, here: str) -> str:
    """Both values of a part of an identity; empty for digests."""
    texts = [printable_line(f"{value!s:.{_READABLE}}") for value in (before, here)]
    return "" if any(map(_DIGEST.search, texts)) else ", and here ".join(texts)


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
            made.update(_bytes_of(array))
            continue
        rows = np.unique(np.linspace(0, len(array) - 1, _PIECES).astype(int))
        size = max(1, _PIECE * len(array) // array.nbytes)
        for row in rows:
            made.update(_bytes_of(array[row : row + size]))
    return made.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of an array: one of bfloat16 is no buffer."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
