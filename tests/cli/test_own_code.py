"""User code runs only where a file or flag names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedrax import FedraxError
from fedrax.experiments import experiment, read_file, user_code
from tests.cli.conftest import TINY

METHOD = """
from dataclasses import dataclass
from pathlib import Path
import fedrax
import numpy as np
from fedrax.participation import ParticipationPolicy
from fedrax.config.hyperparameters import hyperparameters

Path({evidence!r}).write_text("ran")

@hyperparameters
class Mine(fedrax.FedAvg):
    \"\"\"FedAvg under another name.\"\"\"

@dataclass(frozen=True)
class First(ParticipationPolicy):
    \"\"\"The first clients.\"\"\"
    def sample(self, state, round, population, rng):
        return np.arange(population.cohort_size)
"""


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """A file that user code creates when it is run."""
    return tmp_path / "proof"


def write(folder: Path, evidence: Path) -> None:
    """Write mine.py, and an experiment that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(METHOD.format(evidence=str(evidence)))
    (folder / "x.toml").write_text(TINY.replace('"fedavg"', '"mine.py:Mine"'))


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("model", "shutil:rmtree"),
        ("data", "runpy:run_path"),
        ("partition", "os:system"),
        ("algorithm", "subprocess:Popen"),
        ("model", "http.server:HTTPServer"),
    ],
)
@pytest.mark.parametrize("command", ["run", "partition", "profile", "compare"])
def test_files_cannot_name_functions_of_other_packages(part: str, name: str, command: str, tmp_path: Path, fedrax: Any):
    (tmp_path / "x.toml").write_text(f'[{part}]\nname = "{name}"\npath = "{tmp_path}"\n')
    outcome = fedrax(command, "x.toml")
    assert outcome.status == 2 and "not a package that registers an entry point" in outcome.err
    assert (tmp_path / "x.toml").exists()


def test_files_can_name_code_in_their_folder_only(tmp_path: Path, evidence: Path, fedrax: Any):
    write(tmp_path / "elsewhere", evidence)
    (tmp_path / "here").mkdir()
    for name in ("../elsewhere/mine.py", str(tmp_path / "elsewhere" / "mine.py")):
        (tmp_path / "here" / "x.toml").write_text(TINY.replace('"fedavg"', f'"{name}:Mine"'))
        outcome = fedrax("run", "here/x.toml")
        assert outcome.status == 2 and "is outside of" in outcome.err and not evidence.exists()
    (tmp_path / "here" / "link.py").symlink_to(tmp_path / "elsewhere" / "mine.py")
    (tmp_path / "here" / "x.toml").write_text(TINY.replace('"fedavg"', '"link.py:Mine"'))
    assert fedrax("run", "here/x.toml").status == 2 and not evidence.exists()
    assert fedrax("run", "here/x.toml", "--algorithm", "elsewhere/mine.py:Mine").status == 2  # the file is read first
    assert fedrax("run", "elsewhere/mine.py:Mine", "--run.rounds", 1, "--quiet").status == 0 and evidence.exists()


def test_grids_can_name_code_in_the_folder_of_the_file_only(tmp_path: Path, evidence: Path, fedrax: Any):
    write(tmp_path / "elsewhere", evidence)
    (tmp_path / "here").mkdir()
    for name in ("../elsewhere/mine.py", str(tmp_path / "elsewhere" / "mine.py")):
        grid = f'grid = {{ algorithm.name = ["fedavg", "{name}:Mine"] }}\n'
        for text in (grid + TINY, f"{TINY}[[compare]]\n{grid}"):
            (tmp_path / "here" / "x.toml").write_text(text)
            outcome = fedrax("compare", "here/x.toml", "--out", "c")
            assert outcome.status == 2 and "is outside of" in outcome.err and not evidence.exists()
    grid = 'grid = { algorithm.name = ["fedavg", "mine.py:Mine"] }\n'
    (tmp_path / "elsewhere" / "x.toml").write_text(grid + TINY)
    from fedrax.experiments import comparison

    read = comparison.read([Path("elsewhere/x.toml")])
    read.check()
    assert evidence.exists() and [type(found).__name__ for found in algorithms(read)] == ["FedAvg", "Mine"]


def algorithms(read: Any) -> list[Any]:
    """Algorithms at the points of a comparison's grid."""
    return [spec.algorithm for candidates in read.candidates.values() for _, spec in candidates]


