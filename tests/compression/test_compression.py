"""Quantized and sparse uploads: message sizes, values at the server, and error feedback."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import Episode, FedAvg, FedraxError, Scaffold, Upcycled, hyperparameters, tree
from fedrax.algorithms import MIFA
from fedrax.compression import EFSign, Quantized, QuantizedBroadcast, RandomK, TopK
from fedrax.compression.topk import Sparse
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.personalization import Ditto
from fedrax.simulation import Script
from tests.simulation.problems import LOCAL, MODEL_BYTES, TASK, assert_close, assert_identical, bytes_per_client, run
from tests.slow import slow_cases

FEDAVG = FedAvg(local=LOCAL)
LEAVES, NUMBERS = 2, MODEL_BYTES // 4


class Server(NamedTuple):
    """Parameters, and the sum of all uploads."""

    params: Any
    total: Any


@hyperparameters
class IntegerUploads(Algorithm):
    """Uploads integers that depend on client and round, so that all sums are exact."""

    def init(self, params: Any, num_clients: int) -> Server:
        return Server(params, tree.zeros_like(params))

    def client(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """Integers from -50 to 50."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(9), data.round), data.assignment.client)
        draw = lambda a: jax.random.randint(key, a.shape, -50, 51).astype(a.dtype)  # noqa: E731
        return ClientOutput(upload=jax.tree.map(draw, message))

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        return Server(
            server.params, jax.tree.map(lambda t, m: t + jnp.round(m * cohort.size), server.total, cohort.mean)
        ), {}


def run_and_sum(method: Algorithm, **options: Any) -> tuple[fedrax.Result, Any]:
    """(result, sum of uploads at the server) of four clients that take part in all rounds."""
    result = run(method, script=Script(cohorts=[[0, 1, 2, 3]] * 5), rounds=5, **options)
    return result, (result.server.inner if hasattr(result.server, "inner") else result.server).total


# -- quantized -----------------------------------------------------------------------------------------------------


def received(method: Quantized | RandomK, upload: Any, key: jax.Array) -> Any:
    """An upload as the server decodes it."""
    data = ClientData.alone(TASK, np.zeros((1, 4)), np.zeros(1, int), key, round=0, num_clients=1, cohort_size=1)
    output, _ = method.around_client(lambda *_: ClientOutput(upload=upload), (), (), (), data, True)
    return method.around_receive(lambda sent: sent, output.upload)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_quantization_is_unbiased(bits: int):
    """Over 4000 keys, within 4.5 standard errors; each error is at most one level."""
    rng, draws = np.random.default_rng(0), 4000
    upload = {"a": jnp.asarray(rng.normal(size=(5, 7)), jnp.float32), "b": jnp.asarray([3e-4, -1e-4, 0.0])}
    method = Quantized(bits=bits)  # type: ignore[arg-type]
    values = jax.jit(jax.vmap(lambda key: received(method, upload, key)))(jax.random.split(jax.random.key(1), draws))
    for name, true in upload.items():
        found, level = np.asarray(values[name], float), float(jnp.abs(true).max()) / (2 ** (bits - 1) - 1)
        assert np.abs(found - true).max() <= level * (1 + 1e-5)
        error = np.abs(found.mean(0) - true)
        assert (error <= 4.5 * found.std(0) / np.sqrt(draws) + 1e-3 * level).all()
    assert (np.asarray(values["b"])[:, 2] == 0).all()


