"""Norms of differences, computed from the two vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from fedrax import tree
from fedrax.xla.norms import fuse_norms_of_differences, norm


def vectors(dtype: str = "float32") -> tuple[dict, dict]:
    rng = np.random.default_rng(0)
    shapes = {"a": (200, 150), "b": (7,), "c": (), "d": (16384,), "e": (0, 3)}
    draw = lambda: {name: np.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}  # noqa: E731
    return draw(), draw()


def by_numpy(vector: dict) -> float:
    return float(np.sqrt(sum(np.sum(np.asarray(v, float) ** 2) for v in vector.values())))


def test_norm_of_a_difference_is_computed_from_both_vectors():
    a, b = vectors()

    def function(a, b):
        gap = tree.sub(a, b)
        return gap, norm(gap), norm(a)

    made = jax.make_jaxpr(function)(a, b)
    mended = fuse_norms_of_differences(made)
    names = [e.params["name"] for e in mended.jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    assert names == ["fedrax_square_of_difference"] * 5 + ["fedrax_square"] * 5
    *gap, of_gap, of_a = core.jaxpr_as_fun(mended)(*jax.tree.leaves((a, b)))
    expected = {name: a[name] - b[name] for name in a}
    for mine, name in zip(gap, sorted(expected), strict=True):
        np.testing.assert_array_equal(mine, expected[name])
    assert float(of_gap) == pytest.approx(by_numpy(expected), rel=1e-6)
    assert float(of_a) == pytest.approx(by_numpy(a), rel=1e-6)


def test_other_operations_are_unchanged():
    a, _ = vectors()
    del a["c"]
    for other in (lambda a: 2.0 - a, lambda a: a + a, lambda a: a):
        made = jax.make_jaxpr(lambda a, other=other: norm(jax.tree.map(other, a)))(a)
        same = fuse_norms_of_differences(made)
        assert all(e.params.get("name") != "fedrax_square_of_difference" for e in same.jaxpr.eqns if e.invars)


def test_norms_of_expressions_in_blocks():
    a, b = vectors()
    expected = {name: 2 * a[name] + b[name] for name in a}
    found = jax.jit(lambda a, b: tree.norm_of(lambda x, y: 2 * x + y, a, b))(a, b)
    assert float(found) == pytest.approx(by_numpy(expected), rel=1e-6)
    batched = jax.vmap(lambda s: tree.norm_of(lambda x, y: s * x + y, a, b))(jnp.array([2.0, 0.0]))
    assert np.allclose(batched, [by_numpy(expected), by_numpy(b)], rtol=1e-6)


def test_nonfinite_entries_are_detected():
    a, b = vectors()
    a["d"][9000] = np.nan
    assert np.isnan(tree.norm_of(jnp.subtract, a, b))
    a["d"][9000] = np.inf
    assert np.isinf(tree.norm_of(jnp.subtract, a, b))
