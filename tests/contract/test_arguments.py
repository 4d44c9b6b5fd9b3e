"""Every public function raises one clear FedraxError for a wrong argument in each position."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from docs.reference_pages import NAMESPACES, exports
from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError
from fedrax.models import Logistic

UNCHECKED = {
    "fedrax.tree": "vector algebra of any pytree: errors of JAX, which are translated where a method raises them",
    "fedrax.hyperparameters": "a decorator of classes, which checks its argument itself",
    "fedrax.contract.hyperparameters": "the same",
    "fedrax.data.tokenize": "called for each text of a data set; it checks its argument itself",
}
"""Namespaces and functions without checks, with the reason."""


def public_functions() -> dict[str, Callable]:
    """Functions of the public namespaces, each once, and constructors of federations, by name."""
    found: dict[str, Callable] = {}
    for namespace in NAMESPACES:
        for name, value in exports(namespace).items():
            checked = not {namespace, f"{namespace}.{name}"} & UNCHECKED.keys()
            if inspect.isfunction(value) and checked and value not in found.values():
                found[f"{namespace}.{name}"] = value
    constructors = {"from_arrays": fedrax.Federation.from_arrays, "from_dataset": fedrax.Federation.from_dataset}
    return found | {f"fedrax.Federation.{name}": value for name, value in constructors.items()}


FUNCTIONS = public_functions()
SHORT_RUN = {"rounds": 1, "cohort_size": 2}
X, Y, OWNER = np.eye(6, 4, dtype=np.float32), np.arange(6) % 3, np.arange(6) // 2


@functools.cache
def examples() -> dict[str, Any]:
    """Valid arguments by the name of the parameter."""
    model = Logistic().build((4,), 3)
    task = fedrax.classification(model)
    federation = fedrax.Federation.from_arrays(X, Y, OWNER, test=(X, Y))
    params = task.init(jax.random.key(0))
    return {
        "algorithm": fedrax.FedAvg(), "algorithms": [fedrax.FedAvg()], "task": task, "federation": federation,
        "model": model, "params": params, "settings": fedrax.Settings(**SHORT_RUN),
        "loss": lambda outputs, y: outputs[:, 0],
        "x": X, "y": Y, "client_ids": OWNER, "array": X, "share": 0.5, "path": "missing", "directory": "missing",
        "directories": "missing", "dataset": fedrax.data.load("digits"), "partition": fedrax.data.Iid(2), "seed": 0,
        "texts": [["a"]], "words": ("a",), "length": 2, "text": "a b", "name": "digits", "source": "missing.toml",
        "p": params, "parts": [params], "columns": lambda *leaves: leaves, "one": X, "other": X, "delta": 0.1,
        "mu": 1.0, "scores": np.arange(4.0), "canaries": 8, "guesses": 4, "correct": 3, "epsilon": 1.0,
        "client": fedrax.contract.Batch(X, Y), "runs": 2, "method": fedrax.FedAvg(),
        "strength": 0.1, "center": params, "config": fedrax.FedAvg(), "cls": type("Empty", (), {}), "gradient": params,
        "samples": 2, "message": params, "exchanges": [], "num_clients": 3, "cohort_size": 2, "lr": 0.1, "found": X,
        "true": X, "labels": Y, "outputs": X[:, 0], "events": [], "metric": "test_loss", "value": 0.5,
        "data": federation, "result": object.__new__(fedrax.Result),
        "grid": {"local.lr": [0.1]}, "module": None, "sample_input": X, "example": X, "clients": 2, "trainable": "*",
        "tokenizer": lambda text: [1, 2], "lengths": (1, 2),
    }  # fmt: skip


def parameters(function: Callable) -> Iterator[inspect.Parameter]:
    """Parameters other than ``*args`` and ``**kwargs``."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield parameter


def call(name: str, /, **given: Any) -> Any:
    """Call a function with ``given``, and examples for the other required parameters."""
    function = FUNCTIONS[name]
    arguments = {p.name: examples()[p.name] for p in parameters(function) if p.default is p.empty} | given
    if name == "fedrax.flower.federate":
        arguments["grid"] = given.get("grid", object.__new__(fedrax.flower.LocalGrid))
    by_position = [p.name for p in parameters(function) if p.kind == p.POSITIONAL_ONLY]
    return function(*(arguments.pop(p) for p in by_position), **arguments)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_missing_superfluous_and_unknown_arguments_are_rejected(name: str):
    function = FUNCTIONS[name]
    few = [p for p in parameters(function) if p.default is p.empty]
    if few:
        with pytest.raises(FedraxError, match=f"needs the argument .*{few[0].name}"):
            function()
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    with pytest.raises(FedraxError, match=r"by position, not 40 arguments|directories must be .*, not 0"):
        function(*range(40))
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        with pytest.raises(FedraxError, match=r"unknown argument of .*'no_such'"):
            function(no_such=1)


ANY_TYPE = ("Any", Any, "Tree", "object", "Tree | None")
POSITIONS = [(name, p.name, p.annotation in ANY_TYPE) for name, f in FUNCTIONS.items() for p in parameters(f)]


