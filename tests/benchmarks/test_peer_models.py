"""Flax models of the comparison: equal to PyTorch's if installed, and to its formulas; counts of multiply-adds."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.extend import core

from benchmarks.fedrax_problems import model_of, parameters_of
from benchmarks.make_arrays import make_arrays
from benchmarks.runners.jax_models import cross_entropy
from benchmarks.runners.linen_models import HEADS, MODULES, parameters, sample_input
from benchmarks.starting_weights import starting_weights, uniform
from benchmarks.workloads import SMALL_WORKLOADS, WORKLOADS

RECURRENT = ("W7", "G4-small")
SHAPES = {"W1": (784,), "W2": (60,), "W3": (32, 32, 3), "W4": (25, 50)}


def random_weights(name):
    """Random initial weights without constant arrays, so that exchanged arrays are detected."""
    rng = np.random.default_rng(3)
    return {
        key: (value + 0.1 * WORKLOADS[name].is_trained(key) * rng.standard_normal(value.shape)).astype(np.float32)
        for key, value in starting_weights(WORKLOADS[name], rng).items()
    }


def random_batch(name, size=3) -> Any:
    rng, sample = np.random.default_rng(4), sample_input(WORKLOADS[name])
    shape = (size, *sample.shape[1:])
    return (
        rng.integers(0, 90, shape).astype(np.int32)
        if sample.dtype == np.int32
        else rng.standard_normal(shape, np.float32)
    )


@pytest.mark.slow(keep=9)
@pytest.mark.parametrize("name", [*MODULES, *SMALL_WORKLOADS])
def test_outputs_and_gradients_agree_with_pytorch(name):
    """In float64, because gradients of ReLU near zero depend on float32 rounding. Recurrent cells, which have no ReLU,
    run in float32, the only dtype of Flax's carry.
    """
    torch = pytest.importorskip("torch")
    from benchmarks.runners import torch_models

    workload, x, y = WORKLOADS[name], random_batch(name, 2), np.array([0, 3])
    dtype, tolerance = (np.float32, 2e-5) if name in RECURRENT else (np.float64, 1e-6)
    x = x if x.dtype == np.int32 else x.astype(dtype)
    y = np.broadcast_to(y[:, None], x.shape) if workload.network == "CausalTransformer" else y
    weights = {key: value.astype(dtype) for key, value in random_weights(name).items()}
    with jax.enable_x64(name not in RECURRENT):
        apply, params = model_of(workload).apply, parameters_of(workload, weights)

        def loss(params):
            outputs = apply(params, x)
            return cross_entropy(outputs, jnp.asarray(y)), outputs

        gradients, found = jax.jit(jax.grad(loss, has_aux=True))(params)
        expected = torch_models.build(workload).to(torch.from_numpy(np.zeros(1, dtype)).dtype).eval()
        torch_models.load(expected, weights)
        outputs = expected(torch.from_numpy(x if x.ndim < 4 else x.transpose(0, 3, 1, 2).copy()))
        torch_models.cross_entropy(outputs, torch.from_numpy(y.copy())).backward()
        trained = {key: value for key, value in expected.named_parameters() if value.requires_grad}
        assert set(trained) == set(filter(workload.is_trained, weights))
        converted = parameters({key: value.grad.numpy() for key, value in trained.items()})
        assert found.dtype == dtype
        np.testing.assert_allclose(found, outputs.detach().numpy(), atol=tolerance)

        for path, desired in jax.tree.leaves_with_path(converted):  # frozen weights have none
            actual = gradients
            for key in path:
                actual = actual[key.key]
            np.testing.assert_allclose(actual, desired, atol=tolerance)


def test_gru_agrees_with_the_formula_of_pytorch():
    """h' = (1 - z) n + z h with r, z and n in this order in the weights, and r multiplying the hidden part of n."""
    weights, x = random_weights("W7"), random_batch("W7")
    inputs, hidden = weights["embedding.weight"][x], np.zeros((3, 128), np.float32)

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    for step in range(x.shape[1]):
        ri, zi, ni = np.split(inputs[:, step] @ weights["gru.weight_ih"].T + weights["gru.bias_ih"], 3, axis=1)
        rh, zh, nh = np.split(hidden @ weights["gru.weight_hh"].T, 3, axis=1)
        r, z = sigmoid(ri + rh), sigmoid(zi + zh)
        n = np.tanh(ni + r * (nh + weights["gru.bias_hn"]))
        hidden = (1 - z) * n + z * hidden
    expected = hidden @ weights["fc.weight"].T + weights["fc.bias"]
    ours = model_of(WORKLOADS["W7"]).apply(parameters_of(WORKLOADS["W7"], weights), x)
    np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_attention_agrees_with_the_formula_of_pytorch():
    """Queries, keys and values are the thirds of one product, and heads are blocks of each third."""
    rng, width, tokens = np.random.default_rng(0), 16, 5
    shapes = {"in_proj_weight": (3 * width, width), "in_proj_bias": (3 * width,)}
    shapes |= {"out_proj.weight": (width, width), "out_proj.bias": (width,)}
    weights = {f"self_attn.{name}": uniform(rng, shape, width) for name, shape in shapes.items()}
    x = rng.standard_normal((tokens, width), np.float32)
    thirds = np.split(x @ weights["self_attn.in_proj_weight"].T + weights["self_attn.in_proj_bias"], 3, axis=1)
    heads = []
    for query, key, value in zip(*(np.split(third, HEADS, axis=1) for third in thirds), strict=True):
        scores = np.exp(query @ key.T / math.sqrt(width / HEADS))
        heads.append(scores / scores.sum(axis=1, keepdims=True) @ value)
    expected = np.hstack(heads) @ weights["self_attn.out_proj.weight"].T + weights["self_attn.out_proj.bias"]
    module = nn.MultiHeadDotProductAttention(HEADS)
    ours: Any = module.apply({"params": parameters(weights)["self_attn"]}, jnp.asarray(x))
    np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("name", WORKLOADS)
