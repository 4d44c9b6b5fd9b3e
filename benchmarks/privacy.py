"""What DP-SGD costs: a private local step against a plain one, in fedrax and in PyTorch with Opacus.

``python -m benchmarks.privacy`` takes local steps of batches of 64 on one client and one thread, each in a fresh
process, counts the processor's time, which others' work on the machine hardly changes, appends the runs to
``results/privacy.jsonl`` and writes ``privacy.md``. Opacus has an environment of its own, made on first use under
``--cache``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.environments import ensure_environment
from benchmarks.pages import markdown_table, number, write_page
from benchmarks.points import REPOSITORY, measure_point, point_parser
from benchmarks.quiet import run_quietly
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from fedrax import Result
    from fedrax.simulation import Event, RunInfo

RAW = RESULTS / "privacy.jsonl"
BATCH = 64
MODELS = {"W1": ("2NN 784-200-200-10", (784,), 100), "W3": ("LeNet on 32x32x3", (32, 32, 3), 8)}
"""Text, a sample's shape in fedrax, and the steps of a round."""
ROUNDS = 8
OURS = {"fedrax": "plain", "fedrax, SampleDP": "private"}
THEIRS = {"PyTorch": "plain", "Opacus": "hooks", "Opacus, ghost clipping": "ghost"}
ONE_THREAD: dict[str, Any] = {
    "JAX_NUM_CPU_DEVICES": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    parser = point_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of everything, in turn (default 3)")
    parser.add_argument("--report", action="store_true", help="only write the last session's page again")
    arguments = parser.parse_args()
    if arguments.point:
        print(RESULT_PREFIX + json.dumps(measure_here(**json.loads(arguments.point))))
        return
    session = Session.latest(RAW) if arguments.report else measure(arguments)
    print(table(session))
    print("wrote", write_report(session, arguments.out))


def measure(arguments: argparse.Namespace) -> Session:
    """All models in all ways, in turn; ends the command where a run fails."""
    python = ensure_environment("opacus", arguments.cache) / "python"
    session = Session.start(RAW)
    for repeat in range(1, arguments.repeats + 1):
        for model, (_, _, steps) in MODELS.items():
            for name, how in (OURS | THEIRS).items():
                point = {"model": model, "how": how, "batch": BATCH, "steps": steps, "rounds": ROUNDS}
                if name in OURS:
                    result = measure_point("benchmarks.privacy", point, arguments.max_wait, **ONE_THREAD)
                else:
                    command = [str(python), "-m", "benchmarks.runners.run_opacus", "--point", json.dumps(point)]
                    path = {"PYTHONPATH": str(REPOSITORY)} | ONE_THREAD
                    result = run_quietly(command, os.environ | path, arguments.max_wait, timeout=900)
                session.add({"model": model, "name": name, "steps": steps, "repeat": repeat} | result)
                if "failed" in result:
                    raise SystemExit(f"error: {name} failed on {model}: {result['failed']}")
                print(f"{model} {name:34s} {1e3 * step(session.runs[-1]):8.3f} ms a step", flush=True)
    return session


class ProcessorTime:
    """A sink that notes the processor's time at each event; a run with ``eval_every=1`` has one after each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def start(self, run: RunInfo) -> None:
        pass

    def event(self, event: Event) -> None:
        self.seconds.append(time.process_time())

    def finish(self, result: Result | None) -> None:
        pass


def measure_here(model: str, how: str, batch: int, steps: int, rounds: int) -> dict[str, Any]:
    """Processor seconds of fedrax's rounds of one client in this process, after the first two."""
    from benchmarks.fedrax_problems import model_of
    from fedrax import FedAvg, Federation, LocalSGD, SampleDP, classification, simulate

    rng, count, sink = np.random.default_rng(0), batch * steps, ProcessorTime()
    x, y = rng.random((count, *MODELS[model][1]), np.float32), rng.integers(10, size=count)
    federation = Federation.from_arrays(x, y, np.zeros(count, int), num_classes=10, test=(x[:1], y[:1]))
    plain = FedAvg(local=LocalSGD(lr=0.01, steps=steps, batch_size=batch))
    task = classification(model_of(WORKLOADS[model]))
    settings: dict[str, Any] = {"rounds": rounds, "cohort_size": 1, "eval_every": 1}
    simulate(
        SampleDP(plain) if how == "private" else plain, task, federation, sinks=[sink], weights="uniform", **settings
    )
    return {"seconds": np.diff(sink.seconds)[1:].tolist()}


def step(run: dict[str, Any]) -> float:
    """Processor seconds of a step: of the median round."""
    return statistics.median(run["seconds"]) / run["steps"]


def table(session: Session) -> str:
    """A row for each model and way: the median over repeats."""
    rows = []
    for model, (text, _, _) in MODELS.items():
        runs = [run for run in session.runs if run["model"] == model]
        cost = {name: statistics.median(step(r) for r in runs if r["name"] == name) for name in OURS | THEIRS}
        for names in (OURS, THEIRS):
            for name in names:
                against = [f"{cost[name] / cost[other]:.2f}" for other in (next(iter(names)), "Opacus")]
                foreign = statistics.median(r["foreign_cpu"] for r in runs if r["name"] == name)
                memory = statistics.median(r["peak_pss_mb"] for r in runs if r["name"] == name)
                rows.append((text, name, number(1e3 * cost[name]), *against, f"{memory:.0f}", f"{foreign:.2f}"))
    head = ("model", "steps of", "ms a step", "× plain", "× Opacus", "peak MB", "foreign CPU")
    return markdown_table(head, rows)


def write_report(session: Session, out: Path) -> Path:
    version = next(run["version"] for run in session.runs if "version" in run)
    header, repeats = session.header, max(run["repeat"] for run in session.runs)
    introduction = (
        f"Written by `python -m benchmarks.privacy` on {header['date']} from session `{header['id']}` of "
        f"`privacy.jsonl`. One client, batches of {BATCH}, plain SGD; private steps clip each sample's gradient to 1 "
        f"and add noise of deviation 1. All on one thread, Opacus {version}. Processor time: of each run the median of "
        f"{ROUNDS - 2} rounds, of these the median of {repeats} runs. × plain: against plain steps of the same "
        "library.\n\n"
        f"{session.machine_text()} No accelerator is used."
    )
    return write_page(out / "privacy.md", ["# The cost of DP-SGD", introduction, table(session)])


if __name__ == "__main__":
    main()
