"""The method in CONTRIBUTING.md is complete: it needs a single new file, and it computes FedACG."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedrax
from fedrax import Federation, LocalSGD, regression, simulate
from fedrax.experiments.user_code import import_named
from fedrax.models import Linear
from tests.blocks import ROOT, blocks

METHOD = next(block.text for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "python")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its contract tests with the new file and no other change."""
    root = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(fedrax.__file__).parent, root / "src" / "fedrax", ignore=ignored)
    shutil.copytree(ROOT / "tests" / "contract", root / "tests" / "contract", ignore=ignored)
    for name in ("pyproject.toml", "tests/conftest.py", "tests/compiler.py", "tests/examples.py", "tests/slow.py"):
        shutil.copy(ROOT / name, root / name)
    (root / "src/fedrax/algorithms/fedacg.py").write_text(METHOD, encoding="utf-8")
    return root


def run(checkout: Path, *arguments: str) -> str:
    """Output of a Python command in the copy; fails with it if the command does."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    completed = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


def fedrax_commands(checkout: Path, *commands: str) -> list[str]:
    """Output of several ``fedrax`` commands, run in one process."""
    code = "import sys; from fedrax.cli import main\n"
    code += "for line in sys.argv[1:]: assert main(line.split()) == 0, line; print('\\f')"
    return run(checkout, "-c", code, *commands).split("\f")[:-1]


def test_method_is_short():
    assert len(METHOD.splitlines()) < 60


@pytest.mark.slow
def test_method_passes_the_contract_tests(checkout: Path):
    tests = "tests/contract/test_every_algorithm.py"
    report = run(checkout, "-m", "pytest", tests, "-k", "fedacg", "-q", "-p", "no:cacheprovider")
    written = (ROOT / tests).read_text().count("\ndef test_")
    passed = int(report.rsplit(" passed", 1)[0].split()[-1])
    assert passed >= written > 5, report


@pytest.mark.slow
def test_method_is_on_the_command_line(checkout: Path):
    flags = "--algorithm fedacg --algorithm.beta 0.02 --run.rounds 3 --model logistic"
    commands = ("list algorithms", f"run {flags} --out runs/fedacg", "resume runs/fedacg")
    listed, ran, resumed = fedrax_commands(checkout, *commands)
    assert "fedacg" in listed.lower() and "fedacg" in ran
    assert "3 rounds" in resumed
    assert 'name = "fedacg"' in (checkout / "runs/fedacg/experiment.toml").read_text()


def test_method_agrees_with_numpy(tmp_path: Path):
    (tmp_path / "fedacg.py").write_text(METHOD, encoding="utf-8")
    _, kind = import_named("fedacg.py:FedACG", tmp_path)
    rng = np.random.default_rng(0)
    clients, rows, lr, lam, beta = 3, 5, 0.05, 0.7, 0.3
    x = rng.normal(size=(clients, rows, 4))
    y = np.einsum("crf,cf->cr", x, rng.normal(size=(clients, 4)))  # each client has its own model
    x_rows, y_rows = x.reshape(-1, 4), y.reshape(-1)
    offsets = np.arange(clients + 1) * rows
    federation = Federation.from_arrays(x_rows, y_rows, offsets=offsets, test=(x_rows, y_rows))
    algorithm = kind(local=LocalSGD(lr=lr, steps=2, batch_size="full"), lam=lam, beta=beta)
    start = {"output": {"weight": np.zeros((1, 4)), "bias": np.zeros(1)}}
    result = simulate(
        algorithm,
        regression(Linear().build((4,), 1)),
        federation,
        rounds=6,
        cohort_size=clients,
        dtype="float64",
        params=start,
    )

    w, before, lengths = np.zeros(5), np.zeros(5), []
    inputs = np.concatenate([x, np.ones((clients, rows, 1))], axis=2)
    for _ in range(6):
        start, ends = w + lam * (w - before), []
        for a, b in zip(inputs, y, strict=True):
            local = start.copy()
            for _ in range(2):
                local -= lr * (2 * a.T @ (a @ local - b) / rows + beta * (local - start))
            ends.append(local)
        w, before = np.mean(ends, axis=0), w
        lengths.append(np.linalg.norm(w - before))
    ours = np.append(result.params["output"]["weight"], result.params["output"]["bias"])
    np.testing.assert_allclose(ours, w, rtol=1e-9)
    np.testing.assert_allclose([event["momentum"] for event in result.events], lengths, rtol=1e-6)
