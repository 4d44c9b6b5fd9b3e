"""The pages and the package use the words of the glossary: ``docs/words.txt`` has those to avoid, and what to write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.blocks import ROOT

WORDS = dict(line.split("->") for line in (ROOT / "docs" / "words.txt").read_text("utf-8").splitlines())
QUOTING = ("papers.md", "CODE_OF_CONDUCT.md")
"""Pages in the words of others."""
FILES = sorted(
    file
    for pattern in ("*.md", "docs/*.md", "docs/methods/*.md", "docs/tutorials/*.md", "examples/**/*.py", "src/**/*.py")
    for file in ROOT.glob(pattern)
    if file.name not in QUOTING
)
FIELD = (
    "accountant, adapter, aggregation, algorithm, broadcast message, checkpoint, client, client drift, "
    "client state, cohort, control variate, cross-device, cross-silo, differential privacy, error feedback, "
    "fairness, federation, fine-tuning, global model, heterogeneity, learning rate, local epoch, local step, "
    "malicious client, microbatch, mini-batch, natural clients, neighboring datasets, noise multiplier, non-IID, "
    "participation, partition, personal layers, personal model, personalization, privacy audit, privacy budget, "
    "proximal term, resume, robust aggregation, round, secure aggregation, sensitivity, server, server state, "
    "staleness, straggler, update, upload, wrapper"
)
"""Terms that the glossary defines."""
PATTERN = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, WORDS))})(?![\w-])", re.IGNORECASE)


def avoided(text: str) -> Iterator[str]:
    """What to replace in a text without its blocks of code; a phrase may go over the end of a line."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    flat = re.sub(r"(?<=\S)\n[ >#*-]*(?=\S)", " ", text)
    for match in PATTERN.finditer(flat):
        around = flat[max(0, match.start() - 30) : match.end() + 30].replace("\n", " ")
        yield f"{match[0]!r}: write {WORDS[match[0].lower()]!r}, in '...{around}...'"


@pytest.mark.parametrize(
    "folder", sorted({file.parent for file in FILES}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_words_of_the_glossary_are_used(folder: Path):
    files = [file for file in FILES if file.parent == folder]
    assert not [f"{file.name}: {found}" for file in files for found in avoided(file.read_text("utf-8"))]


def test_avoided_words_are_found_across_lines():
    assert len(list(avoided("Nobody\n- who takes\n  part has a step\nsize."))) == 3
    assert not list(avoided("A `step_size`, a footstep sized up."))


def test_the_glossary_defines_the_words_of_the_field():
    page = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    parts = re.findall(r"^:::\{glossary\}\n(.*?)^:::$", page, re.MULTILINE | re.DOTALL)
    terms = {line for part in parts for line in part.splitlines() if line and not line.startswith(" ")}
    assert not set(FIELD.split(", ")) - terms
