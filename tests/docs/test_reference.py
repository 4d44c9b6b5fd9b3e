"""Documentation and examples import from the public namespaces only, and the reference contains every public name."""

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from docs import reference_pages

ROOT = Path(__file__).parents[2]
PUBLIC = {*reference_pages.NAMESPACES, "fedrax.cli"}


def code_of(path: Path) -> Iterator[str]:
    """Python code of a page, a notebook or an example."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        yield text
    elif path.suffix == ".ipynb":
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        yield from (cell for cell in cells if not cell.startswith("%"))
    else:
        blocks = re.findall(r"^ *```(?:python|\{code-block\} python)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
        yield from (textwrap.dedent(re.sub(r"^ *:\w+:.*\n", "", block, flags=re.MULTILINE)) for block in blocks)


def modules_imported(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_pages_and_examples_import_from_public_namespaces() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.*")]
    internal = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in pages
        if path.suffix in (".md", ".py", ".ipynb") and "_generated" not in path.parts
        for code in code_of(path)
        for module in modules_imported(code)
        if module.split(".")[0] == "fedrax" and module not in PUBLIC
    ]
    assert not internal, "\n".join(internal)


def test_reference_contains_every_public_name_once(tmp_path: Path) -> None:
    reference_pages.write_pages(tmp_path)
    text = "\n".join(path.read_text("utf-8") for path in tmp_path.glob("*.md"))
    described = [
        importlib.import_module(m).__dict__.get(n) or getattr(importlib.import_module(m), n)
        for m, n in re.findall(r"auto(?:class|exception|function):: (fedrax[\w.]*)\.(\w+)\n", text)
    ]
    public = {
        id(value)
        for namespace in reference_pages.NAMESPACES
        for value in reference_pages.exports(namespace).values()
        if inspect.isclass(value) or inspect.isroutine(value)
    }
    assert len(described) == len(public) and {id(value) for value in described} == public


def test_root_namespace_is_small() -> None:
    assert 20 <= len(reference_pages.exports("fedrax")) <= 32


def test_the_readme_names_every_method() -> None:
    table = (ROOT / "README.md").read_text("utf-8").partition("## Methods")[2].partition("\n## ")[0]
    known = {
        name.lower() for name, value in reference_pages.exports("fedrax.algorithms").items() if isinstance(value, type)
    }
    named = set(re.findall(r"\w+", table.replace("-", "").lower()))
    assert known - {"upcycled"} <= named and "upcycledfl" in named
