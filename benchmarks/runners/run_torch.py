"""A plain PyTorch loop: one module, weights copied for each client, tensor slices as batches, a running mean."""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch

from benchmarks.runners.torch_models import build, device_peak_mb, evaluate, finished, local_sgd, on_device, trained
from benchmarks.timing import RoundClock, report, runner_arguments


def main() -> None:
    arguments, workload, arrays = runner_arguments("A plain PyTorch loop.", threads=1)
    torch.set_num_threads(arguments.threads)
    device = on_device(arguments.device, arguments.precision)
    server, client = build(workload, arrays.initial).to(device), build(workload).to(device)
    x, y = torch.from_numpy(arrays.x).to(device), torch.from_numpy(arrays.y).to(device)
    server_weights, client_weights = trained(server), trained(client)
    client.load_state_dict(server.state_dict())  # the frozen weights are never copied again
    sums = [torch.zeros_like(weight) for weight in server_weights]

    clock = RoundClock()
    clock.start()
    for cohort in arrays.cohorts:
        for k in cohort:
            with torch.no_grad():
                for mine, theirs in zip(client_weights, server_weights, strict=True):
                    mine.copy_(theirs)
            rows = arrays.rows(k)
            local_sgd(client, x[rows], y[rows], workload)
            with torch.no_grad():
                for total, mine in zip(sums, client_weights, strict=True):
                    total.add_(mine, alpha=arrays.size(k))
        samples = sum(arrays.size(k) for k in cohort)
        with torch.no_grad():
            for theirs, total in zip(server_weights, sums, strict=True):
                theirs.copy_(total / samples)
                total.zero_()
        finished(device)
        clock.tick()

    found = evaluate(server, arrays)
    report(clock, {"torch": torch.__version__}, *found, device_peak_mb(device))


if __name__ == "__main__":
    main()
