"""User-defined server optimizers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from fedrax import FedAvg, FedraxError, tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.optim.server import SGD
from tests.simulation.problems import LOCAL, run


@hyperparameters
class Halving:
    """A server optimizer that moves half of the mean update."""

    lr: float = 0.5

    def init(self, params: Any) -> Any:
        return ()

    def step(self, params: Any, state: Any, delta: Any, round: Any) -> Any:
        return tree.add_scaled(params, self.lr, delta), state


def test_user_defined_server_optimizer_is_used():
    one, other = run(FedAvg(LOCAL, Halving())), run(FedAvg(LOCAL, SGD(lr=0.5)))  # type: ignore[arg-type]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one.params, other.params)


class WithoutStep:
    """Not a server optimizer, because it lacks ``step``."""

    def init(self, params: Any) -> Any:
        return ()


def test_class_without_step_is_rejected_as_server_optimizer():
    with pytest.raises(FedraxError, match="server_optimizer must be of class"):
        run(FedAvg(LOCAL, hyperparameters(WithoutStep)()))
