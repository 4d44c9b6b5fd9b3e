"""``fedrax list``: the parts of experiments by name."""

from __future__ import annotations

import dataclasses
import inspect
import json
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.table import Table

from fedrax.algorithms.fedavg import FedAvg
from fedrax.cli.arguments import parse
from fedrax.config.annotations import fields_of
from fedrax.contract.local_training import LocalSGD
from fedrax.errors import unknown
from fedrax.escaping import strip_markup
from fedrax.experiments import serialization
from fedrax.experiments.experiment import ALGORITHM, DATA, MODEL, PARTITION
from fedrax.experiments.finetuning_specs import FINETUNING
from fedrax.experiments.task_specs import TASK
from fedrax.report.comparison_table import wide_console
from fedrax.robust.wrapper import Robust
from fedrax.simulation import Settings


def _of(cls: type, name: str) -> serialization.ClassChoice:
    """The choice of a field."""
    choice = serialization.choice_of(fields_of(cls)[name])
    assert choice is not None
    return choice


KINDS = {
    "algorithms": ALGORITHM,
    "datasets": DATA,
    "partitions": PARTITION,
    "models": MODEL,
    "finetuning": FINETUNING,
    "tasks": TASK,
    "optimizers": _of(FedAvg, "server_optimizer"),
    "schedules": _of(LocalSGD, "schedule"),
    "proximal": _of(LocalSGD, "prox"),
    "participation": _of(Settings, "participation"),
    "aggregation": _of(Robust, "rule"),
}

DESCRIPTION = f"""List the parts of experiments: `fedrax list [{"|".join(KINDS)}]`.

optimizers: server optimizers (server_optimizer). schedules: learning rate schedules. proximal: proximal operators of
local steps. aggregation: aggregation rules of robust."""


@dataclass
class ListOptions:
    """Arguments of ``fedrax list``."""

    kind: Annotated[str | None, tyro.conf.Positional] = None
    """One of the lists; by default all of them."""
    json: bool = False
    """Print JSON, with the settings of each entry and their defaults."""


def main(args: list[str]) -> int:
    """Print the lists."""
    options = parse(ListOptions, args, "fedrax list", DESCRIPTION)
    if options.kind is not None and options.kind not in KINDS:
        raise unknown("list", options.kind, KINDS)
    kinds = KINDS if options.kind is None else {options.kind: KINDS[options.kind]}
    if options.json:
        print(json.dumps({kind: entries(choice) for kind, choice in kinds.items()}, indent=2))
        return 0
    console = wide_console()
    for kind, choice in kinds.items():
        table = Table(title=kind, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
        for entry in entries(choice):
            table.add_row(entry["name"], entry["description"])
        console.print(table)
        console.print()
    return 0


def entries(choice: serialization.ClassChoice) -> list[dict[str, Any]]:
    """Name, one line of description, and settings of every class of a choice."""
    made = []
    for name, cls in choice.classes().items():
        written = cls.__doc__ or ""
        if written.startswith(f"{cls.__name__}("):  # the signature, which dataclass sets without a docstring
            written = ""
        text = strip_markup(inspect.cleandoc(written).split("\n\n")[0])
        made.append({"name": name, "description": text, "settings": settings(cls)})
    return made


def settings(cls: type, value: Any = None) -> dict[str, Any]:
    """Every field with its default, or its value in ``value``; None if it has none."""
    shown = {}
    for name, item in serialization.defaults_of(cls, value).items():
        choice = serialization.choice_of(fields_of(cls)[name])
        if item is None or item is dataclasses.MISSING:
            shown[name] = None
        elif dataclasses.is_dataclass(item):
            shown[name] = ({} if choice is None else {"name": choice.name_of(item)}) | settings(type(item), item)
        else:
            shown[name] = serialization.plain(item)
    return shown
