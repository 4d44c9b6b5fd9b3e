"""Initial parameters: one compiled program for equal initializers, and never the parameters of another task."""

from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedraxError, Task, classification
from fedrax.contract import initialization
from fedrax.contract.initialization import initial_parameters
from fedrax.models import MLP


def task_with_init(init: object) -> Task:
    return Task(init, lambda params, batch, key: batch.x @ params["w"])  # type: ignore[arg-type]


def test_initialization_is_compiled_once_for_all_seeds_and_equal_tasks():
    before = initialization._cached_init.cache_info().misses
    for task in [classification(MLP(hidden=(7, 5)).build((6,), 3)) for _ in range(2)]:
        for seed in (0, 1):
            drawn, direct = initial_parameters(task, jax.random.key(seed), None), task.init(jax.random.key(seed))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), drawn, direct)
    assert initialization._cached_init.cache_info().misses == before + 1


def test_different_scale_is_not_shared():
    for scale in (1.0, 2.0):
        task = task_with_init(lambda key, scale=scale: {"w": scale * jax.random.normal(key, (4,))})
        drawn = initial_parameters(task, jax.random.key(3), None)["w"]
        np.testing.assert_allclose(drawn, scale * jax.random.normal(jax.random.key(3), (4,)), rtol=1e-6)


def test_failed_compilation_is_repeated(monkeypatch: pytest.MonkeyPatch):
    task = task_with_init(lambda key: {"w": 3 * jax.random.uniform(key, (5,))})
    failed: Future = Future()
    failed.set_exception(MemoryError("none left"))
    with monkeypatch.context() as patch:
        patch.setattr(initialization, "_compile_in_background", lambda *_: failed)
        with pytest.raises(MemoryError):
            initial_parameters(task, jax.random.key(0), None)
    assert initial_parameters(task, jax.random.key(0), None)["w"].shape == (5,)


def test_initializers_with_numpy_generators_are_not_shared():
    """NumPy's generator draws different parameters for each task, although their programs have the same text."""
    numbers = np.random.default_rng(0)
    for make in (
        lambda: task_with_init(lambda key: {"w": jnp.asarray(numbers.normal(size=4))}),
        lambda: task_with_init(lambda key: {"w": jax.pure_callback(numbers.normal, jnp.zeros(()), 0.0) * jnp.ones(4)}),
    ):
        one, other = (np.asarray(initial_parameters(make(), jax.random.key(0), None)["w"]) for _ in range(2))
        assert not np.array_equal(one, other)


def test_nonfinite_given_parameters_are_rejected():
    task = task_with_init(lambda key: {"w": jnp.zeros(4)})
    for spoiled in (np.array([0, np.nan, 0, 0], np.float32), jnp.array([jnp.inf, 0, 0, 0], jnp.bfloat16)):
        with pytest.raises(FedraxError, match="the initial parameters are not finite: w has entries"):
            initial_parameters(task, jax.random.key(0), {"w": spoiled})
    assert initial_parameters(task, jax.random.key(0), {"w": np.ones(4)})["w"].sum() == 4
