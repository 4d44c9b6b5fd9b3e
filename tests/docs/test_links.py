"""Links between the files of the repository lead to files and headings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.blocks import ROOT

FOLDERS = (".github", "benchmarks", "docs", "examples", "papers", "src", "tests")
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    if not {"_build", "_generated"} & set(page.parts)
)
WRITTEN = ("_generated/", "../_generated/")
"""What the build of the documentation writes, which fails where a link to it is wrong."""


def prose(text: str) -> str:
    """A page without code."""
    return re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@cache
def labels() -> set[str]:
    """The labels of the documentation, which its pages may use as links."""
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    return {label for page in pages for label in re.findall(r"^\(([\w-]+)\)=$", page.read_text("utf-8"), re.MULTILINE)}


def broken(page: Path, text: str) -> Iterator[str]:
    """The links of a page, in Markdown or HTML, without target in the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", prose(text)):
        link = "".join(target)
        if re.match(r"\w+:", link) or link.startswith(WRITTEN):
            continue
        path, _, anchor = link.partition("#")
        file = page.parent / path if path else page
        if not file.exists() and path not in labels():
            yield f"{page.name}: {link}"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text("utf-8")):
            yield f"{page.name}: {link} has no such heading"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_links_have_targets(page: Path):
    assert not list(broken(page, page.read_text("utf-8")))


def test_broken_links_are_found():
    text = (
        "[a](README.md) [b](no.md) [c](README.md#methods) [d](README.md#no) ![e](no.png) `[f](no.md)` [g](https://a.b)"
    )
    assert list(broken(ROOT / "CHANGELOG.md", text)) == [
        "CHANGELOG.md: no.md",
        "CHANGELOG.md: README.md#no has no such heading",
        "CHANGELOG.md: no.png",
    ]
