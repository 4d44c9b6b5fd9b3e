"""Batch norm and other running statistics of user modules change as in the modules' own calls."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax.contract.initialization import initial_parameters
from fedrax.contract.task import Batch, Task, Variables, classification
from fedrax.contract.task_checks import constant_statistic
from fedrax.errors import FedraxError
from fedrax.models import Model, from_equinox, from_linen, from_nnx
from fedrax.simulation.setup import prepare

eqx, nn, nnx = (pytest.importorskip(module) for module in ("equinox", "flax.linen", "flax.nnx"))
X = jnp.asarray(np.random.default_rng(0).normal(2, 3, size=(6, 4)), jnp.float32)
KEY = jax.random.key(3)


class Linen(nn.Module):
    def setup(self):
        self.hidden, self.norm, self.dropout, self.out = (
            nn.Dense(8),
            nn.BatchNorm(momentum=0.9),
            nn.Dropout(0.2),
            nn.Dense(3),
        )

    def encode(self, x, train: bool = False):
        x = jnp.tanh(self.norm(self.hidden(x), use_running_average=not train))
        return self.dropout(x, deterministic=not train)

    def head(self, x):
        return self.out(x)

    def __call__(self, x, train: bool = False):
        return self.head(self.encode(x, train))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout, self.out = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def encode(self, x):
        return self.dropout(jnp.tanh(self.norm(self.hidden(x))))

    def __call__(self, x):
        return self.out(self.encode(x))


class Equinox(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key, mode="batch"):
        hidden, out = jax.random.split(key)
        self.hidden, self.out = eqx.nn.Linear(4, 8, key=hidden), eqx.nn.Linear(8, 3, key=out)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", momentum=0.9, mode=mode)
        self.dropout = eqx.nn.Dropout(0.2)

    def encode(self, x, state, key=None):
        x, state = self.norm(self.hidden(x), state)
        return self.dropout(jnp.tanh(x), key=key), state

    def head(self, x):
        return self.out(x)

    def __call__(self, x, state, key=None):
        x, state = self.encode(x, state, key)
        return self.head(x), state


ADAPTED = {
    "linen": lambda: from_linen(Linen(), X, features="encode", blocks=("encode", "head")),
    "nnx": lambda: from_nnx(Nnx, features="encode", blocks=(Nnx.encode, lambda module, x: module.out(x))),
    "equinox": lambda: from_equinox(Equinox, features="encode", blocks=("encode", lambda module, x: module.head(x))),
    "equinox_ema": lambda: from_equinox(
        eqx.nn.make_with_state(Equinox)(KEY, mode="ema"), features=Equinox.encode, blocks=("encode", "head")
    ),
}


@pytest.fixture(params=ADAPTED)
def model(request) -> Model:
    return ADAPTED[request.param]()


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def train_steps(model: Model, steps: int = 3) -> Variables:
    """Variables after some training batches."""
    variables = model.init(KEY)
    for step in range(steps):
        _, statistics = model.train(variables, X + step, jax.random.key(step))
        variables = Variables(variables.params, statistics)
    return variables


@pytest.mark.slow(keep=2)
def test_training_updates_statistics_and_evaluation_uses_them(model: Model):
    start, later = model.init(KEY), train_steps(model)
    assert isinstance(start, Variables)
    assert_same(model.init(KEY), start)
    assert jax.tree.structure(start.statistics) == jax.tree.structure(later.statistics)
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), start.statistics, later.statistics)
    assert all(jax.tree.leaves(changed))
    assert not jnp.allclose(model.apply(start, X), model.apply(later, X))
    np.testing.assert_array_equal(model.apply(later, X), model.apply(later, X))


def test_samples_are_independent_in_evaluation_only(model: Model):
    variables = train_steps(model)
    np.testing.assert_allclose(model.apply(variables, X)[:2], model.apply(variables, X[:2]), rtol=1e-5, atol=1e-6)
    others = X.at[2:].multiply(3)
    assert not jnp.allclose(model.apply(variables, X, KEY)[:2], model.apply(variables, others, KEY)[:2])


@pytest.mark.slow(keep=2)
def test_results_are_the_same_under_jit_and_vmap(model: Model):
    variables = train_steps(model)
    assert_same(jax.jit(model.train)(variables, X, KEY), model.train(variables, X, KEY))
    np.testing.assert_allclose(
        jax.jit(model.apply)(variables, X, KEY), model.train(variables, X, KEY)[0], rtol=1e-5, atol=1e-6
    )
    over_clients = jax.vmap(model.train, in_axes=(None, 0, None))(variables, jnp.stack([X, 2 * X]), KEY)
    assert_same(jax.tree.map(lambda a: a[1], over_clients), model.train(variables, 2 * X, KEY))


def test_blocks_compose_to_the_model_in_both_modes(model: Model):
    variables = train_steps(model)
    for key in (None, KEY):
        x = X
        for block in model.blocks or ():
            x = block(variables, x, key)
        np.testing.assert_allclose(x, model.apply(variables, X, key), rtol=1e-5, atol=1e-6)
        features = model.features(variables, X, key) if model.features else None
        assert features is not None and features.shape == (6, 8)


def test_linen_agrees_with_the_module():
    module, model = Linen(), from_linen(Linen(), X)
    own = module.init(KEY, X)
    variables = model.init(KEY)
    assert_same(variables.params, own["params"])
    assert_same(variables.statistics, {"batch_stats": own["batch_stats"]})
    np.testing.assert_allclose(model.apply(variables, X), module.apply(own, X), rtol=1e-6)
    desired = module.apply(own, X, train=True, mutable=["batch_stats"], rngs={"dropout": KEY})
    assert_same(model.train(variables, X, KEY), desired)


def test_nnx_agrees_with_the_module():
    module = Nnx(nnx.Rngs(0))
    model = from_nnx(module)
    variables = model.init(KEY)
    module.eval()
    np.testing.assert_allclose(model.apply(variables, X), module(X), rtol=1e-6)
    outputs, statistics = model.train(variables, X, KEY)
    np.testing.assert_array_equal(module.norm.mean[...], 0)  # the user's module is not changed
    module.train()
    nnx.reseed(module, default=KEY, dropout=KEY)
    np.testing.assert_allclose(outputs, module(X), rtol=1e-5, atol=1e-6)
    assert_same(statistics, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)))


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_equinox_agrees_with_the_module(mode):
    network, state = eqx.nn.make_with_state(Equinox)(KEY, mode=mode)
    model = from_equinox(lambda key: eqx.nn.make_with_state(Equinox)(key, mode=mode))
    variables = model.init(KEY)
    over_batch = lambda network, keys, state: jax.vmap(  # noqa: E731
        network, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch"
    )(X, state, keys)
    desired, new = over_batch(network, jax.random.split(KEY, len(X)), state)
    outputs, statistics = model.train(variables, X, KEY)
    np.testing.assert_allclose(outputs, desired, rtol=1e-6)
    assert_same(jax.tree.leaves(statistics), jax.tree.leaves(dict(zip(*reversed(new.tree_flatten()), strict=True))))
    evaluated = over_batch(eqx.nn.inference_mode(network), None, new)[0]
    np.testing.assert_allclose(model.apply(Variables(variables.params, statistics), X), evaluated, rtol=1e-6)


def test_equinox_module_with_state_inside_equals_the_pair():
    inside = from_equinox(Equinox(KEY))
    pair = from_equinox(eqx.nn.make_with_state(Equinox)(KEY))
    assert_same(jax.tree.leaves(inside.init(KEY)), jax.tree.leaves(pair.init(KEY)))
    np.testing.assert_array_equal(inside.train(inside.init(KEY), X, KEY)[0], pair.train(pair.init(KEY), X, KEY)[0])


def losses_of(task: Task, variables: Variables, batch: Batch) -> dict[str, jax.Array]:
    trained, _ = task.loss_and_statistics(variables, batch, KEY)
    return {"train": trained, "evaluation": task.evaluation_loss(variables, batch)}


def test_replaced_loss_is_used_in_training(model: Model):
    task, batch = classification(model), Batch(X, jnp.array([0, 1, 2, 0, 1, 2]))
    with pytest.raises(FedraxError, match=r"loss_and_statistics, .* replace that one instead"):
        dataclasses.replace(task, loss=lambda variables, batch, key: 2 * task.loss(variables, batch, key))

    def doubled(variables, batch, key):
        losses, statistics = task.loss_and_statistics(variables, batch, key)
        return 2 * losses, statistics

    twice, variables = dataclasses.replace(task, loss_and_statistics=doubled), train_steps(model)
    np.testing.assert_allclose(twice.loss(variables, batch, KEY), 2 * task.loss(variables, batch, KEY), rtol=1e-6)


def test_tasks_train_and_evaluate_in_different_modes(model: Model):
    task, batch = classification(model), Batch(X, jnp.array([0, 1, 2, 0, 1, 2]))
    variables = train_steps(model)
    logits = {"train": model.train(variables, X, KEY)[0], "evaluation": model.apply(variables, X)}
    for mode, losses in losses_of(task, variables, batch).items():
        expected = -jax.nn.log_softmax(logits[mode])[jnp.arange(6), batch.y]
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(task.loss(variables, batch, KEY), losses_of(task, variables, batch)["train"], rtol=1e-6)
    accuracy = task.metrics["accuracy"](variables, batch)
    np.testing.assert_array_equal(accuracy, logits["evaluation"].argmax(-1) == batch.y)
    np.testing.assert_array_equal(task.outputs(variables, X), logits["evaluation"])


def test_variables_can_be_given_as_initial_parameters(model: Model):
    task = classification(model)
    assert_same(initial_parameters(task, KEY, None), task.init(KEY))
    given = train_steps(model)
    assert_same(initial_parameters(task, KEY, given), given)
    with pytest.raises(FedraxError, match="do not fit the model"):
        initial_parameters(task, KEY, given.params)


@pytest.mark.slow(keep=2)
def test_training_by_the_task_lowers_the_loss(model: Model):
    task, batch = classification(model), Batch(X, jnp.array([0, 1, 2, 0, 1, 2]))

    def objective(params, statistics, key):
        losses, statistics = task.loss_and_statistics(Variables(params, statistics), batch, key)
        return losses.mean(), statistics

    step = jax.jit(jax.value_and_grad(objective, has_aux=True))
    params, statistics = start = task.init(KEY)
    for i in range(40):
        (_, statistics), gradient = step(params, statistics, jax.random.key(i))
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)
    before, after = (task.evaluation_loss(v, batch).mean() for v in (start, Variables(params, statistics)))
    assert after < 0.5 * before


def test_integer_and_float64_statistics_keep_their_types():
    with jax.enable_x64(True):
        model = from_equinox(Equinox)
        variables = model.init(KEY)
        _, statistics = model.train(variables, X.astype("float64"), KEY)
        kinds = lambda tree: [leaf.dtype.name for leaf in jax.tree.leaves(tree)]  # noqa: E731
        assert kinds(statistics) == kinds(variables.statistics)
        assert model.apply(variables, X.astype("float64")).dtype == jnp.float64


def make_clients(*sizes: int) -> fedrax.Federation:
    """Clients with these numbers of samples."""
    x = np.random.default_rng(1).normal(size=(sum(sizes), 4)).astype(np.float32)
    return fedrax.Federation.from_arrays(x, np.arange(len(x)) % 3, np.repeat(np.arange(len(sizes)), sizes))


@pytest.mark.slow(keep=2)
def test_batches_of_a_single_sample_are_rejected_with_batch_norm(model: Model):
    """Detected for modules of all libraries before the first round."""
    task = classification(model)
    name = constant_statistic(task, model.init(KEY), Batch(X, jnp.zeros(6, int)))
    assert name is not None
    method, settings = fedrax.FedAvg(local=fedrax.LocalSGD(batch_size=1)), fedrax.Settings()
    with pytest.warns(
        fedrax.FedraxWarning, match=rf"local.batch_size is 1, .* \({re.escape(name)}\) is zero .* 2 or more"
    ):
        prepare(method, task, make_clients(3, 4), settings)


@pytest.mark.parametrize(
    ("local", "sizes", "words"),
    [
        (
            {"batch_size": 4, "microbatches": 4},
            (5, 5),
            "local.microbatches = 4 cuts batches into single samples, .* lower",
        ),
        ({"batch_size": 4, "microbatches": 3}, (5, 5), None),
        ({"batch_size": 4}, (3, 1, 2, 1), "client 1 has a single sample, as 1 more, .* leave such clients out"),
        ({"batch_size": 4}, (3, 2), None),
        ({"batch_size": 1}, (3, 2), "local.batch_size is 1"),
    ],
)
def test_batches_of_a_single_sample_are_warned_of(local: dict, sizes: tuple, words: str | None, recwarn):
    method = fedrax.FedAvg(local=fedrax.LocalSGD(**local))
    prepare(method, classification(from_nnx(Nnx)), make_clients(*sizes), fedrax.Settings())
    printed = [str(w.message) for w in recwarn if issubclass(w.category, fedrax.FedraxWarning)]
    assert (printed == []) if words is None else re.search(words, " ".join(printed))


class Counting(nnx.Module):
    """Running statistics that do not depend on samples, and batch norm of images."""

    def __init__(self, rngs):
        self.seen, self.norm = nnx.BatchStat(jnp.zeros(())), nnx.BatchNorm(1, rngs=rngs)
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        self.seen.value = self.seen.value + len(x)
        return self.out(self.norm(x.reshape(-1, 4, 1)).reshape(-1, 4))


def test_other_statistics_are_not_warned_of(recwarn):
    task = classification(from_nnx(Counting))
    assert constant_statistic(task, task.init(KEY), Batch(X, jnp.zeros(6, int))) is None


class Stubborn(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


def hand_made_pair():
    module = Equinox(KEY)
    return module, eqx.nn.State(module)


REJECTED = {
    "argument train": lambda: from_linen(Stubborn(), X),
    "unknown method of Linen 'encod'; did you mean 'encode'": lambda: from_linen(Linen(), X, features="encod"),
    "unknown method of Nnx 'heads'": lambda: from_nnx(Nnx, blocks=("encode", "heads")),
    "unknown method of Equinox 'heads'": lambda: from_equinox(Equinox, blocks=("encode", "heads")),
    "make_with_state": lambda: from_equinox(eqx.nn.make_with_state(Equinox)(KEY)[0]),
    "the pair that equinox": lambda: from_equinox(hand_made_pair()),
    "or the pair": lambda: from_equinox((Equinox(KEY), 3)),
    "over the axis 'batch', and the batch axis is 'rows'": lambda: from_equinox(Equinox, axis_name="rows"),
}


@pytest.mark.parametrize("message", REJECTED)
def test_unsupported_statistics_are_rejected(message):
    with pytest.raises(FedraxError, match=message) as caught:
        REJECTED[message]()
    assert "\n" not in str(caught.value)
