"""Samples with several inputs: runs are those of the same numbers packed into one array."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fedrax
from fedrax import FedAvg, Federation, FedraxError, LocalSGD, classification, simulate
from fedrax.contract import Model, rescale
from fedrax.data import Dataset, DirichletClients, as_samples, hold_out, load
from fedrax.flower import LocalGrid, client_app, federate
from fedrax.flower.deployment import _facts, _placeholder
from fedrax.models import MLP, freeze, from_equinox, from_linen, from_nnx, lora
from fedrax.participation import PowerOfChoice
from fedrax.personalization import Ditto
from fedrax.privacy import ClientDP, Flat, SampleDP
from fedrax.simulation import client_metrics
from fedrax.simulation.persistence.run_identity import of_data

CLASSES, WORDS, ROWS, CLIENTS = 3, 7, 60, 5


def network(params: Any, row: Any, tokens: Any, mask: Any) -> Any:
    """Logits of a row of numbers and the mean embedding of the tokens that are not masked."""
    weight = mask.astype(row.dtype)[..., None]
    bag = (params["words"][tokens] * weight).sum(1) / jnp.maximum(weight.sum(1), 1)
    return jnp.concatenate([row, bag], 1) @ params["out"]


def init(key: Any) -> Any:
    words, out = jax.random.split(key)
    return {"words": jax.random.normal(words, (WORDS, 2)), "out": jax.random.normal(out, (6, CLASSES))}


def pack(x: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([x["row"], x["tokens"], x["mask"]], axis=1, dtype=np.float32)


def in_order(x: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    return x["row"], x["tokens"], x["mask"]


NAMED = Model(init, lambda params, x, key=None: network(params, **x))
ORDERED = Model(init, lambda params, x, key=None: network(params, *x))
PACKED = Model(init, lambda params, x, key=None: network(params, x[:, :4], x[:, 4:9].astype(jnp.int32), x[:, 9:] > 0))
RNG = np.random.default_rng(0)
X = {
    "tokens": RNG.integers(0, WORDS, (ROWS, 5), np.int8),
    "mask": RNG.random((ROWS, 5)) < 0.6,
    "row": RNG.normal(size=(ROWS, 4)).astype(np.float32),
}
Y = RNG.integers(0, CLASSES, ROWS)
OWNER = np.sort(np.concatenate([np.arange(CLIENTS), RNG.integers(0, CLIENTS, ROWS - CLIENTS)]))
LOCAL = LocalSGD(lr=0.2, epochs=1, batch_size=4)
TASK, TASK_PACKED = classification(NAMED), classification(PACKED)


def federation(form: Callable[[Any], Any] = lambda x: x, **options: Any) -> Federation:
    made = form(X)
    test = {"test": (made, Y), "test_client_ids": OWNER}
    return Federation.from_arrays(made, Y, OWNER, num_classes=CLASSES, **(test | options))


DATA, DATA_PACKED = federation(), federation(pack)


def assert_same(one: Any, other: Any) -> None:
    """The same parameters and events."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), one.params, other.params)
    for mine, theirs in zip(one.events, other.events, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"seconds", "seconds_round", "seconds_compile"}:
            if isinstance(mine[name], float):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param(FedAvg(local=LOCAL), {"plan": "vmap", "devices": 2, "per_client": True}, id="vmap"),
        pytest.param(FedAvg(local=LOCAL), {"plan": "scan", "devices": 1, "eval_train": True}, id="scan"),
        pytest.param(FedAvg(local=LOCAL), {"plan": "loop"}, id="loop"),
        pytest.param(FedAvg(local=LOCAL), {"plan": "debug"}, id="debug"),
        pytest.param(FedAvg(local=LOCAL), {"samples": "streamed", "eval_train": True}, id="streamed"),
        pytest.param(FedAvg(local=LocalSGD(lr=0.2, batch_size=4, microbatches=2)), {"plan": "scan"}, id="microbatches"),
        pytest.param(FedAvg(local=LOCAL), {"participation": PowerOfChoice(candidates=4)}, id="asked"),
        pytest.param(FedAvg(local=LOCAL), {"finetune": 1}, id="finetuned"),
        pytest.param(Ditto(FedAvg(local=LOCAL)), {"per_client": True}, id="personal"),
        pytest.param(SampleDP(FedAvg(local=LocalSGD(lr=0.2, steps=2, batch_size=4))), {}, id="sample-level"),
        pytest.param(ClientDP(FedAvg(local=LOCAL), clip=Flat(0.5), noise=0.1), {}, id="client-level"),
    ],
)
def test_runs_are_those_of_one_array(method: Any, options: dict[str, Any]):
    settings: dict[str, Any] = {"rounds": 2, "cohort_size": 3, "progress": False} | options
    assert_same(
        simulate(method, TASK, DATA, **settings),
        simulate(method, TASK_PACKED, DATA_PACKED, **settings),
    )


