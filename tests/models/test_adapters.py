"""Adapters give the outputs and gradients of the modules they wrap."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, Federation, LocalSGD, simulate
from fedrax.contract.task import Batch, classification
from fedrax.errors import FedraxError
from fedrax.models import Variables, from_equinox, from_linen, from_nnx

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
KEY = jax.random.key(3)


def assert_same_trees(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def gradient(apply, params):
    return jax.grad(lambda p: (apply(p, X) ** 2).sum())(params)


def check_dropout(model):
    """With a key, outputs are random and reproducible, also in jit; without a key they are deterministic."""
    params = model.init(KEY)
    first, second = jax.random.split(KEY)
    noisy = model.apply(params, X, first)
    assert not jnp.allclose(noisy, model.apply(params, X, second))
    assert not jnp.allclose(noisy, model.apply(params, X))
    np.testing.assert_allclose(noisy, jax.jit(model.apply)(params, X, first), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(model.apply(params, X), model.apply(params, X))


def check_learns(model):
    task = classification(model)
    params, batch = task.init(KEY), Batch(X, jnp.array([0, 1, 2, 0, 1]))
    step = jax.jit(jax.value_and_grad(lambda p: task.loss(p, batch, KEY).mean()))
    start = step(params)[0]
    for _ in range(30):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, step(params)[1])
    assert step(params)[0] < 0.8 * start


def make_linen_module(rate=0.0):
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False):
            x = nn.Dropout(rate, deterministic=not train)(nn.tanh(nn.Dense(8)(x)))
            return nn.Dense(3)(x)

    return Network()


def test_linen_adapter():
    module = make_linen_module()
    model = from_linen(module, X)
    variables = module.init(KEY, X)
    params = model.init(KEY)
    assert_same_trees(params, variables["params"])
    np.testing.assert_allclose(model.apply(params, X), module.apply(variables, X), rtol=1e-6)
    assert_same_trees(gradient(model.apply, params), gradient(lambda v, x: module.apply(v, x), variables)["params"])
    check_dropout(from_linen(make_linen_module(0.5), X))
    check_learns(model)


@pytest.mark.parametrize("argument", ["training", "deterministic"])
def test_linen_modules_with_other_training_arguments(argument):
    nn = pytest.importorskip("flax.linen")

    class Training(nn.Module):
        @nn.compact
        def __call__(self, x, training):
            return nn.Dropout(0.5, deterministic=not training)(x)

    class Deterministic(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic):
            return nn.Dropout(0.5)(x, deterministic=deterministic)

    check_dropout(from_linen({"training": Training, "deterministic": Deterministic}[argument](), X))


def nnx_network(rate=0.0):
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(4, 8, rngs=rngs)
            self.dropout = nnx.Dropout(rate, rngs=rngs)
            self.out = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(self.dropout(nnx.tanh(self.hidden(x))))

    return nnx, Network


def test_linen_modules_that_index_with_the_input():
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x[:, jnp.argsort(nn.Dense(4)(x).sum(0))])

    model = from_linen(Network(), np.asarray(X))
    assert model.apply(model.init(KEY), X).shape == (5, 2)


def test_nnx_adapter():
    nnx, network = nnx_network()
    module = network(nnx.Rngs(0))
    model = from_nnx(module)
    params = model.init(KEY)
    np.testing.assert_array_equal(params["hidden"]["kernel"], module.hidden.kernel[...])
    np.testing.assert_allclose(model.apply(params, X), module(X), rtol=1e-6)
    desired = nnx.grad(lambda m: (m(X) ** 2).sum())(module)
    assert_same_trees(gradient(model.apply, params), nnx.to_pure_dict(desired))
    _, noisy = nnx_network(0.5)
    check_dropout(from_nnx(noisy))
    check_learns(model)


def test_constructors_of_nnx_modules_are_traced_if_possible():
    """Otherwise each parameter would be drawn by its own compiled program."""
    _, network = nnx_network(0.5)
    seen = []

    def create(rngs):
        seen.append(rngs.params.key.get_value())
        return network(rngs)

    def looks(rngs):
        made = create(rngs)
        assert float(jnp.abs(made.hidden.kernel.get_value()).sum()) > 0
        return made

    model, eager = from_nnx(create), from_nnx(looks)
    assert [isinstance(key, jax.core.Tracer) for key in seen] == [True, True, False]
    params = model.init(KEY)
    assert_same_trees(eager.init(KEY), params)
    assert_same_trees(eager.apply(params, X, KEY), model.apply(params, X, KEY))
    check_dropout(model)


@pytest.mark.parametrize("needed", [False, True])
def test_nnx_modules_that_take_rngs_at_each_call(needed):
    """For example Flax's MNIST tutorial, in which dropout has no streams of its own."""
    nnx = pytest.importorskip("flax.nnx")

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.dropout = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5)

    class Asks(Network):
        def __call__(self, x, rngs: nnx.Rngs | None = None):
            return self.dropout(x, rngs=rngs)

    class Needs(Network):
        def __call__(self, x, rngs):
            return self.dropout(x, rngs=rngs)

    model = from_nnx(Needs if needed else Asks)
    check_dropout(model)


