"""Every example runs."""

import ast
import json
import re
import runpy
import sys
import tomllib
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from tests.blocks import ROOT, blocks
from tests.docs.test_reference import code_of, modules_imported

EXAMPLES = ROOT / "examples"
mpl.use("agg")


LONG = ("own_method", "several_processes", "step_sizes", "client_drift", "fine_tuning", "fine_tuning_text")
"""Examples that are run by ``make test-all`` only, because other tests cover most of their code."""


def examples_with_suffix(suffix: str) -> list:
    """The examples with this suffix."""
    found = sorted(EXAMPLES.glob(f"*.{suffix}"))
    return [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in LONG else ()) for path in found]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("path", examples_with_suffix("py"))
def test_script_runs_and_prints_an_accuracy(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for library in ("torch", "transformers", "peft"):
        if re.search(rf"^(import|from) {library}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("path", examples_with_suffix("ipynb"))
def test_cells_of_notebook_run(path: Path):
    """Without its first cell, which installs fedrax on Colab."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    install, *code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert install == "%pip install --quiet fedrax"
    assert code and not any(cell.get("outputs") for cell in cells)
    names: dict = {}
    plt.close("all")  # a notebook starts without figures of other tests
    for number, source in enumerate(code, 2):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
    plt.close("all")


@pytest.mark.parametrize("path", examples_with_suffix("ipynb"))
def test_notebooks_need_no_files_of_the_repository(path: Path):
    """They run on another machine: no paths but in a temporary folder, and packages that the installation brings."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/home/|/Users/|/content/|\.\./|data_dir|sys\.path", text)
    imported = {module.split(".")[0] for code in code_of(path) for module in modules_imported(code)}
    assert imported - sys.stdlib_module_names <= {"fedrax", "jax", "matplotlib", "numpy", "optax", "polars"}


# -- the Flower app ----------------------------------------------------------------------------------------------------

APP, PAGE = EXAMPLES / "flower", ROOT / "docs" / "deployment.md"
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def read(path: Path) -> str:
    return path.read_text("utf-8")


def is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def program(text: str) -> str:
    """Code of a module without docstrings and comments, with imports as in a flat folder."""
    module = ast.parse(text.replace("from digits.", "from "))
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.FunctionDef):
            node.body = [line for line in node.body if not (isinstance(line, ast.Expr) and is_text(line.value))]
    return ast.unparse(module)


def test_deployment_page_shows_the_code_of_the_example():
    shown = {block.file: block.text for block in blocks(PAGE) if block.file}
    files = sorted((APP / "digits").glob("[a-z]*.py"))
    assert len(files) == 3
    for file in files:
        assert program(shown[file.name]) == program(read(file)), file.name
    apps = tomllib.loads(read(APP / "pyproject.toml"))["tool"]["flwr"]["app"]["components"]
    for name, place in apps.items():
        assert place == f"digits.{name.removesuffix('app')}_app:app"
        assert re.search(
            r"^app = \w+_app\(", read(APP / f"{place.partition(':')[0].replace('.', '/')}.py"), re.MULTILINE
        )


def test_deployment_page_has_the_commands_of_the_example():
    page, federation = read(PAGE), read(APP / "digits" / "federation.py")
    clients = int(re.findall(r"^CLIENTS = (\d+)$", federation, re.MULTILINE)[0])
    nodes = [line for line in page.splitlines() if line.startswith("flower-supernode --insecure")]
    assert [re.findall(r"partition-id=(\d+)", line) for line in nodes] == [[str(k)] for k in range(clients)]
    assert len({re.findall(r"--port (\d+)", line)[0] for line in nodes}) == clients
    assert len(set(re.findall(r"127\.0\.0\.1:\d+", page))) == 1  # of the SuperNodes and of the connection
    (connection,) = re.findall(r"^flwr run examples/flower (\w+)", page, re.MULTILINE)
    assert f"[superlink.{connection}]" in page


def test_texts_about_the_example_have_its_number_of_clients():
    federation = read(APP / "digits" / "federation.py")
    clients = int(re.findall(r"^CLIENTS = (\d+)$", federation, re.MULTILINE)[0])
    files = [PAGE, APP / "pyproject.toml", *(APP / "digits").glob("*.py")]
    for text in map(read, files):
        for word in re.findall(r"\b(\w+) clients", text):
            number = NUMBERS.index(word) + 1 if word in NUMBERS else int(word) if word.isdecimal() else clients
            assert number == clients, f"{word} clients"
