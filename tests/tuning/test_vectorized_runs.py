"""Vectorized runs with different hyper-parameters equal the same runs one after another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedrax import FedAvg, LocalSGD, sweep
from fedrax.config.annotations import Leaf
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput
from fedrax.contract.averaging import Averaging
from fedrax.optim import Optax
from tests.simulation.problems import FEDERATION, LOCAL, TASK


def adagrad(start: float) -> FedAvg:
    rule = Optax.of(optax.adagrad, initial_accumulator_value=start)
    return FedAvg(local=LocalSGD(lr=0.1, steps=3, batch_size=2, carry=True, optimizer=rule))


@hyperparameters
class InitialState(Averaging):
    """The client state is a number whose initial value is a hyper-parameter."""

    initial: float = 0.0

    def init_client(self, params: Any) -> Any:
        return jnp.asarray(self.initial)

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        result = self.local.run(data, message)
        update = jax.tree.map(lambda a, b: state * (a - b), result.params, message)
        return ClientOutput(upload=update, state=state + 1, info=result.info)

    def personal(self, params: Any, state: Any) -> Any:
        return jax.tree.map(lambda a: state * a, params)


@pytest.mark.parametrize(
    "methods",
    [[adagrad(0.01), adagrad(100.0)], [InitialState(LOCAL, initial=b) for b in (0.5, 2.0)]],
    ids=["optax", "own"],
)
def test_vectorized_runs_have_their_own_initial_client_states(methods: list[Algorithm]):
    options: dict[str, Any] = {"rounds": 3, "cohort_size": 3, "eval_every": 3, "devices": 1}
    together, in_turn = (sweep(methods, TASK, FEDERATION, **options, mode=m) for m in ("vectorized", "sequential"))
    for (one,), (other,) in zip(together, in_turn, strict=True):
        for name in other.events[-1].keys() - {"seconds"}:
            assert one.events[-1][name] == pytest.approx(other.events[-1][name], rel=1e-4), name
        for i in range(FEDERATION.num_clients):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), one.client_state(i), other.client_state(i)
            )


@hyperparameters
class Weighted(FedAvg):
    """Scales each client's update by its entry of ``factors``."""

    factors: Leaf[Any] = None
    first: Leaf[Any] = None

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        out = FedAvg.client(self, message, state, data)
        factor = self.factors[jnp.minimum(data.assignment.client, self.first[0])]
        return out._replace(upload=jax.tree.map(lambda u: factor * u, out.upload))


def test_integer_fields_stay_integers_in_vectorized_runs():
    lists = [np.linspace(0, 1, 8), np.linspace(1, 0, 8)]
    methods = [Weighted(LOCAL, factors=list_, first=np.array([k + 5])) for k, list_ in enumerate(lists)]
    together, in_turn = (
        sweep(methods, TASK, FEDERATION, rounds=2, cohort_size=3, mode=m) for m in ("vectorized", "sequential")
    )
    for (one,), (other,) in zip(together, in_turn, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one.params, other.params)
    uneven = [methods[0], Weighted(LOCAL, factors=np.ones(9), first=np.array([5]))]
    assert len(sweep(uneven, TASK, FEDERATION, rounds=1, cohort_size=3)) == 2