@pytest.mark.parametrize(("bits", "up"), [(4, NUMBERS // 2 + 1), (8, NUMBERS), (16, 2 * NUMBERS)])
def test_bytes_of_quantized_uploads(bits: int, up: int):
    """Arrays of 12 and 3 entries: with four bits, the last half byte of the odd array counts."""
    assert bytes_per_client(Quantized(FEDAVG, bits=bits)) == (MODEL_BYTES, up + 4 * LEAVES)  # type: ignore[arg-type]


def test_quantization_of_zeros_integers_and_bfloat16():
    upload = {"zero": jnp.zeros(3), "count": jnp.int32([7]), "short": jnp.asarray([1.0, -0.5], jnp.bfloat16)}
    got = received(Quantized(bits=16), upload, jax.random.key(0))
    np.testing.assert_array_equal(got["zero"], 0)
    assert got["count"].dtype == jnp.int32 and got["count"] == 7
    assert got["short"].dtype == jnp.float32
    np.testing.assert_allclose(got["short"], [1, -0.5], atol=1e-4)


# -- TopK ----------------------------------------------------------------------------------------------------------


WRAPS = {"alone": TopK, "inside": lambda *a: Upcycled(TopK(*a), a=0.0)}
PLAN_CASES = [(plan, wrap) for wrap in WRAPS for plan in ("scan", "vmap", "loop", "debug")]
IN_MAKE_TEST = [("vmap", "alone"), ("debug", "alone"), ("scan", "inside"), ("loop", "inside")]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("plan", "wrap"), slow_cases(PLAN_CASES, IN_MAKE_TEST))
def test_uploads_and_error_feedback_sum_to_all_updates(plan: str, wrap: str):
    _, everything = run_and_sum(IntegerUploads())
    result, sent = run_and_sum(WRAPS[wrap](IntegerUploads(), 0.2), plan=plan)
    rests = [result.client_state(client).own[0] for client in range(4)]
    jax.tree.map(
        lambda all, sent, *rest: np.testing.assert_array_equal(all, sent + sum(rest)), everything, sent, *rests
    )
    assert any(np.any(leaf) for leaf in jax.tree.leaves(rests))


def test_topk_uploads_the_largest_entries():
    values = {"a": jnp.asarray([[1.0, -7.0], [3.0, 0.5]]), "b": jnp.asarray([-4.0, 2.0])}
    sent = Sparse.largest(values, 3)
    assert sorted(np.asarray(sent.indices).tolist()) == [1, 2, 4]
    expected = {"a": [[0, -7], [3, 0]], "b": [-4, 0]}
    jax.tree.map(
        np.testing.assert_array_equal,
        sent.dense(),
        jax.tree.map(jnp.asarray, expected, is_leaf=lambda x: isinstance(x, list)),
    )


@pytest.mark.slow
def test_topk_of_all_entries_is_the_inner_method():
    for method in (FEDAVG, Episode(local=LOCAL, gamma=0.1)):
        whole, sparse = run(method), run(TopK(method, fraction=1.0))
        inside = [np.asarray(leaf) for leaf in jax.tree.leaves(whole.server)]
        mine = [np.asarray(leaf) for leaf in jax.tree.leaves(sparse.server.inner)]
        for one, other in zip(inside, mine, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
        assert not any(np.any(leaf) for c in range(8) for leaf in jax.tree.leaves(sparse.client_state(c).own))


@pytest.mark.parametrize(("fraction", "k"), [(0.01, 1), (0.2, 3), (0.21, 4), (1.0, NUMBERS)])
def test_bytes_of_sparse_uploads(fraction: float, k: int):
    assert bytes_per_client(TopK(FEDAVG, fraction)) == (MODEL_BYTES, 8 * k)


def test_fraction_of_entries_is_rounded_up_exactly():
    """0.07 x 100 is 7.000000000000001 in float64."""
    shares = [(0.07, 7), (0.14, 14), (0.071, 8), (0.001, 1)]
    assert [len(TopK(fraction=share).compress([np.zeros(100)]).values) for share, _ in shares] == [k for _, k in shares]


def test_each_part_of_an_upload_has_its_own_encoding():
    """Quantized around TopK: uncompressed indices, one byte per value. FedAvg's update inside SCAFFOLD's upload is
    sparse.
    """
    assert bytes_per_client(Quantized(TopK(FEDAVG, 0.2)))[1] == 3 * (4 + 1) + 4
    assert bytes_per_client(TopK(Scaffold(local=LOCAL), 0.2))[1] == 3 * 8 + MODEL_BYTES


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (TopK(Quantized(FEDAVG)), "in the shape of the model, and the upload of Quantized has another"),
        (TopK(MIFA(local=LOCAL, memory="server")), "in the shape of the model, and the upload of MIFA has another"),
        (TopK(FEDAVG, fraction=0.0), "fraction must be greater than 0"),
        (Quantized(FEDAVG, bits=5), "bits must be one of 4, 8, 16"),  # type: ignore[arg-type]
    ],
    ids=["order", "each", "none", "bits"],
)
def test_misuse_raises_a_clear_error(method: Algorithm, message: str):
    with pytest.raises(FedraxError, match=message):
        run(method, rounds=1)


# -- RandomK and signs -----------------------------------------------------------------------------------------------


def test_randomk_is_unbiased():
    """Over 4000 keys, within 4.5 standard errors; a fifth of 37 entries, rounded up, is drawn."""
    rng, draws = np.random.default_rng(0), 4000
    upload = {"a": jnp.asarray(rng.normal(size=(5, 7)), jnp.float32), "b": jnp.asarray([3.0, -1.0]), "n": jnp.int32(7)}
    method = RandomK(fraction=0.2)
    values = jax.jit(jax.vmap(lambda key: received(method, upload, key)))(jax.random.split(jax.random.key(1), draws))
    assert (np.asarray(values["n"]) == 7).all()
    flat, true = (
        np.concatenate([np.asarray(t[n], float).reshape(k, -1) for n in "ab"], axis=1)
        for t, k in ((values, draws), (upload, 1))
    )
    assert (np.count_nonzero(flat, axis=1) == 8).all()
    np.testing.assert_allclose(np.where(flat != 0, flat * 8 / 37, true), np.broadcast_to(true, flat.shape), rtol=1e-5)
    assert (np.abs(flat.mean(0) - true[0]) <= 4.5 * flat.std(0) / np.sqrt(draws)).all()


def test_randomk_of_all_entries_is_the_inner_method():
    one, other = (run(m, rounds=1).params for m in (FEDAVG, RandomK(FEDAVG, fraction=1.0)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), one, other)


def test_randomk_rejects_uploads_without_floats():
    with pytest.raises(FedraxError, match="the upload of Quantized has none: apply quantization outside"):
        run(RandomK(Quantized(FEDAVG)), rounds=1)


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        (EFSign(FEDAVG), 2 + 4, MODEL_BYTES),  # 15 signs and a scale
        (EFSign(Scaffold(local=LOCAL)), 2 + 4 + MODEL_BYTES, 2 * MODEL_BYTES),
        (RandomK(FEDAVG, 0.2), 3 * 4 + 8, MODEL_BYTES),
        (Quantized(RandomK(FEDAVG, 0.2)), 3 + 4 + 8, MODEL_BYTES),
        (QuantizedBroadcast(FEDAVG, bits=8), MODEL_BYTES, NUMBERS + 4 * LEAVES),
        (EFSign(QuantizedBroadcast(FEDAVG)), 2 + 4, 2 * NUMBERS + 4 * LEAVES),
    ],
    ids=["signs", "signs inside SCAFFOLD", "random", "random and short", "down", "both ways"],
)
def test_bytes_are_those_of_the_packed_encoding(method: Algorithm, up: int, down: int):
    assert bytes_per_client(method) == (down, up)


