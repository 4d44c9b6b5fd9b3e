"""Flower: its simulation runtime on Ray, Message API, ``FedAvg`` strategy, PyTorch clients."""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import time

import flwr
import ray
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from flwr.simulation import run_simulation

from benchmarks.runners.flower_client import app as client_app
from benchmarks.runners.torch_models import build, evaluate
from benchmarks.timing import RoundClock, report, runner_arguments
from benchmarks.workloads import Arrays, Workload


class TimedFedAvg(FedAvg):
    """Flower's ``FedAvg`` with the shared cohorts (the message names the client to train) and a clock."""

    def __init__(self, workload: Workload, arrays: Arrays, arrays_path: str, threads: int) -> None:
        super().__init__(
            fraction_train=workload.cohort / workload.clients,
            fraction_evaluate=0.0,
            min_available_nodes=workload.clients,
        )
        self.workload, self.cohorts, self.clock = workload, arrays.cohorts, RoundClock()
        self.job = {"workload": workload.name, "arrays": arrays_path, "threads": threads}

    def configure_train(self, server_round, arrays, config, grid):
        nodes, _ = sample_nodes(grid, self.min_available_nodes, self.workload.cohort)
        return [
            Message(
                content=RecordDict(
                    {
                        self.arrayrecord_key: arrays,
                        self.configrecord_key: ConfigRecord(self.job | {"client": int(client)}),
                    }
                ),
                message_type=MessageType.TRAIN,
                dst_node_id=node,
            )
            for node, client in zip(nodes, self.cohorts[server_round - 1], strict=True)
        ]

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        errors = [reply.error.reason for reply in replies if reply.has_error()]
        if errors or len(replies) != self.workload.cohort:
            raise RuntimeError(f"{len(replies)} replies, errors: {errors}")
        result = super().aggregate_train(server_round, replies)
        self.clock.tick()
        return result


def main() -> None:
    arguments, workload, arrays = runner_arguments("Flower's simulation.", actors=2, threads=1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    cores = os.cpu_count() or 1
    torch.set_num_threads(cores)  # threads of the server, which only averages
    strategy = TimedFedAvg(workload, arrays, os.path.abspath(arguments.arrays), arguments.threads)
    model = build(workload, arrays.initial)
    server_app = ServerApp()

    @server_app.main()
    def serve(grid, context):
        while len(list(grid.get_node_ids())) < workload.clients:
            time.sleep(0.05)
        strategy.clock.start()
        initial = ArrayRecord(model.state_dict())
        result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=workload.total_rounds)
        model.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.clients,
        backend_config={
            "init_args": {"num_cpus": cores, "num_gpus": 0, "include_dashboard": False},
            "client_resources": {"num_cpus": cores / arguments.actors, "num_gpus": 0.0},
        },
    )
    versions = {"flwr": flwr.__version__, "ray": ray.__version__, "torch": torch.__version__}
    report(strategy.clock, versions, *evaluate(model, arrays))


if __name__ == "__main__":
    main()
