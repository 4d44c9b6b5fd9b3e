"""The code blocks of a Markdown page, and how they run: ``python -m tests.blocks README.md`` runs a page.

The blocks of a page run in order in one directory. Python blocks share one namespace; a block whose first line is a
comment with a file name is also written to that file. Lines of shell blocks that begin with ``fedrax`` run through the
command line's ``main``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOT_RUN = ("make", "pip install", "python examples/")
"""Shell lines that are tested elsewhere: creating environments by continuous integration, examples by a test."""
NOT_CODE = ("text", "{")
SHORTENING_FLAGS = {
    "run": {"--run.rounds": "2"},
    "compare": {"--run.rounds": "2", "--seeds": "0"},
    "profile": {"--rounds": "2"},
}
"""Options that are appended to a command unless it has them, because experiments of the pages take long."""


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
    from fedrax import cli

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


def run_page(page: Path) -> None:
    """Run all blocks of a page in the current directory, in which an earlier block may write files for later ones."""
    module = types.ModuleType(f"page_{page.stem.replace('-', '_').lower()}")
    folder, before = str(Path.cwd()), set(sys.modules)
    sys.modules[module.__name__] = module  # type hints are resolved in a module
    sys.path.insert(0, folder)
    try:
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
    finally:
        sys.path.remove(folder)
        for name in {module.__name__, *(Path(block.file).stem for block in blocks(page) if block.file)} - before:
            sys.modules.pop(name, None)


if __name__ == "__main__":
    for page in [Path(argument).resolve() for argument in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / "examples", Path(folder) / "examples")
            os.chdir(folder)
            run_page(page)
            os.chdir(ROOT)
        print(f"{page.name}: {len(blocks(page))} blocks")
