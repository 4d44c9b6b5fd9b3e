"""Write your own method: FedAvg with exponentially averaged server steps. It is checked and compared with FedAvg.

python examples/own_method.py
fedrax run --algorithm examples/own_method.py:FedAvgEMA --algorithm.decay 0.8
"""

from typing import Any, NamedTuple

import jax

from fedrax import (
    Algorithm,
    ClientData,
    ClientOutput,
    Cohort,
    FedAvg,
    Federation,
    LocalSGD,
    check_algorithm,
    classification,
    hyperparameters,
    simulate,
    tree,
)
from fedrax.contract import Decay, Info
from fedrax.data import Shards, load
from fedrax.models import MLP


class Server(NamedTuple):
    """Global parameters, and the averaged step."""

    params: Any
    step: Any


@hyperparameters
class FedAvgEMA(Algorithm):
    """x <- x + v with v <- decay v + (1 - decay) mean Delta_i."""

    local: LocalSGD = LocalSGD()
    decay: Decay = 0.5
    """Weight of the previous step in the average."""

    def init(self, params: Any, num_clients: int) -> Server:
        """Server state before the first round: the averaged step is zero."""
        return Server(params, tree.zeros_like(params))

    def client(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """Run local SGD and upload the update."""
        result = self.local.run(data, message)
        return ClientOutput(upload=tree.sub(result.params, message), info=result.info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """Average the step over rounds, and apply it."""
        mix = lambda v, d: (self.decay * v + (1 - self.decay) * d).astype(v.dtype)  # noqa: E731
        step = jax.tree.map(mix, server.step, cohort.mean)
        return Server(tree.add(server.params, step), step), {"step": tree.norm(step)}


if __name__ == "__main__":
    check_algorithm(FedAvgEMA)
    digits = load("digits")
    federation = Federation.from_dataset(digits, Shards(clients=20, per_client=1), seed=0)
    task = classification(MLP(hidden=(64,)).build(digits.train.x.shape[1:], 10), digits.preprocess())
    local = LocalSGD(lr=0.2, steps=10)
    for method in (FedAvg(local=local), FedAvgEMA(local=local), FedAvgEMA(local=local, decay=0.8)):
        result = simulate(method, task, federation, rounds=50, cohort_size=5)
        print(f"{type(method).__name__}: accuracy {result.metric('test_accuracy')[-1][1]:.3f}")