def test_equinox_module_with_channels_first_warns_of_the_layout():
    eqx = pytest.importorskip("equinox")
    model = from_equinox(lambda key: eqx.nn.Conv2d(1, 2, 3, key=key))
    with pytest.raises(ValueError, match="feature") as raised:
        model.apply(model.init(KEY), jnp.zeros((5, 8, 8, 1)))
    (note,) = [note for note in raised.value.__notes__ if note.startswith("fedrax: ")]
    assert "[height, width, channels] = [8, 8, 1]" in note and "jnp.moveaxis(x, -1, 0)" in note


def test_applying_parameters_does_not_change_an_nnx_module():
    nnx, network = nnx_network()
    module = network(nnx.Rngs(0))
    before = module(X)
    model = from_nnx(module)
    params = model.init(KEY)
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert not model.apply(zeros, X).any()
    np.testing.assert_array_equal(module(X), before)
    np.testing.assert_allclose(model.apply(params, X), before, rtol=1e-6)


def equinox_network(rate=0.0):
    eqx = pytest.importorskip("equinox")

    class Network(eqx.Module):
        hidden: eqx.nn.Linear
        dropout: eqx.nn.Dropout
        out: eqx.nn.Linear

        def __init__(self, key):
            hidden_key, out_key = jax.random.split(key)
            self.hidden = eqx.nn.Linear(4, 8, key=hidden_key)
            self.dropout = eqx.nn.Dropout(rate)
            self.out = eqx.nn.Linear(8, 3, key=out_key)

        def __call__(self, x, key=None):
            return self.out(self.dropout(jnp.tanh(self.hidden(x)), key=key))

    return eqx, Network


def test_equinox_adapter():
    eqx, network = equinox_network()
    module = network(KEY)
    model = from_equinox(module)
    params = model.init(jax.random.key(0))
    np.testing.assert_allclose(model.apply(params, X), jax.vmap(module)(X), rtol=1e-6)
    desired = eqx.filter_grad(lambda m: (jax.vmap(m)(X) ** 2).sum())(module)
    assert_same_trees(gradient(model.apply, params), eqx.filter(desired, eqx.is_inexact_array))
    check_dropout(from_equinox(equinox_network(0.5)[1]))
    check_learns(model)


def test_equinox_samples_have_different_dropout_masks():
    _, network = equinox_network(0.5)
    model = from_equinox(network)
    same = jnp.tile(X[:1], (5, 1))
    outputs = model.apply(model.init(KEY), same, KEY)
    assert len(np.unique(np.asarray(outputs), axis=0)) > 1


@pytest.mark.parametrize(("network", "adapt"), [(nnx_network, from_nnx), (equinox_network, from_equinox)])
def test_functions_draw_new_parameters_for_each_key_and_modules_do_not(network, adapt):
    library, create = network()
    first, second = (adapt(create).init(jax.random.key(seed)) for seed in (0, 1))
    different = jax.tree.map(lambda a, b: bool((a != b).any()), first, second)
    assert any(jax.tree.leaves(different))
    module = create(library.Rngs(0)) if adapt is from_nnx else create(KEY)
    assert_same_trees(*(adapt(module).init(jax.random.key(seed)) for seed in (0, 1)))


def test_modules_without_statistics_have_plain_parameters():
    nnx, eqx = (pytest.importorskip(m) for m in ("flax.nnx", "equinox"))
    models = [
        from_linen(make_linen_module(), X),
        from_nnx(nnx.Linear(4, 3, rngs=nnx.Rngs(0))),
        from_equinox(equinox_network()[1]),
    ]
    for model in [*models, from_equinox(eqx.nn.Linear(4, 3, key=KEY))]:
        assert model.train is None and not isinstance(model.init(KEY), Variables)
        assert model.features is None and model.blocks is None


def test_features_and_blocks_are_methods_or_functions_of_the_module():
    _, network = nnx_network(0.5)
    nnx_model = from_nnx(
        network,
        features=lambda m, x: m.dropout(jnp.tanh(m.hidden(x))),
        blocks=(lambda m, x: m.dropout(jnp.tanh(m.hidden(x))), lambda m, x: m.out(x)),
    )
    _, network = equinox_network(0.5)
    eqx_model = from_equinox(
        network,
        features=lambda m, x, key=None: m.dropout(jnp.tanh(m.hidden(x)), key=key),
        blocks=(lambda m, x, key=None: m.dropout(jnp.tanh(m.hidden(x)), key=key), lambda m, x: m.out(x)),
    )
    for model in (nnx_model, eqx_model):
        params = model.init(KEY)
        assert model.blocks is not None and model.features is not None
        for key in (None, KEY):
            features = model.features(params, X, key)
            np.testing.assert_array_equal(model.blocks[0](params, X, key), features)
            np.testing.assert_allclose(model.blocks[1](params, features, key), model.apply(params, X, key), rtol=1e-6)


