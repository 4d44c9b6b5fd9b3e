"""Every example runs, as a person would run it."""

import json
import runpy
from pathlib import Path

import matplotlib as mpl
import pytest

from tests.docs.test_code_blocks import ROOT

EXAMPLES = ROOT / "examples"
mpl.use("agg")


LONG = ("own_method", "several_processes", "step_sizes", "client_drift")
"""Those that run much of what others run, or what has tests of its own: a part of ``make test-all``."""


def named(ending: str) -> list:
    """The examples with this ending."""
    found = sorted(EXAMPLES.glob(f"*.{ending}"))
    return [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in LONG else ()) for path in found]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("path", named("py"))
def test_script_runs_and_says_something(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if "import torch" in path.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("path", named("ipynb"))
def test_cells_of_notebook_run(path: Path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(cell.get("outputs") for cell in cells)
    names: dict = {}
    for number, source in enumerate(code, 1):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
