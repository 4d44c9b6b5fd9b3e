"""Releases: one version, its changelog, and workflows whose actions are pinned."""

from __future__ import annotations

import re
import tomllib

import pytest

import fedrax
from tests import release
from tests.blocks import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_version_is_in_one_place():
    assert release.version() == fedrax.__version__
    assert PROJECT["dynamic"] == ["version"]
    assert not re.search(r"^version:", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)


def test_the_changelog_is_short_and_begins_with_the_version():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"^## (\S+) \(", text, re.MULTILINE)[1] == fedrax.__version__  # type: ignore[index]
    assert len(text.splitlines()) <= 150


def test_notes_of_a_release_are_its_section_of_the_changelog():
    text = "# Changelog\n\n## 0.2.0 (2027-01-31)\n\n- new\n\n## 0.1.0 (2026-12-01)\n\n- old\n"
    assert release.notes(text, "0.2.0") == "- new"
    with pytest.raises(SystemExit, match="make it"):
        release.notes(text, "0.1.0")
    with pytest.raises(SystemExit, match="make it"):
        release.notes(text.replace("2027-01-31", "unreleased"), "0.2.0")


def test_actions_are_pinned_by_commit():
    used = [line for path in WORKFLOWS for line in re.findall(r"uses: (.+)", path.read_text("utf-8"))]
    assert len(used) > 10
    assert not [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]
    assert len({line.partition("@")[0] for line in used}) == len(set(used))  # one version of each


def test_only_the_publishing_jobs_may_write():
    jobs = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8").split("\n  ")
    writing = [line.strip() for line in jobs if line.strip().endswith(": write")]
    assert sorted(writing) == ["contents: write", "id-token: write"]


def test_every_supported_python_is_tested():
    named = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert PROJECT["requires-python"] == f">={named[0]}"
    for name in ("tests.yml", "release.yml"):
        text = (ROOT / ".github" / "workflows" / name).read_text("utf-8")
        assert f"python: {str(named).replace(chr(39), chr(34))}" in text
