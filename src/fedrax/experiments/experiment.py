"""Experiments: data, partition, model, algorithm and settings, as objects and as TOML files.

    name = "digits"

    [data]
    name = "digits"

    [partition]
    name = "shards"
    clients = 20
    per_client = 1

    [algorithm]
    name = "scaffold"
    local = { lr = 0.1, epochs = 1 }
    server_optimizer = { name = "adam", lr = 0.01 }

    [run]
    rounds = 50

``fedrax list`` shows the names. Data, model, task, partition and algorithm can be user code: ``name = "file.py:thing"``
(in the folder of the TOML file or below) or ``"module:thing"`` (of a package with an entry point of the group
``fedrax``). ``thing`` is a subclass of Algorithm, a function that returns a Dataset, a dataclass with the method
``assign`` of a partition, or a function that returns a Model or a Task and may have the parameters ``input_shape`` and
``num_outputs``. Other parameters are keys of the table. A table ``[finetuning]`` trains a part of a pretrained model.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import tomlkit

from fedrax.algorithms.fedavg import FedAvg
from fedrax.config.arguments import checked_arguments
from fedrax.config.hyperparameters import check
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.contract.task_checks import check_words
from fedrax.data import DATASETS, PARTITIONS, Dataset, Federation, hold_out, load
from fedrax.data.partition import Shards
from fedrax.data.readers.array_files import given_directory
from fedrax.errors import FedraxError
from fedrax.experiments import serialization
from fedrax.experiments.finetuning_specs import FINETUNING
from fedrax.experiments.serialization import ALGORITHM, ClassChoice, Reader, TomlTable
from fedrax.experiments.task_specs import TASK, Auto
from fedrax.experiments.user_code import Trust, trust_in
from fedrax.files import read_toml, write_text
from fedrax.inputs import map_inputs
from fedrax.models import MODELS, Model
from fedrax.report.doctor import runs_below
from fedrax.simulation.persistence.checkpoint import check_format
from fedrax.simulation.persistence.run_directory import CHECKPOINT
from fedrax.simulation.results.result import Result
from fedrax.simulation.run import restore
from fedrax.simulation.settings import Seed, Settings


@cache
def _data_classes() -> dict[str, type]:
    """For each data set a class of the options of its reader."""
    made = {}
    for name, entry in DATASETS.items():
        made[name] = serialization.options_class(entry.read, ("data_dir",), "read")
        args = inspect.cleandoc(entry.read.__doc__ or "").partition("\n\nArgs:")  # help of options shows them
        made[name].__doc__ = entry.description + "".join(args[1:])
    return made


def _user_data(found: Any) -> type:
    """A class of the options of a user's function that returns a Dataset."""
    if not inspect.isfunction(found):
        raise FedraxError(f"{found!r} is not a function that returns a fedrax.data.Dataset.")
    return serialization.options_class(found, ("data_dir",), "read")


class _Seeded:
    """What the command line says of the field that all partitions get."""

    seed: Seed
    """Seed of the partition, and of validation rows that are held out."""


@cache
def _partition_class(cls: type) -> type:
    """A partition class with the field ``seed``."""
    seed = ("seed", Seed, dataclasses.field(default=0))
    frozen = cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    made = dataclasses.make_dataclass(cls.__name__, [seed], bases=(cls, _Seeded), frozen=frozen)
    made.__doc__, made.__module__ = cls.__doc__, cls.__module__
    return made


def _partition_classes() -> dict[str, type]:
    """The partitions by name, each with the field ``seed``."""
    return {name: _partition_class(cls) for name, cls in PARTITIONS.items()}


def _user_partition(found: Any) -> type:
    """A user's partition class with the field ``seed``."""
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, "assign")):
        raise FedraxError(f"{found!r} is not a dataclass with the method assign(dataset, seed).")
    return _partition_class(found)


def _user_model(found: Any) -> type:
    """A user's model class, or a class of the options of a user's function."""
    if isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, "build"):
        return found
    if not inspect.isfunction(found):
        raise FedraxError(f"{found!r} is not a function that returns a Model or a Task.")
    return serialization.options_class(found, ("input_shape", "num_outputs"), "build")


