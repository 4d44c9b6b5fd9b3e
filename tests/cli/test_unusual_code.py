"""Own code that is written otherwise than usual: several files, names that are taken, plain dataclasses, data files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedrax import FedraxError
from fedrax.experiments import experiment, user_code

MODEL = """
from fedrax.models import MLP
from my_layers import WIDTH

def model(input_shape, num_outputs, width: int = WIDTH):
    return MLP(hidden=(width,)).build(input_shape, num_outputs)
"""


def test_own_code_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """And nothing of an equal name that lies beside other code."""
    before = list(sys.path)
    for folder, width in (("a", 3), ("b", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_layers.py").write_text(f"WIDTH = {width}\n")
        (tmp_path / folder / "mine.py").write_text(MODEL)
        made = experiment.from_table({"model": {"name": "mine.py:model"}}, "x", tmp_path / folder)
        assert made.model.width == width and sys.path == before


def test_files_of_one_folder_share_what_lies_beside_them(tmp_path: Path) -> None:
    """Also where code of another folder has imported a module of that name in between."""
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
def test_a_parameter_called_name_is_refused(part: str, tmp_path: Path) -> None:
    """In a file that key says whose parameters they are, so that this one would keep its default."""
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


def test_a_partition_need_not_be_frozen(tmp_path: Path) -> None:
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


def test_a_part_of_a_method_may_be_ones_own(tmp_path: Path) -> None:
    """A schedule in a file, as in Python, and in the file that a run keeps; one that is none is a sentence."""
    (tmp_path / "mine.py").write_text(SCHEDULE)

    def made(name: str, **fields: int) -> experiment.Experiment:
        local = {"schedule": {"name": f"mine.py:{name}", **fields}}
        return experiment.from_table({"algorithm": {"name": "fedavg", "local": local}}, "x", tmp_path)

    warming = made("Warmup", rounds=4)
    assert warming.algorithm.local.schedule(1) == 0.5  # type: ignore[attr-defined]
    assert experiment.from_table(experiment.to_table(warming), "x", tmp_path) == warming
    with pytest.raises(FedraxError, match=r"schedule\]: 'Prox' is no schedule: write a class with .* that Constant, "):
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
def test_own_data_gets_the_directory_of_data_files(
    given: str | Path | None, variable: str, path: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same here and on workers, to which it goes as a string."""
    monkeypatch.setenv("FEDRAX_DATA", variable)
    (tmp_path / "mine.py").write_text(DATA)
    table = {"data": {"name": "mine.py:load"}, "partition": {"name": "iid", "clients": 3}}
    made = experiment.from_table(table, "x", tmp_path)
    assert experiment.load_federation(made, given).name == repr(path)