def test_a_tuple_and_a_sweep_and_predictions_are_those_of_one_array(tmp_path: Path):
    settings: dict[str, Any] = {"rounds": 2, "cohort_size": 3, "progress": False}
    expected = simulate(FedAvg(local=LOCAL), TASK_PACKED, DATA_PACKED, **settings)
    ordered = simulate(FedAvg(local=LOCAL), classification(ORDERED), federation(in_order), **settings)
    assert_same(ordered, expected)
    np.testing.assert_allclose(ordered.predict(in_order(X)), expected.predict(pack(X)), rtol=1e-5, atol=1e-6)
    methods = [FedAvg(local=LocalSGD(lr=lr, epochs=1, batch_size=4)) for lr in (0.2, 0.1)]
    swept = fedrax.sweep(methods, TASK, DATA, (0,), mode="vectorized", **settings)
    np.testing.assert_allclose(swept[0][0].params["out"], expected.params["out"], rtol=1e-5, atol=1e-6)
    found = client_metrics(swept[0][0], TASK, DATA)["loss"].to_numpy()
    wanted = client_metrics(expected, TASK_PACKED, DATA_PACKED)["loss"].to_numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_federation_on_flower_is_the_simulation():
    simulated = simulate(FedAvg(local=LOCAL), TASK, DATA, rounds=2, cohort_size=CLIENTS, plan="scan", devices=1)
    for form, model in ((lambda x: x, NAMED), (in_order, ORDERED)):
        data, task = federation(form), classification(model)
        grid = LocalGrid(client_app(FedAvg(local=LOCAL), task, data, seed=0), CLIENTS)
        settings: dict[str, Any] = {"rounds": 2, "cohort_size": CLIENTS, "seed": 0, "wait": 30.0}
        result = federate(grid, FedAvg(local=LOCAL), task, clients=CLIENTS, test=(form(X), Y), **settings)
        np.testing.assert_allclose(result.params["out"], simulated.params["out"], rtol=1e-4, atol=1e-5)
        with pytest.raises(FedraxError, match=r"test has samples \(x, y\).*clients' are \(x\["):
            federate(grid, FedAvg(local=LOCAL), task, clients=CLIENTS, test=(pack(X), Y), **settings)
        known = _placeholder(_facts(data))
        assert jax.tree.map(lambda a: (a.shape[1:], a.dtype), known.train) == jax.tree.map(
            lambda a: (a.shape[1:], a.dtype), data.train
        )


def test_a_client_may_give_a_tuple_of_inputs():
    def own(context: Any) -> Any:
        mine = int(context.node_config["partition-id"]) == OWNER
        return tuple(a[mine] for a in in_order(X)), Y[mine]

    task = classification(ORDERED)
    grid = LocalGrid(client_app(FedAvg(local=LOCAL), task, own, seed=0), CLIENTS)
    result = federate(grid, FedAvg(local=LOCAL), task, clients=CLIENTS, rounds=1, cohort_size=2, seed=0, wait=30.0)
    assert np.isfinite(result.params["out"]).all()


