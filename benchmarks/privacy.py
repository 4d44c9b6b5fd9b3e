"""The cost of differential privacy: DP-SGD steps in fedrax and Opacus, and rounds with client-level privacy.

``python -m benchmarks.privacy`` takes local steps with batches of 64 on one client and one thread, each in a fresh
process, and rounds of W1 on all cores, plain and private in turn in one process. It measures processor time, which
depends little on other processes, appends the runs to ``results/privacy.jsonl`` and writes ``privacy.md``. Opacus runs
in a separate environment, created on first use under ``--cache``.
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
SAMPLES = 60
"""Samples of a client of W1."""
MODELS = {
    "W1": ("2NN 784-200-200-10", (784,), 100),
    "W3": ("LeNet on 32x32x3", (32, 32, 3), 8),
    "W5": ("3x3 convolutions, group norm", (32, 32, 3), 4),
    "W6": ("ResNet-20, group norm", (32, 32, 3), 2),
}
"""Description, shape of a sample in fedrax, and number of steps in a round."""
ROUNDS = 8
OURS = {"fedrax": "plain", "fedrax, SampleDP": "private"}
THEIRS = {"PyTorch": "plain", "Opacus": "hooks", "Opacus, ghost clipping": "ghost"}
AT = {"FedAvg": None, "ClientDP, noise at the server": "server", "ClientDP, noise at the clients": "client"}
"""Variants of a round of W1, with the place where noise is added."""
BLOCK, BLOCKS, TURNS = 20, 3, 5
"""Rounds in a timed block, blocks in a run after one for warm-up, and runs of each variant in turn."""
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
        point = json.loads(arguments.point)
        print(RESULT_PREFIX + json.dumps(measure_here(**point) if point else measure_rounds()))
        return
    session = Session.latest(RAW) if arguments.report else measure(arguments)
    print(table(session), rounds_table(session), sep="\n\n")
    print("wrote", write_report(session, arguments.out))


def measure(arguments: argparse.Namespace) -> Session:
    """All models and variants one after the other; exits if a run fails."""
    python = ensure_environment("opacus", arguments.cache) / "python"
    session = Session.start(RAW)
    for repeat in range(1, arguments.repeats + 1):
        rounds = measure_point("benchmarks.privacy", {}, arguments.max_wait)
        if "failed" in rounds:
            raise SystemExit(f"error: rounds of W1 failed: {rounds['failed']}")
        session.add({"repeat": repeat} | rounds)
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


class Clocks:
    """Sink that records processor time and wall time at each event."""

    def __init__(self) -> None:
        self.processor: list[float] = []
        self.wall: list[float] = []

    def start(self, run: RunInfo) -> None:
        pass

    def event(self, event: Event) -> None:
        self.processor.append(time.process_time())
        self.wall.append(time.perf_counter())

    def finish(self, result: Result | None) -> None:
        pass


def measure_rounds() -> dict[str, Any]:
    """Seconds a round of each block, on random samples with the sizes of W1, with and without client-level privacy."""
    from benchmarks.fedrax_problems import model_of
    from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
    from fedrax.privacy import ClientDP
    from fedrax.simulation import use_all_cores

    use_all_cores()
    w, rng = WORKLOADS["W1"], np.random.default_rng(0)
    x, y = rng.random((w.clients * SAMPLES, 784), np.float32), rng.integers(10, size=w.clients * SAMPLES)
    offsets = np.arange(w.clients + 1) * SAMPLES
    federation = Federation.from_arrays(x, y, offsets=offsets, num_classes=10, test=(x[:1], y[:1]), shuffle=False)
    plain = FedAvg(local=LocalSGD(lr=w.learning_rate, epochs=w.epochs, batch_size=w.batch, order="stored"))
    task = classification(model_of(w))
    settings: dict[str, Any] = {"rounds": BLOCK * (BLOCKS + 1), "cohort_size": w.cohort, "eval_every": BLOCK}
    found: dict[str, Any] = {name: {"processor": [], "wall": []} for name in AT}
    for turn in range(TURNS + 1):  # the first one compiles all variants
        for name, at in AT.items():
            clocks = Clocks()
            algorithm = plain if at is None else ClientDP(plain, at=at)  # type: ignore[arg-type]
            simulate(algorithm, task, federation, sinks=[clocks], weights="uniform", progress=False, **settings)
            for clock, noted in vars(clocks).items() if turn else ():
                found[name][clock] += (np.diff(noted[BLOCK - 1 :: BLOCK]) / BLOCK).tolist()
    return {"rounds": found}


def measure_here(model: str, how: str, batch: int, steps: int, rounds: int) -> dict[str, Any]:
    """Processor seconds of rounds with one client in this process, after the first two."""
    from benchmarks.fedrax_problems import model_of
    from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
    from fedrax.privacy import SampleDP

    rng, count, sink = np.random.default_rng(0), batch * steps, Clocks()
    x, y = rng.random((count, *MODELS[model][1]), np.float32), rng.integers(10, size=count)
    federation = Federation.from_arrays(x, y, np.zeros(count, int), num_classes=10, test=(x[:1], y[:1]))
    plain = FedAvg(local=LocalSGD(lr=0.01, steps=steps, batch_size=batch))
    task = classification(model_of(WORKLOADS[model]))
    settings: dict[str, Any] = {"rounds": rounds, "cohort_size": 1, "eval_every": 1}
    simulate(
        SampleDP(plain) if how == "private" else plain, task, federation, sinks=[sink], weights="uniform", **settings
    )
    return {"seconds": np.diff(sink.processor)[1:].tolist()}


def step(run: dict[str, Any]) -> float:
    """Processor seconds of a step, from the median round."""
    return statistics.median(run["seconds"]) / run["steps"]


def table(session: Session) -> str:
    """A row for each model and variant: medians over repeats."""
    rows = []
    for model, (text, _, _) in MODELS.items():
        runs = [run for run in session.runs if run.get("model") == model]
        cost = {name: statistics.median(step(r) for r in runs if r["name"] == name) for name in OURS | THEIRS}
        for names in (OURS, THEIRS):
            for name in names:
                against = [f"{cost[name] / cost[other]:.2f}" for other in (next(iter(names)), "Opacus")]
                foreign = statistics.median(r["foreign_cpu"] for r in runs if r["name"] == name)
                memory = statistics.median(r["peak_pss_mb"] for r in runs if r["name"] == name)
                rows.append((text, name, number(1e3 * cost[name]), *against, f"{memory:.0f}", f"{foreign:.2f}"))
    head = ("model", "steps of", "ms a step", "× plain", "× Opacus", "peak MB", "foreign CPU")
    return markdown_table(head, rows)


def rounds_table(session: Session) -> str:
    """A row for each variant of a round: medians over all blocks of all repeats."""
    runs = [run["rounds"] for run in session.runs if "rounds" in run and "model" not in run]

    def median(name: str, clock: str) -> float:
        return statistics.median(seconds for run in runs for seconds in run[name][clock])

    rows = []
    for name in AT:
        cost = {clock: median(name, clock) for clock in ("processor", "wall")}
        against = [f"{cost[clock] / median('FedAvg', clock):.2f}" for clock in cost]
        rows.append((name, *(number(1e3 * seconds) for seconds in cost.values()), *against))
    return markdown_table(("W1", "processor ms a round", "wall ms", "processor × plain", "wall × plain"), rows)


def write_report(session: Session, out: Path) -> Path:
    version = next(run["version"] for run in session.runs if "version" in run)
    header, repeats = session.header, max(run["repeat"] for run in session.runs)
    introduction = (
        f"Written by `python -m benchmarks.privacy` on {header['date']} from session `{header['id']}` of "
        f"`privacy.jsonl`. One client, batches of {BATCH}, plain SGD; private steps clip per-sample gradients to 1 "
        f"and add noise of standard deviation 1. Everything runs on one thread, with Opacus {version}. Times are "
        f"processor time: the median over {repeats} runs of each run's median over {ROUNDS - 2} rounds. × plain is "
        "relative to plain steps of the same library.\n\n"
        f"{session.machine_text()} No accelerator is used."
    )
    rounds = (
        f"Rounds of W1 ({WORKLOADS['W1'].cohort} clients, random samples) on all cores, with and without client-level "
        f"privacy: runs in turn in one process, medians over blocks of {BLOCK} rounds, including the privacy "
        "accounting. Noise at the clients is drawn once for each client, noise at the server once a round."
    )
    page = ["# Cost of differential privacy", introduction, table(session), rounds, rounds_table(session)]
    return write_page(out / "privacy.md", page)


if __name__ == "__main__":
    main()