COMPARISON_KEYS = ("compare", "seeds", "target", "grid", "search")
"""Keys of a file that only comparisons use."""
FILES = {".csv": "csv", ".tsv": "csv", ".npz": "npz"}
"""For suffixes of data files the name of the data set that reads them."""
DATA = ClassChoice("data set", _data_classes, _user_data, files=FILES)
PARTITION = ClassChoice("partition", _partition_classes, _user_partition, keep=True)
MODEL = ClassChoice("model", lambda: MODELS, _user_model)


@dataclass(frozen=True)
class Experiment:
    """Everything that determines the results of a run. The defaults are a small experiment on bundled data.

    Example:
        >>> experiment = fedrax.experiments.Experiment(algorithm=fedrax.Scaffold(), run=fedrax.Settings(rounds=50))
        >>> experiment.algorithm_name
        'scaffold'
    """

    name: str = "experiment"
    """Name of the experiment."""
    data: Annotated[Any, DATA] = dataclasses.field(default_factory=lambda: _data_classes()["digits"]())
    """The data set: options of a reader of `fedrax.data.DATASETS`."""
    partition: Annotated[Any, PARTITION] = dataclasses.field(default_factory=lambda: _partition_classes()["shards"]())
    """How samples are distributed over clients."""
    model: Annotated[Any, MODEL] = dataclasses.field(default_factory=lambda: MODELS["2nn"]())
    """The model: options of an entry of `fedrax.models.MODELS`."""
    finetuning: Annotated[Any | None, FINETUNING] = None
    """Which parameters of a pretrained model are trained: options of `fedrax.models.lora` or `fedrax.models.freeze`;
    None: all, without pretrained weights."""
    task: Annotated[Any, TASK] = dataclasses.field(default_factory=Auto)
    """Loss and metrics."""
    algorithm: Annotated[Algorithm, ALGORITHM] = dataclasses.field(default_factory=FedAvg)
    """The method."""
    normalize: bool = True
    """Standardize each channel of images by the mean and deviation of the data set; otherwise pixels are in [0, 1]."""
    client_test: float = 0.0
    """Share of each client's training rows that becomes its own test data, in place of the data set's test data."""
    validation: float = 0.0
    """Share of each client's training rows that is held out and replaces the test data."""
    run: Settings = dataclasses.field(default_factory=Settings)
    """Settings of the run."""

    def __repr__(self) -> str:
        """Three lines: data and model, run settings, algorithm."""
        data, partition, model = DATA.name_of(self.data), PARTITION.name_of(self.partition), MODEL.name_of(self.model)
        clients = getattr(self.partition, "clients", None)
        of = "" if clients is None else f" among {clients:,} clients"
        model += "" if self.finetuning is None else f", fine-tuned by {FINETUNING.name_of(self.finetuning)}"
        return (
            f"Experiment {self.name!r}: {self.method_name} on {data}, partition {partition}{of}, model {model}\n"
            f"  {self.run.rounds} rounds with cohorts of {self.run.cohort_size}, seed {self.run.seed}\n"
            f"  {self.algorithm!r}"
        )

    @property
    def algorithm_name(self) -> str:
        """The algorithm's name in files."""
        return ALGORITHM.name_of(self.algorithm)

    @property
    def method_name(self) -> str:
        """The algorithm's name for display, without the file of a user class."""
        return self.algorithm_name.rpartition(":")[2]

    @property
    def model_name(self) -> str:
        """The model's name for display, without the file of a user's function."""
        return MODEL.name_of(self.model).rpartition(":")[2]

    def check(self) -> None:
        """Raise FedraxError for values out of their bounds and for contradictory settings."""
        for name in ("validation", "client_test"):
            if not 0 <= getattr(self, name) < 1:
                raise FedraxError(f"{name} must be a share in [0, 1), got {getattr(self, name)}")
        for part in ("model", "finetuning", "algorithm", "run", "partition"):
            if getattr(self, part) is not None:
                check(getattr(self, part), part)
        name, run = type(self.algorithm).__name__, self.run
        self.algorithm.traits.check_run(name, run.weights, run.cohort_size, varying_cohort=False)


