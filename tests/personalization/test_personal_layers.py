"""Personal parameters and statistics of clients against plain loops over rounds, clients and steps."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from fedrax import (
    ClientOutput,
    FedAvg,
    FedraxError,
    LocalSGD,
    Scaffold,
    Task,
    classification,
    hyperparameters,
    sweep,
    tree,
)
from fedrax.algorithms import FedADMM, FedSGD, PFedMe
from fedrax.contract import Variables
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Batch
from fedrax.models import MLP, from_linen
from fedrax.optim import Optax
from fedrax.personalization import Ditto, Personalized
from fedrax.privacy import ClientDP
from fedrax.privacy.mechanisms.clipping import Flat
from fedrax.robust import Attacked
from fedrax.robust.attacked_clients import Gaussian
from fedrax.simulation import Script
from tests.simulation.problems import FEDERATION, assert_identical, run
from tests.slow import slow_cases
from tests.wrappers.own_methods import PersonalNorm

ROUNDS, COHORTS, STEPS, ROWS = 3, [[1, 3], [3, 5], [1, 3]], 2, 3
LOCAL = LocalSGD(lr=0.1, steps=STEPS, batch_size=ROWS)
DRAWN = np.random.default_rng(0).permuted(np.broadcast_to(np.arange(5), (ROUNDS, 2, STEPS, 5)), axis=-1)[..., :ROWS]
SCRIPT = Script(cohorts=COHORTS, batches=DRAWN)
OPTIONS: dict[str, Any] = {"script": SCRIPT, "rounds": ROUNDS, "eval_every": 1, "devices": 1}


class Network(nn.Module):
    """Batch norm between two layers."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits."""
        x = nn.BatchNorm(momentum=0.8, use_running_average=not train, name="norm")(nn.Dense(5, name="hidden")(x))
        return nn.Dense(3, name="output")(jax.nn.relu(x))


NORM_TASK = classification(from_linen(Network(), FEDERATION.train[0][:1]))
LAYERS = classification(MLP(hidden=(6,)).build((4,), 3))


def personal_mask(params: Any, patterns: tuple[str, ...]) -> Any:
    """True for personal parameters."""
    leaves = [any(fnmatchcase(name, p) for p in patterns) for name in tree.leaf_names(params)]
    return jax.tree.structure(params).unflatten(leaves)


def plain_loop(
    task: Task,
    start: Any,
    patterns: tuple[str, ...],
    at_home: bool,
    alternate: bool = False,
    decay: float = 0.0,
    clip: float = np.inf,
) -> tuple[Any, Any, dict, dict]:
    """(global parameters, mean statistics, parameters of clients, statistics of clients).

    alternate: one step of the personal parameters, then the steps of the others. clip: maximal length of a step.
    """
    params, mean = start if isinstance(start, Variables) else (start, ())
    personal, own, statistics = personal_mask(params, patterns), {}, {}

    def step(params: Any, moving: Any, batch: Batch, held: Any = None) -> tuple[Any, Any]:
        def loss(params: Any) -> Any:
            if not moving:
                return task.loss(params, batch, jax.random.key(0)).mean(), ()
            losses, moved = task.loss_and_statistics(Variables(params, moving), batch, jax.random.key(0))
            return losses.mean(), moved

        gradient, moved = jax.grad(loss, has_aux=True)(params)
        direction = jax.tree.map(lambda p, g: g + decay * p, params, gradient)
        if held is not None:
            direction = jax.tree.map(lambda d, h: jax.numpy.where(h, 0, d), direction, held)
        length = LOCAL.lr * tree.norm(direction)
        rate = LOCAL.lr * jax.numpy.minimum(1, clip / length)
        return jax.tree.map(lambda p, d: p - rate * d, params, direction), moved

    step = jax.jit(step)
    for r, cohort in enumerate(COHORTS):
        ends, moved = [], []
        for k, client in enumerate(cohort):
            x = jax.tree.map(lambda mine, g, h: mine if h else g, own.get(client, params), params, personal)
            moving = statistics.get(client, start[1]) if at_home else mean
            drawn = [FEDERATION.offsets[client] + rows for rows in SCRIPT.batches[r, k]]
            batches = [Batch(*(np.asarray(a)[rows] for a in FEDERATION.train)) for rows in drawn]
            if alternate:
                first, _ = step(x, moving, batches[0], jax.tree.map(lambda h: not h, personal))
                x = jax.tree.map(lambda old, new, h: new if h else old, x, first, personal)
            for batch in batches:
                new, moving = step(x, moving, batch, personal if alternate else None)
                x = jax.tree.map(lambda old, new, h: old if h and alternate else new, x, new, personal)
            own[client], statistics[client] = x, moving
            ends.append(x)
            moved.append(moving)
        params = jax.tree.map(lambda p, h, *e: p if h else sum(e) / len(e), params, personal, *ends)
        if not at_home:
            mean = jax.tree.map(lambda *m: sum(m) / len(m), *moved)
    return params, mean, own, statistics


