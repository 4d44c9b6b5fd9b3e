"""Parameters and statistics that clients keep, against plain loops over rounds, clients and steps."""

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
from tests.wrappers.own_methods import NormAtHome

ROUNDS, COHORTS, STEPS, ROWS = 3, [[1, 3], [3, 5], [1, 3]], 2, 3
LOCAL = LocalSGD(lr=0.1, steps=STEPS, batch_size=ROWS)
DRAWN = np.random.default_rng(0).permuted(np.broadcast_to(np.arange(5), (ROUNDS, 2, STEPS, 5)), axis=-1)[..., :ROWS]
SCRIPT = Script(cohorts=COHORTS, batches=DRAWN)
OPTIONS: dict[str, Any] = {"script": SCRIPT, "rounds": ROUNDS, "eval_every": 1, "devices": 1}


class Network(nn.Module):
    """Two layers with batch norm between."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits."""
        x = nn.BatchNorm(momentum=0.8, use_running_average=not train, name="norm")(nn.Dense(5, name="hidden")(x))
        return nn.Dense(3, name="output")(jax.nn.relu(x))


NORM = classification(from_linen(Network(), FEDERATION.train[0][:1]))
LAYERS = classification(MLP(hidden=(6,)).build((4,), 3))


def home_of(params: Any, patterns: tuple[str, ...]) -> Any:
    """True where a parameter stays at home."""
    leaves = [any(fnmatchcase(name, p) for p in patterns) for name in tree.leaf_names(params)]
    return jax.tree.structure(params).unflatten(leaves)


def by_hand(
    task: Task,
    start: Any,
    patterns: tuple[str, ...],
    at_home: bool,
    alternate: bool = False,
    decay: float = 0.0,
    clip: float = np.inf,
) -> tuple[Any, Any, dict, dict]:
    """(global parameters, mean statistics, clients' parameters, clients' statistics).

    alternate: one step of what stays alone, then the steps of the rest alone. clip: the longest of these.
    """
    params, mean = start if isinstance(start, Variables) else (start, ())
    home, own, statistics = home_of(params, patterns), {}, {}

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
            x = jax.tree.map(lambda mine, g, h: mine if h else g, own.get(client, params), params, home)
            moving = statistics.get(client, start[1]) if at_home else mean
            drawn = [FEDERATION.offsets[client] + rows for rows in SCRIPT.batches[r, k]]
            batches = [Batch(*(np.asarray(a)[rows] for a in FEDERATION.train)) for rows in drawn]
            if alternate:
                first, _ = step(x, moving, batches[0], jax.tree.map(lambda h: not h, home))
                x = jax.tree.map(lambda old, new, h: new if h else old, x, first, home)
            for batch in batches:
                new, moving = step(x, moving, batch, home if alternate else None)
                x = jax.tree.map(lambda old, new, h: old if h and alternate else new, x, new, home)
            own[client], statistics[client] = x, moving
            ends.append(x)
            moved.append(moving)
        params = jax.tree.map(lambda p, h, *e: p if h else sum(e) / len(e), params, home, *ends)
        if not at_home:
            mean = jax.tree.map(lambda *m: sum(m) / len(m), *moved)
    return params, mean, own, statistics


