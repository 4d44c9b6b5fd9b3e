"""FedLab: its standalone pipeline with the serial client trainer, PyTorch models."""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from unittest import mock

# FedLab imports torchvision for its dataset downloaders, which are not used here.
for name in ("torchvision", "torchvision.transforms", "torchvision.datasets"):
    sys.modules[name] = mock.MagicMock()

import fedlab  # noqa: E402
import torch  # noqa: E402
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402
from fedlab.utils import Aggregators, SerializationTool  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from benchmarks.runners.torch_models import build, evaluate  # noqa: E402
from benchmarks.timing import RoundClock, report, runner_arguments  # noqa: E402
from benchmarks.workloads import Arrays  # noqa: E402


class ClientSummary:
    """FedLab's interface of a federated dataset, with one loader per client."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.x, self.y = torch.from_numpy(arrays.x), torch.from_numpy(arrays.y)

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        rows = self.arrays.rows(client)
        return DataLoader(TensorDataset(self.x[rows], self.y[rows]), batch_size=batch_size)


class Server(FedAvgServerHandler):
    """FedLab's server with the shared cohorts, and a weighted instead of a plain mean."""

    arrays: Arrays

    def sample_clients(self):
        self.cohort = self.arrays.cohorts[self.round].tolist()
        return self.cohort

    def global_update(self, buffer):
        weights = [float(self.arrays.size(k)) for k in self.cohort]
        mean = Aggregators.fedavg_aggregate([upload[0] for upload in buffer], weights)
        SerializationTool.deserialize_model(self._model, mean)


class Pipeline(StandalonePipeline):
    clock: RoundClock

    def evaluate(self):  # FedLab calls this at the end of each round
        self.clock.tick()


def main() -> None:
    arguments, workload, arrays = runner_arguments("FedLab.", threads=1)
    torch.set_num_threads(arguments.threads)
    model = build(workload, arrays.initial)
    server = Server(model, workload.total_rounds, sample_ratio=workload.cohort / workload.clients)
    server.arrays = arrays
    trainer = FedAvgSerialClientTrainer(model, workload.clients)
    trainer.setup_dataset(ClientSummary(arrays))
    trainer.setup_optim(workload.epochs, workload.batch, workload.learning_rate)
    pipeline = Pipeline(server, trainer)
    pipeline.clock = RoundClock()
    pipeline.clock.start()
    pipeline.main()
    versions = {"fedlab": fedlab.__version__, "torch": torch.__version__}
    report(pipeline.clock, versions, *evaluate(server.model, arrays))


if __name__ == "__main__":
    main()
