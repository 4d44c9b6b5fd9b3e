"""The arguments of ``simulate`` and its like, refused in a sentence where they are something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.data import Dataset, Federation
from fedrax.errors import FedraxError, unknown
from fedrax.models import Model
from fedrax.simulation.settings import Settings


def changed_settings(settings: Settings | None, options: Mapping[str, object]) -> Settings:
    """``settings`` with single fields replaced; FedraxError with the nearest name for one that there is not."""
    if not isinstance(settings, Settings | None):
        raise FedraxError(f"settings are a fedrax.Settings, not {type(settings).__name__}; single ones go by name")
    known = [field.name for field in dataclasses.fields(Settings)]
    for name in options:
        if name not in known:
            raise unknown("setting", name, known)
    return dataclasses.replace(settings or Settings(), **options)


def check_arguments(algorithm: Any, task: Any, federation: Any) -> None:
    """Refuse a class where its object is meant, and things in each other's places."""
    wanted = {"algorithm": (algorithm, Algorithm), "task": (task, Task), "federation": (federation, Federation)}
    for name, (value, kind) in wanted.items():
        if isinstance(value, kind):
            continue
        if isinstance(value, type):
            raise FedraxError(f"the {name} is the class {value.__name__}: give an object, {value.__name__}(...)")
        hint = ": divide it with Federation.from_dataset" if isinstance(value, Dataset) else ""
        hint = hint or (": classification(model) makes a task of it" if isinstance(value, Model) else "")
        raise FedraxError(f"the {name} must be a fedrax.{kind.__name__}, not {type(value).__name__}{hint}")


def check_lists(**given: Any) -> None:
    """Refuse one thing where several are meant: ``seeds=3`` for ``seeds=[3]``."""
    for name, value in given.items():
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise FedraxError(f"{name} must be a list, not {type(value).__name__}: put brackets around it")


def rounds_kept(trajectory: bool | Collection[int], rounds: int) -> Collection[int]:
    """The rounds after which ``trajectory`` wants the parameters."""
    if isinstance(trajectory, bool):
        return range(1, rounds + 1) if trajectory else ()
    check_lists(trajectory=trajectory)
    if wrong := [r for r in trajectory if r not in range(1, rounds + 1)]:
        raise FedraxError(
            f"the trajectory of {rounds} rounds is that after rounds 1 to {rounds}, not after {wrong[0]!r}"
        )
    return frozenset(trajectory)
