"""Escaping and formatting of names and settings for terminals, Markdown, SVG and matplotlib."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "–": "--",
}


def printable_line(text: str) -> str:
    """The text as one line without control characters, which move cursors and are invalid in SVG."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def strip_markup(text: str) -> str:
    """A docstring as one line of text, with roles and backquotes removed."""
    return re.sub(r"(?::\w+:)?`+~?([^`]*)`+", r"\1", " ".join(text.split()))


def printable_lines(text: str) -> str:
    """The text without control characters except line ends."""
    return "\n".join(map(printable_line, text.split("\n")))


def escape_markdown(text: str) -> str:
    """Escape markup, HTML and cell separators, for a cell of a Markdown table."""
    escaped = html.escape(printable_line(text), quote=False)
    return "".join(f"\\{c}" if c in "\\`*_[]|~#$" else c for c in escaped)


def escape_latex(text: str) -> str:
    """Escape the special characters of LaTeX, for text in its default encoding."""
    return "".join(_LATEX.get(c, c) for c in printable_line(text))


def escape_matplotlib(text: str) -> str:
    """Escape mathtext, and leading underscores, for which matplotlib omits a label from the legend."""
    shown = printable_line(text).replace("$", r"\$")
    return f"\N{HAIR SPACE}{shown}" if shown.startswith("_") else shown


def format_settings(settings: Mapping[str, Any]) -> str:
    """Settings as text: ``local.lr 0.1, server_optimizer adam``."""
    return ", ".join(f"{short_path(path)} {format_setting(value)}" for path, value in settings.items())


def short_path(path: str) -> str:
    """The path of a setting without the prefix ``algorithm.``."""
    return path.removeprefix("algorithm.")


def format_setting(value: Any) -> str:
    """The value of a setting as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        rest = ", ".join(f"{key} {format_setting(item)}" for key, item in value.items() if key != "name")
        return f"{value.get('name', '')} ({rest})" if rest else str(value.get("name", ""))
    return str(value)
