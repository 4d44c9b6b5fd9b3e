"""A page for each reproduced paper: its README, and every table and picture that its commands wrote.

``papers.md`` is written for readers of the repository; in the built documentation its links to result files lead to
these pages.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
PAPERS = ("losac", "episode", "upcycled", "gradma")
LEAKS = "leakage.md"
"""The page that shows the results of papers/dlg."""


def write_pages(generated: Path) -> None:
    """Write ``generated/papers/NAME.md`` for each paper."""
    folder = generated / "papers"
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAPERS:
        (folder / f"{name}.md").write_text(page(name), encoding="utf-8")


def page(name: str) -> str:
    """The page of a paper."""
    base, results = f"../../../papers/{name}", ROOT / "papers" / name / "results"
    parts = [f"```{{include}} {base}/README.md\n:relative-images:\n```\n"]
    tables = sorted(file.stem for file in results.glob("*.md"))
    pictures = sorted(file.stem for file in results.glob("*.png"))
    for table in tables:
        parts.append(f"(papers-{name}-{table})=\n```{{include}} {base}/results/{table}.md\n:heading-offset: 1\n```\n")
        own = [picture for picture in pictures if owner(picture, tables) == table]
        parts += [f"![{picture}]({base}/results/{picture}.png)\n" for picture in own]
    parts += [f"![{picture}]({base}/results/{picture}.png)\n" for picture in pictures if not owner(picture, tables)]
    return "\n".join(parts)


def owner(picture: str, tables: list[str]) -> str:
    """The table with the longest name that the picture's begins with."""
    return max((table for table in tables if re.match(rf"{re.escape(table)}(-|$)", picture)), key=len, default="")


def lead_to_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the links of ``papers.md``, and add the pages to the table of contents."""
    if docname != "papers":
        return
    text = re.sub(r"\]\(\.\./papers/dlg/[^)]*\)", f"]({LEAKS})", source[0])
    text = re.sub(r"\]\(\.\./papers/(\w+)/results/([\w-]+)\.md\)", r"](#papers-\1-\2)", text)
    text = re.sub(r"\]\(\.\./papers/(\w+)/README\.md\)", r"](_generated/papers/\1.md)", text)
    text = re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"`\1`", text)
    entries = "\n".join(f"_generated/papers/{name}" for name in PAPERS)
    source[0] = f"{text}\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the hook."""
    app.connect("source-read", lead_to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
