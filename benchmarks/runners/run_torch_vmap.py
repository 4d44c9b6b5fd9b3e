"""A cohort side by side in PyTorch: ``torch.func`` (functional_call, grad, vmap over clients), eager or compiled.

With ``--compiled 1`` the local step is compiled by ``torch.compile``; its compilation is part of the first round.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from torch.func import functional_call, grad, vmap

from benchmarks.runners.torch_models import build, cross_entropy, device_peak_mb, evaluate, finished, on_device
from benchmarks.timing import RoundClock, report, runner_arguments

Weights = dict[str, torch.Tensor]


def main() -> None:
    arguments, workload, arrays = runner_arguments("PyTorch, clients side by side.", compiled=0, threads=1)
    torch.set_num_threads(arguments.threads)
    device = on_device(arguments.device, arguments.precision)
    model = build(workload, arrays.initial).to(device)
    frozen = {name: w.detach() for name, w in model.named_parameters() if not w.requires_grad}
    server = {name: w.detach().clone() for name, w in model.named_parameters() if w.requires_grad}
    clients, size = workload.clients, arrays.size(0)
    x, y = (torch.from_numpy(a).to(device).unflatten(0, (clients, size)) for a in (arrays.x, arrays.y))
    cohorts = torch.from_numpy(arrays.cohorts).to(device)

    def loss(weights: Weights, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(model, {**weights, **frozen}, (x,)), y)

    def step(weights: Weights, x: torch.Tensor, y: torch.Tensor) -> Weights:
        """One step of all clients, weights [S, ...], x and y [S, B, ...]."""
        gradients = vmap(grad(loss), randomness="different")(weights, x, y)
        return {name: w - workload.learning_rate * gradients[name] for name, w in weights.items()}

    if arguments.compiled:
        step = torch.compile(step)
    clock = RoundClock()
    clock.start()
    with torch.no_grad():  # of the loop; torch.func differentiates inside
        for cohort in cohorts:
            own_x, own_y = x[cohort], y[cohort]
            weights = {name: w.expand(len(cohort), *w.shape).contiguous() for name, w in server.items()}
            for _ in range(workload.epochs):
                for start in range(0, size, workload.batch):
                    batch = slice(start, start + workload.batch)
                    weights = step(weights, own_x[:, batch].contiguous(), own_y[:, batch].contiguous())
            server = {name: w.mean(0) for name, w in weights.items()}
            finished(device)
            clock.tick()

    model.load_state_dict({**server, **frozen})
    found = evaluate(model, arrays)
    report(clock, {"torch": torch.__version__}, *found, device_peak_mb(device))


if __name__ == "__main__":
    main()
