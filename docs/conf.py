"""Sphinx configuration; built with warnings as errors by ``make docs``."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import fedrax
from docs import benchmark_pages, method_table

project = "fedrax"
author = "fedrax developers"
version = release = fedrax.__version__

extensions = ["docs.mathml", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_generated/*.md", "results"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "fedrax"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["sides.css"]
html_theme_options = {"navigation_with_keys": True}

autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_type_aliases = {"Tree": "Tree"}
default_role = "code"  # a name in single backquotes is code, as in the Markdown pages
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

GENERATED = Path(__file__).parent / "_generated"
method_table.write(GENERATED / "methods.md")
benchmark_pages.collect(GENERATED)


def _escape_norms(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """|d| is a norm in the docstrings, not reStructuredText's substitution."""
    for i, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        lines[i] = "".join(part if part.startswith("``") else part.replace("|", "\\|") for part in parts)


def setup(app: Any) -> None:
    """Hook into Sphinx."""
    app.connect("autodoc-process-docstring", _escape_norms)