# -- all ---------------------------------------------------------------------------------------------------------------

COMPRESSED = {
    "four bits of two phases": Quantized(Episode(local=LOCAL, gamma=0.1), bits=4),
    "both around SCAFFOLD": Quantized(TopK(Scaffold(local=LOCAL), 0.3)),
}


FOUR_BITS, BOTH = COMPRESSED
CASES = [(FOUR_BITS, "vmap"), (BOTH, "loop"), (FOUR_BITS, "debug"), (BOTH, "vmap")]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_plans_agree(name: str, plan: str):
    options = {"rounds": 2, "cohort_size": 2, "devices": 1}
    assert_close(run(COMPRESSED[name], plan=plan, **options), run(COMPRESSED[name], **options))


def test_a_resumed_run_keeps_the_compression_error(tmp_path):
    method = COMPRESSED["both around SCAFFOLD"]
    options = {"cohort_size": 2, "devices": 1, "eval_every": 2}
    run(method, rounds=2, directory=tmp_path, **options)
    assert_identical(run(method, directory=tmp_path, resume=True, **options), run(method, **options))


class LayerCalledDense(NamedTuple):
    """A model with a layer that has the name of a method of the encodings."""

    dense: Any


class LayerCalledParams(NamedTuple):
    """A model with a layer that has the name of a field of many broadcast messages."""

    params: Any


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("model", [LayerCalledDense, LayerCalledParams])
@pytest.mark.parametrize("method", [TopK(Scaffold(local=LOCAL)), EFSign(FEDAVG), TopK(FEDAVG), Ditto(FEDAVG)])
def test_layers_may_have_any_names(method: Algorithm, model: Any):
    """SCAFFOLD also uploads the change of its control variate, which has the structure of the model."""
    task = dataclasses.replace(
        TASK,
        init=lambda key: model(TASK.init(key)),
        loss=lambda params, batch, key: TASK.loss(params[0], batch, key),
        metrics={},
        outputs=None,
    )
    found, expected = run(method, task=task).params[0], run(method).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected)