@pytest.mark.parametrize(
    ("name", "parameter"), [(name, parameter) for name, parameter, any_type in POSITIONS if not any_type]
)
def test_argument_of_a_wrong_type_is_named(name: str, parameter: str):
    """A plain object in place of each argument with a type."""
    with pytest.raises(FedraxError, match=rf"{parameter} must be .*, not an object") as caught:
        call(name, **{parameter: object()})
    assert "\n" not in str(caught.value)


NOT_CALLED = {"fedrax.flower.federate": "it waits for clients", "fedrax.privacy.observe_client": "it compiles rounds"}
"""Functions that would run with any value of an untyped argument, with the reason."""
UNTYPED = [(name, parameter) for name, parameter, any_type in POSITIONS if any_type and name not in NOT_CALLED]


@pytest.mark.parametrize(("name", "parameter"), UNTYPED)
def test_untyped_arguments_raise_fedrax_errors_only(name: str, parameter: str):
    """Invalid trees, arrays, modules and files are rejected by fedrax or have no effect."""
    for wrong in (object(), "text", {"a": "b"}, [object()], 3, lambda: None, type("Empty", (), {})):
        with contextlib.suppress(FedraxError):
            call(name, **{parameter: wrong})


@checked_arguments
def sample(
    model: fedrax.contract.Model, count: fedrax.contract.PositiveInt = 1, rate: float = 0.5,
    kind: Literal["a", "b"] = "a", path: Path | str | None = None, scores: np.ndarray | None = None,
    methods: tuple[fedrax.Algorithm, ...] = (), *, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """All arguments except the model."""
    return {name: value for name, value in locals().items() if name != "model"}


MODEL = Logistic().build((4,), 3)


def test_numbers_and_lists_are_converted_to_the_annotated_type():
    given = sample(MODEL, np.int64(3), 2, "b", scores=[1, 2], progress=np.bool_(False))
    assert [type(given[name]) for name in ("count", "rate", "progress")] == [int, float, bool]
    assert given["rate"] == 2.0 and isinstance(given["scores"], np.ndarray) and given["kind"] == "b"
    assert type(sample(MODEL, rate=np.float32(0.5))["rate"]) is float
    assert sample(MODEL, scores=jnp.ones(2))["scores"].shape == (2,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "sample: model must be a Model, not None"),
        ({"model": Logistic()}, r"not a Logistic: Logistic\(...\).build\(input_shape, outputs\) gives the model"),
        ({"model": Logistic}, r"not the class Logistic: Logistic\(...\).build"),
        ({"model": np.sum}, r"Model\(init, apply\) makes a model of functions"),
        ({"model": lambda x: x}, r"not the function <lambda>: fedrax.contract.Model\(init, apply\)"),
        ({"count": 0}, "count must be at least 1, not 0"),
        ({"count": 2.0}, "count must be a whole number, not 2.0"),
        ({"count": True}, "count must be a whole number, not True"),
        ({"rate": "0.1"}, "rate must be a number, not '0.1'"),
        ({"rate": float("nan")}, "rate must be a finite number, not nan"),
        ({"rate": np.ones(2)}, "rate must be a number, not an? ndarray"),
        ({"kind": "c"}, "kind must be one of 'a', 'b', not 'c'"),
        ({"kind": np.zeros(3)}, "kind must be one of 'a', 'b'"),
        ({"path": 3}, "path must be a path or a string or None, not 3"),
        ({"scores": "abc"}, "scores must be an array or None, not 'abc'"),
        ({"scores": [1, "a"]}, "scores must be an array or None, not a list"),
        ({"methods": [fedrax.FedAvg]}, "methods must be a list"),
        ({"progress": 1}, "progress must be true or false, not 1"),
        ({"modell": 1}, "unknown argument of sample: 'modell'; did you mean 'model'"),
    ],
)
def test_messages_explain_wrong_arguments(given: dict[str, Any], message: str):
    with pytest.raises(FedraxError, match=message):
        sample(**{"model": MODEL} | given)


def test_constructor_arguments_are_checked():
    for make, message in (
        (lambda: fedrax.optim.Optax(), "Optax needs the field transform"),
        (lambda: fedrax.FedAvg(1, 2, 3, 4, 5), r"FedAvg takes .* by position, not 5 arguments"),
        (lambda: fedrax.Settings(1, rounds=2), "Settings is given the field rounds by position and by name"),
        (lambda: fedrax.data.Shards("20"), "Shards: clients must be a whole number, not '20'"),
        (lambda: fedrax.data.Similarity(5, float("nan")), "Similarity: percent must be a finite number, not nan"),
        (
            lambda: fedrax.data.DirichletClasses(5, float("inf")),
            "DirichletClasses: .* must be a finite number",
        ),
        (lambda: fedrax.data.Shards(client=20), "unknown field of Shards: 'client'; did you mean 'clients'"),
        (lambda: fedrax.models.MLP(hidden="200"), "MLP: hidden must be a list of whole numbers, not '200'"),
    ):
        with pytest.raises(FedraxError, match=message):
            make()