def test_a_partition_moves_the_inputs_of_a_sample_together(tmp_path: Path):
    numbered = X | {"row": np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], 4, 1)}
    samples = as_samples(numbered, Y)
    assert {name: a.dtype.name for name, a in samples.x.items()} == {
        "mask": "bool", "row": "float32", "tokens": "int8",
    }  # fmt: skip
    data = Dataset("mixed", samples, samples, CLASSES)
    assert "x['mask'] bool [5], x['row'] float32 [4], x['tokens'] int8 [5], y int32 []" in repr(data)
    made = Federation.from_dataset(data, DirichletClients(clients=4, alpha=1.0), seed=0)
    for part in (made.train, made.test, hold_out(made, 0.3).train, hold_out(made, 0.3).test):
        order = part.x["row"][:, 0].astype(int)
        np.testing.assert_array_equal(part.x["tokens"], X["tokens"][order])
        np.testing.assert_array_equal(part.x["mask"], X["mask"][order])
        np.testing.assert_array_equal(part.y, Y[order])
    assert all(a.ctypes.data % 64 == 0 for a in made.train.arrays)


@pytest.mark.parametrize("form", [dict, in_order])
def test_an_npz_file_has_an_array_for_each_input(tmp_path: Path, form: Any):
    inputs = form(X)
    keys = inputs if isinstance(inputs, dict) else dict(enumerate(inputs))
    arrays = {f"x_{key}_{part}": a for key, a in keys.items() for part in ("train", "test")}
    arrays |= {"y_train": Y, "y_test": Y, "client_train": OWNER}
    np.savez(tmp_path / "data.npz", **arrays)
    data = load("npz", path=tmp_path / "data.npz")
    assert jax.tree.structure(data.train.x) == jax.tree.structure(inputs)
    jax.tree.map(np.testing.assert_array_equal, data.test.x, inputs)
    del arrays[f"x_{next(iter(keys))}_test"]
    np.savez(tmp_path / "less.npz", **arrays)
    with pytest.raises(FedraxError, match="has no array 'x_"):
        load("npz", path=tmp_path / "less.npz")


def test_bytes_of_images_are_scaled_and_other_inputs_are_as_stored():
    images = RNG.integers(0, 256, (4, 2, 2, 1), np.uint8)
    x = {"image": images, "tokens": np.full((4, 3), 200, np.uint8)}
    data = Federation.from_arrays(x, [0, 1, 0, 1], [0, 0, 1, 1], pixels="image", mean=(0.5,), std=(0.25,))
    preprocess = data.preprocess()
    assert preprocess is not None
    read = preprocess(jax.tree.map(jnp.asarray, x))
    np.testing.assert_array_equal(read["image"], rescale(0.5, 0.25)(jnp.asarray(images)))
    np.testing.assert_array_equal(read["tokens"], x["tokens"], strict=True)
    scaled = rescale(of="1")((jnp.zeros(2), jnp.asarray(images)))[1]
    np.testing.assert_array_equal(scaled, rescale()(jnp.asarray(images)))
    with pytest.raises(FedraxError, match="`scale` needs the name of the images among the inputs, of='image' or"):
        rescale()(x)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"row": np.where(np.arange(ROWS)[:, None] == 7, np.nan, X["row"])},
            r"x\['row'\] is not finite in 1 of",
        ),
        ({"tokens": X["tokens"][:-1]}, r"x\['tokens'\] of shape \(59, 5\) and y of shape \(60,\) are not n samples"),
        ({"mask": X["mask"].astype(str)}, r"not x\['mask'\] of dtype <U5"),
        ({"a b": X["mask"]}, "names that are Python identifiers, not 'a b'"),
        ({"row": {"deep": X["row"]}}, r"x\['row'\] must be an array \[n, ...\], not a dictionary"),
        ({"tokens": X["tokens"].astype(np.int64) + (1 << 40)}, r"x\['tokens'\] holds integers"),
    ],
)
def test_errors_name_the_input(changes: dict[str, Any], says: str):
    with pytest.raises(FedraxError, match=says):
        Federation.from_arrays(X | changes, Y, OWNER)


