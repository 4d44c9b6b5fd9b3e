"""`fedrax new`: the project that it writes, and invalid arguments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import tomlkit

from fedrax.cli.new_command import names
from fedrax.errors import FedraxError
from fedrax.files import new_directory
from tests.cli.conftest import Outcome


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project, written by the command."""
    from fedrax.cli import main

    directory = tmp_path_factory.mktemp("new") / "Heart-study"
    assert main(["new", str(directory)]) == 0
    return directory


@pytest.mark.slow
def test_the_tests_of_the_project_pass(project: Path):
    """In a separate process, as a user runs them: data, method, learning, and the Flower app against simulate."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr


def test_the_experiment_of_the_project_runs(project: Path, fedrax: Callable[..., Outcome]):
    outcome = fedrax("run", project / "experiment.toml", "--out", "r", "--run.rounds", 2)
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith("ClippedAvg: ")


@pytest.mark.slow
def test_the_method_of_the_project_is_compared_with_another(project: Path, fedrax: Callable[..., Outcome]):
    outcome = fedrax("compare", project / "experiment.toml", "--algorithms", "fedavg", "--seeds", 0, "--run.rounds", 2)
    assert outcome.status == 0, outcome.err


OWN_TABLE = "\n".join(
    ["site,dose,weight,remark,outcome"]
    + [
        f"{('north', 'south', 'west')[i % 3]},{i},{i % 7},none,{('good', 'fair', 'bad')[i % 3 - i % 2]}"
        for i in range(60)
    ]
)
OWN_COLUMNS = {"client": "site", "label": "outcome", "classes": ["bad", "fair", "good"], "features": ["dose", "weight"]}


def with_own_table(project: Path, directory: Path, columns: dict) -> Path:
    """A copy of the project whose table and keys of [data] are a user's; returns the experiment file."""
    shutil.copytree(project, directory, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "data.csv").write_text(OWN_TABLE)
    table = tomlkit.parse((directory / "experiment.toml").read_text("utf-8"))
    table["data"].update(columns)
    (directory / "experiment.toml").write_text(tomlkit.dumps(table))
    return directory / "experiment.toml"


def test_a_table_with_other_columns_needs_only_their_names(
    project: Path, fedrax: Callable[..., Outcome], tmp_path: Path
):
    file = with_own_table(project, tmp_path / "own", OWN_COLUMNS)
    outcome = fedrax("run", file, "--out", "r", "--run.rounds", 2, "--run.cohort-size", 3, "--json")
    assert outcome.status == 0, outcome.err
    assert json.loads((tmp_path / "r" / "clients.json").read_text())["names"] == ["north", "south", "west"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "data.client: {path} has no column 'clinic'; it has site, dose, weight, remark, outcome"),
        (OWN_COLUMNS | {"label": "ill"}, "data.label: {path} has no column 'ill'; it has site, dose"),
        (OWN_COLUMNS | {"features": ["age"]}, "data.features: {path} has no column 'age'; it has site, dose"),
        (OWN_COLUMNS | {"features": ["remark"]}, "row 2 of {path} has remark = 'none', which is no number"),
        (OWN_COLUMNS | {"classes": ["no"]}, "row 2 of {path} has outcome = 'good'; values: bad, fair, good"),
    ],
)
def test_wrong_keys_for_a_table_name_what_it_has(
    columns: dict, message: str, project: Path, fedrax: Callable[..., Outcome], tmp_path: Path
):
    file = with_own_table(project, tmp_path / "own", columns)
    outcome = fedrax("run", file, "--out", "r")
    assert outcome.status == 2 and message.format(path=file.with_name("data.csv")) in outcome.err, outcome.err
    assert "Traceback" not in outcome.err


def test_names_are_those_of_the_directory(project: Path):
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert {"heart_study/method.py", "tests/test_heart_study.py", "data.csv", ".gitignore"} <= files
    texts = [(project / name).read_text("utf-8") for name in files if not name.endswith(".pyc")]
    assert not [text for text in texts if "starter" in text]
    assert 'name = "heart-study"' in (project / "pyproject.toml").read_text("utf-8")


def test_the_flower_app_is_bundled_without_the_data(project: Path):
    build = pytest.importorskip("flwr.cli.build")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower uses
        bundle = build.build_fab_from_disk(project)
    names = set(zipfile.ZipFile(BytesIO(bundle)).namelist())
    assert {"experiment.toml", "heart_study/client_app.py", "heart_study/server_app.py"} <= names
    assert not [name for name in names if name.endswith(".csv") or "test" in name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("2024", "--name takes a letter"),
        ("my study", "--name takes a letter"),
        ("a" * 33, "at most 31"),
        ("../up", "--name takes a letter"),
        ("class", "keyword of Python"),
        ("json", "another package 'json'"),
        ("numpy", "another package 'numpy'"),
        ("tests", "another package 'tests'"),
        ("fedrax", "another package 'fedrax'"),
    ],
)
def test_invalid_names(name: str, words: str, fedrax: Callable[..., Outcome], tmp_path: Path):
    outcome = fedrax("new", "d", "--name", name)
    assert outcome.status == 2 and words in outcome.err
    assert not (tmp_path / "d").exists()


def test_names_become_names_of_a_package_and_of_an_app():
    assert names("My-Study_2") == ("my-study-2", "my_study_2")
    assert names("a" * 32)[1] == "a" * 32


def test_directory_with_files_is_rejected(fedrax: Callable[..., Outcome], tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine.txt").write_text("mine")
    outcome = fedrax("new", "d")
    assert outcome.status == 2 and "d exists and is not empty" in outcome.err
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["mine.txt"]
    (tmp_path / "f").write_text("mine")
    assert fedrax("new", "f").status == 2 and (tmp_path / "f").read_text() == "mine"


def test_empty_directory_is_filled_and_named_by_its_path(
    fedrax: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "cats").mkdir()
    monkeypatch.chdir(tmp_path / "cats")
    assert fedrax("new", ".").status == 0
    assert (tmp_path / "cats" / "cats" / "model.py").is_file()


def test_files_are_removed_after_an_error(tmp_path: Path):
    (tmp_path / "empty").mkdir()

    def fill(directory: Path) -> None:
        with new_directory(directory, ""):
            (directory / "sub").mkdir(parents=True)
            (directory / "sub" / "file").touch()
            raise FedraxError("the disk is full")

    for name in ("new", "empty"):
        with pytest.raises(FedraxError, match="full"):
            fill(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
