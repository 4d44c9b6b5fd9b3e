"""Batches that all devices share for remaining clients: results as on one device."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedrax import Episode, FedAvg, Federation, GradMA, LocalSGD, Scaffold, classification, simulate
from fedrax.algorithms import MimeSVRG
from fedrax.models import from_linen
from fedrax.xla import Limits, Options, microbatch, use_options
from fedrax.xla.flops import count_flops
from fedrax.xla.microbatch import BatchSplit, batch_splits, device_speedup, plan_microbatches

SIZES = (9, 10, 8, 12, 11)
LOCAL = LocalSGD(lr=0.05, epochs=2, batch_size=7)


class WithDropout(nn.Module):
    """Samples are independent given the dropout mask."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(x))


class WithBatchNorm(nn.Module):
    """Samples are not independent."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x)))


@pytest.fixture
def share_small_batches() -> Iterator[None]:
    """Share batches of any size."""
    with use_options(Options(limits=Limits(sharing_overhead=float("inf"), sharing_flops=1.0))):
        yield


@cache
def task_of(module: nn.Module) -> Any:
    """One task per module, because programs are cached by task."""
    return classification(from_linen(module, np.zeros((1, 4), np.float32)))


def run(algorithm: Any, module: nn.Module | None = None, **changes: Any) -> Any:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x, y = rng.normal(size=(len(owner), 4)).astype(np.float32), rng.integers(0, 3, len(owner))
    federation = Federation.from_arrays(x, y, owner, test=(x, y), num_classes=3)
    settings: dict[str, Any] = {"rounds": 3, "cohort_size": 3, "plan": "scan", "eval_every": 3, "progress": False}
    return simulate(algorithm, task_of(module or WithDropout()), federation, **(settings | changes))


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", [FedAvg, Scaffold, Episode, GradMA, MimeSVRG])
def test_results_agree_with_one_device(kind: Any, share_small_batches: None) -> None:
    algorithm = kind(local=dataclasses.replace(kind().local, lr=0.05, epochs=2, steps=None, batch_size=7))
    found, expected = run(algorithm), run(algorithm, devices=1)
    assert "left over on all of them together" in found.plan and "samples at a time" not in found.plan
    assert_close((found.params, found.server), (expected.params, expected.server))


def test_resumed_run_is_bitwise_equal(tmp_path: Path, share_small_batches: None) -> None:
    uninterrupted = run(Scaffold(local=LOCAL), rounds=4)
    run(Scaffold(local=LOCAL), rounds=2, directory=tmp_path)
    found = run(Scaffold(local=LOCAL), rounds=4, directory=tmp_path, resume=True)
    jax.tree.map(
        np.testing.assert_array_equal, (found.params, found.server), (uninterrupted.params, uninterrupted.server)
    )


def test_batches_with_batch_norm_are_not_shared(share_small_batches: None) -> None:
    assert "left over" not in run(FedAvg(local=LOCAL), WithBatchNorm()).plan


def test_small_batches_are_not_shared() -> None:
    assert "left over" not in run(FedAvg(local=LOCAL)).plan


@pytest.mark.parametrize(("width", "rows", "worth"), [(8, 32, False), (512, 2, False), (512, 256, True)])
def test_sharing_weighs_arithmetic_against_communication(width: int, rows: int, worth: bool) -> None:
    w = jnp.ones((width, width))
    losses = lambda w, x, key: jnp.tanh(jnp.tanh(x @ w) @ w).sum(1)  # noqa: E731
    cut = plan_microbatches(losses, w, jnp.ones((rows, width)), jax.random.key(0), 13)
    assert (cut is not None) == worth
    if cut is not None:
        assert cut.rows == rows and cut.overhead is not None and 0 < cut.overhead < 0.3


def test_batches_of_long_programs_are_not_shared() -> None:
    def losses(w: Any, x: Any, key: Any) -> Any:
        for _ in range(300):
            x = jnp.tanh(x @ w)
        return x.sum(1)

    assert plan_microbatches(losses, jnp.ones((64, 64)), jnp.ones((8, 64)), jax.random.key(0), 13) is None


@pytest.mark.parametrize(
    "divide", [lambda x: x / len(x), lambda x: x * (1 / len(x)), lambda x: x / jnp.float32(len(x))]
)
def test_models_that_use_the_batch_size_are_not_shared(divide: Any, share_small_batches: None) -> None:
    losses = lambda w, x, key: (divide(x) @ w).sum(1)  # noqa: E731
    alone = lambda w, x, key: (x @ w).sum(1)  # noqa: E731
    cut = lambda f: plan_microbatches(f, jnp.ones((4, 4)), jnp.ones((8, 4)), jax.random.key(0), 13)  # noqa: E731
    assert cut(losses) is None and cut(alone) is not None


def test_no_device_has_a_single_sample(share_small_batches: None) -> None:
    losses = lambda w, x, key: (x @ w).sum(1)  # noqa: E731
    cut = lambda rows: plan_microbatches(losses, jnp.ones((4, 4)), jnp.ones((rows, 4)), jax.random.key(0), 13)  # noqa: E731
    assert cut(2) is None and cut(3) is not None


def test_speed_of_devices_together() -> None:
    assert device_speedup([], 2) == 1
    assert device_speedup([BatchSplit(4, 8)], 2) == 2 and device_speedup([BatchSplit(5, 8)], 2) == 5 / 3
    assert device_speedup([BatchSplit(1, 0, 0.25)], 2) == pytest.approx(4 / 3)
    assert device_speedup([BatchSplit(4, 8), BatchSplit(1, 0, 0.25)], 2) == pytest.approx(4 / 3)


def test_shareable_batches_are_found_in_a_program() -> None:
    cut = microbatch.Microbatches(8, jnp.float32, None, 0.125)
    gradient = lambda w, x, counts: jax.value_and_grad(lambda w: (x @ w).sum())(w)  # noqa: E731
    program = jax.make_jaxpr(lambda w, x: microbatch.accumulate_gradients(gradient, cut, w, x, None))(
        jnp.ones(3), jnp.ones((8, 3))
    )
    assert batch_splits(program) == [BatchSplit(1, 0, 0.125)]


def test_flops_are_counted() -> None:
    a, b = jnp.ones((5, 7)), jnp.ones((7, 3))
    count = lambda function, *args: count_flops(jax.make_jaxpr(function)(*args))  # noqa: E731
    assert count(jnp.dot, a, b) == 2 * 5 * 7 * 3
    assert count(lambda a, b: lax.fori_loop(0, 4, lambda i, c: c + a @ b, jnp.zeros((5, 3))), a, b) == 4 * 2 * 5 * 7 * 3
    images, kernel = jnp.ones((2, 9, 9, 6)), jnp.ones((3, 3, 2, 12))
    in_groups = lambda x, w: lax.conv_general_dilated(  # noqa: E731
        x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=3
    )
    assert count(in_groups, images, kernel) == 2 * (2 * 4 * 4 * 12) * (3 * 3 * 2)
