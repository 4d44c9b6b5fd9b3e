"""The command line in unusual environments: no home directory, closed streams, missing devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome
from tests.cli.test_outputs import command
from tests.slow import slow_cases

RUN = ["run", "--data", "digits", "--partition", "shards", "--model", "logistic", "--run.rounds", "1", "--out", "r"]


WITHOUT_ACCOUNT = "import os, fedrax.files, pwd; os.setuid(54321); fedrax.files.cache_directory()"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_unknown_user_without_home_directory():
    known = {name: value for name, value in os.environ.items() if name not in ("HOME", "FEDRAX_CACHE")}
    completed = subprocess.run([sys.executable, "-c", WITHOUT_ACCOUNT], env=known, stderr=subprocess.PIPE, text=True)
    assert "FedraxError: this user has no home directory" in completed.stderr and "set FEDRAX_CACHE" in completed.stderr


@pytest.mark.parametrize("streams", [(0, 1, 2), pytest.param((1,), marks=pytest.mark.slow)], ids=str)
def test_run_with_closed_streams_writes_its_events(streams: tuple[int, ...], tmp_path: Path):
    closing = "".join(f"{number}>&- " for number in streams)
    call = [sys.executable, "-m", "fedrax", *RUN]
    paths = os.pathsep.join(path for path in sys.path if path)
    completed = subprocess.run(
        ["sh", "-c", f'exec "$@" {closing}', "sh", *call], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}
    )
    assert completed.returncode == 0 and (tmp_path / "r/events.jsonl").read_text().count("\n") == 1


def test_unwritable_cache_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    done = command(tmp_path, *RUN, "--quiet", FEDRAX_CACHE=str(tmp_path / "file"))
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert "the compilation cache is off" in done.stderr and "set FEDRAX_CACHE" in done.stderr


@pytest.mark.parametrize("platform", slow_cases(["of_no_kind", "cuda"]))
def test_missing_devices_raise_a_clear_error(platform: str, tmp_path: Path):
    done = command(tmp_path, *RUN, JAX_PLATFORMS=platform)
    if done.returncode == 0:
        pytest.skip("this machine has such a device")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"no device of JAX_PLATFORMS={platform}" in done.stderr


def test_missing_devices_raise_a_clear_error_in_python():
    code = """import numpy as np, fedrax
federation = fedrax.Federation.from_arrays(np.eye(4, dtype=np.float32), np.arange(4) % 2, np.arange(4))
task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
fedrax.simulate(fedrax.FedAvg(), task, federation, rounds=1)"""
    environment = os.environ | {"JAX_PLATFORMS": "of_no_kind"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert "FedraxError: JAX finds no device of JAX_PLATFORMS=of_no_kind" in done.stderr


def test_removed_working_directory_raises_a_clear_error(
    fedrax: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        outcome = fedrax(*RUN)
    finally:
        monkeypatch.chdir(tmp_path)
    assert outcome.status == 2 and "the current directory does not exist any more" in outcome.err


@pytest.mark.slow
def test_lists_work_without_docstrings(tmp_path: Path):
    """Python -OO removes docstrings, and dataclasses then describe themselves by their fields."""
    done = command(tmp_path, "list", "partitions", PYTHONOPTIMIZE="2")
    assert done.returncode == 0 and "shards" in done.stdout and "Shards(" not in done.stdout
