"""Local steps of PyTorch, plain and by Opacus: a part of ``python -m benchmarks.privacy``."""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise

import opacus
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.runners.torch_models import MODELS
from benchmarks.timing import RESULT_PREFIX

SHAPES = {"W1": (784,)} | dict.fromkeys(("W3", "W5", "W6"), (3, 32, 32))


def main() -> None:
    parser = argparse.ArgumentParser(description="Local steps of PyTorch, plain and by Opacus.")
    parser.add_argument("--point", required=True)
    point = json.loads(parser.parse_args().point)
    torch.set_num_threads(1)
    result = {"seconds": time_steps(**point), "version": opacus.__version__}
    print(RESULT_PREFIX + json.dumps(result), flush=True)


def time_steps(model: str, how: str, batch: int, steps: int, rounds: int) -> list[float]:
    """Processor seconds of each round except the first two.

    how: "plain", or Opacus's ``grad_sample_mode``: "hooks" or "ghost".
    """
    module, x = MODELS[model](), torch.rand(batch * steps, *SHAPES[model])
    y, criterion = torch.randint(10, (batch * steps,)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    if how != "plain":
        parts = opacus.PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=how,
        )
        module, optimizer = parts[:2]
        criterion = parts[2] if how == "ghost" else F.cross_entropy
    ends = []
    for _ in range(rounds):
        for start in range(0, len(y), batch):
            rows = slice(start, start + batch)
            optimizer.zero_grad()
            criterion(module(x[rows]), y[rows]).backward()
            optimizer.step()
        ends.append(time.process_time())
    return [end - start for start, end in pairwise(ends)][1:]


if __name__ == "__main__":
    main()
