"""Fields of user-defined methods: enumerations, arrays and NumPy scalars."""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedrax import (
    FedAvg,
    FedraxError,
    LocalSGD,
    algorithms,
    compression,
    optim,
    participation,
    privacy,
    robust,
    tree,
)
from fedrax.config.annotations import Leaf, fields_of
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import ClientOutput
from fedrax.experiments import serialization
from fedrax.testing import check_algorithm
from tests.simulation.problems import LOCAL, run


class Side(Enum):
    """Options of :class:`Sided`."""

    LEFT = "left"
    RIGHT = "right"


@hyperparameters
class Sided(FedAvg):
    """FedAvg whose updates change their sign with an enumeration field."""

    side: Side = Side.LEFT

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        output = super().client(message, state, data)
        return output._replace(upload=tree.scale(1 if self.side is Side.LEFT else -1, output.upload))


def test_enumeration_fields_are_checked_and_read_from_files(tmp_path: Path):
    with pytest.raises(FedraxError, match=r"Sided.side must be a Side: LEFT, RIGHT, got 'left'"):
        run(Sided(LOCAL, side="left"))  # type: ignore[arg-type]
    reader = serialization.Reader("a file", tmp_path)
    assert serialization.table_of(Sided(side=Side.RIGHT))["side"] == "RIGHT"
    assert reader.fields(Sided, {"side": "RIGHT"}, "").side is Side.RIGHT
    with pytest.raises(FedraxError, match=r"side: must be a Side: LEFT, RIGHT, not 'right'"):
        reader.fields(Sided, {"side": "right"}, "")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("options", [{"plan": "debug"}, {"plan": "loop"}, {"devices": 1}], ids=str)
def test_field_may_contain_parameters(options: dict[str, Any]):
    @hyperparameters
    class Towards(FedAvg):
        teacher: Leaf[Any] = ()

        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            output = super().client(message, state, data)
            near = tree.sub(self.teacher, message)
            return output._replace(upload=tree.add_scaled(output.upload, 0.1, near))

    first = run(FedAvg(LOCAL), rounds=1)
    assert len(run(Towards(LOCAL, teacher=first.params), rounds=2, **options).events) == 2


@hyperparameters
class Weighed(FedAvg):
    """FedAvg with a float field that scales the updates."""

    mu: float = 0.1

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        output = super().client(message, state, data)
        return output._replace(upload=tree.scale(1 - self.mu, output.upload))


def test_float_field_may_be_a_numpy_scalar():
    one, other = (run(Weighed(LOCAL, mu=mu), rounds=1).params for mu in (0.1, np.float32(0.1)))  # type: ignore[arg-type]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, other)


@pytest.mark.slow
def test_check_algorithm_accepts_numpy_scalars():
    check_algorithm(Weighed(mu=np.float32(0.1)))  # type: ignore[arg-type]


FLOATS = [
    (cls, name)
    for namespace in (algorithms, optim, participation, robust, privacy, compression)
    for cls in (getattr(namespace, name) for name in namespace.__all__)
    if dataclasses.is_dataclass(cls) and not inspect.isabstract(cls) and hasattr(cls, "__hyperparameters__")
    for name, field in fields_of(cls).items()
    if any(kind.type is float for kind in field.types) and isinstance(getattr(cls, name, None), float)
]


@pytest.mark.parametrize(("cls", "name"), FLOATS, ids=lambda value: getattr(value, "__name__", value))
def test_numbers_in_float_fields_become_floats(cls: type, name: str):
    """Of any numeric type; a field that also accepts integers keeps them."""
    given = getattr(cls, name)
    needed = {f.name: FedAvg() for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    for kind in (np.float32, np.float64, np.array, Fraction):
        value = getattr(cls(**needed, **{name: kind(given)}), name)
        assert type(value) is float and value == float(kind(given))
    kinds = {kind.type for kind in fields_of(cls)[name].types}
    for integer in (1, np.int64(1)):
        value = getattr(cls(**needed, **{name: integer}), name)
        assert value == 1 and type(value) is (int if int in kinds else float)


def test_numbers_in_tuples_become_floats_and_trees_are_kept():
    @hyperparameters
    class Ranges:
        box: tuple[float, float] = (0.0, 1.0)
        sizes: tuple[int, ...] = ()
        name: str = ""
        rate: float | None = None

    made = Ranges((0, np.float32(2)), (np.int64(3),), np.str_("a"), None)
    assert repr(made).endswith("Ranges(box=(0.0, 2.0), sizes=(3,), name='a', rate=None)")
    assert jax.tree.leaves(jax.tree.map(lambda leaf: 0, made)) == [0, 0]
    assert type(jax.tree.leaves(jax.tree.map(lambda leaf: 0, made))[0]) is int
    assert isinstance(Ranges(rate=jax.numpy.float32(1)).rate, jax.Array)
    assert type(FedAvg(local=LocalSGD(lr=10**400)).local.lr) is float  # infinite, which ``check`` rejects
