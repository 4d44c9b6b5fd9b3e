"""Options of all methods, and nested wrappers, with the default plans."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import fedrax
from fedrax.config.annotations import fields_of
from fedrax.config.hyperparameters import check
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.wrapper import Wrapper
from fedrax.experiments.method_registry import algorithms
from fedrax.simulation.setup import prepare
from tests.contract.test_every_algorithm import FEDERATION, SIZES, TASK, assert_close, example, run
from tests.slow import slow_cases

LOCAL = fedrax.LocalSGD(lr=0.02, steps=2, batch_size=3, momentum=0.5, weight_decay=0.1)


def is_valid(algorithm: Algorithm) -> bool:
    """Whether the option can be used alone; some need another field as well."""
    try:
        check(algorithm)
    except fedrax.FedraxError:
        return False
    return True


def other_choices() -> Iterator[tuple[str, Algorithm]]:
    """Each method with each non-default value of a choice or switch."""
    for name, kind in algorithms().items():
        if kind is fedrax.privacy.ObjectivePerturbation:
            continue  # its other choice is for the models of its theorem only
        base = example(kind)
        for field in fields_of(kind).values():
            default = getattr(base, field.name)
            known = [choice for kind_ in field.types for choice in kind_.choices]
            switch = [not default] if isinstance(default, bool) else []
            for value in [choice for choice in known if choice != default] + switch:
                yield f"{name}-{field.name}={value}", dataclasses.replace(base, **{field.name: value})


def nested_wrappers() -> Iterator[tuple[str, Algorithm]]:
    """Every wrapper around every wrapper, around a method with server and client states if possible."""
    wrappers = {name: kind for name, kind in algorithms().items() if issubclass(kind, Wrapper)}
    for (outer, around), (inner, kind) in itertools.product(wrappers.items(), repeat=2):
        local_models = fedrax.privacy.OutputPerturbation in (around, kind)  # SCAFFOLD's control variates would leak
        for method in (fedrax.Scaffold(local=LOCAL), fedrax.FedAvg(local=LOCAL))[local_models:]:
            made = around(inner=kind(inner=method))  # type: ignore[call-arg]
            if is_valid(made):
                yield f"{outer}({inner}({type(method).__name__.lower()}))", made
                break


CHOICES, PAIRS = dict(other_choices()), dict(nested_wrappers())
NAMES = [name for name, kind in algorithms().items() if issubclass(kind, Wrapper)]
PAIRS_TO_RUN = {
    step: {f"{outer}({NAMES[(i + step) % len(NAMES)]}" for i, outer in enumerate(NAMES)} for step in (1, 0, 4)
}
"""Pairs that are run: every wrapper once outside and once inside; in ``make test-all`` three times."""
IN_MAKE_TEST = {name for name in PAIRS if name.rpartition("(")[0] in PAIRS_TO_RUN[1]}
REJECTED = {
    *(f"{outer}({inner}" for outer in ("efsign", "topk") for inner in ("efsign", "quantized", "randomk", "topk")),
    *(f"personalized({inner}" for inner in ("efsign", "quantized", "randomk", "topk")),
    "randomk(quantized",
    *(f"{outer}(quantizedbroadcast" for outer in ("ditto", "personalized")),
    *(f"{o}(clientdp" for o in ("attacked", "efsign", "personalized", "quantized", "randomk", "robust", "topk")),
    *("outputperturbation(ditto", "outputperturbation(outputperturbation", "sampledp(ditto"),
}
"""Wrappers that need uploads or broadcast messages with the structure of the model, or floats, around wrappers that
encode them; that change sums with calibrated noise; and that count local steps."""
REASON = "needs|wraps|goes around|numbers|floating-point|a plain sum|one gradient"
LOSSY = ("efsign", "quantized", "randomk", "topk")
"""Wrappers whose discrete choices depend on rounding, so that plans agree in message sizes only."""


@pytest.mark.parametrize("name", slow_cases(PAIRS, IN_MAKE_TEST))
def test_pairs_of_wrappers_can_be_traced_or_are_rejected_with_the_reason(name: str):
    """Incompatible pairs are found when the round is traced, before compilation."""
    start = lambda: prepare(PAIRS[name], TASK, FEDERATION, fedrax.Settings(rounds=2, cohort_size=2))  # noqa: E731
    if name.rpartition("(")[0] in REJECTED:
        with pytest.raises(fedrax.FedraxError, match=REASON):
            start()
    else:
        assert start().info.bytes_up > 0


TO_RUN = {name: case for name, case in CHOICES.items() if is_valid(case)} | {
    name: case
    for name, case in PAIRS.items()
    if name.rpartition("(")[0] in set().union(*PAIRS_TO_RUN.values()) - REJECTED
}


SIMILAR_CODE = {
    *("gradma-previous=local", "gradmaw-scope=leaf", "losac-reading=printed", "quantized-bits=16"),
    "upcycled-extrapolate=server",
}
"""Options whose code is also run by another option of the method or of a related method."""


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", slow_cases(TO_RUN, CHOICES.keys() - SIMILAR_CODE))
def test_sequential_and_vectorized_clients_agree(name: str):
    base, other = run(TO_RUN[name], rounds=2), run(TO_RUN[name], rounds=2, plan="vmap", chunk=2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((base.params, other.params)))
    assert [event["bytes_up"] for event in other.events] == [event["bytes_up"] for event in base.events]
    if not any(word in name for word in LOSSY):
        assert_close(other.server, base.server)
        for client in range(len(SIZES)):
            assert_close(other.client_state(client), base.client_state(client))
