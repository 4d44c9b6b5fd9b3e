"""Errors in user code, translated into messages with the file, the line and a remedy."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedrax.errors import FedraxError
from fedrax.xla import is_library_code

_TRACING_ERRORS = {
    jax.errors.TracerBoolConversionError: "asks for the truth of a traced value: use jnp.where or jax.lax.cond"
    " instead of if, and, or, while",
    jax.errors.TracerArrayConversionError: "passes a traced value to NumPy: use jax.numpy",
    jax.errors.TracerIntegerConversionError: "uses a traced value as a Python index or size: use jnp.take, or a static"
    " field",
    jax.errors.NonConcreteBooleanIndexError: "indexes by a traced Boolean array, whose result has an unknown size:"
    " use jnp.where",
    jax.errors.ConcretizationTypeError: "needs a value that is known only when the program runs: annotate the field"
    " as int, compute with jax.numpy, and show numbers as info",
    jax.errors.UnexpectedTracerError: "keeps a traced value outside of the function that made it: return it as state;"
    " and take local steps, local.run(...), outside of jax.lax.cond, scan and vmap",
}
"""Messages for JAX's tracing errors; subclasses come before their base."""
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
"""Remedies by regular expressions for error messages."""
_CARRY = re.compile(r"input carry (?:component )?(\S+) has type (\S+) but the corresponding .* has type (\S+?),? ")
"""JAX's message about a loop body whose carry changes its type: path, type before, type after."""
_METHOD_NAMES = ("init", "init_client", "broadcast", "client", "receive", "server", "personal")


class PhaseCall(NamedTuple):
    """The call of a function of a phase that raised an error."""

    name: str
    """The function's name in its code; ``<lambda>`` for a lambda."""
    label: str
    """The function in words, as :func:`phase_function` gives it."""
    frames: list[traceback.FrameSummary]
    """The traceback inside of the call."""
    remedy: str | None
    """What to do if the function lacks a state that the phase before did not return."""


class UserCodeError(FedraxError):
    """An exception in user code, which may be the consequence of an earlier error."""


def tracing_message(error: BaseException) -> str | None:
    """The message and remedy for a tracing error of JAX; None for any other error."""
    return next((text for kind, text in _TRACING_ERRORS.items() if isinstance(error, kind)), None)


@contextmanager
def translate_errors(algorithm: Any) -> Iterator[None]:
    """Context manager: raise errors in a method's code as FedraxError with the file, the line and a remedy.

    For methods of the library only tracing errors are translated, for user code all errors.
    """
    try:
        yield
    except (FedraxError, jax.errors.JaxRuntimeError, MemoryError):
        raise
    except Exception as error:
        message = tracing_message(error)
        if message is not None:
            raise FedraxError(f"{_location(algorithm, error)} {message}") from error
        if not _is_user_code(algorithm):
            raise
        raise UserCodeError(f"{_location(algorithm, error)} {_failure(error)}") from error


@contextmanager
def collecting_errors(algorithm: Any, errors: list[FedraxError]) -> Iterator[None]:
    """Context manager: append an error to ``errors``, so that further checks can run.

    After a first error, exceptions of user code are ignored, because they may be its consequence.
    """
    try:
        with translate_errors(algorithm):
            yield
    except FedraxError as error:
        if not (errors and isinstance(error, UserCodeError)):
            errors.append(error)
    except Exception:
        if not errors:
            raise


def call_in_phase(algorithm: Any, p: int, what: str, *inputs: Any) -> Any:
    """Call the function ``what`` of phase ``p``; an error that it raises knows which function that is."""
    function = getattr(algorithm.phases[p], what)
    try:
        return function(*inputs)
    except Exception as error:
        if not hasattr(error, _CALL):
            remedy = None
            if what == "client" and p and isinstance(inputs[1], tuple) and not inputs[1]:
                before = phase_function(algorithm, p - 1, what)
                remedy = f"{before} returned no state: write ClientOutput(upload=..., state=...) there"
            frames = traceback.extract_tb(error.__traceback__)[1:]
            call = PhaseCall(_code_name(function), phase_function(algorithm, p, what), frames, remedy)
            with suppress(AttributeError):  # of an error class with slots
                setattr(error, _CALL, call)
        raise


