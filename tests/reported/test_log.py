"""README.md has one row for each test of this folder, and each row has one test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"\| \[[^]]+ (\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\) \|.*\| `(\S+)` \|")


def test_rows_and_tests_are_the_same():
    lines = [line for line in (HERE / "README.md").read_text("utf-8").splitlines() if line.startswith("| [")]
    rows = [ROW.fullmatch(line) for line in lines]
    assert all(row and row[1] == row[3] and line.count(" | ") == 4 for row, line in zip(rows, lines, strict=True))
    sources = [(row[2], row[3]) for row in rows if row]
    assert len(set(sources)) == len(sources) >= 20
    found = {
        f"{path.name}::{node.name}"
        for path in HERE.glob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if path.name != Path(__file__).name and isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    named = [row[4] for row in rows if row]
    assert sorted(named) == sorted(found)
