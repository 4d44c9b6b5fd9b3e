"""The gallery: every picture that commands of the repository drew, beside what it shows.

For the papers this is what the paper prints and what was found here, from ``papers/*/items.toml``; a picture belongs to
the items whose results name its table.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.method_pages import TITLES
from docs.paper_pages import PAPERS, ROOT, owner
from papers.items import Paper, read, sentence

INTRODUCTION = """\
# Gallery

Every picture was drawn by a command of the repository from runs that it made. Those of the papers stand beside what the
paper reports; [](../papers.md) lists all their items, those without a picture too.
"""
OTHERS = {
    "Comparisons": (
        (
            "docs/results/digits.png",
            "Four methods on digits sorted by label (`make demo`).",
            "tutorials/first-comparison.md",
        ),
        (
            "docs/results/hospitals.png",
            "Four methods on patients of hospitals (`make figures`).",
            "tutorials/own-data.md",
        ),
        ("docs/results/fine-tuning.png", "Adapters, all parameters and the head alone.", "pretrained-models.md"),
    ),
    "Speed and memory": (
        ("benchmarks/results/peers.png", "Rounds of fedrax and of other simulators.", "_generated/benchmarks/peers.md"),
        (
            "benchmarks/results/scaling.png",
            "A round against clients, cohort and size of the model.",
            "_generated/benchmarks/scaling.md",
        ),
        ("benchmarks/results/methods.png", "The cost of methods.", "_generated/benchmarks/methods.md"),
        ("benchmarks/results/storage.png", "Samples and states on disk.", "_generated/benchmarks/storage.md"),
    ),
}
"""(picture, caption, page with the figures) by section."""


def write_page(path: Path) -> None:
    """Write the gallery to ``path``, a file of ``docs/_generated``."""
    parts = [INTRODUCTION]
    for title, pictures in OTHERS.items():
        parts.append(f"## {title}")
        parts += [picture(file, f"{caption} [Numbers](../{page})") for file, caption, page in pictures]
    for name in PAPERS:
        parts += paper_pictures(read(name))
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def picture(file: str, caption: str) -> str:
    """A figure with a caption; ``file`` from the root of the repository."""
    return f"```{{figure}} ../../{file}\n:width: 100%\n:figclass: gallery\n\n{caption}\n```"


def paper_pictures(paper: Paper) -> list[str]:
    """The pictures of a paper: those of its figures and tables first, those of no item last."""
    results = ROOT / "papers" / paper.name / "results"
    tables = sorted(file.stem for file in results.glob("*.md"))
    left = sorted(file.stem for file in results.glob("*.png"))
    parts = [f"## {TITLES[paper.name]}"]
    for entry in sorted(paper.items, key=lambda entry: entry.kind not in ("figure", "table")):
        names = {Path(result).stem for result in entry.results if result.startswith("results/")}
        own = [name for name in left if {name, owner(name, tables)} & names]
        if not own:
            continue
        left = [name for name in left if name not in own]
        printed = f" The paper: {entry.printed.rstrip('.')}." if entry.printed else ""
        found = f" Here: {sentence(paper.name, entry.found, entry.values)}" if entry.found else ""
        reason = f" {entry.reason}" if entry.reason else ""
        parts.append(f"**{entry.item}** ({entry.status}).{printed}{found}{reason}")
        parts += [picture(f"papers/{paper.name}/results/{name}.png", spelled(name)) for name in own]
    return parts + [picture(f"papers/{paper.name}/results/{name}.png", spelled(name)) for name in left]


def spelled(name: str) -> str:
    """The name of a picture in words: figure2-c25 -> figure 2, c25."""
    return re.sub(r"^(figure|fig|table)(\d)", r"\1 \2", name.replace("_", " ").replace("-", ", "))
