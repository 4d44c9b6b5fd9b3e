"""What goes wrong inside a method's own code, as a sentence that names the place and what to write instead."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from fedrax.errors import FedraxError
from fedrax.xla import is_library_code

_SENTENCES = {
    jax.errors.TracerBoolConversionError: "asks for the truth of a traced value: use jnp.where or jax.lax.cond"
    " instead of if, and, or, while",
    jax.errors.TracerArrayConversionError: "hands a traced value to NumPy: use jax.numpy",
    jax.errors.TracerIntegerConversionError: "uses a traced value as a Python index or size: use jnp.take, or a static"
    " field",
    jax.errors.NonConcreteBooleanIndexError: "takes entries by a traced condition, and their number is known only when"
    " the program runs: use jnp.where",
    jax.errors.ConcretizationTypeError: "needs a value that is known only when the program runs: annotate the field"
    " as int, compute with jax.numpy, and show numbers as info",
    jax.errors.UnexpectedTracerError: "keeps a traced value outside of the function that made it: return it as state;"
    " and take local steps, local.run(...), outside of jax.lax.cond, scan and vmap",
}
"""What JAX refuses to trace; of a kind and a kind of it the latter first."""
_HINTS = {
    r"pytree structure error|^\w*Error: (Expected|Mismatch|Tuple arity|List arity|Dict key)": "both trees need the same"
    " keys, and what the server adds up is uploaded so, such as tree.sub(result.params, message)",
    r"operand type.*'(dict|tuple|list|NoneType)'|requires ndarray or scalar": "a model's numbers are a tree: use"
    " tree.add, tree.sub and tree.scale of fedrax, or jax.tree.map",
    r"branch(es)? (outputs )?must": "return the same keys, shapes and types from all branches",
    r"carry input and carry output|carry component": "return from the loop's body what it begins with, of the same"
    " keys, shapes and types, such as jnp.float32(0) for 0",
    r"incompatible shapes|contracting dimensions|broadcast": "give both the same shapes",
    r"^TypeError: tuple indices must be": "what no client sends, or the server does not send, is an empty tuple",
    r"immutable": "write x.at[i].set(y)",
    r"cannot assign to field|can't set attribute": "return what changes as a new state, state._replace(...)",
    r"ClientOutput\.__new__": "write ClientOutput(upload=..., state=..., info=..., each=..., total=...)",
    r"^KeyError": "cohort.mean has the keys of the upload, the message those that broadcast gives it",
}
"""What to write instead of what fails with such words."""
_CARRY = re.compile(r"input carry (?:component )?(\S+) has type (\S+) but the corresponding .* has type (\S+?),? ")
"""Where a loop's body returns something else than it begins with, what."""
_FUNCTIONS = ("init", "init_client", "broadcast", "client", "receive", "server", "personal")


class OwnCodeError(FedraxError):
    """A method's own code failed, which may be for what it was given."""


def in_words(error: BaseException) -> str | None:
    """What JAX refuses to trace, and what to write instead; None for any other error."""
    return next((text for kind, text in _SENTENCES.items() if isinstance(error, kind)), None)


@contextmanager
def explained(algorithm: Any) -> Iterator[None]:
    """Raise errors of a method's code as FedraxError with the file, the line and a remedy.

    For methods of the library only what JAX cannot trace is translated; for user code every error is.
    """
    try:
        yield
    except (FedraxError, jax.errors.JaxRuntimeError, MemoryError):
        raise
    except Exception as error:
        words = in_words(error)
        if words is not None:
            raise FedraxError(f"{_place(algorithm, error)} {words}") from error
        if not _is_own(algorithm):
            raise
        raise OwnCodeError(f"{_place(algorithm, error)} {_failure(error)}") from error


@contextmanager
def noted(algorithm: Any, broken: list[FedraxError]) -> Iterator[None]:
    """What goes wrong is put into ``broken``, for others to be looked for.

    Where something was broken before, what follows from it is not known: of errors, only those that the rules name.
    """
    try:
        with explained(algorithm):
            yield
    except FedraxError as error:
        if not (broken and isinstance(error, OwnCodeError)):
            broken.append(error)
    except Exception:
        if not broken:
            raise


def refuse(broken: list[FedraxError]) -> None:
    """Raise what was noted, a line each."""
    if len(broken) == 1:
        raise broken[0]
    if broken:
        raise FedraxError("\n".join(dict.fromkeys(map(str, broken)))) from broken[0]


def _failure(error: Exception) -> str:
    """The error's first line, and what to write instead where that is known."""
    said = f"{type(error).__name__}: {error}".strip().split("\n")[0].rstrip(".:")
    hint = next((hint for words, hint in _HINTS.items() if re.search(words, said)), None)
    keys = re.findall(r"with metadata\s+(\(.*\))", str(error))
    if len(keys) == 2:
        said = f"{said} ({keys[0]} and {keys[1]})"
    if carry := _CARRY.search(str(error)):
        said = f"{said} ({carry[1]} begins as {carry[2]} and ends as {carry[3]})"
    if isinstance(error, AttributeError) and error.name is not None:
        near = difflib.get_close_matches(error.name, dir(error.obj), 1)
        hint = f"did you mean {near[0]!r}?" if near else hint
    return f"fails with {said}" + (f": {hint}" if hint else "")


def _is_own(config: Any) -> bool:
    """Whether a method, or a part of it, is of a class of the user's own."""
    if not type(config).__module__.startswith("fedrax."):
        return True
    parts = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return any(_is_own(part) for part in parts if dataclasses.is_dataclass(part))


def _place(algorithm: Any, error: Exception) -> str:
    """Where an error arose: 'Mine (file.py, line 12, in client)', the last frame in the file of the method.

    'your code' stands for other user code, such as a model.
    """
    name, frames = type(algorithm).__name__, traceback.extract_tb(error.__traceback__)
    try:
        file = inspect.getfile(type(algorithm))
    except (TypeError, OSError):
        file = ""
    own = own_frame(error)
    if own is not None and own.filename != file:
        name, file = "your code", own.filename
    mine = [frame for frame in frames if frame.filename == file]
    if mine:
        return f"{name} ({Path(file).name}, line {mine[-1].lineno}, in {mine[-1].name})"
    inside = [frame.name for frame in frames if frame.name in _FUNCTIONS]
    return f"{name}.{inside[-1]}" if inside else name


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The last place on an error's way that lies in code of the user's own, in no package."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next(
        (frame for frame in frames if not (is_library_code(frame.filename) or frame.filename.startswith("<"))), None
    )
