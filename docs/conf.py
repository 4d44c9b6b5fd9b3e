"""Sphinx configuration; built with warnings as errors by ``make docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import fedrax
from docs import (
    benchmark_pages,
    diagrams,
    executed_pages,
    gallery_page,
    method_table,
    paper_pages,
    reference_pages,
)

project = "fedrax"
author = "fedrax developers"
version = release = fedrax.__version__

extensions = [
    "docs.mathml",
    "docs.method_pages",
    "docs.navigation",
    "docs.paper_pages",
    "docs.reference_pages",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_generated/benchmarks.md", "_generated/methods.md", "results"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

nb_execution_mode = "cache"
nb_execution_cache_path = str(executed_pages.prepare(Path(__file__).parent / "_build" / "executed"))
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120  # seconds for a cell
nb_merge_streams = True
nb_output_stderr = "remove-warn"

html_theme = "furo"
html_title = "fedrax"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["pages.css", "cells.css"]
html_theme_options = {"navigation_with_keys": True}

autodoc_default_options = {"member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in reference_pages.TYPE_ALIASES}
suppress_warnings = ["ref.python"]  # a field such as `loss` belongs to several classes
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False  # the title of a page is the namespace
default_role = "code"  # a name in single backquotes is code, as in the Markdown pages
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

GENERATED = Path(__file__).parent / "_generated"
method_table.write(GENERATED / "methods.md")
benchmark_pages.collect(GENERATED)
paper_pages.write_pages(GENERATED)
gallery_page.write_page(GENERATED / "gallery.md")
diagrams.write(GENERATED / "diagrams")
reference_pages.write_pages()
