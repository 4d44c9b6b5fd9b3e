"""The papers' commands end in a sentence."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fedrax import FedraxError
from fedrax.simulation import Interrupted
from papers.dlg import __main__ as dlg
from papers.ending import in_a_sentence


@pytest.mark.parametrize(
    ("stop", "status", "sentence"),
    [
        (FedraxError("no such data"), 1, "papers.x: no such data\n"),
        (KeyboardInterrupt(), 130, "papers.x: stopped; runs that are finished and kept are not run again\n"),
        (Interrupted(signal.SIGTERM), 143, "papers.x: stopped; runs that are finished and kept are not run again\n"),
    ],
)
def test_status_and_sentence(stop: Any, status: int, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    @in_a_sentence("papers.x")
    def main() -> int:
        raise stop

    assert main() == status
    assert capsys.readouterr().err == sentence
    assert in_a_sentence("papers.x")(lambda: 7)() == 7


def test_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FEDRAX_DATA", raising=False)
    folders = ["--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["dlg", "lenet", *folders])
    assert dlg.main() == 1
    assert str(tmp_path) in capsys.readouterr().err
