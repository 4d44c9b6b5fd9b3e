"""Fixtures of the command-line tests: commands run in this process, in an empty directory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fedrax.cli import main
from fedrax.experiments import run_comparison


@pytest.fixture(scope="module", autouse=True)
def share_tasks(shared_tasks: None) -> None:
    """Share tasks in all modules of this folder."""


class Outcome(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def fedrax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """``fedrax("run", ...)`` runs a command in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDRAX_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("fedrax.experiments.user_code._modules", set())  # no user code is trusted yet

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
    """File of an experiment with a short run."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


GRID_COMPARISON = "seeds = [0, 1]\ngrid = { algorithm.local.lr = [0.01, 0.3] }\n" + TINY.replace(
    "rounds = 4", "rounds = 2"
)
"""File of a comparison with a grid."""


@pytest.fixture(scope="session")
def local_comparison(tmp_path_factory: pytest.TempPathFactory) -> run_comparison.ComparisonResult:
    """The result of ``GRID_COMPARISON`` in this process."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "t.toml").write_text(GRID_COMPARISON)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fedrax.experiments.search.trials.should_vectorize", lambda *_: False
        )  # sequentially, as on workers
        return run_comparison.compare(folder / "t.toml", directory=folder / "here")


def events_by_run(directory: Path) -> dict[str, list]:
    """Events of all runs without durations."""
    return {
        str(path.parent.relative_to(directory)): [
            {key: value for key, value in json.loads(line).items() if not key.startswith("seconds")}
            for line in path.read_text().splitlines()
        ]
        for path in directory.rglob("events.jsonl")
    }