def test_multiply_adds_are_those_of_the_traced_models(name):
    """Products and convolutions of the forward pass of one sample."""
    model = model_of(WORKLOADS[name])
    x = np.zeros((1, *SHAPES[name]), np.float32) if name in SHAPES else sample_input(WORKLOADS[name])
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert multiply_adds(jax.make_jaxpr(model.apply)(params, x).jaxpr) == sum(WORKLOADS[name].macs)


def multiply_adds(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        shapes = [variable.aval.shape for variable in equation.invars]
        outputs = math.prod(equation.outvars[0].aval.shape)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += outputs * math.prod(shapes[0][axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            total += outputs * math.prod(shapes[1]) // shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
        repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += repeats * sum(multiply_adds(inner) for inner in core.jaxprs_in_params(equation.params))
    return total


def test_samples_of_the_ragged_workload():
    workload = WORKLOADS["W10"]
    arrays = make_arrays(workload)
    sizes = np.diff(arrays["offsets"])
    assert (sizes[0], sizes[-1], len(sizes)) == (1, 500, 17)
    assert (sizes % workload.batch).any()
    assert set(arrays["y"]) == set(range(5))
    assert np.array_equal(arrays["cohorts"], np.tile(np.arange(17), (workload.total_rounds, 1)))


def test_labels_are_the_next_symbols():
    arrays = make_arrays(WORKLOADS["W7"])
    x, y = arrays["x"], arrays["y"]
    assert (x.dtype, x.shape[1:]) == (np.int32, (80,))
    pairs = set(zip(x[:, :-1].ravel().tolist(), x[:, 1:].ravel().tolist(), strict=True))
    assert len(pairs) <= 90 * 3
    assert pairs.issuperset(zip(x[:, -1].tolist(), y.tolist(), strict=True))
