"""Apple's pfl-research: ``FederatedAveraging`` on the ``SimulatedBackend``, PyTorch models.

One process with ``python -m``, several with ``torchrun -m`` (gloo: pfl's own multi-worker mode).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import os

import numpy as np
import torch
import torch.nn.functional as F
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

from benchmarks.runners.torch_models import MODELS, device_peak_mb, evaluate, finished, load, on_device
from benchmarks.timing import RoundClock, report, runner_arguments
from benchmarks.workloads import Arrays, Workload


class Ticks(TrainingProcessCallback):
    def __init__(self, clock: RoundClock, device: torch.device) -> None:
        self.clock, self.device = clock, device

    def on_train_begin(self, *, model):
        self.clock.start()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        finished(self.device)
        self.clock.tick()
        return False, Metrics()


def federated_dataset(workload: Workload, arrays: Arrays, device: torch.device) -> FederatedDataset:
    x, y = torch.from_numpy(arrays.x).to(device), torch.from_numpy(arrays.y).to(device)
    users = [
        PyTorchTensorDataset((x[arrays.rows(k)], y[arrays.rows(k)]), user_id=str(k)) for k in range(workload.clients)
    ]
    # Balancing workers by data size makes pfl prefetch thousands of users, so that the sampler must be endless. Without
    # balancing, workers can only share cohorts whose size is a multiple of their number.
    order = itertools.cycle(arrays.cohorts.ravel().tolist())
    uneven = len(set(np.diff(arrays.offsets).tolist())) > 1 or workload.cohort % 2 > 0
    sizes = {k: arrays.size(k) for k in range(workload.clients)} if uneven else None
    return FederatedDataset(lambda user: users[user], lambda: next(order), sizes)


def model_class(workload: Workload) -> type:
    class Model(MODELS[workload.name]):
        def loss(self, x, y):
            return F.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x, y):
            return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(y))}

    return Model


def main() -> None:
    arguments, workload, arrays = runner_arguments("Apple's pfl-research.", threads=1)
    torch.set_num_threads(arguments.threads)
    np.random.seed(0)  # noqa: NPY002 - pfl uses the global generator
    os.environ["PFL_PYTORCH_DEVICE"] = arguments.device
    device = on_device(arguments.device, arguments.precision)
    module = model_class(workload)().to(device)
    load(module, arrays.initial)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    dataset = federated_dataset(workload, arrays, device)
    backend = SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByDatapoints()])

    clock = RoundClock()
    FederatedAveraging().run(
        backend=backend,
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=workload.total_rounds,
            evaluation_frequency=10**6,  # the first round is evaluated anyway, because pfl cannot disable it
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_batch_size=workload.batch,
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.learning_rate,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Ticks(clock, device)],
        send_metrics_to_platform=False,
    )
    if os.environ.get("RANK", "0") == "0":
        versions = {"pfl": pfl_version, "torch": torch.__version__}
        report(clock, versions, *evaluate(module, arrays), device_peak_mb(device))
    if torch.distributed.is_initialized():  # a process that exits normally sometimes aborts in its communication thread
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