@pytest.mark.parametrize(
    ("hidden", "adapt", "package"),
    [
        ("flax.linen", lambda: from_linen(object(), X), "flax"),
        ("flax.nnx", lambda: from_nnx(object()), "flax"),
        ("equinox", lambda: from_equinox(object()), "equinox"),
    ],
)
def test_missing_package_is_named(monkeypatch, hidden, adapt, package):
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(FedraxError, match=rf"needs {package}"):
        adapt()


def test_random_streams_with_any_name_depend_on_the_key():
    """In NNX also streams of modules that are created for each layer of a scan."""
    nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return x + jax.random.normal(self.make_rng("latent"), x.shape) if train else x

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.streams = nnx.Rngs(latent=0)

        def __call__(self, x, deterministic):
            return x if deterministic else x + jax.random.normal(self.streams.latent(), x.shape)

    class Layers(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=2)(make)(rngs)

        def __call__(self, x):
            scanned = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return scanned(self.layers, x)

    for model in (from_linen(Linen(), X), from_nnx(Nnx), from_nnx(Layers)):
        check_dropout(model)


def test_errors_of_flax_are_explained():
    nn = pytest.importorskip("flax.linen")

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(3)(x))

    noisy, dense = from_linen(Noisy(), X), from_linen(nn.Dense(3), X)
    params = noisy.init(KEY)
    assert not jnp.allclose(noisy.apply(params, X, KEY), noisy.apply(params, X, jax.random.key(4)))
    with pytest.raises(FedraxError, match=r"Noisy draws random numbers in evaluation too .*an argument train"):
        noisy.apply(params, X)
    with pytest.raises(FedraxError, match=r"Dense cannot be computed: .*\(2, 3\).*\(4, 3\)$"):
        dense.apply(dense.init(KEY), X[:, :2])
    with pytest.raises(FedraxError, match=r"Sequential cannot be initialized with a batch .*\[5, 4\]: .*running_av"):
        from_linen(nn.Sequential([nn.BatchNorm()]), X)


def test_equinox_modules_that_require_a_key_get_one_in_evaluation():
    _, network = equinox_network(0.5)

    class Needs(network):
        def __call__(self, x, *, key):
            return self.out(self.dropout(jnp.tanh(self.hidden(x)), key=jax.random.split(key)[0]))

    check_dropout(from_equinox(Needs))


def test_equinox_modules_with_local_functions_can_be_initialized_repeatedly():
    """Two such modules have different tree structures."""
    eqx = pytest.importorskip("equinox")

    class Network(eqx.Module):
        out: eqx.nn.Linear
        activation: object = eqx.field(static=True)

        def __init__(self, key):
            self.out, self.activation = eqx.nn.Linear(4, 3, key=key), lambda x: jnp.tanh(x)

        def __call__(self, x):
            return self.activation(self.out(x))

    model = from_equinox(Network)
    first, second = (model.init(jax.random.key(seed)) for seed in (0, 1))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    np.testing.assert_allclose(model.apply(second, X), jax.vmap(Network(jax.random.key(1)))(X), rtol=1e-6)


@pytest.mark.parametrize("normed", [True, False])
def test_sown_intermediates_of_linen_modules_are_ignored(normed):
    nn = pytest.importorskip("flax.linen")

    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            if normed:
                x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
            hidden = nn.relu(nn.Dense(4)(x))
            self.sow("losses", "activity", (hidden**2).mean())
            self.sow("intermediates", "hidden", hidden)
            return nn.Dense(3)(hidden)

    module, model = Sowing(), from_linen(Sowing(), X)
    variables, whole = model.init(KEY), module.init({"params": KEY}, X)
    outputs, moved = module.apply(whole, X, train=True, mutable=["batch_stats", "losses"])
    if normed:
        assert_same_trees(variables.params, whole["params"])
        assert list(variables.statistics) == ["batch_stats"]
        assert_same_trees(model.train(variables, X, KEY), (outputs, {"batch_stats": moved["batch_stats"]}))
    else:
        assert_same_trees(variables, whole["params"])
        assert model.train is None
        assert_same_trees(model.apply(variables, X, KEY), outputs)
    y = np.array([0, 1, 2, 0, 1])
    federation = Federation.from_arrays(np.asarray(X), y, np.arange(5) % 2, num_classes=3)
    found = simulate(FedAvg(local=LocalSGD(lr=0.1)), classification(model), federation, rounds=2, cohort_size=2)
    assert np.isfinite(found.metric("train_loss")[-1][1])
