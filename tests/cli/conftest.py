"""Fixtures of the command-line tests: commands run in this process, in an empty directory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fedrax.cli import main
from fedrax.experiments import run_comparison


@pytest.fixture(scope="module", autouse=True)
def one_task_each(tasks_once: None) -> None:
    """In all modules of this folder."""


class Outcome(NamedTuple):
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str


@pytest.fixture
def fedrax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """``fedrax("run", ...)`` as from a shell, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDRAX_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("fedrax.experiments.user_code._modules", set())  # of a process that has run no command

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:  # --help
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call


TINY = """
name = "tiny"
[partition]
name = "shards"
clients = 8
[model]
name = "logistic"
[algorithm]
name = "fedavg"
local = { lr = 0.1, steps = 2 }
[run]
rounds = 4
cohort_size = 3
eval_every = 2
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A file of a run that takes no time."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


SEARCHED = "seeds = [0, 1]\ngrid = { algorithm.local.lr = [0.01, 0.3] }\n" + TINY.replace("rounds = 4", "rounds = 2")
"""A comparison of a grid."""


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> run_comparison.ComparisonResult:
    """The comparison, made in this process."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "t.toml").write_text(SEARCHED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedrax.experiments.search.trials.should_vectorize", lambda *_: False)  # here too, one by one
        return run_comparison.compare(folder / "t.toml", directory=folder / "here")


def numbers(directory: Path) -> dict[str, list]:
    """The events of every run but their times."""
    return {
        str(path.parent.relative_to(directory)): [
            {key: value for key, value in json.loads(line).items() if not key.startswith("seconds")}
            for line in path.read_text().splitlines()
        ]
        for path in directory.rglob("events.jsonl")
    }