def phase_function(algorithm: Any, p: int, what: str) -> str:
    """A function of a phase in words: ``client``, or ``measure of phase 1`` of a method with several phases."""
    if len(algorithm.phases) == 1:
        return what
    name = _code_name(getattr(algorithm.phases[p], what))
    return f"{what if name in ('', '<lambda>', 'unchanged') else name} of phase {p + 1}"


def _code_name(function: Any) -> str:
    """The name of a function in its code, as in a traceback."""
    return getattr(function, "__name__", "")


_CALL = "_fedrax_phase_call"
_OF_AN_EMPTY_TUPLE = re.compile(r"[Tt]uple|got 0\)|pytree structure|Mismatch|Expected")
"""What Python and JAX say of an empty tuple where a state is expected."""


def raise_collected(errors: list[FedraxError]) -> None:
    """Raise the collected errors as one, with a line for each; nothing if there are none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise FedraxError("\n".join(dict.fromkeys(map(str, errors)))) from errors[0]


def _failure(error: Exception) -> str:
    """The first line of the error, and a remedy if there is one."""
    message = f"{type(error).__name__}: {error}".strip().split("\n")[0].rstrip(".:")
    hint = next((hint for pattern, hint in _HINTS.items() if re.search(pattern, message)), None)
    keys = re.findall(r"with metadata\s+(\(.*\))", str(error))
    if len(keys) == 2:
        message = f"{message} ({keys[0]} and {keys[1]})"
    if carry := _CARRY.search(str(error)):
        message = f"{message} ({carry[1]} begins as {carry[2]} and ends as {carry[3]})"
    if isinstance(error, AttributeError) and error.name is not None:
        near = difflib.get_close_matches(error.name, dir(error.obj), 1)
        hint = f"did you mean {near[0]!r}?" if near else hint
    call: PhaseCall | None = getattr(error, _CALL, None)
    if call is not None and call.remedy and _OF_AN_EMPTY_TUPLE.search(message):
        hint = call.remedy
    return f"fails with {message}" + (f": {hint}" if hint else "")


def _is_user_code(config: Any) -> bool:
    """Whether the class of a method, or of a nested object, is user code."""
    if not type(config).__module__.startswith("fedrax."):
        return True
    parts = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return any(_is_user_code(part) for part in parts if dataclasses.is_dataclass(part))


def _location(algorithm: Any, error: Exception) -> str:
    """Where an error was raised: 'Mine (file.py, line 12, in client)', from the last frame in the method's file.

    If that frame is not of the phase's function, the function is named as well. For other user code, such as a model,
    the name is 'your code'.
    """
    name, call = type(algorithm).__name__, getattr(error, _CALL, None)
    frames = traceback.extract_tb(error.__traceback__) if call is None else call.frames
    try:
        file = inspect.getfile(type(algorithm))
    except (TypeError, OSError):
        file = ""
    user_frame = _last_user_frame(frames)
    if user_frame is not None and user_frame.filename != file:
        name, file = "your code", user_frame.filename
    in_file = [frame for frame in frames if frame.filename == file]
    if in_file:
        function = in_file[-1].name
        if call is not None and name != "your code":
            function = call.label if function == call.name else f"{function}, called by {call.label}"
        return f"{name} ({Path(file).name}, line {in_file[-1].lineno}, in {function})"
    if call is not None:
        return f"{name}.{call.label}"
    methods = [frame.name for frame in frames if frame.name in _METHOD_NAMES]
    return f"{name}.{methods[-1]}" if methods else name


def innermost_user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost traceback frame in user code, outside of installed packages; None if there is none."""
    return _last_user_frame(traceback.extract_tb(error.__traceback__))


def _last_user_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    return next(
        (frame for frame in reversed(frames) if not (is_library_code(frame.filename) or frame.filename[:1] == "<")),
        None,
    )
