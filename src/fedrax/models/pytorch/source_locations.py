"""Lines of user code where an error or an operator of a traced graph originates."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def line_of_error(torch: ModuleType, error: BaseException) -> str:
    """The innermost line of user code in an error's traceback: ``net.py, line 12: y = x.item()``."""
    frames = [(f.filename, f.lineno, f.line) for f in traceback.extract_tb(error.__traceback__)]
    frames += [(file, int(number), code) for file, number, code in _FRAME.findall(str(error))]
    own = [frame for frame in frames if _is_user_code(torch, frame[0])]
    return _location(own[-1]) if own else "an unknown line"


def current_line(torch: ModuleType) -> str:
    """The line of user code that is being executed."""
    own = [f for f in traceback.extract_stack() if _is_user_code(torch, f.filename)]
    return _location((own[-1].filename, own[-1].lineno, own[-1].line))


def line_of(torch: ModuleType, node: Any) -> str:
    """The line of user code where a node of a traced graph originates."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if _is_user_code(torch, frame[0])]
    return _location(own[-1]) if own else "an unknown line"


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def _is_user_code(torch: ModuleType, file: str) -> bool:
    """Whether a source file is neither PyTorch's nor fedrax's."""
    own = (Path(torch.__path__[0]), Path(__file__).parent)
    return not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in own)


def _location(frame: tuple) -> str:
    """File, line number and code of a frame as text."""
    file, number, code = frame
    return f"{Path(file).name}, line {number}" + (f": {code.strip()}" if code and code.strip() else "")
