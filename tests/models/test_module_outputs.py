"""Required arguments and outputs of adapted modules."""

from functools import partial

import jax.numpy as jnp
import pytest

from fedrax import FedAvg, LocalSGD, simulate
from fedrax.contract.task import Batch, classification
from fedrax.errors import FedraxError
from fedrax.models import from_equinox, from_linen, from_nnx
from tests.models.toy_data import FEDERATION, KEY, X, Y

eqx, nn, nnx = (pytest.importorskip(module) for module in ("equinox", "flax.linen", "flax.nnx"))


class Norm(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)
        return nn.Dropout(0.5, deterministic=self.axis_name is not None)(nn.Dense(3)(x))


class NormNnx(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = nnx.BatchNorm(4, axis_name="batch", rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_linen(Norm("batch"), X), "Norm averages over the device axis batch, .*: unset axis_name"),
        (lambda: from_nnx(NormNnx), "NormNnx averages over the device axis batch, .*: unset axis_name"),
        (lambda: from_linen(Norm(), X), "Norm draws random numbers in evaluation too"),
        (lambda: from_linen(Norm, X), r"not the class Norm: give Norm\(\.\.\.\)"),
        (lambda: from_linen(partial(Norm, "batch"), X), r"not the class Norm: give Norm\(\.\.\.\)"),
        (lambda: from_linen(Norm(), {"x": "text"}), r"a dictionary or tuple of arrays, not a dict"),
    ],
)
def test_modules_that_cannot_be_adapted_are_rejected_with_the_reason(make, message):
    with pytest.raises(FedraxError, match=message):
        simulate(FedAvg(), classification(make()), FEDERATION, rounds=1, cohort_size=2)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        hidden = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(3)(hidden), hidden


def test_module_with_statistics_must_return_one_array():
    with pytest.raises(FedraxError, match="a model's outputs are an array, not tuple"):
        simulate(FedAvg(), classification(from_linen(Pair(), X)), FEDERATION, rounds=1, cohort_size=2)


@pytest.mark.parametrize("normed", [False, True])
def test_losses_and_metrics_of_bfloat16_outputs_are_float32(normed):
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False):
            x = nn.BatchNorm(use_running_average=not train)(x) if normed else x
            return nn.Dense(3, dtype=jnp.bfloat16)(x)

    task, batch = classification(from_linen(Network(), X)), Batch(X, Y)
    params = task.init(KEY)
    values = [task.loss(params, batch, KEY), task.evaluation_loss(params, batch)]
    values.append(task.metrics["accuracy"](params, batch))
    if task.loss_and_statistics is not None:
        values.append(task.loss_and_statistics(params, batch, KEY)[0])
    assert len(values) == 3 + normed and {value.dtype for value in values} == {jnp.dtype("float32")}
    settings = {"rounds": 1, "cohort_size": 2, "progress": False, "finetune": 1}
    assert simulate(FedAvg(local=LocalSGD(lr=0.1)), task, FEDERATION, **settings).events


def test_dtype_error_on_uint8_inputs_suggests_preprocess():
    class Network(eqx.Module):
        conv: eqx.nn.Conv2d

        def __init__(self, key):
            self.conv = eqx.nn.Conv2d(1, 2, 3, key=key)

        def __call__(self, x):
            return self.conv(jnp.moveaxis(x, -1, 0)).ravel()

    model = from_equinox(Network)
    with pytest.raises(TypeError, match="dtypes") as raised:
        model.apply(model.init(KEY), jnp.zeros((5, 8, 8, 1), jnp.uint8))
    (note,) = [note for note in raised.value.__notes__ if note.startswith("fedrax: ")]
    assert "preprocess=fedrax.contract.rescale()" in note and "moveaxis" not in note
