"""Flower's client side, in a separate module so that Ray's actors can import it."""

# pyright: reportMissingImports=false

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.runners.torch_models import build, local_sgd
from benchmarks.workloads import WORKLOADS, Arrays

app = ClientApp()


@cache
def resident(workload: str, arrays_path: str, threads: int):
    """Model and samples, which stay in the actor's process between clients."""
    torch.set_num_threads(threads)
    arrays = Arrays(arrays_path)
    return build(WORKLOADS[workload]), torch.from_numpy(arrays.x), torch.from_numpy(arrays.y), arrays


@app.train()
def train(message: Message, context: Context) -> Message:
    job = message.content["config"]
    model, x, y, arrays = resident(job["workload"], job["arrays"], job["threads"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rows = arrays.rows(job["client"])
    local_sgd(model, x[rows], y[rows], WORKLOADS[job["workload"]])
    upload = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": arrays.size(job["client"])}),
    }
    return Message(content=RecordDict(upload), reply_to=message)