def from_table(table: Mapping[str, Any], source: str, folder: Path = Path(), trust: Trust = "beside") -> Experiment:
    """The experiment of a table.

    Args:
        table: The table.
        source: Prefix of messages.
        folder: Folder to which paths are relative.
        trust: Which user code the table may name.

    Returns:
        The checked experiment.
    """
    if "compare" in table:
        raise FedraxError(
            f"{source} compares several algorithms ([[compare]]): use `fedrax compare` with it; in Python"
            " fedrax.experiments.read_file reads it and fedrax.compare runs it."
        )
    table = {key: value for key, value in table.items() if key not in COMPARISON_KEYS}
    experiment = Reader(source, folder, trust=trust, also_known=COMPARISON_KEYS).fields(
        Experiment, table, "", Experiment()
    )
    try:
        experiment.check()
    except FedraxError as error:
        raise FedraxError(f"{source}: {error}.") from error
    return experiment


def read(path: str | Path, trust: Trust | None = None) -> Experiment:
    """Read and check the experiment of a TOML file; ``trust``: which user code it may name, by default `trust_in`."""
    path = Path(path)
    return from_table(read_file(path), str(path), path.parent, trust or trust_in(path))


def read_file(path: Path) -> TomlTable:
    """Read the TOML table of an experiment; raises FedraxError for one without any table, most likely a wrong file."""
    reader = FILES.get(path.suffix.lower())
    if reader is not None:
        raise FedraxError(f"{path} is a data file, not an experiment: use --data {reader} --data.path {path}")
    table = read_toml(path)
    if not set(table) - {"name", "normalize", "client_test", "seeds", "target"}:
        raise FedraxError(f"{path} is not an experiment: it has no [data], [model], [algorithm], [run], ...")
    return table


def to_table(experiment: Experiment, folder: Path | None = None) -> TomlTable:
    """The table of all settings, including defaults; paths are absolute, or relative to the folder of a file."""
    return serialization.table_of(experiment, Experiment(), folder)


def write(experiment: Experiment, path: str | Path) -> None:
    """Write the complete TOML file atomically."""
    write_text(Path(path), tomlkit.dumps(to_table(experiment)))


def load_federation(experiment: Experiment, data_dir: str | Path | None = None) -> Federation:
    """Read the data and partition it over clients; ``data_dir``: directory of data files, by default $FEDRAX_DATA."""
    name = DATA.name_of(experiment.data)
    options = {f.name: getattr(experiment.data, f.name) for f in dataclasses.fields(experiment.data)}
    if name in DATASETS:
        dataset = load(name, data_dir, **options)
    else:
        dataset = experiment.data.read(data_dir=given_directory(data_dir))
        if not isinstance(dataset, Dataset):
            raise FedraxError(f"{name} returned {type(dataset).__name__}, not a fedrax.data.Dataset.")
    federation = Federation.from_dataset(dataset, experiment.partition, experiment.partition.seed)
    if experiment.client_test:
        federation = hold_out(federation, experiment.client_test, experiment.partition.seed)
    clients = dataset.train_clients
    if clients is not None and isinstance(experiment.partition, Shards):  # the default, so maybe not intended
        note = f"warning: the data have {len(np.unique(clients)):,} clients, and the partition shards assigns their"
        note += " rows to other clients: --partition natural keeps them"
        federation = dataclasses.replace(federation, notes=(*federation.notes, note))
    return with_validation(experiment, federation)


def with_validation(experiment: Experiment, federation: Federation) -> Federation:
    """The federation with the experiment's share of validation data instead of test data, if it has one."""
    if not experiment.validation:
        return federation
    return hold_out(federation, experiment.validation, experiment.partition.seed)


