"""``python -m benchmarks.repeats``: bitwise reproducibility of a run on this machine.

Each run is repeated in one process, stopped halfway and resumed, and repeated in a second process with an empty
compilation cache; on a GPU also with XLA's flag for deterministic operations. Appends the outcome to
``results/repeats.jsonl`` and writes ``repeats.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environments import cache_directory
from benchmarks.gpu import graphics_card
from benchmarks.machine import cores, processor
from benchmarks.make_arrays import ensure_arrays
from benchmarks.pages import markdown_table, write_page
from benchmarks.quiet import printed_result
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX

CASES = ("W1-Scaffold", "W5-GradMA", "W6-FedAvg", "W7-FedAvg", "W11-FedAvg")
"""Workload and method: dense layers, convolutions, a deep network, gathers and a recurrence, many small clients."""
FLAG = "--xla_gpu_deterministic_ops=true"
ROUNDS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="default: all")
    parser.add_argument("--cache", type=Path, default=cache_directory(), help="where arrays are kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where runs are kept and the page is written")
    parser.add_argument("--report", action="store_true", help="only write the last session's page again")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(RESULT_PREFIX + json.dumps(train(**json.loads(arguments.point))))
        return
    raw = arguments.out / "repeats.jsonl"
    session = Session.latest(raw) if arguments.report else measure(raw, arguments)
    print(write_page(arguments.out / "repeats.md", sections(session)).read_text())


def measure(raw: Path, arguments: argparse.Namespace) -> Session:
    """Run two processes of every setting in parallel; results are compared, not times."""
    on_gpu = arguments.device == "cuda"
    described = {"gpu": graphics_card() if on_gpu else "none", "cpu": processor(), "cores": cores()}
    session = Session.start(raw, described, jax=version("jax"))
    settings = ("", FLAG) if on_gpu else ("",)
    for case in arguments.cases:
        workload, method = case.split("-")
        arrays = str(ensure_arrays(workload, arguments.cache / "arrays"))
        point = {"workload": workload, "method": method, "arrays": arrays}
        with tempfile.TemporaryDirectory() as place:
            pairs = [
                [start(point | {"out": f"{place}/{n}-{twice}"}, flags, arguments.device) for twice in range(2)]
                for n, flags in enumerate(settings)
            ]
            printed = [[child.communicate()[0] for child in pair] for pair in pairs]
        for flags, outputs in zip(settings, printed, strict=True):
            session.add({"workload": workload, "method": method, "flags": flags} | compared(*map(outcome, outputs)))
            print(session.runs[-1], flush=True)
    return session


def start(point: dict[str, Any], flags: str, device: str) -> subprocess.Popen[str]:
    """A fresh process with an empty compilation cache."""
    command = [sys.executable, "-m", "benchmarks.repeats", "--point", json.dumps(point)]
    ours = {"FEDRAX_CACHE": point["out"] + "-cache", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
    ours |= {"JAX_PLATFORMS": "cpu"} if device == "cpu" else {}
    return subprocess.Popen(command, env=os.environ | ours, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outcome(output: str) -> dict[str, Any]:
    """The result that a process printed; exits if it failed."""
    return printed_result(output) or sys.exit(f"error: a run failed:\n{output[-3000:]}")


def compared(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Distances to the first run of the first process, relative to the change of parameters by that run; 0 means
    bitwise equal.

    Digests show whether the other process is bitwise equal.
    """
    return {**first["apart"], "digests": [first["digest"], second["digest"]], "moved": first["moved"]}


def train(workload: str, method: str, arrays: str, out: str) -> dict[str, Any]:
    """The digest of the final parameters, and the distances of a repeated and of a resumed run to them."""
    import jax

    import fedrax
    from benchmarks.fedrax_problems import federation_of, problem
    from benchmarks.workloads import WORKLOADS, Arrays
    from fedrax import LocalSGD, classification, simulate
    from fedrax.simulation import use_all_cores

    use_all_cores()
    defined, data = WORKLOADS[workload], Arrays(arrays, channels_last=True)
    model, params = problem(defined, data.initial)
    local = LocalSGD(lr=defined.learning_rate, epochs=defined.epochs, batch_size=defined.batch)
    made, task, federation = getattr(fedrax, method)(local=local), classification(model), federation_of(data)
    shared: dict[str, Any] = {"cohort_size": defined.cohort, "params": params}

    def flat(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)])

    whole = flat(simulate(made, task, federation, rounds=ROUNDS, **shared).params)
    again = flat(simulate(made, task, federation, rounds=ROUNDS, **shared).params)
    simulate(made, task, federation, rounds=ROUNDS // 2, directory=out, **shared)
    resumed = flat(simulate(made, task, federation, rounds=ROUNDS, directory=out, resume=True, **shared).params)
    moved = float(np.linalg.norm(whole - flat(params)))
    apart = {
        key: 0.0 if other.tobytes() == whole.tobytes() else float(np.linalg.norm(other - whole)) / moved
        for key, other in (("again", again), ("resumed", resumed))
    }
    digest = hashlib.sha256(whole.tobytes()).hexdigest()[:16]
    return {"digest": digest, "apart": apart, "moved": moved}


def sections(session: Session) -> Iterator[str]:
    header, m = session.header, session.header["machine"]
    yield "# Bitwise reproducibility"
    card = m["gpu"] if m["gpu"] != "none" else "no GPU"
    yield (
        f"Written by `python -m benchmarks.repeats` on {header['date']} from session `{header['id']}` of "
        f"`repeats.jsonl`. Machine: {card}; {m['cpu']}, {m['cores']} cores; jax {header['jax']}. {ROUNDS} rounds of "
        "workloads of `peers.md` and `gpu.md`, in float32. *Equal*: all bits of the final parameters are equal. "
        "Otherwise the cell has the distance between the parameters, relative to how far the run has moved them."
    )
    lines = []
    for run in session.runs:
        setting = f"`{run['flags']}`" if run["flags"] else "as installed"
        said = ["equal" if run[key] == 0 else f"{run[key]:.1e}" for key in ("again", "resumed")]
        said.append("equal" if run["digests"][0] == run["digests"][1] else "not equal")
        lines.append((f"{run['workload']}, {run['method']}", setting, *said))
    head = ("", "XLA's flags", "again in one process", "stopped and resumed", "in another process")
    yield markdown_table(head, lines)


if __name__ == "__main__":
    main()
