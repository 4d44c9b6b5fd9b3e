"""Uploads of narrow types are averaged in float32; integers are summed exactly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import Algorithm, ClientOutput, Cohort, hyperparameters
from fedrax.config.annotations import Static
from fedrax.contract import Info
from fedrax.contract.client_data import ClientData
from fedrax.simulation import Script
from tests.simulation.problems import run


@hyperparameters
class ConstantUploads(Algorithm):
    """Uploads a number in one dtype, and an integer total in another."""

    kind: Static[str] = "int8"

    def init(self, params: Any, num_clients: int) -> Any:
        """Parameters, the mean and the total."""
        from tests.wrappers.own_methods import Server

        zero = {"mean": jnp.zeros(()), "total": jnp.uint32(0), "half": jnp.zeros(())}
        return Server({"model": params, **zero})

    def params(self, server: Any) -> Any:
        return server.params["model"]

    def with_params(self, server: Any, params: Any) -> Any:
        return server._replace(params=server.params | {"model": params})

    def client(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """Client c uploads c + 1, and 2^31 + c in the total."""
        number = data.assignment.client
        counted = (jnp.uint32(2**31) + number.astype(jnp.uint32), (256 + number).astype(jnp.bfloat16))
        return ClientOutput(upload=(number + 1).astype(self.kind), total=counted)

    def server(self, server: Any, cohort: Cohort) -> tuple[Any, Info]:
        """Store both."""
        total, half = cohort.total
        assert cohort.mean.dtype == half.dtype == jnp.float32 and total.dtype == jnp.uint32
        return server._replace(params=server.params | {"mean": cohort.mean, "total": total, "half": half}), {}


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kind", ["int8", "bfloat16", "int4"])
@pytest.mark.parametrize("plan", [{"plan": "scan", "devices": 2}, {"plan": "vmap", "devices": 1}, {"plan": "loop"}])
def test_means_are_not_rounded_to_the_dtype_of_uploads(kind: str, plan: dict):
    result = run(ConstantUploads(kind=kind), script=Script(cohorts=[[0, 3, 6]]), rounds=1, **plan)
    found = jax.tree.map(np.asarray, result.server.params)
    np.testing.assert_allclose(found["mean"], np.mean([1, 4, 7]), rtol=1e-6)
    assert found["total"] == (3 * 2**31 + 9) % 2**32
    assert found["half"] == 256 + 260 + 262  # in bfloat16 these numbers are rounded to even ones
    assert result.events[0]["bytes_up"] == 3 * ({"int8": 1, "bfloat16": 2, "int4": 1}[kind] + 4 + 2)
