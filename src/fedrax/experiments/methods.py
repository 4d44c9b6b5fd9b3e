"""The methods by name: every algorithm and wrapper of the package."""

from __future__ import annotations

import importlib
import pkgutil

import fedrax.algorithms
import fedrax.wrappers
from fedrax.contract.algorithm import Algorithm, is_algorithm
from fedrax.errors import unknown


def algorithms() -> dict[str, type[Algorithm]]:
    """Every algorithm of the package by its name; a new file in ``fedrax/algorithms`` is found by itself."""
    found: dict[str, type[Algorithm]] = {}
    for package in (fedrax.algorithms, fedrax.wrappers):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for value in vars(importlib.import_module(module.name)).values():
                if is_algorithm(value) and value.__module__ == module.name:
                    found[value.__name__.lower()] = value
    return dict(sorted(found.items()))


def find_algorithm(name: str) -> type[Algorithm]:
    """The algorithm class called ``name`` (case does not matter); FedraxError with the nearest name otherwise."""
    known = algorithms()
    if name.lower() not in known:
        raise unknown("algorithm", name, known)
    return known[name.lower()]
