"""Formulas as MathML, which browsers draw by themselves: no script, no fonts and nothing from the network."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def mathml(formula: str, display: str = "inline") -> str:
    """The formula, in LaTeX's notation, as MathML; ExtensionError for a command that has no form there."""
    found = convert(formula, display=display)
    unknown = re.search(r"\\[A-Za-z]+", re.sub(r"<annotation.*?</annotation>", "", found))
    if unknown:
        raise ExtensionError(f"{unknown.group()} of the formula {formula!r} has no form in MathML")
    return found


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Offer it to Sphinx as ``html_math_renderer = "mathml"``."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