@pytest.mark.slow
def test_resume_runs_user_code_only_with_trust(tmp_path: Path, evidence: Path, fedrax: Any):
    write(tmp_path, evidence)
    chosen = ("--run.participation", "mine.py:First")
    assert fedrax("run", "x.toml", *chosen, "--out", "r", "--quiet").status == 0
    evidence.unlink()

    def resume(*more: str) -> subprocess.CompletedProcess[str]:  # in a new process, which trusts no code yet
        command = [sys.executable, "-m", "fedrax", "resume", "r", "--quiet", *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    rejected = resume()
    assert rejected.returncode == 2 and "add --trust to fedrax resume" in rejected.stderr and not evidence.exists()
    assert resume("--trust", "--run.rounds", "6").returncode == 0 and evidence.exists()


def test_commands_do_not_run_code_of_a_received_run_directory(tmp_path: Path, evidence: Path, fedrax: Any):
    write(tmp_path, evidence)
    assert fedrax("run", "x.toml", "--out", "r", "--quiet").status == 0
    (tmp_path / "r" / "sent.py").write_text(METHOD.format(evidence=str(tmp_path / "sent")))
    file = tmp_path / "r" / "experiment.toml"
    made = file.read_text()
    file.write_text(made.replace(str(tmp_path / "mine.py"), "sent.py"))
    for command in ("run", "compare", "partition", "diagnose", "privacy", "audit", "profile"):
        outcome = fedrax(command, file)
        assert outcome.status == 2 and "the experiment of a run directory names code" in outcome.err, command
    with pytest.raises(FedraxError, match="the experiment of a run directory names code"):
        read_file(file)
    file.write_text('grid = { algorithm.name = ["sent.py:Mine"] }\n' + TINY)
    assert "the experiment of a run directory names code" in fedrax("compare", file).err
    assert not (tmp_path / "sent").exists()
    (tmp_path / "r" / "experiment.toml").write_text(made)
    (tmp_path / "copied.toml").write_text(made)
    assert (
        fedrax("run", "copied.toml", "--out", "again", "--quiet").status == 0
    )  # in the folder of the code that it names


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "raise KeyError('gone')", "import nothing_of_this_name"])
def test_user_code_that_fails_on_import_is_an_error(code: str, tmp_path: Path, fedrax: Any):
    (tmp_path / "mine.py").write_text(f"\n\n{code}")
    outcome = fedrax("run", "mine.py:Mine")
    assert outcome.status == 2 and "mine.py, line 3, cannot be imported" in outcome.err


@pytest.mark.parametrize(
    ("apply", "message"),
    [("lambda params: params", "takes 1 positional argument"), ("lambda params, x, y, z: x", "missing 1 required")],
)
def test_model_with_wrong_arguments_raises_a_clear_error(apply: str, message: str, tmp_path: Path, fedrax: Any):
    (tmp_path / "mine.py").write_text(
        f"from fedrax.models import Model\n\ndef model():\n    return Model(lambda key: 1.0, {apply})\n"
    )
    outcome = fedrax("run", "--model", "mine.py:model", "--quiet")
    assert outcome.status == 2 and outcome.err.startswith("fedrax: the task's loss cannot be computed")
    assert message in outcome.err and len(outcome.err.splitlines()) == 1


def test_model_without_parameters_is_rejected(tmp_path: Path, fedrax: Any):
    (tmp_path / "mine.py").write_text(
        "from fedrax.models import Model\n\ndef model():\n    return Model(lambda key: {}, lambda params, x, key: x)\n"
    )
    outcome = fedrax("run", "--model", "mine.py:model", "--quiet")
    assert outcome.status == 2 and "the model has no parameters" in outcome.err


def test_defaults_that_no_file_can_express_are_kept(tmp_path: Path, fedrax: Any):
    (tmp_path / "mine.py").write_text(
        "import optax\nfrom fedrax import FedAvg, LocalSGD, hyperparameters\nfrom fedrax.optim import Optax\n\n\n"
        "@hyperparameters\nclass Mine(FedAvg):\n"
        "    local: LocalSGD = LocalSGD(optimizer=Optax.of(optax.adamw, weight_decay=0.01))\n"
    )
    (tmp_path / "x.toml").write_text(TINY.replace('"fedavg"', '"mine.py:Mine"'))
    assert fedrax("run", "x.toml").status == 0
    steps = read_file(tmp_path / "x.toml").algorithm.local
    assert steps.optimizer is not None and steps.steps == 2


MODEL = """
from fedrax.models import MLP
from my_layers import WIDTH

def model(input_shape, num_outputs, width: int = WIDTH):
    return MLP(hidden=(width,)).build(input_shape, num_outputs)
"""


