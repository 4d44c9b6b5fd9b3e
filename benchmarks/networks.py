"""``python -m benchmarks.networks``: plain Flax Linen networks against loops in PyTorch and plain JAX.

Runs thirty-three networks without layers of fedrax's model zoo, the same networks in a PyTorch training loop, and in a
loop of jitted JAX steps. Shapes, batches and work are equal. Each library initializes its own weights, since only time
is compared (`benchmarks.peers` uses equal weights and compares losses). Appends the runs to ``results/networks.jsonl``
and writes ``networks.md``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from typing import Any

from benchmarks.environments import ensure_environment
from benchmarks.machine import cores
from benchmarks.network_cases import CASES, CLIENTS, LEARNING_RATE
from benchmarks.pages import markdown_table, number, write_page
from benchmarks.points import REPOSITORY, measure_point, point_parser
from benchmarks.quiet import run_quietly
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX

RAW = RESULTS / "networks.jsonl"
ROUNDS = 9
COLD, WARM = OURS = "fedrax, nothing compiled before", "fedrax, compiled before"
JAX = "jitted steps of JAX"


def main() -> None:
    parser = point_parser(__doc__)
    parser.add_argument("--networks", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=1, help="runs of everything, in turn (default 1)")
    parser.add_argument("--report", action="store_true", help="only write the last session's page again")
    arguments = parser.parse_args()
    if arguments.point:
        print(RESULT_PREFIX + json.dumps(measure_here(**json.loads(arguments.point))))
        return
    session = Session.latest(RAW) if arguments.report else measure(arguments)
    print(write_page(arguments.out / "networks.md", sections(session)).read_text())


def measure(arguments: argparse.Namespace) -> Session:
    """Run every network in every setting."""
    python = ensure_environment("torch", arguments.cache / "environments") / "python"
    session = Session.start(RAW)
    for repeat in range(1, arguments.repeats + 1):
        for name in arguments.networks:
            with tempfile.TemporaryDirectory() as kept:
                again = partial(measure_point, "benchmarks.networks", {"name": name}, arguments.max_wait)
                runs = {setting: again(FEDRAX_CACHE=kept) for setting in OURS}
            runs[JAX] = loop(sys.executable, "run_jax_network", name, wait=arguments.max_wait)
            for threads in sorted({1, min(cores(), 8)}):
                runs[f"{threads} threads"] = loop(
                    str(python), "run_torch_network", name, str(threads), wait=arguments.max_wait
                )
            for setting, run in runs.items():
                session.add({"network": name, "setting": setting, "repeat": repeat} | run)
            print(name, {setting: run.get("round", run.get("failed")) for setting, run in runs.items()}, flush=True)
    return session


def loop(python: str, runner: str, *options: str, wait: float) -> dict[str, Any]:
    """A run of the PyTorch loop or of the plain JAX loop."""
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    return run_quietly([python, "-m", f"benchmarks.runners.{runner}", *options], variables, wait, timeout=900)


def measure_here(name: str) -> dict[str, Any]:
    """Seconds of a fedrax round, seconds from process start to the end of the first round, number of parameters."""
    started = time.monotonic()
    import jax
    import numpy as np

    from benchmarks.runners.linen_networks import network
    from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
    from fedrax.models import from_linen
    from fedrax.xla import applied_passes

    case = CASES[name]
    x, y = case.arrays()
    everyone = [np.concatenate([a] * CLIENTS) for a in (x, y)]
    federation = Federation.from_arrays(
        *everyone, offsets=np.arange(CLIENTS + 1) * len(x), test=(x[:8], y[:8]), num_classes=case.classes, shuffle=False
    )
    first = First()
    result = simulate(
        FedAvg(local=LocalSGD(lr=LEARNING_RATE, epochs=1, batch_size=case.batch, order="stored")),
        classification(from_linen(network(name), x[:1])),
        federation,
        rounds=ROUNDS,
        cohort_size=CLIENTS,
        eval_every=ROUNDS,
        progress=False,
        sinks=[first],
    )
    seconds = [event["seconds"] for event in result.events][:-1]  # the last one is evaluated
    steps = [after - before for before, after in itertools.pairwise(seconds)]
    return {
        "round": statistics.median(steps),
        "first": first.ended - started,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(result.params)),
        "plan": result.plan,
        "applied": sorted(applied_passes()),
    }


class First:
    """Sink that records when the first round ended."""

    ended = 0.0

    def start(self, run: object) -> None: ...

    def event(self, event: object) -> None:
        self.ended = self.ended or time.monotonic()

    def finish(self, result: object) -> None: ...


def sections(session: Session) -> list[str]:
    """Sections of the page."""
    lines, ratios, jax_ratios = [], [], []
    for name, case in CASES.items():
        runs = [run for run in session.runs if run["network"] == name and "failed" not in run]
        of = {setting: [run for run in runs if run["setting"] == setting] for setting in (*OURS, JAX)}
        ours, loops = [*of[COLD], *of[WARM]], [run for run in runs if run["setting"] not in of]
        if not of[COLD] or not of[WARM] or not loops:
            continue
        time, best = statistics.median(run["round"] for run in ours), min(loops, key=lambda run: run["round"])
        ratios.append(best["round"] / time)
        sizes = dict.fromkeys(f"{run['parameters']:,}" for run in (ours[0], best))
        plain = min((run["round"] for run in of[JAX]), default=None)
        jax_ratios += [plain / time] if plain else []
        times = (
            number(1e3 * time),
            number(1e3 * best["round"]),
            number(1e3 * plain) if plain else "–",
            f"{ratios[-1]:.2f}",
        )
        firsts = (number(statistics.median(run["first"] for run in found)) for found in of.values() if found)
        peaks = (max(run["peak_pss_mb"] for run in part) for part in (of[COLD], of[WARM], [best]))
        memory = " / ".join(f"{peak:.0f}" for peak in peaks)
        lines.append((name, case.what, " / ".join(sizes), *times, " / ".join(firsts), memory))
    failed = [f"- **{run['network']}, {run['setting']} failed**" for run in session.runs if "failed" in run]
    against_jax = f", plain JAX's {statistics.median(jax_ratios):.2f}" if jax_ratios else ""
    text = (
        f"Written by `python -m benchmarks.networks` on {session.header['date']} from session "
        f"`{session.header['id']}` of `networks.jsonl`. FedAvg with {CLIENTS} clients in a round and two or four local "
        "steps. fedrax trains Flax Linen networks. It is compared with a loop over clients in PyTorch, on one thread "
        "and on all cores, of which the faster is shown, and with a loop in plain JAX that calls a jitted step for "
        "each batch. A run's milliseconds a round are the median of its rounds. Over several runs the table has the "
        "median for fedrax and the minimum for the loops. Times of the loops are wall time. fedrax's timer is "
        "restarted with each block of rounds and leaves out what the host does between two blocks, which is about one "
        "percent or less of rounds of this length (`benchmarks.profiles`). Each network runs twice under fedrax, first "
        "with an empty compilation cache and then with the cache of the first run. For both, and for plain JAX without "
        "a cache, the table has the seconds from process start to the end of the first round; for both and for PyTorch "
        "it has the peak memory. fedrax is as fast or faster on "
        f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)}; the median ratio, PyTorch's time over ours, is "
        f"{statistics.median(ratios):.2f}{against_jax}.\n\n{session.machine_text()} No accelerator is used."
    )
    head = (
        "network",
        "layers",
        "parameters",
        "fedrax, ms",
        "PyTorch, ms",
        "plain JAX, ms",
        "PyTorch / fedrax",
        "first round, s: empty cache / warm cache / plain JAX",
        "peak MB: empty cache / warm cache / PyTorch",
    )
    return ["# Plain Flax networks against PyTorch and plain JAX", text, markdown_table(head, lines), *failed]


if __name__ == "__main__":
    main()
