"""Server and client states of user-defined methods: any structure of arrays, and clear errors for anything else."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, FedraxError, tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import ClientOutput, Cohort
from tests.simulation.problems import LOCAL, run


class State(NamedTuple):
    params: Any
    extra: Any = ()


@hyperparameters
class WithExtraState(FedAvg):
    """FedAvg with an additional field of the server state."""

    def init(self, params: Any, n: int) -> State:
        return State(params, self.extra(n))

    def extra(self, n: int) -> Any:
        return ()

    def server(self, server: State, cohort: Cohort) -> Any:
        return server._replace(params=tree.add(server.params, cohort.mean)), {}


def test_arguments_of_methods_may_have_any_names():
    jax.tree.map(np.testing.assert_array_equal, run(WithExtraState(LOCAL)).params, run(FedAvg(LOCAL)).params)


def test_float64_numpy_arrays_in_a_state_become_float32():
    """The server state cannot contain 64-bit arrays without JAX's x64 mode."""

    @hyperparameters
    class Counting(WithExtraState):
        def extra(self, n: int) -> Any:
            return np.zeros(n), np.log(n), np.arange(n)

    kept = run(Counting(LOCAL)).server.extra
    assert [leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)] == [4, 4, 4]


def test_infinite_initial_state_is_rejected():
    @hyperparameters
    class Best(WithExtraState):
        def extra(self, n: int) -> Any:
            return {"best": jnp.inf}

    for plan in ("scan", "debug"):
        with pytest.raises(FedraxError, match=r"Best.init returns .*best is not finite.*finfo"):
            run(Best(LOCAL), plan=plan)


@pytest.mark.parametrize("where", ["server", "client"])
def test_random_key_in_a_state_is_rejected(where: str):
    @hyperparameters
    class Drawing(WithExtraState):
        def extra(self, n: int) -> Any:
            return jax.random.key(0) if where == "server" else ()

        def init_client(self, params: Any) -> Any:
            return jax.random.key(0) if where == "client" else ()

    with pytest.raises(FedraxError, match=r"random key in its state: keep its numbers, jax\.random\.key_data"):
        run(Drawing(LOCAL))


def test_initial_client_state_none_is_rejected():
    @hyperparameters
    class Later(FedAvg):
        def init_client(self, params: Any) -> Any:
            return {"before": None}

        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            output = super().client(message, state, data)
            return output._replace(state={"before": output.upload})

    with pytest.raises(FedraxError, match="init_client's holds no numbers: give it arrays in place of None"):
        run(Later(LOCAL))
