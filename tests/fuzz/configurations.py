"""Experiments with unusual values."""

from __future__ import annotations

import copy
import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import tomlkit
from hypothesis import strategies as st

from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.experiments.method_registry import algorithms
from fedrax.simulation.process import numeric_context
from fedrax.simulation.setup import prepare

MODELS = ("logistic", "2nn", "mlp")
PARTITIONS = ("iid", "shards", "dirichlet_classes", "dirichlet_clients", "mix", "natural")
PARTICIPATION = ("uniform", "weighted_by_samples", "availability", "fixed_list", "asynchronous")
ODD = [0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**63, 10**30, 10**400]
ODD += [0.0, -0.0, 0.5, 1.0, 1.5, 1e-300, 1e300, math.inf, -math.inf, math.nan]
ODD += [
    True,
    False,
    "",
    "none",
    "auto",
    "six",
    "~nosuchuser",
    "a\0b",
    "x" * 300,
    "\ud7ff",
    "os:system",
    "no.py:No",
    "../x",
]
ODD += [[], [1], [0, 4], [10**9], [2**70], [[1]], [math.nan], ["a"], {}, {"name": "sgd"}, {"name": "nope"}, {"x": 1}]
KEYS = ["seed", "rounds", "lr", "steps", "name", "x", "", "client s", "local", "rule", "prox", "clip", "schedule"]


@cache
def complete(algorithm: str) -> dict[str, Any]:
    """The table of an experiment with all keys."""
    shared = {"data": "digits", "partition": {"name": "iid", "clients": 4}, "model": "logistic"}
    run = {"rounds": 2, "cohort_size": 2}
    table = {**shared, "algorithm": algorithm, "run": run}
    return experiment.to_table(experiment.from_table(table, "base"))


def places(table: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all keys of a table and its inner tables."""
    found = [path] if path else []
    if isinstance(table, dict):
        for key, value in table.items():
            found += places(value, (*path, key))
    return found


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict, list[tuple]]:
    """A table, and the paths that were changed."""
    table = copy.deepcopy(complete(draw(st.sampled_from(sorted(algorithms())))))
    for part, names in (("model", MODELS), ("partition", PARTITIONS)):
        if draw(st.integers(0, 3)) == 0:
            table[part] = {"name": draw(st.sampled_from(names))}
    if draw(st.integers(0, 3)) == 0:
        table["run"]["participation"] = {"name": draw(st.sampled_from(PARTICIPATION))}
    changed = []
    for _ in range(draw(st.integers(1, 2))):
        *outer, last = draw(st.sampled_from(places(table)))
        inner = table
        for key in outer:
            inner = inner[key]
        match draw(st.integers(0, 9)):
            case 0:
                inner.pop(last, None)
            case 1:
                inner[draw(st.sampled_from(KEYS))] = copy.deepcopy(draw(st.sampled_from(ODD)))
            case 2:
                inner[last] = draw(st.integers() | st.floats() | st.text(max_size=9))
            case _:
                inner[last] = copy.deepcopy(draw(st.sampled_from(ODD)))  # copy, because the value is shared
        changed.append((*outer, last))
    return table, changed


@cache
def federation() -> Federation:
    """The federation on which models are built."""
    return experiment.load_federation(experiment.from_table(complete("fedavg"), "base"))


def check(case: tuple[dict, list[tuple]], deep: bool = False) -> bool:
    """Check that a table is rejected with a FedraxError, or that its experiment has its values and survives a round
    trip.

    deep: also partitions the data, traces the round, and prepares the run.
    """
    table, changed = case
    try:
        text = tomlkit.dumps(table)
        read = experiment.from_table(tomllib.loads(text), "x.toml")
    except FedraxError:
        return False
    except ValueError:  # values that TOML cannot express
        return False
    written = experiment.to_table(read)
    assert experiment.to_table(experiment.from_table(tomllib.loads(tomlkit.dumps(written)), "again")) == written
    for path in changed:
        assert_meant(path, table, written)
    try:
        made = experiment.load_federation(read) if deep else federation()
        task = experiment.make_task(read, made)
        if deep:
            with numeric_context(read.run.dtype):
                prepare(read.algorithm, task, made, read.run)
    except FedraxError:
        return False
    return True


def assert_meant(path: tuple, given: Any, kept: Any) -> None:
    """Assert that no accepted value became another one."""
    for key in path:
        if not isinstance(given, dict) or key not in given or not isinstance(kept, dict) or key not in kept:
            return
        given, kept = given[key], kept[key]
    if isinstance(given, dict) or isinstance(kept, dict):
        return  # names stand for tables
    if isinstance(given, str) and Path(str(kept)).is_absolute():
        return
    if isinstance(kept, float) and isinstance(given, int):
        given = float(given)  # rounded to the nearest float
    same = given == kept or (given != given and kept != kept)
    assert same, f"{'.'.join(path)}: {given!r} became {kept!r}"
