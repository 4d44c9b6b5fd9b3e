"""Every code block of the README and the documentation runs: here, or as a cell of a page that the build executes."""

from __future__ import annotations

import ast
import shutil
import tomllib
import types
from pathlib import Path

import matplotlib as mpl
import pytest

from tests.blocks import ROOT, Block, blocks, run_page, run_python

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(page for folder in ("methods", "tutorials") for page in (ROOT / "docs" / folder).glob("*.md")),
]
FIRST_READ = ("README",)

mpl.use("agg")


@pytest.mark.usefixtures("shared_tasks")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id="-".join(page.relative_to(ROOT).with_suffix("").parts),
            marks=() if page.stem in FIRST_READ else pytest.mark.slow,
        )
        for page in PAGES
    ],
)
def test_blocks_of_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    run_page(page)
    assert "Traceback" not in capsys.readouterr().err


def test_tutorial_goes_from_a_table_to_a_comparison_in_six_commands():
    cells = [
        block.text for block in blocks(ROOT / "docs" / "tutorials" / "own-data.md") if "code-cell" in block.language
    ]
    shell = [cell.replace("\\\n", " ") for cell in cells if cell.startswith("%%sh")]
    commands = [line for cell in shell for line in cell.splitlines() if line.startswith("fedrax")]
    assert len(commands) <= 6
    (written,) = [cell.split("\n", 1) for cell in cells if cell.startswith("%%writefile")]
    compared = tomllib.loads(written[1])
    name = written[0].removeprefix("%%writefile ")
    assert any(command.startswith(f"fedrax compare {name} ") for command in commands)
    assert len(compared["compare"]) > 2 and len(compared["grid"]["algorithm"]["local"]["lr"]) > 1
    assert {"missing", "client", "label"} <= compared["data"].keys()


def has_cells(page: Path) -> bool:
    return any(block.language.startswith("{code-cell}") for block in blocks(page))


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if has_cells(page)])
def test_cells_are_run_by_the_build(page: Path):
    """By myst-nb, for pages with this header; no cell is left out."""
    text = page.read_text(encoding="utf-8")
    header = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n"
    assert text.startswith(header) and page.is_relative_to(ROOT / "docs")
    assert "skip-execution" not in text
    kinds = {block.language for block in blocks(page)}
    assert not kinds & {"python", "toml"}, "what is not a cell cannot use the names and files of cells"


def test_the_build_fails_where_a_cell_does():
    lines = ast.parse((ROOT / "docs" / "conf.py").read_text(encoding="utf-8")).body
    settings = {
        line.targets[0].id: line.value.value
        for line in lines
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Constant)
    }
    assert settings["nb_execution_mode"] == "cache"
    assert settings["nb_execution_raise_on_error"] is True
    assert settings["nb_output_stderr"] == "remove-warn"  # and warnings are errors
    assert settings["nb_execution_timeout"] <= 120
    assert "nb_execution_excludepatterns" not in settings
    assert "sphinx-build -W " in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_blocks_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("text\n```python\n# a.py\nx = 1\n```\n\n```sh\nmake\n```\n")
    python, shell = blocks(page)
    assert python == Block(3, "python", "# a.py\nx = 1\n")
    assert python.file == "a.py"
    assert (shell.language, shell.file) == ("sh", None)


def test_an_error_in_a_block_names_the_page_and_line(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("text\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as raised:
        run_python(blocks(page)[0], page, types.ModuleType("page"))
    assert raised.traceback[-1].path == page
    assert raised.traceback[-1].lineno == 3  # counted from 0