def assert_near(a: Any, b: Any) -> None:
    """Assert equality up to rounding."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


CASES = {
    "FedBN": (NORM_TASK, ("norm/*",), True),
    "shared statistics": (NORM_TASK, ("norm/*",), False),
    "statistics alone": (NORM_TASK, (), True),
    "FedPer": (LAYERS, ("output/*",), False),
    "FedRep": (LAYERS, ("output/*",), False),
    "LG-FedAvg": (LAYERS, ("*0/weight", "*0/bias"), False),
}


def test_frozen_parameters_are_excluded_from_decay_and_clipping():
    decay, clip = 2.0, 0.02
    local = dataclasses.replace(LOCAL, weight_decay=decay, clip=clip)
    alternate = dataclasses.replace(local, steps=1)
    start, patterns = LAYERS.init(jax.random.key(4)), ("output/*",)
    method = Personalized(FedAvg(local=local), personal_params=patterns, alternate=alternate)
    result = run(method, task=LAYERS, params=start, **OPTIONS)
    params, _, own, _ = plain_loop(LAYERS, start, patterns, False, True, decay, clip)
    assert_near(result.params, params)
    for client in (1, 3, 5):
        for name, leaf in result.client_state(client).own.items():
            assert_near(leaf, dict(zip(tree.leaf_names(params), jax.tree.leaves(own[client]), strict=True))[name])


@pytest.mark.parametrize("method", ["noise", "decay", "attack"])
def test_personal_parameters_do_not_change_at_the_server(method: str):
    inner = FedAvg(local=LOCAL)
    if method == "decay":
        inner = FedAvg(local=LOCAL, server_optimizer=Optax.of(optax.adamw, learning_rate=0.1, weight_decay=0.1))
    stays = Personalized(
        Attacked(inner, attack=Gaussian()) if method == "attack" else inner, personal_params=("output/*",)
    )
    around = ClientDP(stays, clip=Flat(1.0), noise=1.0) if method == "noise" else stays
    start = LAYERS.init(jax.random.key(4))
    result = run(around, task=LAYERS, params=start, **OPTIONS)
    leaves = map(jax.tree.leaves, (start, result.params))
    for name, old, new in zip(tree.leaf_names(start), *leaves, strict=True):
        assert np.array_equal(old, new) == name.startswith("output/")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_rounds_agree_with_a_plain_loop(case: str):
    task, patterns, at_home = CASES[case]
    if case == "LG-FedAvg":
        patterns = (tree.leaf_names(task.init(jax.random.key(0)))[0].split("/")[0] + "/*",)
    start = task.init(jax.random.key(4))
    alternate = dataclasses.replace(LOCAL, steps=1) if case == "FedRep" else None
    method = Personalized(FedAvg(local=LOCAL), personal_params=patterns, statistics=at_home, alternate=alternate)
    result = run(method, task=task, params=start, **OPTIONS)
    params, mean, own, statistics = plain_loop(task, start, patterns, at_home, alternate is not None)
    steps = STEPS if alternate is None else STEPS + 1
    assert result.events[-1]["gradients"] == ROUNDS * 2 * steps * ROWS
    assert_near(result.params, params)
    assert_near(result.statistics, mean)
    names, personal = tree.leaf_names(params), jax.tree.leaves(personal_mask(params, patterns))
    for client in (1, 3, 5):
        leaves = dict(zip(names, jax.tree.leaves(own[client]), strict=True))
        assert_near(result.client_state(client).own, {n: leaves[n] for n, h in zip(names, personal, strict=True) if h})
        if at_home:
            row = result.homes[client]
            assert_near(jax.tree.map(lambda a, row=row: a[row], result.store.statistics), statistics[client])
    travels = sum(leaf.nbytes for leaf, h in zip(jax.tree.leaves(params), personal, strict=True) if not h)
    travels += 0 if at_home else tree.num_bytes(mean)
    assert [event["bytes_up"] for event in result.events] == [2 * travels * r for r in (1, 2, 3)]
    assert [event["bytes_down"] for event in result.events] == [2 * travels * r for r in (1, 2, 3)]
    loss, losses = (
        jax.jit(task.evaluation_loss),
        [],
    )  # metrics of each client's model on its own samples; the global test set belongs to no client
    for client in range(FEDERATION.num_clients):
        x = jax.tree.map(
            lambda mine, g, h: mine if h else g, own.get(client, params), params, personal_mask(params, patterns)
        )
        moving = statistics.get(client, start[1]) if at_home else mean
        rows = slice(*FEDERATION.offsets[client : client + 2])
        model = Variables(x, moving) if isinstance(start, Variables) else x
        losses.extend(loss(model, Batch(*(np.asarray(a)[rows] for a in FEDERATION.train))))
    np.testing.assert_allclose(result.events[-1]["train_personal_loss"], np.mean(losses), rtol=1e-4)


@pytest.mark.parametrize("plan", slow_cases(["scan", "vmap", "loop", "debug"]))
def test_user_defined_fedbn_agrees_with_the_wrapper(plan: str):
    wrapped = Personalized(FedAvg(local=LOCAL), personal_params=("norm/*",), statistics=True)
    expected, given = (run(m, task=NORM_TASK, **OPTIONS, plan=plan) for m in (wrapped, PersonalNorm(local=LOCAL)))
    assert_near(given.params, expected.params)
    for client in (1, 3, 5):
        assert_near(given.client_state(client), expected.client_state(client).own)
    for name in ("train_personal_loss", "train_personal_accuracy", "test_loss"):
        np.testing.assert_allclose(given.events[-1][name], expected.events[-1][name], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plan", slow_cases(["vmap", "loop", "debug"]))
def test_plans_agree(plan: str):
    method = Personalized(FedAvg(local=LOCAL), personal_params=("norm/*",), statistics=True)
    one, other = (run(method, task=NORM_TASK, **OPTIONS, plan=p) for p in ("scan", plan))
    assert_near(other.params, one.params)
    for client in (1, 3, 5):
        assert_near(other.client_state(client), one.client_state(client))
        actual, desired = (jax.tree.map(lambda a, r=r: a[r.homes[client]], r.store.statistics) for r in (one, other))  # noqa: B023
        assert_near(actual, desired)
    for name in ("train_personal_loss", "train_personal_accuracy"):
        np.testing.assert_allclose(other.events[-1][name], one.events[-1][name], rtol=1e-4)


@pytest.mark.slow
def test_resumed_runs_and_sweeps_keep_personal_parameters(tmp_path):
    methods = [
        Personalized(FedAvg(local=LocalSGD(lr=lr, steps=2, batch_size=3)), personal_params=("norm/*",), statistics=True)
        for lr in (0.1, 0.2)
    ]
    options = {"cohort_size": 3, "eval_every": 2, "devices": 1, "checkpoint_every": 1}
    uninterrupted = run(methods[0], task=NORM_TASK, **options)
    run(methods[0], task=NORM_TASK, **options | {"rounds": 2}, directory=tmp_path)
    assert_identical(run(methods[0], task=NORM_TASK, **options, directory=tmp_path, resume=True), uninterrupted)
    together = sweep(methods, NORM_TASK, FEDERATION, rounds=4, cohort_size=3, eval_every=2, mode="vectorized")
    np.testing.assert_allclose(
        together[0][0].events[-1]["train_personal_loss"], uninterrupted.events[-1]["train_personal_loss"], rtol=1e-4
    )
    assert_near(together[0][0].params, uninterrupted.params)


def test_without_personal_parameters_it_is_the_inner_method():
    method = FedAvg(local=LOCAL)
    one, other = (run(m, task=LAYERS, **OPTIONS) for m in (method, Personalized(method)))
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert one.events[-1]["bytes_up"] == other.events[-1]["bytes_up"]


@hyperparameters
class TwoModels(FedAvg):
    """Broadcasts two models, one of which contains the other's statistics."""

    def broadcast(self, server: Any) -> Any:
        return jax.tree.map(lambda a: jnp.stack([a, a]), server.params)

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        return super().client(tree.row(message, 0), state, data)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Personalized(TwoModels(), personal_params=("output/*",)), "the broadcast of TwoModels has another structure"),
        (
            Personalized(personal_params=("outptu/*",)),
            "no parameter has the name 'outptu/\\*' .*'output/\\*'.* output/bias",
        ),
        (Personalized(personal_params=("*",)), "none is left to train together"),
        (Personalized(Scaffold()), "without control variates, and Scaffold is none"),
        (Personalized(FedSGD(), personal_params=("output/*",)), "methods with local steps"),
        (Personalized(FedADMM(), personal_params=("output/*",)), "clients of FedADMM start from their own models"),
        (Personalized(alternate=LOCAL), "the steps of alternate train personal parameters, and there are none"),
    ],
    ids=["TwoModels", "typo", "all", "Scaffold", "FedSGD", "FedADMM", "nothing"],
)
def test_misuse_raises_a_clear_error(method: Personalized, message: str):
    with pytest.raises(FedraxError, match=message):
        run(method, task=LAYERS, rounds=1)


