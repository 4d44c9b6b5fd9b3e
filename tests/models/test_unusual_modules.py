"""Modules whose switches, constants, axes and constructors are not as most have them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, Federation, LocalSGD, simulate
from fedrax.algorithms import FedSGD
from fedrax.contract.task import Batch, classification
from fedrax.errors import FedraxError
from fedrax.models import Model, Variables, from_equinox, from_linen, from_nnx

eqx, nn, nnx = (pytest.importorskip(module) for module in ("equinox", "flax.linen", "flax.nnx"))
X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
Y = np.array([0, 1, 2, 0, 1, 2])
FEDERATION = Federation.from_arrays(np.asarray(X), Y, np.arange(6) % 2, num_classes=3)
KEY, OTHER = jax.random.key(3), jax.random.key(4)


def is_random_in_training_alone(model: Model) -> bool:
    params = model.init(KEY)
    noisy = bool(jnp.any(model.apply(params, X, KEY) != model.apply(params, X, OTHER)))
    return noisy and bool(jnp.all(model.apply(params, X) == model.apply(params, X)))


class EnableDropout(eqx.Module):
    out: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.out, self.dropout = eqx.nn.Linear(4, 3, key=key), eqx.nn.Dropout(0.5)

    def __call__(self, x, enable_dropout: bool = False, key=None):
        return self.dropout(self.out(x), key=key, inference=not enable_dropout)


class Inference(EnableDropout):
    def __call__(self, x, *, key, inference: bool = False):
        return self.dropout(self.out(x), key=key, inference=inference)


class NoKey(EnableDropout):
    def __call__(self, x):
        return self.dropout(self.out(x))


@pytest.mark.parametrize("network", [EnableDropout, Inference])
def test_switches_of_equinox_modules_are_set(network):
    model = from_equinox(network)
    assert is_random_in_training_alone(model)
    params = model.init(KEY)
    np.testing.assert_allclose(model.apply(params, X), jax.vmap(network(KEY).out)(X), rtol=1e-5, atol=1e-6)


def test_dropout_without_a_key_is_a_sentence():
    model = from_equinox(NoKey)
    model.apply(model.init(KEY), X)
    with pytest.raises(FedraxError, match=r"NoKey draws random numbers and has no key .* an argument key"):
        simulate(FedAvg(), classification(model), FEDERATION, rounds=1, cohort_size=2)


class IsTraining(nn.Module):
    @nn.compact
    def __call__(self, x, is_training):
        return nn.Dropout(0.5, deterministic=not is_training)(nn.Dense(3)(x))


class IsTesting(nnx.Module):
    def __init__(self, rngs):
        self.out, self.dropout = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, testing: bool = True):
        return self.dropout(self.out(x), deterministic=testing)


def test_switches_by_their_other_names():
    assert is_random_in_training_alone(from_linen(IsTraining(), X))
    assert is_random_in_training_alone(from_nnx(IsTesting))


class Stochastic(nnx.Module):
    def __init__(self, rngs):
        self.out, self.dropout = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, stochastic: bool = False):
        return self.dropout(self.out(x), deterministic=not stochastic)


class Adaptive(nn.Module):
    @nn.compact
    def __call__(self, x, adapt: bool = False):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not adapt)(x))


class Always(nnx.Module):
    def __init__(self, rngs):
        self.out, self.dropout = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, noisy: bool = True):
        return self.dropout(self.out(x), deterministic=not noisy)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: from_nnx(Stochastic), "Stochastic draws random numbers or not by its argument stochastic, .* train"),
        (lambda: from_linen(Adaptive(), X), "Adaptive moves statistics or not by its argument adapt"),
        (lambda: from_nnx(Always), "Always draws random numbers or not by its argument noisy"),
    ],
)
def test_a_switch_of_another_name_that_stands_the_wrong_way_is_refused(make, says):
    with pytest.raises(FedraxError, match=says):
        simulate(FedAvg(), classification(make()), FEDERATION, rounds=1, cohort_size=2)


def test_other_arguments_that_are_true_or_false_are_left_alone():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False, return_hidden: bool = False, checked: bool = True):
            hidden = nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x))
            outputs = nn.Dense(3)(hidden)
            return (outputs, hidden) if return_hidden else outputs

    assert is_random_in_training_alone(from_linen(Network(), X))


def test_partitioned_parameters_are_plain_ones():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))(x)

    model = from_linen(Network(), X)
    assert {type(leaf) for leaf in model.init(KEY)["Dense_0"].values()} == {type(X)}
    found = simulate(FedAvg(), classification(model), FEDERATION, rounds=1, cohort_size=2, eval_train=True)
    assert np.isfinite(found.metric("train_accuracy")[-1][1])


class Constants(nn.Module):
    drawn: bool = False

    @nn.compact
    def __call__(self, x):
        make = lambda: jax.random.normal(self.make_rng("params"), (4,)) if self.drawn else jnp.arange(4.0)  # noqa: E731
        return nn.Dense(3)(x + self.variable("constants", "places", make).value)


def test_collections_that_never_move_are_constants():
    model = from_linen(Constants(), X)
    params = model.init(KEY)
    assert model.train is None and not isinstance(params, Variables)
    expected = Constants().apply({"params": params, "constants": {"places": jnp.arange(4.0)}}, X)
    np.testing.assert_allclose(model.apply(params, X), expected, rtol=1e-6)


def test_what_begins_otherwise_with_each_key_is_kept_beside_the_parameters_and_named():
    model = from_linen(Constants(drawn=True), X)
    assert list(model.init(KEY).statistics) == ["constants"]
    with pytest.raises(FedraxError, match=r"takes no care of running statistics, .* keeps constants/places: use"):
        simulate(FedSGD(), classification(model), FEDERATION, rounds=1, cohort_size=2)


def test_variables_that_a_call_makes_are_no_statistics():
    class Seen(nnx.Variable):
        pass

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.out = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            x = self.norm(x)
            self.seen = Seen(x.mean())
            return self.out(x)

    model = from_nnx(Network)
    variables = model.init(KEY)
    assert model.train is not None
    _, statistics = model.train(variables, X, KEY)
    assert jax.tree.structure(statistics) == jax.tree.structure(variables.statistics)
    assert simulate(FedAvg(), classification(model), FEDERATION, rounds=2, cohort_size=2).events


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
    ("make", "says"),
    [
        (lambda: from_linen(Norm("batch"), X), "Norm takes means over an axis batch: leave axis_name out"),
        (lambda: from_nnx(NormNnx), "NormNnx takes means over an axis batch: leave axis_name out"),
        (lambda: from_linen(Norm(), X), "Norm draws random numbers in evaluation too"),
        (lambda: from_linen(Norm, X), r"not the class Norm: give Norm\(\.\.\.\)"),
        (lambda: from_linen(partial(Norm, "batch"), X), r"not the class Norm: give Norm\(\.\.\.\)"),
        (lambda: from_linen(Norm(), {"x": X}), r"a batch .* an array \[B, \.\.\.\], not a dict"),
    ],
)
def test_what_cannot_be_is_a_sentence(make, says):
    with pytest.raises(FedraxError, match=says):
        simulate(FedAvg(), classification(make()), FEDERATION, rounds=1, cohort_size=2)


@pytest.mark.parametrize("part", [False, True])
def test_constructors_that_take_their_randomness_by_name_alone(part):
    class Nnx(nnx.Module):
        def __init__(self, outputs=3, *, rngs):
            self.out = nnx.Linear(4, outputs, rngs=rngs)

        def __call__(self, x):
            return self.out(x)

    class Equinox(eqx.Module):
        out: eqx.nn.Linear

        def __init__(self, outputs=3, *, key):
            self.out = eqx.nn.Linear(4, outputs, key=key)

        def __call__(self, x):
            return self.out(x)

    for model in (from_nnx(partial(Nnx, 3) if part else Nnx), from_equinox(partial(Equinox, 3) if part else Equinox)):
        first, second = model.init(KEY), model.init(OTHER)
        assert model.apply(first, X).shape == (6, 3)
        assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool(jnp.any(a != b)), first, second)))


def test_streams_of_other_names_have_keys_of_their_own():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.streams, self.gain = nnx.Rngs(0, dropout=1), nnx.Param(jnp.ones(()))

        def __call__(self, x):
            draws = [jax.random.normal(key, x.shape) for key in (self.streams.default(), self.streams.dropout())]
            return self.gain * (draws[0] - draws[1])

    model = from_nnx(Network)
    assert jnp.any(model.apply(model.init(KEY), X, KEY) != 0)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        hidden = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(3)(hidden), hidden


def test_outputs_of_networks_with_statistics_are_an_array_too():
    with pytest.raises(FedraxError, match="a model's outputs are an array, not tuple"):
        simulate(FedAvg(), classification(from_linen(Pair(), X)), FEDERATION, rounds=1, cohort_size=2)


@pytest.mark.parametrize("normed", [False, True])
def test_losses_and_metrics_of_short_outputs_are_float32(normed):
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


def test_bytes_are_told_of_preprocess_and_not_of_the_layout():
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


@pytest.mark.parametrize("where", ["attribute", "list", "function"])
def test_arrays_of_nnx_modules_that_are_no_variables(where):
    """Tables of positions, masks, knots of splines."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            table = jnp.arange(4.0) / 4
            self.table = nnx.List([table]) if where == "list" else table if where == "attribute" else 0
            self.add = (lambda x: x + table) if where == "function" else None
            self.out = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            if self.add is not None:
                return self.out(self.add(x))
            return self.out(x + (self.table[0] if where == "list" else self.table))

    model = from_nnx(Network)
    params = model.init(jax.random.key(0))
    assert set(params) == {"out"}
    expected = (X + jnp.arange(4.0) / 4) @ params["out"]["kernel"] + params["out"]["bias"]
    np.testing.assert_allclose(jax.jit(model.apply)(params, X), expected, rtol=1e-5)
