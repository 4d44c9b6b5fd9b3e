"""Float hyper-parameters are inputs of the compiled program; integers and strings are static."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrax
from fedrax.algorithms import MIFA, FedDyn, FedNova, FedSaga, FedSGD, PFedMe
from fedrax.algorithms.gradma import GradMA, GradMAS
from fedrax.compression import TopK
from fedrax.config.annotations import Leaf, Static
from fedrax.config.hyperparameters import check, hyperparameters
from fedrax.contract import Positive
from fedrax.errors import FedraxError
from fedrax.optim import Optax, proximal, server
from fedrax.optim.proximal import L1
from fedrax.optim.schedules import InverseTimeDecay, OptaxSchedule
from fedrax.optim.server import SGD, Adam
from fedrax.simulation import Script
from tests.algorithms.problems import make_problem

LOCAL = fedrax.LocalSGD(lr=0.1, steps=2, batch_size=3)


def counting_task() -> tuple[fedrax.Task, list[int]]:
    """A task, and the number of times its loss was traced."""
    task, traces = make_problem().task, [0]

    def loss(params: Any, batch: Any, key: Any) -> Any:
        traces[0] += 1
        return task.loss(params, batch, key)

    return dataclasses.replace(task, loss=loss), traces


def cosine(**options: Any) -> OptaxSchedule:
    return OptaxSchedule.of(optax.cosine_decay_schedule, **{"init_value": 0.7, "decay_steps": 50, **options})


def piecewise_constant(factors: Any) -> OptaxSchedule:
    return OptaxSchedule.of(optax.piecewise_constant_schedule, init_value=1.0, boundaries_and_scales=factors)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (fedrax.FedAvg(LOCAL), fedrax.FedAvg(dataclasses.replace(LOCAL, lr=0.2))),
        (
            fedrax.FedProx(dataclasses.replace(LOCAL, momentum=0.5, clip=0.1, prox=L1(0.1)), Adam(0.1), mu=0.1),
            fedrax.FedProx(dataclasses.replace(LOCAL, momentum=0.6, clip=0.2, prox=L1(0.2)), Adam(0.2, b2=0.9), mu=0.3),
        ),
        (fedrax.Episode(LOCAL, gamma=0.001), fedrax.Episode(LOCAL, gamma=0.002)),
        (
            FedDyn(LOCAL, alpha=0.3),
            FedDyn(dataclasses.replace(LOCAL, lr=0.2), alpha=0.6),
        ),
        (
            FedNova(LOCAL, mu=0.3),
            FedNova(dataclasses.replace(LOCAL, lr=0.2), mu=0.6),
        ),
        (PFedMe(LOCAL, lam=3.0), PFedMe(LOCAL, lam=4.0, inner_lr=0.03)),
        (GradMA(LOCAL, beta1=0.4, beta2=0.9), GradMA(LOCAL, server_lr=0.8, beta1=0.6, beta2=0.2)),
        (
            fedrax.algorithms.upcycle(fedrax.Scaffold(dataclasses.replace(LOCAL, schedule=InverseTimeDecay(0.1))), 0.3),
            fedrax.algorithms.upcycle(fedrax.Scaffold(dataclasses.replace(LOCAL, schedule=InverseTimeDecay(0.2))), 0.6),
        ),
    ],
    ids=["FedAvg", "FedProx", "Episode", "FedDyn", "FedNova", "PFedMe", "GradMA", "Upcycled"],
)
def test_changed_floats_do_not_recompile(first: Any, second: Any):
    """The second run traces the loss at most as often as a run of the same algorithm, and has another result."""
    (task, traces), problem = counting_task(), make_problem()

    def run(algorithm: Any) -> tuple[int, np.ndarray]:
        before = traces[0]
        result = fedrax.simulate(algorithm, task, problem.federation, rounds=2, cohort_size=3, devices=1)
        return traces[0] - before, np.asarray(result.params["bias"])

    (compiled, start), (again, _), (changed, end) = run(first), run(first), run(second)
    assert changed <= again < compiled
    assert np.abs(start - end).max() > 1e-6


def test_leaves_are_the_float_fields():
    algorithm = fedrax.FedProx(fedrax.LocalSGD(0.1, steps=5, momentum=0.9, schedule=cosine(alpha=0.2)), SGD(0.5), 0.3)
    assert sorted(jax.tree.leaves(algorithm)) == [0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0]
    static = jax.tree.structure(algorithm)
    assert static == jax.tree.structure(dataclasses.replace(algorithm, mu=0.4))
    assert static != jax.tree.structure(
        dataclasses.replace(algorithm, local=dataclasses.replace(algorithm.local, steps=6))
    )
    assert static != jax.tree.structure(
        dataclasses.replace(algorithm, local=dataclasses.replace(algorithm.local, clip=1.0))
    )


def test_learning_rates_can_be_vmapped():
    lrs = jnp.array([0.1, 0.2, 0.4])
    local = fedrax.LocalSGD()
    ones = {"w": jnp.ones(2)}
    move = lambda lr: dataclasses.replace(local, lr=lr).move(ones, ones, lr, jnp.int32(0))[0]  # noqa: E731
    np.testing.assert_allclose(jax.vmap(move)(lrs)["w"][:, 0], 1 - lrs, rtol=1e-6)


def untyped(**options: Any) -> dict[str, Any]:
    """Options with types that a type checker would reject."""
    return options


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (fedrax.FedAvg(fedrax.LocalSGD(lr=-1.0)), "FedAvg.local.lr must be greater than 0, got -1.0"),
        (fedrax.FedAvg(fedrax.LocalSGD(lr=float("nan"))), "FedAvg.local.lr must be a finite number, got nan"),
        (fedrax.FedAvg(fedrax.LocalSGD(momentum=1.0)), "FedAvg.local.momentum must be less than 1, got 1.0"),
        (fedrax.FedAvg(fedrax.LocalSGD(steps=0)), "FedAvg.local.steps must be at least 1, got 0"),
        (fedrax.FedAvg(fedrax.LocalSGD(**untyped(batch_size=2.5))), "must be a whole number or 'full', got 2.5"),
        (fedrax.FedAvg(fedrax.LocalSGD(**untyped(order="random"))), "local.order must be one of 'shuffle', 'stored'"),
        (fedrax.FedAvg(fedrax.LocalSGD(**untyped(lr="fast"))), "FedAvg.local.lr must be a number, got 'fast'"),
        (fedrax.FedAvg(fedrax.LocalSGD(steps=2, epochs=1)), "give local steps or local epochs, not both"),
        (fedrax.FedAvg(fedrax.LocalSGD(epochs=2, blocks=3)), "give local steps, not epochs"),
        (fedrax.FedAvg(server_optimizer=SGD(momentum=-0.1)), "FedAvg.server_optimizer.momentum must be at least 0"),
        (fedrax.FedAvg(**untyped(local=fedrax.FedAvg())), "FedAvg.local must be of class LocalSGD, got FedAvg"),
        (
            fedrax.FedAvg(**untyped(server_optimizer=LOCAL)),
            "FedAvg.server_optimizer must be of class SGD or Adagrad or Adam or Yogi or Optax, got LocalSGD",
        ),
        (
            fedrax.FedAvg(fedrax.LocalSGD(**untyped(prox=SGD()))),
            "prox must be of class L1 or ElasticNet or NuclearNorm",
        ),
        (fedrax.FedAvg(**untyped(local=None)), "FedAvg.local must be of class LocalSGD, got None"),
        (fedrax.FedAvg(**untyped(local=fedrax.LocalSGD)), "FedAvg.local must be of class LocalSGD, got the class: "),
        (fedrax.Upcycled(**untyped(inner=LOCAL)), "Upcycled.inner must be of class Algorithm, got LocalSGD"),
        (
            fedrax.FedAvg(fedrax.LocalSGD(schedule=cosine(decay_steps="4"))),
            "local.schedule.decay_steps must be a whole number, got '4'",
        ),
        (
            fedrax.FedAvg(fedrax.LocalSGD(schedule=piecewise_constant({-1: 0.5}))),
            "local.schedule.boundaries_and_scales must hold items that must hold items that must be at least 0, got",
        ),
        (
            fedrax.FedAvg(fedrax.LocalSGD(schedule=piecewise_constant([[3, 0.5]]))),
            "local.schedule.boundaries_and_scales must be hashable, because it is static: give a tuple",
        ),
        (fedrax.Scaffold(**untyped(option="III")), "Scaffold.option must be one of 'I', 'II', got 'III'"),
        (fedrax.Episode(fedrax.LocalSGD(clip=0.1)), "unset local.clip"),
        (FedNova(fedrax.LocalSGD(clip=0.1)), "FedNova's normalization has no closed form with local.clip: unset it"),
        (FedNova(fedrax.LocalSGD(weight_decay=0.1)), "no closed form with local.weight_decay"),
        (FedNova(fedrax.LocalSGD(prox=L1(0.1))), "no closed form with local.prox"),
        (FedNova(fedrax.LocalSGD(optimizer=Optax.of(optax.adam))), "no closed form with local.optimizer"),
        (FedNova(fedrax.LocalSGD(momentum=0.5), mu=0.1), "unset local.momentum or mu"),
        (FedNova(fedrax.LocalSGD(lr=0.5), mu=2.0), "FedNova needs local.lr * mu below 1"),
        (PFedMe(fedrax.LocalSGD(momentum=0.5)), "follow w - theta and no gradient: unset local.momentum"),
        (fedrax.LoSAC(fedrax.LocalSGD(steps=3)), "LoSAC stores a gradient for each of M fixed blocks"),
        (FedSaga(fedrax.LocalSGD(steps=3, blocks=2, momentum=0.5)), "FedSaga has no local momentum"),
        (fedrax.LoSAC(fedrax.LocalSGD(steps=3, blocks=2, momentum=0.5)), "LoSAC has no local momentum"),
        (GradMAS(memory=-1), "GradMAS.memory must be at least 0, got -1"),
        (GradMA(beta2=1.0), "GradMA.beta2 must be less than 1, got 1.0"),
        (GradMA(**untyped(previous="server")), "GradMA.previous must be one of 'global', 'local', got 'server'"),
        (fedrax.algorithms.upcycle(fedrax.FedProx(mu=-1.0)), "Upcycled.inner.mu must be at least 0, got -1.0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_invalid_values_are_rejected_by_name(algorithm: Any, message: str):
    with pytest.raises(FedraxError, match=re.escape(message)):
        check(algorithm)


class Unmarked(fedrax.FedAvg):
    """A method without the decorator."""

    strength: Positive = 1.0


class UnmarkedPart(fedrax.LocalSGD):
    """A part of a method without the decorator and without fields."""


@pytest.mark.parametrize("algorithm", [Unmarked(), fedrax.FedAvg(UnmarkedPart())], ids=["method", "part"])
def test_class_without_decorator_is_rejected(algorithm: Any):
    message = "(Unmarked|UnmarkedPart) lacks the decorator @hyperparameters"
    with pytest.raises(FedraxError, match=message):
        check(algorithm)
    problem = make_problem()
    with pytest.raises(FedraxError, match=message):
        fedrax.simulate(algorithm, problem.task, problem.federation, rounds=1, cohort_size=2)


@hyperparameters
class Marked:
    """Fields whose types do not determine whether they are inputs or static, with and without a mark."""

    anything: Any = None
    function: Callable = jnp.tanh
    weights: Leaf[Any] = None
    fixed: Static[Positive] = 0.5
    maybe: Static[float] | None = None
    ends: tuple[Positive, ...] = (1.0, 2.0)
    names: tuple = ("a", 1.5)


def test_marks_determine_inputs_and_static_fields():
    marked = Marked(weights={"w": np.ones(2)})
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(marked)]
    assert names == [".weights['w']", ".ends[0]", ".ends[1]"]
    assert jax.tree.structure(marked) != jax.tree.structure(dataclasses.replace(marked, fixed=0.6))
    check(marked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anything": np.ones(2)}, "Marked.anything must be hashable, because it is static"),
        ({"weights": jnp.tanh}, "Marked.weights must be numbers or arrays, because it is an input"),
        ({"fixed": 0.0}, "Marked.fixed must be greater than 0, got 0.0"),
        ({"ends": (1.0, -1.0)}, "Marked.ends must hold items that must be greater than 0, got (1.0, -1.0)"),
        ({"ends": 1.0}, "Marked.ends must be a list of numbers, got 1.0"),
    ],
    ids=["unhashable", "function", "bound", "items", "no list"],
)
def test_values_that_contradict_a_mark_are_rejected(changes: dict[str, Any], message: str):
    with pytest.raises(FedraxError, match=re.escape(message)):
        check(Marked(**changes))


def test_optax_server_optimizer_is_static():
    rule = fedrax.FedAvg(LOCAL, server.Optax(optax.adamw(1e-2)))
    check(rule)
    assert jax.tree.leaves(rule) == [0.1]
    problem = make_problem()
    result = fedrax.simulate(rule, problem.task, problem.federation, rounds=2, cohort_size=3, devices=1)
    assert len(result.events) == 2


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        (fedrax.Scaffold(LOCAL), {"weights": "samples"}, "Scaffold is defined for uniform aggregation weights only"),
        (MIFA(LOCAL), {"weights": "samples"}, "MIFA is defined for uniform"),
        (
            TopK(fedrax.algorithms.upcycle(fedrax.Scaffold(LOCAL))),
            {"weights": "samples"},
            "^Scaffold is defined for uniform",
        ),
        (
            fedrax.LoSAC(fedrax.LocalSGD(steps=2, blocks=2)),
            {"script": Script(cohorts=[[0, 1], [2]])},
            "LoSAC converges to a wrong point when the cohort's size varies",
        ),
        (GradMAS(LOCAL, memory=2), {}, "a memory of 2 clients is smaller than a cohort of 3"),
        (fedrax.algorithms.upcycle(GradMA(LOCAL, memory=2)), {}, "a memory of 2 clients is smaller than a cohort of 3"),
        (
            GradMA(LOCAL, memory=2),
            {"script": Script(cohorts=[[0, 1], [4, 1, 2]])},
            "a memory of 2 clients is smaller than a cohort of 3",
        ),
    ],
    ids=["Scaffold", "MIFA", "Upcycled", "LoSAC", "GradMAS", "Upcycled GradMA", "GradMA"],
)
def test_settings_that_a_method_does_not_support_are_rejected(algorithm: Any, settings: dict[str, Any], message: str):
    problem, defaults = make_problem(), untyped(rounds=2, cohort_size=3)
    with pytest.raises(FedraxError, match=message):
        fedrax.simulate(algorithm, problem.task, problem.federation, **(defaults | settings))


def test_different_classes_have_different_tree_structures():
    """Otherwise JAX may run the compiled program of one class for another, depending on hash collisions."""
    local = fedrax.LocalSGD(steps=1, batch_size="full")
    pairs = [
        (FedSGD(local=local), fedrax.FedAvg(local=local)),
        (server.Adam(), server.Yogi()),
        (proximal.L1(0.1), proximal.NuclearNorm(0.1)),
    ]
    for one, other in pairs:
        assert len(jax.tree.leaves(one)) == len(jax.tree.leaves(other))
        assert jax.tree.structure(one) != jax.tree.structure(other)
    assert jax.tree.structure(local) == jax.tree.structure(dataclasses.replace(local, lr=0.7))
    assert jax.tree.structure(local) != jax.tree.structure(dataclasses.replace(local, steps=2))


def test_flattening_and_unflattening_restores_algorithms():
    algorithm = fedrax.FedProx(dataclasses.replace(LOCAL, momentum=0.5, prox=L1(0.1)), Adam(0.1), mu=0.1)
    leaves, structure = jax.tree.flatten(algorithm)
    assert jax.tree.unflatten(structure, leaves) == algorithm
    assert jax.tree.map(lambda x: x, algorithm) == algorithm
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(algorithm)]
    assert ".local.prox.weight" in names and ".mu" in names


@hyperparameters
class Warmup:
    """A user-defined schedule."""

    rounds: int = 4

    def __call__(self, round: jax.Array) -> jax.Array:
        return jnp.minimum((round + 1) / self.rounds, 1.0)


def test_user_classes_with_the_common_methods_of_known_classes_are_accepted():
    check(fedrax.FedAvg(local=fedrax.LocalSGD(schedule=Warmup())))  # type: ignore[arg-type]
    for wrong in (
        fedrax.FedAvg(local=fedrax.LocalSGD(schedule=fedrax.FedAvg())),  # type: ignore[arg-type]
        fedrax.FedAvg(server_optimizer=Warmup()),  # type: ignore[arg-type]
    ):
        with pytest.raises(fedrax.FedraxError, match="must be of class"):
            check(wrong)
