"""Exit status and error messages of the papers' commands."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fedrax import FedraxError
from fedrax.simulation import Interrupted
from papers.arguments import folders
from papers.dlg import __main__ as dlg
from papers.ending import in_a_sentence
from papers.episode import __main__ as episode
from papers.gradma import __main__ as gradma
from papers.losac import __main__ as losac
from papers.upcycled import __main__ as upcycled


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (FedraxError("no such data"), 1, "papers.x: no such data\n"),
        (KeyboardInterrupt(), 130, "papers.x: stopped; runs that are finished and kept are not run again\n"),
        (Interrupted(signal.SIGTERM), 143, "papers.x: stopped; runs that are finished and kept are not run again\n"),
    ],
)
def test_exit_status_and_message(error: Any, status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    @in_a_sentence("papers.x")
    def main() -> int:
        raise error

    assert main() == status
    assert capsys.readouterr().err == message
    assert in_a_sentence("papers.x")(lambda: 7)() == 7


def test_missing_data_raise_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FEDRAX_DATA", raising=False)
    folders = ["--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["dlg", "lenet", *folders])
    assert dlg.main() == 1
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "wrong", "message"),
    [
        (losac, ["table2", "--rounds", "0"], "--rounds: a whole number of 1 or more is wanted, not '0'"),
        (losac, ["table2", "--seeds", "1", "1"], "--seeds has a value twice: 1 1"),
        (episode, ["fig3", "--seeds", "0"], "--seeds: a whole number of 1 or more is wanted, not '0'"),
        (gradma, ["table1", "--seeds", "-1"], "--seeds: a whole number of 0 or more is wanted, not '-1'"),
        (upcycled, ["table1", "--rounds", "x"], "--rounds: a whole number of 1 or more is wanted, not 'x'"),
        (dlg, ["methods", "--steps", "0"], "--steps: a whole number of 1 or more is wanted, not '0'"),
    ],
)
def test_invalid_numbers_are_rejected(
    command: Any, wrong: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *wrong])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "what"),
    [(losac, "figure6"), (episode, "fig3"), (gradma, "table1"), (upcycled, "table1"), (dlg, "methods")],
)
def test_unwritable_results_are_rejected_before_runs(
    command: Any, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["command", what, "--results", str(tmp_path / "file" / "results")])
    assert command.main() == 1
    assert f"cannot write to {tmp_path / 'file' / 'results'}: " in capsys.readouterr().err


@pytest.mark.parametrize("damaged", [b"", b'{"seeds": [0', b"[1]", b"{}", b"\xff", b"[" * 100_000], ids=range(6))
def test_damaged_table_of_leaks_is_rejected(
    damaged: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "methods" / "FedSGD.json"
    kept.parent.mkdir()
    kept.write_bytes(damaged)
    monkeypatch.setattr(sys, "argv", ["dlg", "methods", "--out", str(tmp_path), "--results", str(tmp_path)])
    assert dlg.main() == 1
    assert capsys.readouterr().err == f"papers.dlg: {kept} holds no row of this table; take it out and go on.\n"
    assert kept.read_bytes() == damaged


def test_shortened_runs_do_not_overwrite_complete_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def filled(tried: bool, **given: Path) -> tuple[Path, Path]:
        arguments = argparse.Namespace(**{"out": None, "results": None} | given)
        folders(arguments, "losac", tried)
        return arguments.out, arguments.results

    assert filled(False) == (Path("runs/losac"), Path(losac.__file__).parent / "results")
    assert filled(True) == (Path("runs/losac/tried"), Path("runs/losac/tried/results"))
    assert filled(True, out=Path("mine")) == (Path("mine"), Path("mine/results"))
    assert filled(True, results=Path("mine")) == (Path("runs/losac/tried"), Path("mine"))


def test_tables_name_the_options_that_a_command_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(losac.table2, "losses", lambda arguments: said.append(arguments.command))
    monkeypatch.setattr(losac, "folders", lambda *_, **__: None)
    given = ["losses", "--data", "MNIST", "HAR", "--local-steps", "2", "--out", "x", "--data-dir", "y"]
    monkeypatch.setattr(sys, "argv", ["losac", *given, "--seeds", "0"])
    losac.main()
    monkeypatch.setattr(upcycled, "table", lambda arguments: said.append(arguments.command))
    monkeypatch.setattr(upcycled, "folders", lambda *_, **__: None)
    monkeypatch.setattr(upcycled, "writable", lambda *_: None)
    given = ["table1", "--data", "own 0_0", "--search", "coarse", "--only-write"]
    monkeypatch.setattr(sys, "argv", ["upcycled", *given])
    upcycled.main()
    assert said == [
        "python -m papers.losac losses --seeds 0 --data MNIST HAR --local-steps 2",
        "python -m papers.upcycled table1 --data 'own 0_0' --search coarse",
    ]


def test_figure3_with_fewer_seeds_does_not_overwrite_complete_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seeds, where in (("5", Path("runs/episode/tried/results")), ("200", Path(episode.__file__).parent / "results")):
        printed: list[Path] = []
        monkeypatch.setattr(episode, "fig3", lambda arguments, printed=printed: printed.append(arguments.results))
        monkeypatch.setattr(sys, "argv", ["episode", "fig3", "--seeds", seeds])
        episode.main()
        assert printed == [where]
