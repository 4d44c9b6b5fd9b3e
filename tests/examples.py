"""Instances of methods for tests of all methods."""

from __future__ import annotations

import dataclasses

from fedrax import Algorithm
from fedrax.privacy import ObjectivePerturbation


def example(kind: type[Algorithm]) -> Algorithm:
    """The algorithm with its defaults and a learning rate with which no test diverges."""
    if kind is ObjectivePerturbation:  # its theorem does not apply to the model of the tests
        return ObjectivePerturbation(guarantee="none")
    algorithm = kind()
    local = getattr(algorithm, "local", None)
    if local is None:
        return algorithm
    return dataclasses.replace(algorithm, local=dataclasses.replace(local, lr=0.02))  # type: ignore[call-arg]