def test_local_optimizer_state_may_be_carried():
    local = LocalSGD(lr=0.05, steps=2, batch_size=3, optimizer=Optax.of(optax.adam), carry=True)
    result = run(Personalized(FedAvg(local=local), personal_params=("output/*",)), task=LAYERS, **OPTIONS)
    assert result.events[-1]["train_personal_loss"] < result.events[0]["train_personal_loss"]


@pytest.mark.parametrize("inner", [Ditto(FedAvg(local=LOCAL)), PFedMe(local=LOCAL)], ids=["Ditto", "pFedMe"])
def test_personal_models_of_the_inner_method_are_kept_apart(inner: Algorithm):
    method = Personalized(inner, personal_params=("output/*",))
    result = run(method, task=LAYERS, rounds=3, cohort_size=8)
    state = result.client_state(2)
    mine, whole = method.personal(result.params, state), inner.personal(result.params, state.inner)
    jax.tree.map(np.testing.assert_array_equal, mine, whole)


@pytest.mark.filterwarnings("error")
def test_client_models_of_a_float64_run_are_float64():
    method = Personalized(FedAvg(local=LOCAL), personal_params=("output/*",))
    result = run(method, task=LAYERS, dtype="float64", rounds=1, cohort_size=8)
    mine = method.personal(result.params, result.client_state(3))
    assert {leaf.dtype for leaf in jax.tree.leaves(mine)} == {np.dtype(np.float64)}
