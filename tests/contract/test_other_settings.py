"""Every choice of every method, and wrappers around wrappers, on the plans that users get."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import fedrax
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.fields import fields_of
from fedrax.contract.hyperparameters import check
from fedrax.contract.wrapper import Wrapper
from fedrax.experiments.methods import algorithms
from tests.contract.test_every_algorithm import SIZES, assert_close, example, run

LOCAL = fedrax.LocalSGD(lr=0.02, steps=2, batch_size=3, momentum=0.5, weight_decay=0.1)


def is_sound(algorithm: Algorithm) -> bool:
    """Whether the choice stands by itself; some need another field with it and say so."""
    try:
        check(algorithm)
    except fedrax.FedraxError:
        return False
    return True


def other_choices() -> Iterator[tuple[str, Algorithm]]:
    """Each method with each value of a choice or switch that is not its default."""
    for name, kind in algorithms().items():
        base = example(kind)
        for field in fields_of(kind).values():
            default = getattr(base, field.name)
            known = [choice for kind_ in field.kinds for choice in kind_.choices]
            switch = [not default] if isinstance(default, bool) else []
            for value in [choice for choice in known if choice != default] + switch:
                yield f"{name}-{field.name}={value}", dataclasses.replace(base, **{field.name: value})


def wrapped_twice() -> Iterator[tuple[str, Algorithm]]:
    """Every wrapper around every wrapper, around a method that remembers something on both sides where it may."""
    wrappers = {name: kind for name, kind in algorithms().items() if issubclass(kind, Wrapper)}
    for (outer, around), (inner, kind) in itertools.product(wrappers.items(), repeat=2):
        for method in (fedrax.Scaffold(local=LOCAL), fedrax.FedAvg(local=LOCAL)):
            made = around(inner=kind(inner=method))  # type: ignore[call-arg]
            if is_sound(made):
                yield f"{outer}({inner}({type(method).__name__.lower()}))", made
                break


CASES = dict([*other_choices(), *wrapped_twice()])


REFUSED = {
    "personalised(quantised(fedavg))",
    "personalised(topk(fedavg))",
    "topk(quantised(scaffold))",
    "topk(topk(scaffold))",
}
"""Wrappers that read an upload in the shape of the model, around others that send it in another form."""
LOSSY = ("quantised", "topk")
"""Rounding in another order makes another choice here and there: their plans agree in what they send alone."""


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_go_together_is_refused_in_a_sentence(name: str):
    with pytest.raises(fedrax.FedraxError, match=r"needs|goes around|numbers"):
        run(CASES[name], rounds=1)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if is_sound(case) and name not in REFUSED])
def test_clients_in_turn_and_side_by_side_agree(name: str):
    base, other = run(CASES[name], rounds=2), run(CASES[name], rounds=2, plan="vmap", chunk=2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((base.params, other.params)))
    assert [event["bytes_up"] for event in other.events] == [event["bytes_up"] for event in base.events]
    if not any(word in name for word in LOSSY):
        assert_close(other.server, base.server)
        for client in range(len(SIZES)):
            assert_close(other.client_state(client), base.client_state(client))
