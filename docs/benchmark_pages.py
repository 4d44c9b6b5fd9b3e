"""Copies the pages of the benchmarks into the documentation."""

from __future__ import annotations

import shutil
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def collect(generated: Path) -> None:
    """Copy pages and pictures to ``generated/benchmarks``; ``generated/benchmarks.md`` lists the pages."""
    folder = generated / "benchmarks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pages = sorted(RESULTS.glob("*.md"))
    for file in [*pages, *RESULTS.glob("*.svg"), *RESULTS.glob("*.png")]:
        shutil.copy(file, folder)
    text = "The benchmarks have written no results in this checkout.\n"
    if pages:
        entries = "\n".join(f"_generated/benchmarks/{page.stem}" for page in pages)
        text = f"```{{toctree}}\n:maxdepth: 2\n\n{entries}\n```\n"
    (generated / "benchmarks.md").write_text(text, encoding="utf-8")
