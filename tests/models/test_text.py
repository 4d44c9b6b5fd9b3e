"""Text networks against NumPy, independence of padding, the hinge loss, and experiments from files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, classification, simulate
from fedrax.contract import Batch
from fedrax.contract.task import margin
from fedrax.data import Samples
from fedrax.experiments import experiment
from fedrax.models import Linear, Model, SentencePairs, Tweets, cut_padding, from_linen
from fedrax.models.lstm import lstm
from fedrax.models.text_networks import lstm_states
from fedrax.privacy import SampleDP

WORDS = ("a", "b", "c")
KEY = jax.random.key(1)
SMALL = SentencePairs(hidden=3, classifier=4, embedding=2, activation="relu")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_states(layer, vectors):
    h, c = np.zeros((2, layer["hidden_weight"].shape[0]))
    found = []
    for x in vectors:
        gates = x @ layer["input_weight"] + layer["input_bias"] + h @ layer["hidden_weight"] + layer["hidden_bias"]
        i, f, g, o = np.split(gates, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        found.append(h)
    return np.array(found)


def test_sentence_pair_network_agrees_with_numpy() -> None:
    task = margin(SMALL.build((2, 5), 3, vocabulary=WORDS))
    params = task.init(KEY)
    x = np.array([[[2, 3, 4, 1, 0], [4, 2, 0, 0, 0]]], np.int32)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    ends = []
    for message in x[0]:
        vectors = p["embedding"][message[message > 0]]
        both = [numpy_states(p["forward"], vectors), numpy_states(p["backward"], vectors[::-1])]
        ends.append(np.concatenate([way.max(0) for way in both]))
    u, v = ends
    h = np.concatenate([u, v, abs(u - v), u * v])
    for layer in ("dense1", "dense2"):
        h = np.maximum(h @ p[layer]["weight"] + p[layer]["bias"], 0)
    want = p["output"]["weight"] @ h + p["output"]["bias"]
    assert task.outputs is not None
    scores = jax.jit(task.outputs)(params, x)
    np.testing.assert_allclose(scores[0], want, atol=1e-5)
    loss = sum(max(0, 1 - want[1] + want[j]) for j in (0, 2)) / 3
    np.testing.assert_allclose(task.loss(params, Batch(x, np.array([1], np.int32)), KEY), [loss], rtol=1e-4)
    wider = np.pad(x, ((0, 0), (0, 0), (0, 4)))
    np.testing.assert_allclose(task.outputs(params, wider), scores, atol=1e-6)
    assert np.isfinite(task.outputs(params, np.zeros_like(x))).all()  # a pair without words


def test_tweet_network_reads_the_state_at_the_last_word() -> None:
    task = classification(Tweets(hidden=3, embedding=2).build((4,), 2, vocabulary=WORDS))
    params = task.init(KEY)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = np.array([[3, 2, 0, 0]], np.int32)
    h = numpy_states(p["lstm2"], numpy_states(p["lstm1"], p["embedding"][[3, 2]]))[-1]
    assert task.outputs is not None
    outputs = jax.jit(task.outputs)(params, x)
    np.testing.assert_allclose(outputs[0], p["output"]["weight"] @ h + p["output"]["bias"], atol=1e-5)


def test_bidirectional_tweet_network_reads_the_last_states_of_both_directions() -> None:
    task = classification(Tweets(hidden=3, embedding=2, bidirectional=True).build((4,), 2, vocabulary=WORDS))
    params = task.init(KEY)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    words = p["embedding"][[3, 2]]
    first = np.c_[numpy_states(p["lstm1"], words), numpy_states(p["lstm1_backward"], words[::-1])[::-1]]
    h = np.r_[numpy_states(p["lstm2"], first)[-1], numpy_states(p["lstm2_backward"], first[::-1])[-1]]
    assert task.outputs is not None
    outputs = jax.jit(task.outputs)(params, np.array([[3, 2, 0, 0]], np.int32))
    np.testing.assert_allclose(outputs[0], p["output"]["weight"] @ h + p["output"]["bias"], atol=1e-5)
    one = Tweets(hidden=3, embedding=2).build((4,), 2, vocabulary=WORDS).init(KEY)
    np.testing.assert_array_equal(one["lstm1"]["hidden_weight"], params["lstm1"]["hidden_weight"])


def test_states_without_padding_equal_those_of_the_lstm() -> None:
    params = Tweets(hidden=3, layers=1, embedding=2).build((4,), 2, vocabulary=WORDS).init(KEY)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 2)), jnp.float32)
    found = lstm_states(params["lstm1"], x, jnp.ones((2, 4), bool))
    np.testing.assert_allclose(found[:, -1], lstm(params["lstm1"], x), atol=1e-6)


def test_word_vectors_of_a_file_are_not_trained(tmp_path: Path) -> None:
    (tmp_path / "glove.txt").write_text("a 1 0 2\nc 0 1 0\n")
    task = classification(Tweets(2, layers=1, vectors=tmp_path / "glove.txt").build((2,), 2, vocabulary=WORDS))
    params = task.init(KEY)
    assert "embedding" not in params
    assert params["lstm1"]["input_weight"].shape == (3, 8)
    assert task.outputs is not None
    known, unknown = task.outputs(params, np.array([[2, 4], [3, 3]], np.int32))
    assert not np.allclose(known, unknown)


def test_hinge_loss_agrees_with_multi_margin_loss_of_pytorch() -> None:
    scores = np.array([[0.1, 0.2, 0.4, 0.8]], np.float32)
    task = margin(Model(lambda key: {"w": jnp.ones(1)}, lambda params, x, key=None: x))
    loss = task.loss({"w": jnp.ones(1)}, Batch(scores, np.array([3], np.int32)), KEY)
    np.testing.assert_allclose(loss, [(0.3 + 0.4 + 0.6) / 4], rtol=1e-5)  # example of its documentation


def test_word_models_require_word_indices() -> None:
    with pytest.raises(FedraxError, match="vocabulary"):
        SMALL.build((2, 5), 3)
    with pytest.raises(FedraxError, match="pairs of texts"):
        SMALL.build((5,), 3, vocabulary=WORDS)
    with pytest.raises(FedraxError, match="texts"):
        Tweets().build((2, 5), 3, vocabulary=WORDS)


def test_word_model_of_an_experiment_file(tmp_path: Path) -> None:
    (tmp_path / "snli").mkdir()
    for part in ("dev", "test"):
        columns = {"sentence1": ["a b", "c"] * 4, "sentence2": ["b", "a"] * 4, "label": ["entailment", "neutral"] * 4}
        pl.DataFrame(columns).write_parquet(tmp_path / "snli" / f"{part}.parquet")
    table = {
        "data": {"name": "snli", "length": 3},
        "partition": {"name": "similarity", "clients": 2, "percent": 50.0},
        "model": {"name": "sentence_pairs", "hidden": 2, "classifier": 2, "embedding": 2},
    }
    named = experiment.from_table(table | {"model": table["model"] | {"vectors": "glove.txt"}}, "made")
    assert experiment.to_table(named)["model"]["vectors"].endswith("glove.txt")
    _, task, federation = experiment.build(experiment.from_table(table, "made"), tmp_path)
    assert task.name == "margin/sentence_pairs"
    params = task.init(KEY)
    assert params["embedding"].shape == (2 + 3, 2)
    gradient = jax.grad(lambda p: task.loss(p, Batch(*federation.train), KEY).sum())(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_numeric_models_reject_word_indices(tmp_path: Path) -> None:
    """In files and in Python; other integers are accepted."""
    data = {user: {"x": ["good day", "bad day", "day"], "y": [0, 1, 1]} for user in "ab"}
    (tmp_path / "t.json").write_text(json.dumps({"users": list(data), "user_data": data}))
    table = {"data": {"name": "leaf", "path": str(tmp_path / "t.json")}, "partition": {"name": "natural"}}
    for model in ({}, {"model": {"name": "logistic"}}, {"model": {"name": "tinynn"}}):
        with pytest.raises(FedraxError, match=r"token indices, which the model \w+ would read as amounts: .*tweets"):
            experiment.build(experiment.from_table(table | model, "made"))
    tweets = {"name": "tweets", "hidden": 2, "layers": 1, "embedding": 2}
    algorithm, _, federation = experiment.build(experiment.from_table(table | {"model": tweets}, "made"))
    linear = classification(Linear().build(federation.train.x.shape[1:], 2))
    with pytest.raises(FedraxError, match="'t' are token indices"):
        simulate(algorithm, linear, federation, rounds=1, cohort_size=2)
    train, test = (Samples(part.x.astype(np.float32), part.y) for part in (federation.train, federation.test))
    for counts in (replace(federation, vocabulary=()), replace(federation, train=train, test=test)):
        assert len(simulate(algorithm, linear, counts, rounds=1, cohort_size=2).events) == 1


@pytest.mark.parametrize("number", [-1, 5])
def test_word_indices_out_of_range_are_rejected(number: int) -> None:
    """JAX would clamp them to the last word."""
    x = np.array([[2, 3], [4, 0], [3, 2]], np.int32)
    task = classification(Tweets(hidden=2, layers=1, embedding=2).build((2,), 2, vocabulary=WORDS))
    for part in ("train", "test"):
        samples = {"train": x, "test": x} | {part: np.where(x == 0, number, x)}
        federation = Federation.from_arrays(samples["train"], [0, 1, 0], [0, 0, 1], test=(samples["test"], [0, 1, 0]))
        with pytest.raises(FedraxError, match=rf"from .*{number}.*, and the model tweets has embeddings for 0 .*to 4"):
            simulate(FedAvg(), task, federation, rounds=1, cohort_size=1)


class Reader(flax.linen.Module):
    """Attention among the tokens that are not padding, with their positions."""

    @flax.linen.compact
    def __call__(self, input_ids: Any, attention_mask: Any) -> Any:
        seen = attention_mask != 0
        at = self.param("positions", flax.linen.initializers.normal(1.0), (12, 6))[: input_ids.shape[1]]
        h = flax.linen.Embed(9, 6)(input_ids) + at
        scores = jnp.where(seen[:, None], h @ h.swapaxes(1, 2), -1e9)
        mean = jnp.where(seen[..., None], jax.nn.softmax(scores) @ h, 0).sum(1) / seen.sum(1, keepdims=True)
        return flax.linen.Dense(3)(mean)


def texts_of_many_lengths(rows: int = 48) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    mask = (np.arange(12) < rng.integers(1, 13, (rows, 1))).astype(np.int32)
    return {"input_ids": rng.integers(1, 9, (rows, 12), np.int32) * mask, "attention_mask": mask}


@pytest.mark.parametrize(
    ("method", "plan"),
    [
        (FedAvg(local=LocalSGD(lr=0.3, epochs=1, batch_size=4)), "scan"),
        (FedAvg(local=LocalSGD(lr=0.3, epochs=1, batch_size=4)), "vmap"),
        (SampleDP(FedAvg(local=LocalSGD(lr=0.3, steps=2, batch_size=4))), "scan"),
    ],
)
def test_cut_padding_changes_nothing(method: Any, plan: Any):
    x = texts_of_many_lengths()
    y = np.random.default_rng(1).integers(0, 3, len(x["input_ids"]))
    federation = Federation.from_arrays(x, y, np.arange(len(y)) % 4, test=(x, y))
    whole = from_linen(Reader(), jax.tree.map(lambda a: a[:2], x))
    runs = [
        simulate(method, classification(model), federation, rounds=2, cohort_size=3, plan=plan, progress=False)
        for model in (whole, cut_padding(whole, (3, 6)))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), runs[0].params, runs[1].params)
    assert runs[0].events[-1]["test_loss"] == pytest.approx(runs[1].events[-1]["test_loss"], rel=1e-5)


def test_clients_side_by_side_compute_one_length():
    """A branch is chosen by the longest text of all, in place of computing every branch."""
    x = texts_of_many_lengths(6)
    widths: list[int] = []

    def apply(params: Any, x: Any, key: Any = None) -> Any:
        widths.append(x["input_ids"].shape[1])
        return jnp.where(x["attention_mask"] != 0, params[x["input_ids"]], 0)

    model = cut_padding(Model(lambda key: jnp.arange(9.0), apply), (3, 6))
    params, batches = jnp.arange(9.0), jax.tree.map(lambda a: a.reshape(3, 2, 12), x)
    together = jax.vmap(model.apply, (None, 0))
    np.testing.assert_array_equal(together(params, batches).reshape(6, 12), x["input_ids"])
    assert set(widths) == {3, 6, 12}
    made = jax.make_jaxpr(together)(params, batches)
    (branches,) = (e.params["branches"] for e in made.jaxpr.eqns if e.primitive.name == "cond")
    assert len(branches) == 3
    tokens = cut_padding(Model(lambda key: params, lambda p, x, key=None: p[x].sum(1)), (3, 6))
    np.testing.assert_array_equal(tokens.apply(params, x["input_ids"]), x["input_ids"].sum(1))
    with pytest.raises(FedraxError, match="needs samples with the input 'mask'"):
        cut_padding(model, (3,), mask="mask").apply(params, x)
    with pytest.raises(FedraxError, match="lengths must be integers of 1 or more"):
        cut_padding(model, ())
