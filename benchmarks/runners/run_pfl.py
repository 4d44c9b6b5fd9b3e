"""Apple's pfl-research: ``FederatedAveraging`` on the ``SimulatedBackend``, PyTorch models.

One process with ``python -m``, several with ``torchrun -m`` (gloo: pfl's own multi-worker mode).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.version import __version__ as pfl_version

from benchmarks.runners.torch_models import cross_entropy, device_peak_mb, evaluate, finished, load, network, on_device
from benchmarks.timing import RoundClock, TargetClock, report, runner_arguments
from benchmarks.workloads import EVALUATE_EVERY, TARGET_ACCURACY, Arrays, Workload


class Ticks(TrainingProcessCallback):
    """Ends each round; in a whole benchmark it also evaluates every ten rounds."""

    def __init__(self, clock: RoundClock, device: torch.device, evaluated: Callable[[], None] | None) -> None:
        self.clock, self.device, self.evaluated = clock, device, evaluated

    def on_train_begin(self, *, model):
        self.clock.start()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        finished(self.device)
        self.clock.tick()
        if self.evaluated is not None and (central_iteration + 1) % EVALUATE_EVERY == 0:
            self.evaluated()
        return False, Metrics()


def federated_dataset(
    workload: Workload, arrays: Arrays, cohorts: np.ndarray, device: torch.device
) -> FederatedDataset:
    x, y = torch.from_numpy(arrays.x).to(device), torch.from_numpy(arrays.y).to(device)
    users = [
        PyTorchTensorDataset((x[arrays.rows(k)], y[arrays.rows(k)]), user_id=str(k)) for k in range(workload.clients)
    ]
    # Balancing workers by data size makes pfl prefetch thousands of users, so that the sampler must be endless. Without
    # balancing, workers can only share cohorts whose size is a multiple of their number.
    order = itertools.cycle(cohorts.ravel().tolist())
    uneven = len(set(np.diff(arrays.offsets).tolist())) > 1 or workload.cohort % 2 > 0
    sizes = {k: arrays.size(k) for k in range(workload.clients)} if uneven else None
    return FederatedDataset(lambda user: users[user], lambda: next(order), sizes)


def model_class(workload: Workload) -> type:
    class Model(network(workload)):
        def loss(self, x, y):
            return cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x, y):
            return {"loss": Weighted(cross_entropy(self(x), y, "sum").item(), y.numel())}

    return Model


def main() -> None:
    arguments, workload, arrays = runner_arguments("Apple's pfl-research.", threads=1, rounds=0)
    target = TargetClock(TARGET_ACCURACY)
    torch.set_num_threads(arguments.threads)
    np.random.seed(0)  # noqa: NPY002 - pfl uses the global generator
    os.environ["PFL_PYTORCH_DEVICE"] = arguments.device
    device = on_device(arguments.device, arguments.precision)
    module = model_class(workload)(**workload.sizes).to(device)
    load(module, arrays.initial)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    rng, rounds = np.random.default_rng(0), arguments.rounds or workload.total_rounds
    cohorts = arrays.cohorts
    if arguments.rounds:  # a whole benchmark, with cohorts drawn at random
        cohorts = np.stack([rng.choice(workload.clients, workload.cohort, replace=False) for _ in range(rounds)])
    dataset = federated_dataset(workload, arrays, cohorts, device)
    backend = SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByDatapoints()])

    def evaluated() -> None:
        target.reached(evaluate(module, arrays)[1])
        module.train()

    clock = RoundClock()
    FederatedAveraging().run(
        backend=backend,
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**6,  # the first round evaluates all the same: pfl has no "never"
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_batch_size=workload.batch,
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.learning_rate,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Ticks(clock, device, evaluated if arguments.rounds else None)],
        send_metrics_to_platform=False,
    )
    if os.environ.get("RANK", "0") == "0":
        versions = {"pfl": pfl_version, "torch": torch.__version__}
        more = target.summary() if arguments.rounds else {}
        if arguments.rounds:
            clock = RoundClock([target.elapsed, target.elapsed / rounds], target.elapsed)
        report(clock, versions, *evaluate(module, arrays), device_peak_mb(device), **more)
    if torch.distributed.is_initialized():  # a process that just ends now and then aborts in its communication thread
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
