"""``python -m papers.page``: write docs/papers.md, every item of the four papers with its outcome.

Items are in ``papers/*/items.toml``, and their figures are taken from result files. Run the command after a change of a
result or a list; a test compares the page with both.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

from fedrax import files
from papers.ending import in_a_sentence
from papers.items import PAPERS, ROOT, STATUSES, Entry, Paper, path_of, read, sentence

PAGE = ROOT / "docs" / "papers.md"
INTRODUCTION = """# Reproduced papers

Each folder in `papers/` has experiment files of a paper, and commands that run them, print the paper's numbers beside
ours, and write tables and figures. This page lists the algorithms, tables, figures, claims and theorems of the papers:

- **reproduced**: measured or tested here, in the paper's setting as far as it is known, and in agreement with it;
- **differs**: measured here in that setting, with another outcome, or only a part of it; the last column says why;
- **stand-in**: measured on other data, with a smaller network or a shorter run, which compares rankings, not numbers;
- **not here**: not run, with the reason.

`python -m papers.page` writes the page from `papers/*/items.toml`; every figure in the column "found" is taken from a
linked result file.
"""


def main() -> int:
    """Write the page."""
    files.write_text(PAGE, text())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def text() -> str:
    """The page."""
    papers = [read(name) for name in PAPERS]
    lines = [INTRODUCTION, "| paper | items | " + " | ".join(STATUSES) + " |", "|---" * (2 + len(STATUSES)) + "|"]
    for paper in papers:
        lines.append(counts(f"[{short(paper)}](#{short(paper).lower()})", paper.items))
    lines.append(counts("all", [item for paper in papers for item in paper.items]))
    for paper in papers:
        lines += ["", *section(paper)]
    return "\n".join(lines) + "\n"


def counts(name: str, items: tuple[Entry, ...] | list[Entry]) -> str:
    """A row of the table of counts."""
    by = Counter(item.status for item in items)
    return f"| {name} | {len(items)} | " + " | ".join(str(by[status]) for status in STATUSES) + " |"


def section(paper: Paper) -> list[str]:
    """Claims of a paper's abstract, and its items."""
    readme = f"[Commands, choices and discussion](../papers/{paper.name}/README.md)."
    lines = [f"## {short(paper)}", "", f"*{paper.title}*. {readme}", "", "Claims of the abstract:", ""]
    lines += ["| claim | verdict | found |", "|---|---|---|"]
    lines += [f"| {one.item} | **{one.status}** | {evidence(paper.name, one)} |" for one in paper.claims]
    lines += ["", "Items:", "", "|  | item | status | printed | found | why |", "|---|---|---|---|---|---|"]
    for one in paper.items:
        cells = [one.number, one.item, one.status, one.printed, evidence(paper.name, one), one.reason]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def short(paper: Paper) -> str:
    """Name of the method, with which the title begins."""
    return paper.title.split(":")[0]


def evidence(paper: str, entry: Entry) -> str:
    """The result, with links to it."""
    links = []
    for result in entry.results:
        path, test = path_of(paper, result), result.partition("::")[2]
        name = test or path.name
        links.append(f"[{name}]({Path(os.path.relpath(ROOT / path, PAGE.parent)).as_posix()})")
    said = sentence(paper, entry.found, entry.values)
    return " ".join(part for part in (said, f"({', '.join(links)})" if links else "") if part)


if __name__ == "__main__":
    sys.exit(in_a_sentence("papers.page")(main)())
