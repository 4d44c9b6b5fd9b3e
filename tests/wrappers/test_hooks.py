"""Hooks into local training, also several at once, and invalid outputs of hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import FedraxError, check_algorithm, tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.wrapper import Wrapper
from fedrax.models import from_linen
from tests.simulation.problems import FEDERATION, SIZES, TASK, run

LOCAL = fedrax.LocalSGD(lr=0.1, steps=2, batch_size=5)
AVERAGE = fedrax.FedAvg(local=LOCAL)
SCAFFOLD = fedrax.Scaffold(local=LOCAL, option="II")


def wrapper_of(change: Callable[[Any], Any], inner: Algorithm = AVERAGE) -> Wrapper:
    """A wrapper that passes ``change(data)`` to the inner method."""

    @hyperparameters
    class Changing(Wrapper):
        inner: Algorithm = AVERAGE

        def around_client(self, client, message, state, own, data, last):
            return client(message, state, change(data)), own

    return Changing(inner=inner)


def plain_gradient(losses: Any, params: Any, batch: Any, weights: Any, key: Any) -> Any:
    """The plain gradient as a hook."""

    def total(params: Any) -> Any:
        found = losses(params, batch, key)
        return jnp.sum(found if weights is None else jnp.where(weights, found, 0))

    return jax.value_and_grad(total)(params)


def with_gradient(hook: Callable, inner: Algorithm = AVERAGE) -> Wrapper:
    return wrapper_of(lambda data: data.with_gradient(hook), inner)


def with_direction(hook: Callable, inner: Algorithm = AVERAGE) -> Wrapper:
    return wrapper_of(lambda data: data.with_direction(hook), inner)


def test_proximal_term_by_a_wrapper_is_fedprox():
    start = TASK.init(jax.random.key(0))
    ours = wrapper_of(lambda data: data.with_term(fedrax.contract.proximal_term(0.3, start)))
    one = run(ours, rounds=1, params=start).params
    two = run(fedrax.FedProx(local=LOCAL, mu=0.3), rounds=1, params=start).params
    assert_close_trees(one, two)


def test_scaffold_control_excludes_loss_terms_of_wrappers():
    """(x - x_i) / (T eta) would include the term; c_i must be the mean gradient of the local loss."""
    start = jax.tree.map(lambda a: a + 0.5, TASK.init(jax.random.key(0)))
    term = wrapper_of(lambda data: data.with_term(fedrax.contract.proximal_term(0.1, tree.scale(2, start))), SCAFFOLD)
    one, other = (run(method, rounds=1, params=start, cohort_size=len(SIZES)) for method in (term, SCAFFOLD))
    change = tree.sub(one.client_state(0).control, other.client_state(0).control)
    included = tree.scale(0.1, start)  # gradient of the term at x, which must not be part of c_i
    assert float(tree.norm(change)) < 0.3 * float(tree.norm(included))


def test_gradient_hook_replaces_the_gradient():
    one, two = run(AVERAGE, rounds=2), run(with_gradient(plain_gradient), rounds=2)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        with_gradient(plain_gradient, with_gradient(plain_gradient)),
        fedrax.privacy.SampleDP(inner=with_gradient(plain_gradient)),
        with_gradient(plain_gradient, fedrax.privacy.SampleDP(inner=AVERAGE)),
    ],
    ids=["twice", "inside noise", "around noise"],
)
def test_second_gradient_hook_is_rejected(method: Algorithm):
    """Inside SampleDP it would replace the noisy gradient."""
    with pytest.raises(FedraxError, match=r"two wrappers, .* both change how the gradient of a batch is computed"):
        run(method, rounds=1, weights="uniform")


def test_scaffold_control_is_a_mean_of_gradients_with_direction_hooks():
    """(x - x_i) / (T eta) is none for shortened steps: clipping in a hook gives the same c_i as ``local.clip``."""
    gamma = 0.01

    def shortened(direction: Any, x: Any, step: Any) -> Any:
        return tree.scale(jnp.minimum(1, gamma / (LOCAL.lr * tree.norm(direction))), direction)

    clipped = fedrax.Scaffold(local=dataclasses.replace(LOCAL, clip=gamma))
    one, other = (run(m, rounds=2) for m in (with_direction(shortened, fedrax.Scaffold(local=LOCAL)), clipped))
    assert_close_trees(one.params, other.params)
    for i in range(len(SIZES)):
        assert_close_trees(one.client_state(i).control, other.client_state(i).control)


def assert_close_trees(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


def test_outermost_direction_hook_is_applied_last():
    """Clipping around decay bounds the step; decay around clipping may exceed the bound."""

    def shortened(direction: Any, x: Any, step: Any) -> Any:
        return tree.scale(1e-3 / tree.norm(direction), direction)

    def decayed(direction: Any, x: Any, step: Any) -> Any:
        return jax.tree.map(lambda d, a: d + 3 * a + 1, direction, x)

    start = TASK.init(jax.random.key(0))
    far = {
        name: float(tree.norm(tree.sub(run(method, rounds=1, params=start).params, start)))
        for name, method in {
            "clipped": with_direction(shortened, with_direction(decayed)),
            "decayed": with_direction(decayed, with_direction(shortened)),
            "both in one": wrapper_of(lambda data: data.with_direction(decayed).with_direction(shortened)),
        }.items()
    }
    assert far["clipped"] < 2.1e-4 and far["both in one"] < 2.1e-4 and far["decayed"] > 0.1, far


def test_nested_private_wrappers_are_rejected():
    with pytest.raises(FedraxError, match="SampleDP is nested in SampleDP"):
        run(
            fedrax.privacy.SampleDP(inner=wrapper_of(lambda data: data, fedrax.privacy.SampleDP(inner=AVERAGE))),
            rounds=1,
        )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data.batch(0, 5, "stored") and data, "a batch beside them"),
        (lambda data: data.with_batch(lambda step: data.batch(0, 5, "stored")), "other batches"),
        (lambda data: data.with_steps(jnp.int32(50)), "another number of local steps"),
    ],
    ids=["a batch", "batches", "steps"],
)
def test_sample_level_privacy_rejects_uncounted_access_to_samples(change: Callable, what: str):
    with pytest.raises(FedraxError, match=f"SampleDP supports methods .* asks for {what}"):
        run(fedrax.privacy.SampleDP(inner=wrapper_of(change)), rounds=1, weights="uniform")


def test_gradient_hooks_are_rejected_with_running_statistics():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))

    task = fedrax.classification(from_linen(Network(), FEDERATION.train[0][:1]))
    for local in (LOCAL, fedrax.LocalSGD(lr=0.1, steps=2, batch_size=4)):
        with pytest.raises(FedraxError, match="cannot update running statistics"):
            run(with_gradient(plain_gradient, fedrax.FedAvg(local=local)), task=task, rounds=1)


HOOKS = {
    "gives losses of shape () for a batch of": wrapper_of(
        lambda data: data.with_loss(lambda losses: lambda *inputs: losses(*inputs).mean())
    ),
    "with_gradient must return the pair": with_gradient(lambda *inputs: plain_gradient(*inputs)[1]),
    "summed loss, summed gradient: a scalar, and a tree": with_gradient(lambda *inputs: plain_gradient(*inputs)[::-1]),
    "with_direction must return a direction with the tree structure": with_direction(
        lambda d, x, step: jax.tree.map(jnp.mean, d)
    ),
    "structure and shapes of the parameters": with_direction(lambda d, x, step: None),
}


@pytest.mark.parametrize("message", HOOKS)
def test_outputs_of_hooks_are_checked(message: str):
    for use in (lambda method: run(method, rounds=1, devices=1), check_algorithm):
        with pytest.raises(FedraxError) as caught:
            use(HOOKS[message])
        assert message in str(caught.value)


def wrapper_class(name: str, made: Callable) -> Callable[[], type]:
    """A class of wrappers with one method, for invalid returns and signatures."""
    return lambda: hyperparameters(type("Mine", (Wrapper,), {name: made, "__annotations__": {"inner": Algorithm}}))


MISTAKES: dict[str, tuple[str, Callable]] = {
    "Mine.around_client returns a ClientOutput: return the pair output, own": (
        "around_client",
        lambda self, client, message, state, own, data, last: client(message, state, data),
    ),
    "Mine.around_client returns nothing: return the pair output, own": (
        "around_client",
        lambda self, client, message, state, own, data, last: None,
    ),
    "Mine.around_client returns a dict in place of the output": (
        "around_client",
        lambda self, client, message, state, own, data, last: (client(message, state, data).upload, own),
    ),
    "Mine.around_server returns a tuple: return state, own, info": (
        "around_server",
        lambda self, server, state, own, cohort, last: server(state, cohort),
    ),
    "Mine.around_server returns nothing in place of the info": (
        "around_server",
        lambda self, server, state, own, cohort, last: (server(state, cohort)[0], own, None),
    ),
    "server(state, cohort) returns the pair state, info": (
        "around_server",
        lambda self, server, state, own, cohort, last: (server(state, cohort), own, {}),
    ),
    "Mine.around_broadcast returns nothing": ("around_broadcast", lambda self, broadcast, state, own: None),
    "Mine returns a state of its own without an initial one: define init_own": (
        "around_server",
        lambda self, server, state, own, cohort, last: (server(state, cohort)[0], {"n": cohort.round}, {}),
    ),
    "write def around_client(self, client, message, state, own, data, last)": (
        "around_client",
        lambda self, client, message, state, own, data: None,
    ),
    "write def init_own(self, params, num_clients)": ("init_own", lambda self, params: ()),
    "did you mean 'around_server'?": ("around_sever", lambda self, *inputs: None),
    "Mine.client would never be called: define around_client": ("client", lambda self, *inputs: None),
    "Mine.server would never be called: define around_server": ("server", lambda self, *inputs: None),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_invalid_wrappers_raise_a_clear_error(message: str):
    for use in (lambda method: run(method, rounds=1, devices=1), check_algorithm):
        with pytest.raises(FedraxError) as caught:
            use(wrapper_class(*MISTAKES[message])()(inner=AVERAGE))
        assert message in str(caught.value), str(caught.value)


def test_mutable_default_raises_a_clear_error():
    with pytest.raises(FedraxError, match=r"Mine: mutable default .* give a tuple"):
        hyperparameters(type("Mine", (Wrapper,), {"layers": [], "__annotations__": {"layers": list}}))
