"""A client's part of a round is traced once for all programs that contain it."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fedrax
from fedrax.xla import CodeFingerprint
from fedrax.xla.tracing import CACHE_SIZE, INLINE, output_sources, owned_cache, run_cached, trace_once
from tests.simulation.problems import LOCAL, TASK, run


@dataclasses.dataclass(frozen=True)
class TraceCounter:
    """Counts how often the function of a task is traced."""

    shapes: list

    def __call__(self, loss: Any) -> Any:
        def counted(params: Any, batch: Any, key: Any) -> Any:
            self.shapes.append(jax.tree.map(jnp.shape, batch))
            return loss(params, batch, key)

        return counted


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "vmap"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_run_traces_once(plan: str, dtype: str):
    seen = TraceCounter([])
    task = dataclasses.replace(TASK, loss=seen(TASK.loss), name=f"traced {plan} {dtype}")
    for seed in (0, 1):
        run(fedrax.FedAvg(local=LOCAL), task=task, plan=plan, dtype=dtype, rounds=2, seed=seed)
    checked, *traced = seen.shapes
    assert len(traced) == 1 and checked.x[0] != traced[0].x[0]  # and once before, to check it against the samples


def test_inlined_functions_return_inputs_as_themselves():
    inner = jax.jit(lambda x, y: (x, 2 * y), inline=INLINE)
    handed_on = []

    def outer(x: jax.Array, y: jax.Array) -> tuple:
        made = inner(x, y)
        handed_on.append(made[0] is x)
        return made

    made = jax.make_jaxpr(outer)(1.0, 2.0)
    assert handed_on == [True] and [equation.primitive.name for equation in made.eqns] == ["mul"]


def test_inputs_returned_by_calls_are_identified():
    swapped = jax.jit(lambda a, b: (b, a, a + b))
    made = jax.make_jaxpr(lambda x, y: (*swapped(y, jax.jit(lambda y: y)(x)), x, *swapped(x, x)[2:]))(1.0, 2.0)
    x, y = made.jaxpr.invars
    first, second, third, fourth, last = output_sources(made)
    assert (first, second, fourth) == (x, y, x)
    assert third not in (x, y, last) and last not in (x, y)


def test_traces_are_reused_in_meshes_and_under_vmap():
    calls = []

    @trace_once(fixed=1)
    def scaled(by: float, x: dict) -> dict:
        calls.append(by)
        return {"y": by * x["x"], "n": x["n"]}

    def both(x: jax.Array) -> jax.Array:
        inside = lambda a: jax.lax.psum(scaled(2.0, {"x": a[0], "n": 3})["y"], "d")  # noqa: E731
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
        return jax.shard_map(inside, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False)(x)

    x = jnp.arange(6.0).reshape(2, 3)
    assert np.array_equal(scaled(2.0, {"x": x[0], "n": 3})["y"], 2 * x[0])
    assert np.array_equal(jax.jit(both)(x), 2 * x.sum(0))
    assert np.array_equal(jax.vmap(lambda a: scaled(2.0, {"x": a, "n": 3})["y"])(x), 2 * x)
    assert np.allclose(jax.grad(lambda a: scaled(2.0, {"x": a, "n": 3})["y"].sum())(x[0]), 2.0)
    assert calls == [2.0]
    scaled(3.0, {"x": x[0], "n": 3})  # a different constant
    scaled(2.0, {"x": x, "n": 3})  # a different shape
    with jax.enable_x64(True):
        assert scaled(2.0, {"x": np.ones(3), "n": 3})["y"].dtype == np.float64
    assert len(calls) == 4
    made = [jnp.asarray(scaled(2.0, {"x": x, "n": n})["n"]) for n in (3, 1, True, 1.0)]
    assert [a.dtype.name for a in made] == ["int32", "int32", "bool", "float32"]
    assert len(calls) == 7  # Python numbers are constants


def test_equal_new_functions_are_compiled_once(caplog: pytest.LogCaptureFixture):
    """With values and dtypes as from ``jax.jit``, which would compile every new function."""
    x, table = {"w": np.arange(3.0), "n": jnp.arange(2)}, np.arange(6.0, dtype=np.float32)
    makers: dict[str, Any] = {
        "arguments": lambda by: lambda x: {"state": (), "params": x["w"], "again": x["w"]},
        "new": lambda by: lambda x: {"params": x, "zeros": jax.tree.map(jnp.zeros_like, x), "some": by * x["w"]},
        "a number": lambda by: lambda x: (x["w"], 0.5, jnp.float32(2.0)),
        "a constant": lambda by: lambda x: x["w"] + jnp.asarray(table)[1],
    }
    for name, make in makers.items():
        expected = jax.jit(make(2.0))(x)
        with jax.log_compiles():
            caplog.clear()
            ours = [run_cached(make(2.0), x) for _ in range(2)]
            if name in ("arguments", "new"):
                printed = [record.getMessage() for record in caplog.records]
                assert sum("Compiling jit(jaxpr_as_fun)" in line for line in printed) == (name == "new")
                assert not any("Compiling jit(<lambda>)" in line for line in printed)
        for found in ours:
            assert jax.tree.structure(found) == jax.tree.structure(expected)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                assert isinstance(a, jax.Array) and jax.typeof(a) == jax.typeof(b)
                np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(run_cached(makers["new"](3.0), x)["some"], 3 * x["w"])


def test_functions_with_different_hidden_state_are_not_shared():
    """Constants of inner functions, and Python callbacks."""
    x = jnp.ones(3)

    def makers(number: float) -> list[Any]:
        array = np.full(3, number, np.float32)
        there = jax.ShapeDtypeStruct((3,), jnp.float32)
        return [
            lambda x: jax.jit(lambda y: y + array)(x),
            lambda x: jax.jit(lambda y: y + jnp.asarray(array))(x),
            lambda x: jax.lax.cond(x[0] > 1, lambda y: y * array, lambda y: y - array, x),
            lambda x: jax.lax.scan(lambda y, _: (y * array, None), x, None, 2)[0],
            lambda x: jax.pure_callback(lambda y: np.asarray(y + number, np.float32), there, x),
            lambda x: x * np.float32(1 + number * 1e-7),
        ]

    for one, other in zip(makers(1.0), makers(2.0), strict=True):
        a, b = run_cached(one, x), run_cached(other, x)
        np.testing.assert_array_equal(a, jax.jit(one)(x))
        np.testing.assert_array_equal(b, jax.jit(other)(x))
        assert (a != b).any()


def test_functions_are_not_cached_under_disable_jit():
    calls = []

    @trace_once(fixed=0)
    def plain(x: Any) -> Any:
        calls.append(float(x))
        return x

    with jax.disable_jit():
        plain(1.0), plain(2.0)
    assert calls == [1.0, 2.0]


class Owner:
    """An object that takes attributes."""


def test_cached_results_live_as_long_as_their_owner_and_the_most_recent_ones():
    calls = []

    @owned_cache(lambda owner, _: owner)
    def double(owner: Any, number: int) -> list:
        calls.append(number)
        return [owner, 2 * number]

    one, other = Owner(), Owner()
    before = CodeFingerprint(one)
    assert double(one, 3) is double(one, 3) and double(one, 3) is not double(other, 3)
    assert calls == [3, 3] and CodeFingerprint(one) == before
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    for number in range(CACHE_SIZE):
        double(one, number)
    assert len(calls) == 2 + CACHE_SIZE - 1
    double(one, 3)
    double(one, CACHE_SIZE)  # the oldest, 0, makes room
    double(one, 0)
    assert calls[2:] == [*(n for n in range(CACHE_SIZE) if n != 3), CACHE_SIZE, 0]
