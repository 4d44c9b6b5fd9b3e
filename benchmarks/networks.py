"""``python -m benchmarks.networks``: networks as Flax's users write them, beside the same in plain loops.

Thirty-three networks that fedrax has no layers of its own for, in a loop of PyTorch and in one of jitted steps of JAX.
Shapes, batches and work are equal; starting weights are each library's own, for only time is compared (equal weights
and losses: `benchmarks.peers`). Appends the runs to ``results/networks.jsonl`` and writes ``networks.md``.
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
    """Runs of everything."""
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
    """A run of one of the runners that are loops of their own."""
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    return run_quietly([python, "-m", f"benchmarks.runners.{runner}", *options], variables, wait, timeout=900)


def measure_here(name: str) -> dict[str, Any]:
    """A round of ours in seconds, the first since the process started, and how many parameters there are."""
    started = time.monotonic()
    import jax
    import numpy as np

    from benchmarks.runners.linen_networks import network
    from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
    from fedrax.models import from_linen

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
    }


class First:
    """When the first round ended."""

    ended = 0.0

    def start(self, run: object) -> None: ...

    def event(self, event: object) -> None:
        self.ended = self.ended or time.monotonic()

    def finish(self, result: object) -> None: ...


def sections(session: Session) -> list[str]:
    """The page's."""
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
        f"`{session.header['id']}` of `networks.jsonl`. FedAvg with {CLIENTS} clients in a round, each with two or "
        "four steps: networks of Flax Linen under fedrax, and the same networks in a loop of PyTorch, one client after "
        "another, on one thread and on all cores, of which the faster is shown, and of plain JAX, a call of a jitted "
        "step for each batch. A run's milliseconds a round are the median of its rounds; of several runs ours are the "
        "median, the loops' the least. The loops' are wall time. Ours are fedrax's clock of rounds, which starts anew "
        "with each block of rounds and leaves out what the host does between two: by `benchmarks.profiles` about one "
        "per cent of rounds as long as these, or less. Each network "
        "runs twice under fedrax, first with nothing compiled before and then with what the first run has kept. Of "
        "both, and of plain JAX with nothing compiled before, the table has the seconds from the process's start to "
        "the end of the first round; of both and of PyTorch it has the peak of memory. fedrax is as fast or faster on "
        f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)}; the median ratio, PyTorch's time over ours, is "
        f"{statistics.median(ratios):.2f}{against_jax}.\n\n{session.machine_text()} No accelerator is used."
    )
    head = (
        "network",
        "what it has",
        "parameters",
        "fedrax, ms",
        "PyTorch, ms",
        "plain JAX, ms",
        "PyTorch / fedrax",
        "first round, s: nothing compiled / compiled before / plain JAX",
        "peak MB: nothing compiled / compiled before / PyTorch",
    )
    return ["# Networks of one's own", text, markdown_table(head, lines), *failed]


if __name__ == "__main__":
    main()
