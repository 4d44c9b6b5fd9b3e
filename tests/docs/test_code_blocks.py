"""Every code block of the README and the documentation runs.

The blocks of a page run in order in an empty directory. Python blocks share one namespace; a block whose first line
is a comment with a file name is also written to that file. Lines of shell blocks that begin with ``fedrax`` run through
the command line's ``main``.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tomllib
import types
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import pytest

from fedrax import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "methods").glob("*.md"))]
FIRST_READ = ("README", "getting-started")
NOT_RUN = ("make", "pip install", "python examples/")
"""Shell lines that are tested elsewhere: creating environments by continuous integration, examples by a test."""
NOT_CODE = ("text", "{")
SHORTENING_FLAGS = {
    "run": {"--run.rounds": "2"},
    "compare": {"--run.rounds": "2", "--seeds": "0"},
    "profile": {"--rounds": "2"},
}
"""Options that are appended to a command unless it has them, because experiments of the pages take long."""
OUTPUTS = {"tutorial": ("runs/hospitals/curves.png", "runs/hospitals/grid.png", "hospitals.html")}
"""Files that the commands of a page write."""

mpl.use("agg")


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file name in the first line's comment."""
        named = re.match(r"# ([\w.-]+\.(?:py|toml))\n", self.text)
        return named and named.group(1)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a Markdown page, in order."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text[: m.start()].count("\n") + 2, m[1].strip(), m[2]) for m in found]


def run_python(block: Block, page: Path, module: types.ModuleType) -> None:
    """Run a Python block, with line numbers of the page in tracebacks."""
    source = "\n" * (block.line - 1) + block.text
    exec(compile(source, str(page), "exec"), vars(module))


def run_shell(block: Block) -> None:
    """Run the ``fedrax`` lines of a shell block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith(NOT_RUN):
            continue
        program, *arguments = shlex.split(line, comments=True)
        assert program == "fedrax", f"line {block.line}: a shell block that no test can run: {line}"
        quick = SHORTENING_FLAGS.get(arguments[0], {})
        added = [word for option in quick.items() if option[0] not in arguments for word in option]
        try:
            status = cli.main([*arguments, *added])
        except SystemExit as end:  # --help
            status = end.code or 0
        assert status == 0, line


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
    module = types.ModuleType(f"page_{page.stem.replace('-', '_').lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # type hints are resolved in a module
    monkeypatch.syspath_prepend(tmp_path)  # for blocks that import the files of earlier blocks
    before = set(sys.modules)
    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            run_python(block, page, module)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "sh":
            run_shell(block)
        else:
            assert block.language.startswith(NOT_CODE), f"line {block.line}: no test runs {block.language!r}"
    for name in {Path(block.file).stem for block in blocks(page) if block.file} - before:
        sys.modules.pop(name, None)
    assert "Traceback" not in capsys.readouterr().err
    assert all(Path(made).stat().st_size > 1000 for made in OUTPUTS.get(page.stem, ()))


def test_tutorial_compares_four_methods_in_at_most_six_commands():
    shell = [
        block.text.replace("\\\n", " ") for block in blocks(ROOT / "docs" / "tutorial.md") if block.language == "sh"
    ]
    commands = [line for text in shell for line in text.splitlines() if line.strip()]
    picture = next(i for i, command in enumerate(commands) if command.startswith("fedrax compare"))
    assert commands[0] == "pip install ." and picture < 6 and len(commands) <= 6
    compared = tomllib.loads((ROOT / shlex.split(commands[picture])[2]).read_text())
    assert len(compared["compare"]) == 4 and len(compared["grid"]["algorithm"]["local"]["lr"]) > 2
    assert {"missing", "client", "label"} <= compared["data"].keys()


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
