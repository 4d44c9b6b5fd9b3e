"""The lines of the user's source that an error or an operator comes from."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def line_of_error(torch: ModuleType, error: BaseException) -> str:
    """The last line of an error's traceback that is the user's: ``net.py, line 12: y = x.item()``."""
    frames = [(f.filename, f.lineno, f.line) for f in traceback.extract_tb(error.__traceback__)]
    frames += [(file, int(number), code) for file, number, code in _FRAME.findall(str(error))]
    own = [frame for frame in frames if _is_users(torch, frame[0])]
    return _shown(own[-1]) if own else "a line that it does not tell"


def current_line(torch: ModuleType) -> str:
    """The line of the user's that is being run."""
    own = [f for f in traceback.extract_stack() if _is_users(torch, f.filename)]
    return _shown((own[-1].filename, own[-1].lineno, own[-1].line))


def line_of(torch: ModuleType, node: Any) -> str:
    """The user's line that a node of a traced graph comes from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if _is_users(torch, frame[0])]
    return _shown(own[-1]) if own else "a line that PyTorch does not tell"


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def _is_users(torch: ModuleType, file: str) -> bool:
    own = (Path(torch.__path__[0]), Path(__file__).parent)
    return not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in own)


def _shown(frame: tuple) -> str:
    file, number, code = frame
    return f"{Path(file).name}, line {number}" + (f": {code.strip()}" if code and code.strip() else "")
