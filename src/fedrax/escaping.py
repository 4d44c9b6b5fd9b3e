"""Names and labels on their way out: what people or files call things is shown, never interpreted."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any


def plain(text: str) -> str:
    """One line without control characters, which move cursors and are forbidden in SVG."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def without_markup(text: str) -> str:
    """A docstring's text for a terminal: the names in it alone, and no line ends."""
    return re.sub(r"(?::\w+:)?`+~?([^`]*)`+", r"\1", " ".join(text.split()))


def plain_lines(text: str) -> str:
    """Several lines without control characters."""
    return "\n".join(map(plain, text.split("\n")))


def for_markdown(text: str) -> str:
    """For a cell of a Markdown table: no markup, no HTML, no end of the cell."""
    escaped = html.escape(plain(text), quote=False)
    return "".join(f"\\{c}" if c in "\\`*_[]|~#$" else c for c in escaped)


def for_picture(text: str) -> str:
    """For matplotlib: no mathematics between dollars; a legend leaves out labels that begin with an underscore."""
    shown = plain(text).replace("$", r"\$")
    return f"\N{HAIR SPACE}{shown}" if shown.startswith("_") else shown


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """Values at paths for people: ``local.lr 0.1, server_optimizer adam``."""
    return ", ".join(f"{short_path(path)} {value_in_words(value)}" for path, value in settings.items())


def short_path(path: str) -> str:
    """The path of a setting without the word that goes without saying."""
    return path.removeprefix("algorithm.")


def value_in_words(value: Any) -> str:
    """The value of a setting for people."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        rest = ", ".join(f"{key} {value_in_words(item)}" for key, item in value.items() if key != "name")
        return f"{value.get('name', '')} ({rest})" if rest else str(value.get("name", ""))
    return str(value)
