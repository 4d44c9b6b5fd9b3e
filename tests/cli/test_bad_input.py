"""Invalid input: one clear message on standard error, exit status 2, and no partial output."""

import errno
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fedrax.experiments.method_registry import KNOWN_AS, algorithms
from tests.cli.conftest import TINY, Outcome


class Case(NamedTuple):
    """Command-line arguments, the expected message, and a function that prepares the directory."""

    arguments: str
    says: str
    prepare: Callable[[Path], None] | None = None


def file(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Write one file."""

    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def toml(old: str = "", new: str = "") -> Callable[[Path], None]:
    """Write x.toml: the tiny experiment with one replacement, or with appended lines."""
    assert old in TINY
    return file("x.toml", TINY.replace(old, new) if old else TINY + new)


def idx(images: bytes, labels: bytes, suffix: str = "") -> Callable[[Path], None]:
    """Write a data directory with these MNIST files."""

    def write(folder: Path) -> None:
        for part in ("train", "t10k"):
            file(f"data/mnist/{part}-images-idx3-ubyte{suffix}", images)(folder)
            file(f"data/mnist/{part}-labels-idx1-ubyte{suffix}", labels)(folder)

    return write


IMAGES = bytes([0, 0, 8, 3]) + np.array([40, 28, 28], ">u4").tobytes() + bytes(40 * 784)
LABELS = bytes([0, 0, 8, 1]) + np.array([40], ">u4").tobytes() + bytes(range(10)) * 4
MNIST = "run --data mnist --data-dir data --partition.clients 4 --partition.per-client 1"


def npz(**changes: np.ndarray) -> Callable[[Path], None]:
    """Write d.npz with some arrays replaced."""
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.random((40, 3)), "y_train": np.arange(40) % 4, "x_test": rng.random((8, 3))}
    arrays |= {"y_test": np.arange(8) % 4, **changes}

    def write(folder: Path) -> None:
        np.savez(folder / "d.npz", allow_pickle=True, **arrays)  # type: ignore[arg-type]

    return write


NPZ = "run --data npz --data.path d.npz --partition iid --partition.clients 4"
OWN = 'def broken():\n    return 3\ndef fails():\n    raise ValueError("no")\nclass Thing:\n    pass\n'
UNMARKED = "from fedrax import FedAvg\nclass Mine(FedAvg):\n    strength: float = 1.0\n"
OPTIONS = (
    "from __future__ import annotations\n"
    "def model(input_shape, num_outputs, act=print, rank=4, sizes=(3, 4), end=None, other: Missing = 1): ...\n"
)


def own_option(line: str) -> Callable[[Path], None]:
    """Write x.toml with a user-defined model and one of its options."""

    def write(folder: Path) -> None:
        file("own.py", OPTIONS.replace(": Missing", ""))(folder)
        toml('[model]\nname = "logistic"', f'[model]\nname = "own.py:model"\n{line}')(folder)

    return write


CASES = {
    "command": Case("rnu", "did you mean 'run'"),
    "list": Case("list model", "did you mean 'models'"),
    "algorithm": Case("run --algorithm scafold", "unknown algorithm 'scafold'; did you mean 'scaffold'?"),
    "data set": Case("run --data mnits", "unknown data set 'mnits'; did you mean 'mnist'?"),
    "partition": Case("run --partition shard", "did you mean 'shards'?"),
    "model": Case("run --model lenett", "did you mean 'lenet'?"),
    "server optimizer": Case("run --algorithm.server-optimizer adma", "did you mean 'adam'?"),
    "schedule": Case("run --algorithm.local.schedule cosin_decay_schedule", "did you mean 'cosine_decay_schedule'?"),
    "flag": Case("run --algorithm.local.learning 1", "unknown option --algorithm.local.learning; did you mean"),
    "flag of another library": Case("run --algorithm.local.nesterov true", "local.nesterov; see `fedrax run --help`."),
    "flag of Python's": Case(
        "run --algorithm.local.optimizer adam", "--algorithm.local.optimizer: no flag can describe Optax: give it"
    ),
    "flag's value": Case("run --run.rounds ten", "--run.rounds"),
    "flag without value": Case("run --run.rounds", "--run.rounds"),
    "literal": Case("run --run.dtype float16", "--run.dtype"),
    "negative step size": Case("run --algorithm.local.lr -1", "algorithm.local.lr must be greater than 0"),
    "nan step size": Case("run --algorithm.local.lr nan", "algorithm.local.lr must be a finite number"),
    "infinite": Case("run --algorithm fedprox --algorithm.mu inf", "algorithm.mu must be a finite number"),
    "momentum of one": Case("run --algorithm.server-optimizer.momentum 1", "must be less than 1"),
    "negative rounds": Case("run --run.rounds=-1", "run.rounds must be at least 0"),
    "a seed beyond all floats": Case(f"run --run.seed 1{'0' * 400}", "run.seed must be less than"),
    "negative seed": Case("run --run.seed -3", "run.seed must be at least 0"),
    "stragglers": Case("run --run.stragglers 1.5", "run.stragglers must be at most 1"),
    "no batch": Case("run --algorithm.local.batch-size 0", "batch_size must be at least 1"),
    "cohort": Case("run --run.cohort-size 101", "cannot sample 101 clients"),
    "devices": Case("run --run.devices 99", "99 devices"),
    "steps and epochs": Case("run --algorithm.local.steps 2 --algorithm.local.epochs 1", "not both"),
    "more blocks than samples": Case(
        "run --algorithm losac --algorithm.local.blocks 2000", "is too many: the largest client"
    ),
    "blocks beyond numbers": Case(
        "run --algorithm losac --algorithm.local.blocks 1073741824", "is too many: the largest client"
    ),
    "model beyond memory": Case("run --model mlp --model.hidden 1000000000", "more than this machine's memory"),
    "model of no width": Case("run --model mlp --model.hidden 0", "must be at least 1"),
    "brackets": Case("run x.toml", "nested too deeply", file("x.toml", "a = " + "[" * 3000)),
    "a number beyond all": Case("run x.toml", "must be a finite number", toml("lr = 0.1", "lr = 1" + "0" * 400)),
    "steps beyond 32 bits": Case("run --algorithm.local.steps 2147483648", "fit into 32 bits"),
    "rounds beyond 32 bits": Case("run --run.rounds 9223372036854775808", "fit into 32 bits"),
    "milestones beyond 32 bits": Case(
        "run x.toml",
        "fit into 32 bits",
        toml(
            "lr = 0.1",
            "lr = 0.1, schedule = { name = 'piecewise_constant_schedule', init_value = 1,"
            " boundaries_and_scales = [[1180591620717411303424, 0.5]] }",
        ),
    ),
    "devices beyond numbers": Case("run --run.devices 1000000000000", "devices"),
    "channels of no width": Case("run --model cnn --model.channels 0 4", "must be at least 1"),
    "alpha that is no number": Case("run --partition dirichlet_clients --partition.alpha nan", "alpha"),
    "clients beyond numbers": Case("run --partition iid --partition.clients 1000000000000", "fit into 32 bits"),
    "a folder named experiment.toml": Case(
        "resume r", "not a run directory", lambda folder: (folder / "r" / "experiment.toml").mkdir(parents=True)
    ),
    "pipe for a file": Case("run x.toml", "not a regular file", lambda folder: os.mkfifo(folder / "x.toml")),
    "device for a file": Case("run x.toml", "not a regular file", lambda f: (f / "x.toml").symlink_to("/dev/zero")),
    "name of OpenML": Case("run --data openml --data.dataset ../iris", "not a name of openml.org"),
    "empty file": Case("run x.toml", "x.toml is not an experiment", file("x.toml", "")),
    "target of zero": Case("compare --algorithms fedavg --target 0", "accuracy in"),
    "target beyond one": Case("run --run.target 7", "must be at most 1"),
    "home of an unknown user": Case("run --data csv --data.path ~nosuchuser/d.csv", "nosuchuser"),
    "a name too long": Case(f"run --out {'o' * 300}", "File name too long"),
    "NUL": Case("run --out o\0x", "NUL character"),
    "blocks missing": Case("run --algorithm losac --algorithm.local.blocks None", "set local.blocks"),
    "weights": Case("run --algorithm scaffold --run.weights samples", "uniform"),
    "clients": Case("run --partition.clients 5000", "too few"),
    "no clients": Case("run --partition iid --partition.clients 0", "at least 1 client"),
    "percent": Case("run --partition mix --partition.percent 120", "percent must lie in 0 .. 100"),
    "impossible partition": Case("run --partition dirichlet_clients --partition.alpha 0.0001", "raise alpha"),
    "natural": Case("run --partition natural", "no natural clients"),
    "model's input": Case("run --model lenet", "at least 16x16"),
    "profile of a broken file": Case("profile x.toml", "cannot be read as TOML", file("x.toml", "rounds = = 3")),
    "profile's flag": Case("profile --round 3", "unknown option --round; did you mean --rounds?"),
    "profile of too many rounds": Case("profile --rounds 99999999999", "fit into 32 bits"),
    "noise beyond squares": Case("privacy --algorithm client_dp --algorithm.noise 1e300", "too large to be accounted"),
    "noise of nearly nothing": Case("run --algorithm client_dp --algorithm.noise 1e-300", "too small to be accounted"),
    "profile of no rounds": Case("profile --rounds 0", "--rounds must be 1 or more"),
    "no file": Case("run missing.toml", "no file missing.toml"),
    "not toml": Case("run x.toml", "cannot be read as TOML", file("x.toml", "rounds = = 3")),
    "not text": Case("run x.toml", "cannot be read as TOML", file("x.toml", b"\xff\xfe\x00")),
    "a folder": Case("run sub", "cannot be read", lambda folder: (folder / "sub").mkdir()),
    "large file": Case("run x.toml", "too large", file("x.toml", "#" * 2_000_000)),
    "misspelt key": Case(
        "run x.toml", "x.toml: [run]: unknown key 'ronds'; did you mean 'rounds'?", toml("rounds", "ronds")
    ),
    "misspelt key of a comparison": Case(
        "compare x.toml",
        "x.toml: unknown key 'targt'; did you mean 'target'?",
        toml('name = "tiny"', 'name = "tiny"\ntargt = 0.5'),
    ),
    "misspelt table": Case("run x.toml", "unknown key 'modle'; did you mean 'model'?", toml("[model]", "[modle]")),
    "misspelt nested key": Case(
        "run x.toml", "x.toml: [algorithm.local]: unknown key 'step'; did you mean 'steps'?", toml("steps", "step")
    ),
    "key one table too far out": Case(
        "run x.toml",
        "x.toml: unknown key 'rounds'; did you mean 'run.rounds'?",
        toml("[partition]", "rounds = 3\n[partition]"),
    ),
    "key two tables too far out": Case(
        "run x.toml",
        "x.toml: unknown key 'lr'; did you mean 'algorithm.local.lr' or 'algorithm.s",
        file("x.toml", "lr = 0.1"),
    ),
    "key of the method inside": Case(
        "run x.toml", "[algorithm]: unknown key 'local'; did you mean 'inner.local'?", toml("fedavg", "upcycled")
    ),
    "a name of others": Case("run --algorithm FedPer", "'FedPer' is here personalized with personal_params"),
    "name in a file": Case("run x.toml", "x.toml: [algorithm]: unknown algorithm 'fedavgg'", toml("fedavg", "fedavgg")),
    "type in a file": Case("run x.toml", "run.rounds: must be a whole number, not 'four'", toml("= 4", '= "four"')),
    "float for int": Case("run x.toml", "run.rounds: must be a whole number, not 4.5", toml("= 4", "= 4.5")),
    "bool for int": Case("run x.toml", "run.rounds: must be a whole number, not True", toml("= 4", "= true")),
    "value for a table": Case(
        "run x.toml", "model.name: must be a string", toml('[model]\nname = "logistic"', "[model.name]\nx = 3")
    ),
    "bound in a file": Case("run x.toml", "x.toml: algorithm.local.lr must be greater than 0", toml("0.1", "-0.1")),
    "name missing": Case(
        "run x.toml", "'name' is missing", toml("steps = 2 }", "steps = 2, prox = { weight = 1.0 } }")
    ),
    "compare file": Case("run x.toml", "fedrax compare", toml(new='[[compare]]\nname = "fedavg"\n')),
    "data for an experiment": Case("run d.csv", "not an experiment: use --data csv --data.path d.csv"),
    "file for a data set": Case("run --data d.tsv", "the data set is 'csv', and its path 'd.tsv'"),
    "file for a class": Case("run --algorithm own.py", "write own.py:NAME with the name of the algorithm"),
    "own file missing": Case("run --algorithm own.py:Thing", "there is no file"),
    "own name missing": Case("run --algorithm own.py:Thong", "did you mean", file("own.py", OWN)),
    "not an algorithm": Case("run --algorithm own.py:Thing", "not a subclass", file("own.py", OWN)),
    "own algorithm without decorator": Case(
        "run --algorithm own.py:Mine", "Mine lacks the decorator @hyperparameters", file("own.py", UNMARKED)
    ),
    "own annotations": Case(
        "run --model own.py:model", "annotations of model cannot be read: name 'Missing'", file("own.py", OPTIONS)
    ),
    "own option": Case("run x.toml", "model.rank: must be a whole number, not 'four'", own_option('rank = "four"')),
    "own list": Case(
        "run x.toml", "model.sizes: must be a list of whole numbers, not [1, 'b']", own_option("sizes = [1, 'b']")
    ),
    "own table": Case(
        "run x.toml",
        "model.end: must be a whole number or a number or true or false or a string or a list of values, not {",
        own_option("end = { x = 1 }"),
    ),
    "optimizer of optax": Case(
        "run x.toml",
        "algorithm.local.optimizer: no file can describe Optax: give it from Python",
        toml("lr = 0.1", 'lr = 0.1, optimizer = { name = "adamw" }'),
    ),
    "own function as option": Case("run x.toml", "model.act: cannot be set in a file, not 3", own_option("act = 3")),
    "own file broken": Case("run --algorithm own.py:Thing", "SyntaxError", file("own.py", "class :")),
    "own model": Case("run --model own.py:broken", "not a Model", file("own.py", OWN)),
    "no data directory": Case("run --data mnist", "--data-dir or FEDRAX_DATA"),
    "data missing": Case("run --data mnist --data-dir data", "is missing", lambda folder: (folder / "data").mkdir()),
    "truncated gz": Case(MNIST, "cannot be read", idx(gzip.compress(IMAGES)[:60], gzip.compress(LABELS), ".gz")),
    "wrong magic": Case(MNIST, "not an IDX file", idx(b"\x01\x02" + IMAGES[2:], LABELS)),
    "short file": Case(MNIST, "train-images", idx(IMAGES[:-5], LABELS)),
    "number of labels": Case(
        MNIST, "holds 40 images", idx(IMAGES, LABELS[:4] + b"\0\0\0\x28"[:3] + b"\x27" + LABELS[8:-1])
    ),
    "labels out of range": Case(MNIST, "labels must lie in 0 .. 9", idx(IMAGES, LABELS[:-1] + b"\x0b")),
    "file not said": Case("run --data npz", "--data.path"),
    "npz array missing": Case(NPZ, "is not", file("d.npz", b"PK nonsense")),
    "one class": Case(NPZ, "all labels of 'd' are one class", npz(y_train=np.zeros(40, int), y_test=np.zeros(8, int))),
    "no rows": Case(NPZ, "holds no training samples", npz(x_train=np.zeros((0, 3)), y_train=np.zeros(0, int))),
    "no metric": Case("run x.toml", "did you mean 'auc'", toml(new='[task]\nname = "auto"\nmetrics = ["auk"]\n')),
    "epochs for blocks": Case("run --algorithm losac --algorithm.local.epochs 1", "give local steps, not epochs"),
    "negative labels": Case(NPZ, "class labels must be 0 or more", npz(y_train=np.arange(40) - 1)),
    "objects": Case(NPZ, "Python objects", npz(x_train=np.array([[{}]] * 40, object))),
    "not finite data": Case(NPZ, "not finite", npz(x_test=np.full((8, 3), np.nan))),
    "csv column": Case("run --data csv --data.path d.csv", "did you mean 'lable'?", file("d.csv", "a,lable\n1,2\n")),
    "data option": Case("run --data synthetic --data.alpha -1", "alpha and beta must be 0 or more"),
    "trace": Case(
        "run --run.participation availability --run.participation.trace t.csv", "trace", file("t.csv", "a\n1")
    ),
    "resume nothing": Case("resume nowhere", "not a run directory"),
    "show nothing": Case("show .", "holds no run"),
    "show what": Case("show nowhere", "holds no run"),
    "damaged events": Case("show r", "line 1, is not an event", lambda folder: damaged(folder)),
    "compare nothing": Case("compare", "nothing to compare"),
    "compare labels": Case("compare --algorithms fedavg fedavg", "two methods are called 'fedavg'"),
    "existing comparison": Case(
        "compare x.toml --algorithms FedAvg", "leave 'FedAvg' out, which the file has already", toml()
    ),
    "compare seeds": Case("compare --algorithms fedavg --seeds 1 1", "seeds must be different"),
    "compare target": Case("compare --algorithms fedavg --target 85", "accuracy in (0, 1]"),
    "compare key": Case("compare x.toml", "unknown key 'mus'", toml(new='[[compare]]\nname = "fedprox"\nmus = 1.0\n')),
    "compare numbers": Case(
        "compare x.toml", 'compare = ["fedavg", "scaffold"]', toml('name = "tiny"', 'name = "tiny"\ncompare = [1, 2]')
    ),
    "compare label": Case("compare x.toml", "label must be a string", toml(new="[[compare]]\nlabel = 3\n")),
    "compare files": Case(
        "compare x.toml y.toml",
        "differ in [run]",
        lambda folder: (toml()(folder), file("y.toml", TINY.replace("= 4", "= 5"))(folder))[0],
    ),
    "wandb missing": Case("run --run.rounds 1 --wandb p", "pip install 'fedrax[wandb]'", lambda folder: hide("wandb")),
    "tensorboard missing": Case(
        "run --run.rounds 1 --tensorboard", "pip install 'fedrax[tensorboard]'", lambda folder: hide("tensorboardX")
    ),
    "mlflow missing": Case(
        "run --run.rounds 1 --mlflow p", "pip install 'fedrax[mlflow]'", lambda folder: hide("mlflow")
    ),
}


def damaged(folder: Path) -> None:
    """A run directory with malformed events."""
    complete = TINY.replace("eval_every", "seed = 0\neval_every")
    file("r/experiment.toml", complete)(folder)
    file("r/events.jsonl", "nonsense\n")(folder)


_hidden: list[str] = []


def hide(module: str) -> None:
    """Make a package look as if it were not installed until the end of the test."""
    _hidden.append(module)


@pytest.mark.parametrize("case", CASES.values(), ids=[name.replace(" ", "-") for name in CASES])
def test_invalid_input_raises_one_clear_message(
    case: Case, fedrax: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.prepare is not None:
        case.prepare(tmp_path)
    while _hidden:
        monkeypatch.setitem(__import__("sys").modules, _hidden.pop(), None)
    before = sorted(tmp_path.rglob("*"))
    outcome = fedrax(*case.arguments.split())
    assert outcome.status == 2
    assert case.says in outcome.err
    assert outcome.err.startswith("fedrax: ")
    assert "Traceback" not in outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert len(outcome.err) < 700
    assert outcome.out == ""
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before


def test_there_are_at_least_sixty_cases() -> None:
    assert len(CASES) >= 40


def test_existing_output_is_not_overwritten(fedrax: Callable[..., Outcome], tiny: Path) -> None:
    assert fedrax("run", tiny, "--out", "r", "--quiet").status == 0
    outcome = fedrax("run", tiny, "--out", "r", "--quiet")
    assert outcome.status == 2
    assert "holds a run already" in outcome.err
    assert "fedrax resume r" in outcome.err


def test_unwritable_output_is_rejected(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("a file, not a directory")
    outcome = fedrax("run", tiny, "--out", "plain/r")
    assert outcome.status == 2
    assert "plain/r" in outcome.err
    assert "Not a directory" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_read_only_output_is_rejected(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    outcome = fedrax("run", tiny, "--out", "locked/r")
    assert outcome.status == 2
    assert "ermission denied" in outcome.err


@pytest.mark.parametrize("files", ["experiment.toml", "state.npz", "environment.json"])
def test_full_disk_raises_a_clear_error(
    files: str, fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the file, and no part of it remains."""
    replace = os.replace

    def full(source: str | os.PathLike, target: str | os.PathLike, **folders: int) -> None:
        if Path(target).name == files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", full)
    outcome = fedrax("run", tiny, "--out", "r", "--quiet")
    assert outcome.status == 2
    assert "No space left" in outcome.err
    assert files in outcome.err
    assert not list(tmp_path.rglob("*.part"))
    assert not (tmp_path / "r" / files).exists()


def test_damaged_checkpoint_is_rejected(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    assert fedrax("run", tiny, "--out", "r", "--quiet").status == 0
    state = next((tmp_path / "r" / "checkpoint").iterdir())
    state.write_bytes(state.read_bytes()[:-200])
    before = (tmp_path / "r" / "events.jsonl").read_text()
    outcome = fedrax("resume", "r")
    assert outcome.status == 2
    assert "damaged" in outcome.err
    assert outcome.err.count("\n") == 1
    assert (tmp_path / "r" / "events.jsonl").read_text() == before


def test_checkpoint_of_another_experiment_is_rejected(
    fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path
) -> None:
    assert fedrax("run", tiny, "--out", "r", "--quiet").status == 0
    written = tmp_path / "r" / "experiment.toml"
    written.write_text(written.read_text().replace('name = "fedavg"', 'name = "scaffold"'))
    outcome = fedrax("resume", "r", "--quiet")
    assert outcome.status == 2
    assert "another" in outcome.err


def test_divergence_raises_a_clear_error(fedrax: Callable[..., Outcome], tiny: Path) -> None:
    outcome = fedrax("run", tiny, "--algorithm.local.lr", "1e38", "--out", "r", "--quiet")
    assert outcome.status == 2
    assert "round" in outcome.err
    assert outcome.err.count("\n") == 1


def test_alternative_names_of_methods_are_suggested():
    known = algorithms()
    assert not set(KNOWN_AS) & set(known)
    assert {words.split()[0] for words in KNOWN_AS.values()} <= set(known)