def make_task(experiment: Experiment, federation: Federation, data_dir: str | Path | None = None) -> Task:
    """Build the model for the federation's inputs, with the loss and the metrics of the experiment's ``[task]``.

    ``num_outputs`` of the model is the number of classes (one for a binary task), or the number of targets of a
    regression. ``data_dir``: directory where pretrained weights are searched too, by default $FEDRAX_DATA.
    """
    build = experiment.model.build
    options = {"vocabulary": federation.vocabulary} if "vocabulary" in inspect.signature(build).parameters else {}
    outputs = experiment.task.outputs(federation)
    shape = map_inputs(lambda a: a.shape[1:], federation.train.x)
    made = build(input_shape=shape, num_outputs=outputs, **options)
    if isinstance(made, Task):
        if experiment.task != Auto():
            raise FedraxError(f"{MODEL.name_of(experiment.model)} returns a Task itself: leave [task] out.")
        if experiment.finetuning is not None:
            raise FedraxError(f"[finetuning] needs a Model, and {MODEL.name_of(experiment.model)} returns a Task.")
        return made
    if not isinstance(made, Model):
        name = MODEL.name_of(experiment.model)
        raise FedraxError(f"{name} returned {type(made).__name__}, not a Model or a Task of fedrax.")
    preprocess = federation.preprocess(experiment.normalize)
    if experiment.finetuning is not None:
        example = map_inputs(lambda a: jnp.asarray(a[:1]), federation.train.x)
        made = experiment.finetuning.tuned(made, example if preprocess is None else preprocess(example), data_dir)
    task = experiment.task.build(made, federation, preprocess)
    check_words(task, federation)
    return task


def build(experiment: Experiment, data_dir: str | Path | None = None) -> tuple[Algorithm, Task, Federation]:
    """The algorithm, task and federation, which are the first arguments of ``fedrax.simulate``."""
    federation = load_federation(experiment, data_dir)
    return experiment.algorithm, make_task(experiment, federation, data_dir), federation


@checked_arguments
def load_result(directory: str | Path, data_dir: str | Path | None = None, trust: bool = False) -> Result:
    """Read the result of a run directory: models, also those of the clients, states and events. No round is run.

    The directory is that of ``fedrax run`` or of a run of ``fedrax compare``, whose experiment.toml names the data, the
    model and the method; the data are read again. The global model alone needs neither:
    :func:`fedrax.simulation.load_model`. For a run of `fedrax.simulate`, call it with the same arguments and
    ``resume=True``, which returns the result of a finished run.

    Args:
        directory: The run directory.
        data_dir: Directory of data files, by default ``$FEDRAX_DATA``.
        trust: Whether to run the Python code that the experiment names.

    Returns:
        The result at the last checkpoint, without trajectory and messages. Runs of a comparison are saved without
        client states.

    Raises:
        FedraxError: If the directory has no experiment or no checkpoint, or another run is writing to it.

    Example:
        >>> data = {"data": {"name": "synthetic"}, "partition": {"name": "natural"}}
        >>> file = fedrax.experiments.experiment.from_table(data | {"run": {"rounds": 2, "cohort_size": 2}}, "example")
        >>> problem = fedrax.experiments.experiment.build(file)
        >>> _ = fedrax.simulate(*problem, file.run, directory="run", progress=False)
        >>> fedrax.experiments.experiment.write(file, "run/experiment.toml")
        >>> len(fedrax.experiments.load_result("run").events)
        2
    """
    directory = Path(directory)
    file = directory / "experiment.toml"
    if not file.is_file():
        remedy = runs_below(directory) or (
            "fedrax.simulation.load_model reads the global model of a run of fedrax.simulate, and simulate(...,"
            " directory=..., resume=True) with its own arguments returns its result"
        )
        raise FedraxError(f"{directory} has no experiment.toml: {remedy}")
    check_format(directory / CHECKPOINT)  # before the experiment, whose names may be of that version too
    spec = read(file, "typed" if trust else "none")
    return restore(*build(spec, data_dir), spec.run, directory)
