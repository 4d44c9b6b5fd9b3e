"""Every formula of the documentation is converted to MathML, which browsers draw without network."""

import re

import pytest

from tests.blocks import ROOT

mathml = pytest.importorskip("docs.mathml", reason="needs the extra docs")

PAGES = sorted((ROOT / "docs").glob("**/*.md"))
BETWEEN_DOLLARS = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?!\s)([^$\n]+?)\$", re.DOTALL)


def test_formulas_are_converted_to_mathml():
    found = 0
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for block, inline in BETWEEN_DOLLARS.findall(text):
            made = mathml.mathml(block or inline, "block" if block else "inline")
            assert made.startswith("<math") and "\\" not in made
            found += 1
    assert found > 100


def test_unsupported_commands_are_rejected():
    with pytest.raises(Exception, match="nosuchcommand"):
        mathml.mathml(r"x = \nosuchcommand y")