def assert_near(a: Any, b: Any) -> None:
    """Up to rounding."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


CASES = {
    "FedBN": (NORM, ("norm/*",), True),
    "shared statistics": (NORM, ("norm/*",), False),
    "statistics alone": (NORM, (), True),
    "FedPer": (LAYERS, ("output/*",), False),
    "FedRep": (LAYERS, ("output/*",), False),
    "LG-FedAvg": (LAYERS, ("*0/weight", "*0/bias"), False),
}


def test_what_is_held_takes_no_part_in_decay_and_clipping():
    decay, clip = 2.0, 0.02
    local = dataclasses.replace(LOCAL, weight_decay=decay, clip=clip)
    alternate = dataclasses.replace(local, steps=1)
    start, patterns = LAYERS.init(jax.random.key(4)), ("output/*",)
    method = Personalized(FedAvg(local=local), personal_params=patterns, alternate=alternate)
    result = run(method, task=LAYERS, params=start, **OPTIONS)
    params, _, own, _ = by_hand(LAYERS, start, patterns, False, True, decay, clip)
    assert_near(result.params, params)
    for client in (1, 3, 5):
        for name, leaf in result.client_state(client).own.items():
            assert_near(leaf, dict(zip(tree.leaf_names(params), jax.tree.leaves(own[client]), strict=True))[name])


@pytest.mark.parametrize("method", ["noise", "decay", "attack"])
def test_what_stays_at_home_is_left_alone_on_the_server(method: str):
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
def test_rounds_are_those_of_a_plain_loop(case: str):
    task, patterns, at_home = CASES[case]
    if case == "LG-FedAvg":
        patterns = (tree.leaf_names(task.init(jax.random.key(0)))[0].split("/")[0] + "/*",)
    start = task.init(jax.random.key(4))
    alternate = dataclasses.replace(LOCAL, steps=1) if case == "FedRep" else None
    method = Personalized(FedAvg(local=LOCAL), personal_params=patterns, statistics=at_home, alternate=alternate)
    result = run(method, task=task, params=start, **OPTIONS)
    params, mean, own, statistics = by_hand(task, start, patterns, at_home, alternate is not None)
    steps = STEPS if alternate is None else STEPS + 1
    assert result.events[-1]["gradients"] == ROUNDS * 2 * steps * ROWS
    assert_near(result.params, params)
    assert_near(result.statistics, mean)
    names, home = tree.leaf_names(params), jax.tree.leaves(home_of(params, patterns))
    for client in (1, 3, 5):
        leaves = dict(zip(names, jax.tree.leaves(own[client]), strict=True))
        assert_near(result.client_state(client).own, {n: leaves[n] for n, h in zip(names, home, strict=True) if h})
        if at_home:
            row = result.homes[client]
            assert_near(jax.tree.map(lambda a, row=row: a[row], result.store.statistics), statistics[client])
    travels = sum(leaf.nbytes for leaf, h in zip(jax.tree.leaves(params), home, strict=True) if not h)
    travels += 0 if at_home else tree.num_bytes(mean)
    assert [event["bytes_up"] for event in result.events] == [2 * travels * r for r in (1, 2, 3)]
    assert [event["bytes_down"] for event in result.events] == [2 * travels * r for r in (1, 2, 3)]
    loss, losses = (
        jax.jit(task.evaluation_loss),
        [],
    )  # of each client's own model on its own samples; test data belong to nobody
    for client in range(FEDERATION.num_clients):
        x = jax.tree.map(
            lambda mine, g, h: mine if h else g, own.get(client, params), params, home_of(params, patterns)
        )
        moving = statistics.get(client, start[1]) if at_home else mean
        rows = slice(*FEDERATION.offsets[client : client + 2])
        model = Variables(x, moving) if isinstance(start, Variables) else x
        losses.extend(loss(model, Batch(*(np.asarray(a)[rows] for a in FEDERATION.train))))
    np.testing.assert_allclose(result.events[-1]["train_personal_loss"], np.mean(losses), rtol=1e-4)


@pytest.mark.parametrize("plan", slow_cases(["scan", "vmap", "loop", "debug"]))
def test_fedbn_written_out_is_the_same(plan: str):
    """A method of one's own in a few lines, against the wrapper."""
    wrapped = Personalized(FedAvg(local=LOCAL), personal_params=("norm/*",), statistics=True)
    expected, given = (run(m, task=NORM, **OPTIONS, plan=plan) for m in (wrapped, NormAtHome(local=LOCAL)))
    assert_near(given.params, expected.params)
    for client in (1, 3, 5):
        assert_near(given.client_state(client), expected.client_state(client).own)
    for name in ("train_personal_loss", "train_personal_accuracy", "test_loss"):
        np.testing.assert_allclose(given.events[-1][name], expected.events[-1][name], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plan", slow_cases(["vmap", "loop", "debug"]))
def test_plans_agree(plan: str):
    method = Personalized(FedAvg(local=LOCAL), personal_params=("norm/*",), statistics=True)
    one, other = (run(method, task=NORM, **OPTIONS, plan=p) for p in ("scan", plan))
    assert_near(other.params, one.params)
    for client in (1, 3, 5):
        assert_near(other.client_state(client), one.client_state(client))
        mine, theirs = (jax.tree.map(lambda a, r=r: a[r.homes[client]], r.store.statistics) for r in (one, other))  # noqa: B023
        assert_near(mine, theirs)
    for name in ("train_personal_loss", "train_personal_accuracy"):
        np.testing.assert_allclose(other.events[-1][name], one.events[-1][name], rtol=1e-4)


@pytest.mark.slow
def test_resume_and_sweeps_find_what_stayed_at_home(tmp_path):
    methods = [
        Personalized(FedAvg(local=LocalSGD(lr=lr, steps=2, batch_size=3)), personal_params=("norm/*",), statistics=True)
        for lr in (0.1, 0.2)
    ]
    options = {"cohort_size": 3, "eval_every": 2, "devices": 1, "checkpoint_every": 1}
    whole = run(methods[0], task=NORM, **options)
    run(methods[0], task=NORM, **options | {"rounds": 2}, directory=tmp_path)
    assert_identical(run(methods[0], task=NORM, **options, directory=tmp_path, resume=True), whole)
    together = sweep(methods, NORM, FEDERATION, rounds=4, cohort_size=3, eval_every=2, mode="vectorized")
    np.testing.assert_allclose(
        together[0][0].events[-1]["train_personal_loss"], whole.events[-1]["train_personal_loss"], rtol=1e-4
    )
    assert_near(together[0][0].params, whole.params)


def test_with_nothing_at_home_it_is_the_method_inside():
    method = FedAvg(local=LOCAL)
    one, other = (run(m, task=LAYERS, **OPTIONS) for m in (method, Personalized(method)))
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert one.events[-1]["bytes_up"] == other.events[-1]["bytes_up"]


@hyperparameters
class TwoModels(FedAvg):
    """Sends two models down, one upon the other."""

    def broadcast(self, server: Any) -> Any:
        return jax.tree.map(lambda a: jnp.stack([a, a]), server.params)

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        return super().client(tree.row(message, 0), state, data)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (Personalized(TwoModels(), personal_params=("output/*",)), "the broadcast of TwoModels has another structure"),
        (Personalized(personal_params=("outptu/*",)), "no parameter has the name 'outptu/\\*'; .* output/bias"),
        (Personalized(personal_params=("*",)), "none is left to train together"),
        (Personalized(Scaffold()), "without control variates, and Scaffold is none"),
        (Personalized(FedSGD(), personal_params=("output/*",)), "methods with local steps"),
        (Personalized(FedADMM(), personal_params=("output/*",)), "clients of FedADMM start from their own models"),
        (Personalized(alternate=LOCAL), "the steps of alternate train personal parameters, and there are none"),
    ],
    ids=["TwoModels", "typo", "all", "Scaffold", "FedSGD", "FedADMM", "nothing"],
)
def test_misuse_raises_a_clear_error(method: Personalized, sentence: str):
    with pytest.raises(FedraxError, match=sentence):
        run(method, task=LAYERS, rounds=1)


