"""Frozen parameters and low-rank adapters: pretrained outputs, and gradients of trainable parameters only."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, classification, simulate, tree
from fedrax.contract import Batch
from fedrax.models import CNN, MLP, Model, Variables, freeze, from_equinox, from_linen, from_nnx, from_torch, lora
from fedrax.personalization import Personalized
from fedrax.privacy import ClientDP, Flat

X = jax.random.normal(jax.random.key(0), (6, 4, 8))
Y = np.arange(6) % 3


class Attention(nn.Module):
    """Kernels [8, heads, 4] and [heads, 4, 8], dropout, and an embedding that is not a factor of a product."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        x = x + nn.Embed(4, 8)(jnp.arange(4))
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        x = nn.Dropout(self.rate, deterministic=not train)(nn.gelu(nn.Dense(16)(x)))
        return nn.Dense(3, name="head")(x.mean(1))


class Normalized(nn.Module):
    """Batch norm with running statistics."""

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(5)(x.mean(1)))
        return nn.Dense(3, name="head")(nn.relu(x))


def plain_apply(w: dict, x: Array, key: Array | None = None) -> Array:
    hidden = jnp.tanh(jnp.einsum("btc,dc->btd", x, w["in"]))  # stored as [outputs, inputs]
    return jax.jit(lambda h, v: h @ v)(hidden.mean(1), w["head"])


def plain_init(key: Array) -> dict:
    return {"in": jax.random.normal(key, (10, 8)) / 3, "head": jax.random.normal(key, (10, 3)) / 3}


class Equinox(equinox.Module):
    first: equinox.nn.Linear
    head: equinox.nn.Linear

    def __init__(self, key: Array):
        self.first, self.head = equinox.nn.Linear(8, 7, key=key), equinox.nn.Linear(7, 3, key=key)

    def __call__(self, x: Array) -> Array:
        return self.head(jnp.tanh(self.first(x.mean(0))))


class NNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.head = nnx.Linear(8, 7, rngs=rngs), nnx.Linear(7, 3, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.head(jnp.tanh(self.first(x.mean(1))))


MODELS: dict[str, Callable[[], Model]] = {
    "linen": lambda: from_linen(Attention(), X),
    "nnx": lambda: from_nnx(NNX),
    "equinox": lambda: from_equinox(Equinox),
    "zoo": lambda: MLP(hidden=(6,)).build((4, 8), 3),
    "plain": lambda: Model(plain_init, plain_apply),
    "batch norm": lambda: from_linen(Normalized(), X),
}
HEAD = {"zoo": "output/*"}


def perturbed(params: Any) -> Any:
    keys = jax.random.split(jax.random.key(7), len(jax.tree.leaves(params)))
    leaves, structure = jax.tree.flatten(params)
    moved = [a + 0.1 * jax.random.normal(key, a.shape) for a, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, moved)


def with_params(given: Any, params: Any) -> Any:
    return Variables(params, given.statistics) if isinstance(given, Variables) else params


def trained(given: Any) -> Any:
    return given.params if isinstance(given, Variables) else given


def loss_gradient(apply: Callable, given: Any) -> Any:
    return jax.grad(lambda p: (apply(with_params(given, p), X) ** 2).sum())(trained(given))


@pytest.mark.parametrize("name", MODELS)
def test_frozen_models_have_the_gradients_of_the_whole_model(name: str):
    model = MODELS[name]()
    params, head = model.init(jax.random.key(1)), HEAD.get(name, "*head*")
    tuned = freeze(model, params, head)
    start = tuned.init(jax.random.key(2))
    np.testing.assert_allclose(tuned.apply(start, X), model.apply(params, X), rtol=1e-6)
    names = tree.leaf_names(trained(start))
    assert names == [one for one in tree.leaf_names(trained(params)) if "head" in one or "output" in one]
    whole = dict(
        zip(tree.leaf_names(trained(params)), jax.tree.leaves(loss_gradient(model.apply, params)), strict=True)
    )
    for one, gradient in zip(names, jax.tree.leaves(loss_gradient(tuned.apply, start)), strict=True):
        np.testing.assert_allclose(gradient, whole[one], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_low_rank_changes_of_the_weights(name: str):
    model = MODELS[name]()
    params, head = model.init(jax.random.key(1)), HEAD.get(name, "*head*")
    tuned = lora(model, params, X, rank=2, alpha=6, trainable=() if name == "zoo" else head)
    start = tuned.init(jax.random.key(2))
    np.testing.assert_allclose(tuned.apply(start, X), model.apply(params, X), rtol=1e-5, atol=1e-6)
    given = with_params(start, perturbed(trained(start)))
    merged = tuned.merge(trained(given))
    np.testing.assert_allclose(tuned.apply(given, X), model.apply(with_params(given, merged), X), rtol=1e-4, atol=1e-5)
    expected = jax.grad(lambda p: (model.apply(with_params(given, tuned.merge(p)), X) ** 2).sum())(trained(given))
    for a, b in zip(*map(jax.tree.leaves, (loss_gradient(tuned.apply, given), expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    change = tree.sub(merged, trained(params))
    for one, difference in zip(tree.leaf_names(change), jax.tree.leaves(change), strict=True):
        if one in trained(given)["lora"]:
            flat = np.asarray(difference, float)
            shapes = [flat.reshape(flat.shape[0], -1), flat.reshape(-1, flat.shape[-1])]
            assert min(np.linalg.matrix_rank(matrix, tol=1e-5) for matrix in shapes) == 2
            pair = trained(given)["lora"][one]
            np.testing.assert_allclose(np.linalg.norm(flat), 3 * np.linalg.norm(pair["a"] @ pair["b"]), rtol=1e-5)


def test_gradients_of_frozen_matrices_are_not_computed():
    model = MLP(hidden=(64, 64)).build((32,), 3)
    tuned = lora(model, model.init(jax.random.key(0)), jnp.ones((1, 32)), rank=2, target="dense2/weight")
    start, x = tuned.init(jax.random.key(1)), jnp.ones((5, 32))
    program = str(jax.make_jaxpr(jax.grad(lambda p: tuned.apply(p, x).sum()))(start))
    assert "64,2" in program and program.count("f32[64,64]") == 1, "the matrix itself, and no other array of its shape"


def test_adapters_of_attention_kernels_have_their_shapes_as_matrices():
    model = from_linen(Attention(), X)
    start = lora(model, model.init(jax.random.key(0)), X, rank=2, target="*MultiHead*kernel").init(jax.random.key(1))
    shapes = {name.split("/")[1]: (pair["a"].shape, pair["b"].shape) for name, pair in start["lora"].items()}
    assert shapes == {
        "query": ((8, 2), (2, 8)),
        "key": ((8, 2), (2, 8)),
        "value": ((8, 2), (2, 8)),
        "out": ((8, 2), (2, 8)),
    }


def test_adapter_dropout_and_frozen_factors():
    model = MLP(hidden=(16,)).build((4, 8), 3)
    params = model.init(jax.random.key(0))
    tuned = lora(model, params, X, rank=2, trainable="output/*", dropout=0.5)
    given, keys = perturbed(tuned.init(jax.random.key(1))), jax.random.split(jax.random.key(2), 400)
    outputs = jax.vmap(lambda key: tuned.apply(given, X, key))(keys)
    assert not np.allclose(outputs[0], outputs[1])
    linear = Model(lambda key: params["dense1"]["weight"], lambda w, x, key=None: x.reshape(6, -1) @ w)
    hidden = lora(linear, params["dense1"]["weight"], X, rank=2, dropout=0.5)
    start = perturbed(hidden.init(jax.random.key(1)))
    mean = jax.vmap(lambda key: hidden.apply(start, X, key))(keys).mean(0)
    np.testing.assert_allclose(mean, hidden.apply(start, X), atol=0.15)  # unbiased, because the remainder is linear
    fixed = lora(model, params, X, rank=2, target="dense1/weight", train_a=False)
    assert tree.leaf_names(fixed.init(jax.random.key(1))) == ["lora/dense1/weight/b"]
    b = {"lora": {"dense1/weight": {"b": jnp.ones((2, 16))}}}
    other = {"lora": {"dense1/weight": {"b": jnp.arange(32.0).reshape(2, 16)}}}
    mean = tree.scale(0.5, tree.add(b, other))
    merged = tree.scale(0.5, tree.add(fixed.merge(b), fixed.merge(other)))
    for x, y in zip(*map(jax.tree.leaves, (fixed.merge(mean), merged)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_adapters_in_different_blocks_have_different_dropout():
    blocks = tuple(lambda w, x, key=None, i=i: x @ w[f"w{i}"] for i in range(2))
    w, x = jnp.ones((8, 8)), jnp.ones((3, 8))
    model = Model(lambda key: {"w0": w, "w1": w}, lambda w, x, key=None: blocks[1](w, blocks[0](w, x)), blocks=blocks)
    tuned = lora(model, {"w0": w, "w1": w}, x, rank=2, dropout=0.5)
    same = {name: {"a": jnp.ones((8, 2)), "b": jnp.ones((2, 8))} for name in ("w0", "w1")}
    assert tuned.blocks is not None
    first, second = (block({"lora": same}, x, jax.random.key(0)) for block in tuned.blocks)
    assert not np.array_equal(first, second)


def other() -> Any:
    return MODELS["linen"]().init(jax.random.key(0))


def wider(params: Any) -> Any:
    return params | {"output": {"weight": jnp.zeros((4, 16)), "bias": jnp.zeros(4)}}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, p: freeze(m, p, "haed/*"), r"no parameter has the name 'haed/\*'; the names are dense1/bias"),
        (lambda m, p: freeze(m, p, "outptu/*"), r"'outptu/\*' \(the closest one is 'output/\*'\)"),
        (lambda m, p: freeze(m, p, ()), "trainable chooses no parameter; the names are dense1/bias"),
        (lambda m, p: lora(m, p, X, trainable="dense2/*"), r"trainable: .*'dense2/\*' \(the closest .* 'dense1/\*'\)"),
        (lambda m, p: lora(m, p, X, target="*/kernel"), r"target: no parameter has the name '\*/kernel'"),
        (lambda m, p: lora(m, p, X, rank=4, target="output/weight"), "rank 4 exceeds the dimensions of output/weight"),
        (lambda m, p: lora(m, other(), X), r"params are not those of the model mlp: they have no dense1/bias"),
        (lambda m, p: freeze(m, wider(p), "output/*"), r"output/weight of shape \(4, 16\), which should be of shape"),
        (lambda m, p: freeze(m, p, "output/*").merge(p), "such as result.params, and these have dense1/bias"),
        (lambda m, p: lora(m, p, X, rank=2).merge({"lora": {}}), "these have no lora/dense1/weight/a"),
        (lambda m, p: freeze(m, p, lambda name: False), "trainable chooses no parameter; the names are"),
        (lambda m, p: lora(m, p, X, rank=40), "rank 40 exceeds the dimensions of dense1/weight, 32 x 16"),
        (lambda m, p: lora(m, p, X, rank=0), "rank must be a positive integer, not 0"),
        (lambda m, p: lora(m, p, X, dropout=1.0), "dropout must be at least 0 and less than 1"),
        (lambda m, p: lora(m, p, X, target="dense1/bias"), "dense1/bias is none: choose target among dense1/weight"),
        (
            lambda m, p: lora(m, p, X, target="*", trainable="*"),
            "output/weight: adapted by target and trained by trainable",
        ),
    ],
)
def test_invalid_arguments_are_explained(make: Callable, message: str):
    model = MLP(hidden=(16,)).build((4, 8), 3)
    with pytest.raises(FedraxError, match=message):
        make(model, model.init(jax.random.key(0)))


def federation() -> Federation:
    x = np.random.default_rng(0).normal(size=(30, 4, 8)).astype(np.float32)
    return Federation.from_arrays(x, np.arange(30) % 3, np.arange(30) % 4, test=(np.asarray(X), Y))


@pytest.mark.parametrize("plan", ["vmap", "loop", "debug"])
def test_federated_adapters_agree_on_all_plans(plan: Any):
    model = MLP(hidden=(16,)).build((4, 8), 3)
    tuned = lora(model, model.init(jax.random.key(0)), X, rank=2, trainable="output/*", dropout=0.1)
    settings: Any = dict(rounds=2, cohort_size=3, eval_every=1)
    method = FedAvg(local=LocalSGD(steps=2, batch_size=3, lr=0.1))
    expected = simulate(method, classification(tuned), federation(), plan="scan", **settings)
    found = simulate(method, classification(tuned), federation(), plan=plan, **settings)
    for a, b in zip(*map(jax.tree.leaves, (found.params, expected.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert expected.events[-1]["bytes_up"] == 2 * 3 * tree.num_bytes(tuned.init(jax.random.key(0)))


def flat(params: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def test_client_level_privacy_clips_and_perturbs_the_adapters_alone():
    """The mean of the clients' clipped gradients by the adapters, and noise of standard deviation z C / S on each."""
    model, bound, lr = MLP(hidden=(16,)).build((4, 8), 3), 0.02, 0.5
    tuned = lora(model, model.init(jax.random.key(0)), X, rank=2)
    start, task, data = perturbed(tuned.init(jax.random.key(1))), classification(tuned), federation()

    def run(noise: float) -> np.ndarray:
        inner = FedAvg(local=LocalSGD(steps=1, batch_size="full", lr=lr))
        method = ClientDP(inner=inner, clip=Flat(bound=bound), noise=noise)
        return flat(simulate(method, task, data, params=start, rounds=1, cohort_size=4).params)

    updates = []
    for client in range(4):
        rows = slice(*data.offsets[client : client + 2])
        batch = Batch(*(a[rows] for a in data.train))
        update = -lr * flat(jax.grad(lambda p, batch=batch: task.loss(p, batch, jax.random.key(0)).mean())(start))
        assert np.linalg.norm(update) > 2 * bound
        updates.append(update * bound / np.linalg.norm(update))
    exact = run(0.0)
    np.testing.assert_allclose(exact - flat(start), np.mean(updates, 0), rtol=1e-3, atol=1e-6)
    noise = run(1.5) - exact
    assert noise.size == 2 * (32 + 16) + 2 * (16 + 3) and np.count_nonzero(noise) == noise.size
    assert noise.std() == pytest.approx(1.5 * bound / 4, rel=0.2)


def test_adapters_stay_at_the_clients_and_the_head_is_shared():
    model = MLP(hidden=(16,)).build((4, 8), 3)
    tuned = lora(model, model.init(jax.random.key(0)), X, rank=2, trainable="output/*")
    method = Personalized(FedAvg(local=LocalSGD(steps=3, batch_size=4, lr=0.2)), personal_params=("lora/*",))
    result = simulate(method, classification(tuned), federation(), rounds=2, cohort_size=4)
    shared = tree.num_bytes(result.params["trainable"])
    assert result.events[-1]["bytes_up"] == 2 * 4 * shared
    first, second = (tuned.merge(result.client_model(client)) for client in (0, 1))
    assert not np.allclose(first["dense1"]["weight"], second["dense1"]["weight"])
    np.testing.assert_array_equal(first["output"]["weight"], second["output"]["weight"])
    np.testing.assert_array_equal(first["dense1"]["bias"], second["dense1"]["bias"])


def test_merged_variables_keep_their_statistics():
    model = MODELS["batch norm"]()
    tuned = lora(model, model.init(jax.random.key(0)), X, rank=2)
    data = Federation.from_arrays(np.asarray(X), Y, np.arange(6) % 2)
    result = simulate(
        FedAvg(local=LocalSGD(steps=2, batch_size=3)), classification(tuned), data, rounds=2, cohort_size=2
    )
    merged = tuned.merge(result.model)
    assert isinstance(merged, Variables) and isinstance(result.model, Variables)
    np.testing.assert_allclose(model.apply(merged, X), tuned.apply(result.model, X), rtol=1e-5, atol=1e-6)
    assert not np.allclose(jax.tree.leaves(merged.statistics)[0], jax.tree.leaves(model.init(jax.random.key(0))[1])[0])


def test_adapters_of_a_pytorch_module_come_back_in_it():
    torch = pytest.importorskip("torch")
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    model = from_torch(network, np.array(X))
    tuned = lora(model, model.init(jax.random.key(0)), X, rank=2, trainable="3/*")
    method = FedAvg(local=LocalSGD(steps=2, batch_size=4, lr=0.3))
    result = simulate(method, classification(tuned), federation(), rounds=2, cohort_size=4)
    module = model.to_torch(tuned.merge(result.params))
    found = module(torch.as_tensor(np.array(X))).detach().numpy()
    np.testing.assert_allclose(found, tuned.apply(result.params, X), rtol=1e-5, atol=1e-6)
    before = network(torch.as_tensor(np.array(X))).detach().numpy()
    assert np.abs(found - before).max() > 0.01


def test_runs_are_not_resumed_with_other_frozen_weights(tmp_path: Path):
    model = MLP(hidden=(512,)).build((4, 8), 3)  # weights of 64 kB

    def run(seed: int, rounds: int, resume: bool = False):
        tuned = freeze(model, model.init(jax.random.key(seed)), "output/*")
        start = jax.tree.map(jnp.zeros_like, tuned.init(jax.random.key(0)))
        method = FedAvg(local=LocalSGD(steps=1, batch_size=4))
        return simulate(
            method, classification(tuned), federation(), params=start, rounds=rounds, cohort_size=4,
            directory=tmp_path / "run", checkpoint_every=1, resume=resume,
        )  # fmt: skip

    run(0, 1)
    assert sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file()) < 60_000
    with pytest.raises(FedraxError, match="another experiment"):
        run(1, 2, resume=True)
    run(0, 2, resume=True)


def test_frozen_parameters_may_be_in_half_precision():
    model = CNN(channels=(4, 4), hidden=8).build((8, 8, 1), 3)
    params = model.init(jax.random.key(0))
    tuned = freeze(model, params, "output/*", frozen_dtype="bfloat16")
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 1))
    found, expected = tuned.apply(tuned.init(jax.random.key(0)), x), model.apply(params, x)
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert not np.array_equal(found, expected)


def test_predictions_of_a_result_are_compiled_once():
    model = MLP(hidden=(512, 512)).build((4, 8), 3)
    tuned = freeze(model, model.init(jax.random.key(0)), "output/*")
    method = FedAvg(local=LocalSGD(steps=1, batch_size=4))
    result = simulate(method, classification(tuned), federation(), rounds=1, cohort_size=2)
    first, compilations = result.predict(X), []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        np.testing.assert_array_equal(result.predict(X), first)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compilations
    with pytest.raises(FedraxError, match="not texts: encode"):
        result.predict(["a text"])


def test_frozen_weights_are_freed_with_their_model():
    def large() -> int:
        gc.collect()
        return sum(array.nbytes >= 1 << 20 for array in jax.live_arrays())

    def run() -> int:
        model = MLP(hidden=(512, 512)).build((4, 8), 3)
        tuned = freeze(model, model.init(jax.random.key(0)), "output/*")
        method = FedAvg(local=LocalSGD(steps=1, batch_size=4))
        for plan in ("scan", "loop"):
            simulate(method, classification(tuned), federation(), rounds=1, cohort_size=2, eval_every=1, plan=plan)
        return large()

    before = large()
    assert run() > before
    assert large() == before