def test_misuse_is_one_clear_sentence():
    with pytest.raises(FedraxError, match=r"the same inputs, not x\['mask'\], .* and x\['mask'\]"):
        Federation.from_arrays(X, Y, OWNER, test=({"mask": X["mask"]}, Y))
    with pytest.raises(FedraxError, match="pixels must be 'mask' or 'row' or 'tokens', the input that holds images"):
        Federation.from_arrays(X, Y, OWNER, pixels=True)
    with pytest.raises(FedraxError, match="MLP takes samples of one array, and these have several inputs"):
        MLP().build({"row": (4,)}, 3)  # type: ignore[arg-type]
    wrong = Model(init, lambda params, x, key=None: network(params, x["row"], x["words"], x["mask"]))
    with pytest.raises((FedraxError, KeyError), match="words"):
        simulate(FedAvg(), classification(wrong), DATA, rounds=1, cohort_size=2)


def test_the_identity_of_the_data_has_every_input_and_its_name():
    digest = of_data(DATA)["data"]
    assert of_data(federation())["data"] == digest
    flipped = X["mask"].copy()
    flipped[0, 0] ^= True
    renamed = {"other" if name == "mask" else name: a for name, a in X.items()}
    for changed in (X | {"mask": flipped}, renamed):
        assert of_data(federation(lambda x, changed=changed: changed))["data"] != digest


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, tokens: Any, row: Any, mask: Any, train: bool = False) -> Any:
        words = flax.linen.Embed(WORDS, 2)(tokens) * mask[..., None]
        out = jnp.concatenate([row, words.sum(1)], 1)
        return flax.linen.Dense(CLASSES)(flax.linen.BatchNorm(use_running_average=not train)(out))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.words, self.out = nnx.Embed(WORDS, 2, rngs=rngs), nnx.Linear(6, CLASSES, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens: Any, row: Any, mask: Any) -> Any:
        return self.out(self.features(tokens, row, mask))

    def features(self, tokens: Any, row: Any, mask: Any) -> Any:
        return self.drop(jnp.concatenate([row, (self.words(tokens) * mask[..., None]).sum(1)], 1))


def of_equinox() -> Model:
    equinox = pytest.importorskip("equinox")

    class Network(equinox.Module):
        words: Any
        out: Any

        def __init__(self, key: Any):
            self.words = jax.random.normal(key, (WORDS, 2))
            self.out = equinox.nn.Linear(6, CLASSES, key=key)

        def __call__(self, tokens: Any, row: Any, mask: Any, key: Any = None) -> Any:
            return self.out(jnp.concatenate([row, (self.words[tokens] * mask[:, None]).sum(0)]))

    return from_equinox(lambda key: Network(key))


MODULES = {
    "linen": lambda: from_linen(Linen(), jax.tree.map(lambda a: a[:2], X)),
    "nnx": lambda: from_nnx(lambda rngs: Nnx(rngs), features="features"),
    "equinox": of_equinox,
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_take_a_dictionary_by_name_and_a_tuple_in_order(name: str):
    model = MODULES[name]()
    variables = model.init(jax.random.key(0))
    ordered = X["tokens"], X["row"], X["mask"]
    named = model.apply(variables, X)
    np.testing.assert_array_equal(named, model.apply(variables, ordered))
    changed = model.apply(variables, X | {"mask": ~X["mask"]})
    assert not np.allclose(named, changed)
    if model.features is not None:
        assert model.features(variables, X).shape == (ROWS, 6)
    result = simulate(FedAvg(local=LOCAL), classification(model), DATA, rounds=1, cohort_size=2, progress=False)
    assert np.isfinite(result.predict(X)).all()


def test_frozen_and_low_rank_models_take_several_inputs():
    params = NAMED.init(jax.random.key(0))
    tuned = lora(NAMED, params, X, rank=2, target="out")
    head = freeze(NAMED, params, "out")
    for model in (tuned, head):
        np.testing.assert_allclose(
            model.apply(model.init(jax.random.key(1)), X), NAMED.apply(params, X), rtol=1e-5, atol=1e-6
        )
    with pytest.raises(FedraxError, match=r"example of shape \(2, 5\) and \(2, 4\) and \(2, 3\)"):
        lora(NAMED, params, jax.tree.map(lambda a: a[:2], X | {"tokens": X["tokens"][:, :3]}), rank=2)