def test_user_code_imports_modules_of_its_folder(tmp_path: Path) -> None:
    """And not modules of the same name beside other user code."""
    before = list(sys.path)
    for folder, width in (("a", 3), ("b", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_layers.py").write_text(f"WIDTH = {width}\n")
        (tmp_path / folder / "mine.py").write_text(MODEL)
        made = experiment.from_table({"model": {"name": "mine.py:model"}}, "x", tmp_path / folder)
        assert made.model.width == width and sys.path == before


def test_files_of_one_folder_share_its_modules(tmp_path: Path) -> None:
    """Also if code of another folder imported a module of the same name in between."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared_parts.py").write_text("class Part:\n    pass\n")
    for place in ("b/one.py", "a/one.py", "b/two.py"):
        (tmp_path / place).write_text("from shared_parts import Part\n")
    kinds = [user_code.import_named(f"{place}:Part", tmp_path)[1] for place in ("b/one.py", "a/one.py", "b/two.py")]
    assert kinds[0] is kinds[2] and kinds[0] is not kinds[1]


HEAD = """
from dataclasses import dataclass
from fedrax import FedAvg, hyperparameters
from fedrax.data import Iid
"""
NAMED = {
    "data": "def thing(name='x'):\n    return name\n",
    "model": "def thing(input_shape, num_outputs, name='x'):\n    return name\n",
    "task": "def thing(model, name='x'):\n    return name\n",
    "partition": "@dataclass(frozen=True)\nclass thing(Iid):\n    name: str = 'x'\n",
    "algorithm": "@hyperparameters\nclass thing(FedAvg):\n    name: str = 'x'\n",
}


@pytest.mark.parametrize("part", NAMED)
def test_parameter_called_name_is_rejected(part: str, tmp_path: Path) -> None:
    """In a file this key selects the class, so that the parameter would keep its default."""
    (tmp_path / "mine.py").write_text(HEAD + NAMED[part])
    with pytest.raises(FedraxError, match=r"has a parameter or field called name, .*: rename it"):
        experiment.from_table({part: {"name": "mine.py:thing"}}, "x", tmp_path)


PARTITION = """
@dataclass
class Mine:
    clients: int = 2

    def assign(self, dataset, seed):
        return Iid(self.clients).assign(dataset, seed)
"""


def test_user_defined_partition_need_not_be_frozen(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + PARTITION)
    made = experiment.from_table({"partition": {"name": "mine.py:Mine", "clients": 12}}, "x", tmp_path)
    assert experiment.load_federation(made).num_clients == 12


SCHEDULE = """
from fedrax import hyperparameters
from fedrax.contract import PositiveInt

@hyperparameters
class Warmup:
    rounds: PositiveInt = 5

    def __call__(self, round):
        return (round + 1) / self.rounds

@hyperparameters
class Prox:
    def __prox__(self, x):
        return x
"""


def test_parts_of_a_method_may_be_user_code(tmp_path: Path) -> None:
    """A schedule in a file, in Python, and in the file of a run; a class that is no schedule is rejected."""
    (tmp_path / "mine.py").write_text(SCHEDULE)

    def made(name: str, **fields: int) -> experiment.Experiment:
        local = {"schedule": {"name": f"mine.py:{name}", **fields}}
        return experiment.from_table({"algorithm": {"name": "fedavg", "local": local}}, "x", tmp_path)

    warming = made("Warmup", rounds=4)
    assert warming.algorithm.local.schedule(1) == 0.5  # type: ignore[attr-defined]
    assert experiment.from_table(experiment.to_table(warming), "x", tmp_path) == warming
    with pytest.raises(
        FedraxError, match=r"schedule\]: 'Prox' cannot be the schedule: write a class with .* that Constant, "
    ):
        made("Prox")


DATA = """
import numpy as np
from fedrax.data import Dataset, Samples

def load(data_dir):
    x, y = np.ones((30, 3), np.float32), np.arange(30, dtype=np.int32) % 3
    return Dataset(repr(data_dir), Samples(x, y), Samples(x[:9], y[:9]), 3)
"""


@pytest.mark.parametrize(
    ("given", "variable", "path"),
    [(None, "", None), (None, "e", Path("e")), ("g", "e", Path("g")), (Path("g"), "", Path("g"))],
)
def test_user_defined_data_gets_the_data_directory(
    given: str | Path | None, variable: str, path: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on workers, which receive it as a string."""
    monkeypatch.setenv("FEDRAX_DATA", variable)
    (tmp_path / "mine.py").write_text(DATA)
    table = {"data": {"name": "mine.py:load"}, "partition": {"name": "iid", "clients": 3}}
    made = experiment.from_table(table, "x", tmp_path)
    assert experiment.load_federation(made, given).name == repr(path)