def test_a_local_optimizer_may_be_carried_besides():
    local = LocalSGD(lr=0.05, steps=2, batch_size=3, optimizer=Optax.of(optax.adam), carry=True)
    result = run(Personalized(FedAvg(local=local), personal_params=("output/*",)), task=LAYERS, **OPTIONS)
    assert result.events[-1]["train_personal_loss"] < result.events[0]["train_personal_loss"]


@pytest.mark.parametrize("inner", [Ditto(FedAvg(local=LOCAL)), PFedMe(local=LOCAL)], ids=["Ditto", "pFedMe"])
def test_a_whole_model_of_the_clients_own_is_not_mixed_with_what_stays_at_home(inner: Algorithm):
    method = Personalized(inner, personal_params=("output/*",))
    result = run(method, task=LAYERS, rounds=3, cohort_size=8)
    state = result.client_state(2)
    mine, whole = method.personal(result.params, state), inner.personal(result.params, state.inner)
    jax.tree.map(np.testing.assert_array_equal, mine, whole)


@pytest.mark.filterwarnings("error")
def test_models_of_a_run_in_double_precision_are_put_together_outside_it():
    method = Personalized(FedAvg(local=LOCAL), personal_params=("output/*",))
    result = run(method, task=LAYERS, dtype="float64", rounds=1, cohort_size=8)
    mine = method.personal(result.params, result.client_state(3))
    assert {leaf.dtype for leaf in jax.tree.leaves(mine)} == {np.dtype(np.float64)}
