"""Federated LoRA of BERT: the cost of conversion, compilation and rounds, and the same rounds as a loop in PyTorch.

``python -m benchmarks.fine_tuning`` needs torch, transformers and peft. It builds a BERT classifier with random weights
and adapters of rank 8 at the queries and values, converts it by `from_torch`, runs rounds of 2 clients with 4 steps on
8 sequences of 64 tokens each, and the same rounds client by client in PyTorch, each in a process of its own with
nothing compiled before. It appends the times to ``results/fine_tuning.jsonl`` and writes ``fine_tuning.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import markdown_table, write_page
from benchmarks.points import REPOSITORY
from benchmarks.sessions import RESULTS, Session

RAW = RESULTS / "fine_tuning.jsonl"
CLIENTS, COHORT, STEPS, BATCH, TOKENS, WORDS, LR = 10, 2, 4, 8, 64, 30_000, 0.01
SIDES = ("fedrax", "PyTorch")
COLUMNS = {
    "convert": "from_torch, s",
    "first": "first round, s",
    "round": "further rounds, s",
    "peak": "peak memory, GB",
    "imported": "of it imports and the network, GB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="layers of BERT (default 12: BERT-base)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each run (default 4)")
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the medians are shown (default 3)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # the child's
    arguments = parser.parse_args()
    if arguments.side:
        measured = measure_fedrax if arguments.side == "fedrax" else measure_pytorch
        print(json.dumps(measured(arguments.layers, arguments.rounds)))
        return
    session = Session.start(RAW)
    path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if part)
    for _ in range(arguments.repeats):
        for side in SIDES:
            with tempfile.TemporaryDirectory() as empty:
                command = [sys.executable, "-m", "benchmarks.fine_tuning", "--side", side]
                command += ["--layers", str(arguments.layers), "--rounds", str(arguments.rounds)]
                variables = os.environ | {"FEDRAX_CACHE": empty, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
                printed = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True)
                result = json.loads(printed.stdout.splitlines()[-1])
                session.add({"side": side, "layers": arguments.layers} | result)
                print(side, result, flush=True)
    print(write_page(arguments.out / "fine_tuning.md", sections(session)).read_text())


def classifier(layers: int) -> Any:
    """BERT with adapters: token indices [B, T] -> logits [B, 3]."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    adapters = LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"])

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = get_peft_model(BertForSequenceClassification(config), adapters)

        def forward(self, tokens: Any) -> Any:
            return self.bert(input_ids=tokens).logits

    return Classifier()


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n, T] and labels [n] of all clients, ordered by client."""
    rng, rows = np.random.default_rng(0), CLIENTS * STEPS * BATCH
    return rng.integers(0, WORDS, (rows, TOKENS)).astype(np.int32), rng.integers(0, 3, rows)


def peak() -> float:
    """Peak resident memory of this process in gigabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_fedrax(layers: int, rounds: int) -> dict[str, float]:
    """Seconds and gigabytes of conversion and rounds."""
    warnings.simplefilter("ignore")
    from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
    from fedrax.models import from_torch
    from fedrax.simulation import use_all_cores

    use_all_cores()
    module = classifier(layers)
    imported, start = peak(), time.monotonic()
    x, y = samples()
    model = from_torch(module, x[:4])
    convert = time.monotonic() - start
    offsets = np.arange(0, len(x) + 1, STEPS * BATCH)
    federation = Federation.from_arrays(x, y, offsets=offsets, shuffle=False, test=(x[:BATCH], y[:BATCH]))
    method = FedAvg(local=LocalSGD(steps=STEPS, batch_size=BATCH, order="stored", lr=LR))
    ends, start = [], time.monotonic()
    simulate(
        method, classification(model), federation, rounds=rounds, cohort_size=COHORT, eval_every=1,
        callbacks=[lambda snapshot: ends.append(time.monotonic() - start)],
    )  # fmt: skip
    between = np.diff(ends)
    return {
        "convert": convert, "first": ends[0], "round": float(np.median(between)), "peak": peak(), "imported": imported
    }  # fmt: skip


def measure_pytorch(layers: int, rounds: int) -> dict[str, float]:
    """Seconds and gigabytes of the same rounds, one client after another."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    module = classifier(layers).train()
    imported = peak()
    x, y = (torch.as_tensor(a).long() for a in samples())
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}
    rng, ends, begun = np.random.default_rng(0), [], time.monotonic()
    for _ in range(rounds):
        total = {name: torch.zeros_like(p) for name, p in start.items()}
        for client in rng.choice(CLIENTS, COHORT, replace=False):
            with torch.no_grad():
                for name, p in trained.items():
                    p.copy_(start[name])
            for step in range(STEPS):
                first = (client * STEPS + step) * BATCH
                loss = torch.nn.functional.cross_entropy(module(x[first : first + BATCH]), y[first : first + BATCH])
                gradients = torch.autograd.grad(loss, list(trained.values()))
                with torch.no_grad():
                    for p, gradient in zip(trained.values(), gradients, strict=True):
                        p -= LR * gradient
            for name, p in trained.items():
                total[name] += p.detach() / COHORT
        start = total
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(start[name])
            module(x[:BATCH])  # as in evaluation
        ends.append(time.monotonic() - begun)
    return {"first": ends[0], "round": float(np.median(np.diff(ends))), "peak": peak(), "imported": imported}


def sections(session: Session) -> list[str]:
    """Sections of the page."""
    rows = []
    for side in SIDES:
        runs = [run for run in session.runs if run["side"] == side]
        values = {name: [run[name] for run in runs if name in run] for name in COLUMNS}
        rows.append([side, *(f"{statistics.median(found):.2f}" if found else "–" for found in values.values())])
    layers = session.runs[0]["layers"]
    return [
        "# Federated LoRA of BERT",
        f"Written by `python -m benchmarks.fine_tuning` on {session.header['date']} from session"
        f" `{session.header['id']}` of `fine_tuning.jsonl`. BERT with {layers} layers and random weights, adapters of"
        f" rank 8 at the queries and values; {COHORT} clients a round, {STEPS} steps on {BATCH} sequences of {TOKENS}"
        " tokens each, an evaluation on one batch after each round; nothing compiled before. Medians of"
        f" {len(session.runs) // len(SIDES)} runs.",
        markdown_table(["", *COLUMNS.values()], rows),
        session.machine_text(),
    ]


if __name__ == "__main__":
    main()
