"""A round of `benchmarks.networks` in plain PyTorch: ``... run_torch_network NAME THREADS``."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch.nn import functional as F

from benchmarks.network_cases import CASES, CLIENTS, LEARNING_RATE
from benchmarks.runners.torch_networks import network
from benchmarks.timing import RESULT_PREFIX

ROUNDS = 7


def main() -> None:
    name, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    case, model = CASES[name], network(name)
    x, y = (torch.from_numpy(a).long() if a.dtype.kind == "i" else torch.from_numpy(a) for a in case.arrays())
    if not case.tokens:
        x = x.movedim(-1, 1).contiguous()
    weights = list(model.parameters())
    server = [weight.detach().clone() for weight in weights]
    seconds = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        total = [torch.zeros_like(weight) for weight in server]
        for _ in range(CLIENTS):
            with torch.no_grad():
                for mine, theirs in zip(weights, server, strict=True):
                    mine.copy_(theirs)
            for first in range(0, len(x), case.batch):
                outputs, labels = model(x[first : first + case.batch]), y[first : first + case.batch]
                if case.tokens and case.labels:
                    outputs, labels = outputs.flatten(0, 1), labels.flatten()
                gradients = torch.autograd.grad(F.cross_entropy(outputs, labels), weights)
                with torch.no_grad():
                    for weight, gradient in zip(weights, gradients, strict=True):
                        weight.sub_(gradient, alpha=LEARNING_RATE)
            with torch.no_grad():
                for sum_, weight in zip(total, weights, strict=True):
                    sum_.add_(weight, alpha=1 / CLIENTS)
        server = total
        seconds.append(time.monotonic() - began)
    parameters = sum(weight.numel() for weight in weights)
    result = {"round": statistics.median(seconds[2:]), "parameters": parameters, "torch": torch.__version__}
    print(RESULT_PREFIX + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
