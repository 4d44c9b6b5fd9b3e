"""``python -m benchmarks.storage``: samples streamed from disk and client states spilled to it, against memory.

A federation with 1.2 GB of samples, and one whose clients' states grow to 1.2 GB, each run with everything in memory
and with it on disk. It checks that both end at the same parameters, bit for bit, appends the runs to
``results/storage.jsonl`` and writes ``storage.md``.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.pages import markdown_table, write_page
from benchmarks.points import measure_point, point_arguments
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX

RAW = RESULTS / "storage.jsonl"
REPEATS = 3


class Case(NamedTuple):
    """A federation, and the setting that says where its bulk lies."""

    setting: str
    places: tuple[str, str]
    clients: int
    rows: int
    """A client."""
    features: int
    cohort: int
    rounds: int
    text: str


CASES = {
    "samples": Case(
        setting="samples",
        places=("resident", "streamed"),
        clients=1000,
        rows=300,
        features=1000,
        cohort=20,
        rounds=50,
        text="FedAvg, MLP 1000-200-10, one epoch in batches of 50",
    ),
    "states": Case(
        setting="states",
        places=("resident", "spilled"),
        clients=100_000,
        rows=2,
        features=99,
        cohort=2000,
        rounds=50,
        text="SCAFFOLD, softmax regression 99-30, one step; every client takes part once",
    ),
}


def main() -> None:
    arguments = point_arguments(__doc__)
    if arguments.point:
        print(RESULT_PREFIX + json.dumps(measure_here(**json.loads(arguments.point))))
        return
    session = Session.start(RAW)
    with tempfile.TemporaryDirectory(dir=arguments.cache) as scratch:
        for name, case in CASES.items():
            path = Path(scratch) / f"{name}.npy"
            write_samples(path, case)
            for repeat in range(1, REPEATS + 1):
                for place in case.places:
                    point = {"name": name, "place": place, "path": str(path)}
                    result = measure_point("benchmarks.storage", point, arguments.max_wait)
                    session.add({"case": name, "place": place, "repeat": repeat} | result)
                    if "failed" in result:
                        raise SystemExit(f"error: {name} {place} failed: {result['failed']}")
                    print(
                        name, place, f"{1e3 * result['round_median']:.1f} ms", result["peak_pss_mb"], "MB", flush=True
                    )
            path.unlink()
    page = write_page(arguments.out / "storage.md", sections(session))
    print(page.read_text())
    for name in CASES:
        if len({run["digest"] for run in session.runs if run["case"] == name}) > 1:
            raise SystemExit(f"error: {name}: the two places end at different parameters")


def write_samples(path: Path, case: Case) -> None:
    """Random samples in a ``.npy`` file, a thousand rows at a time."""
    rng = np.random.default_rng(0)
    x = np.lib.format.open_memmap(path, "w+", np.float32, (case.clients * case.rows, case.features))
    some = rng.standard_normal((1000, case.features), np.float32)
    for start in range(0, len(x), len(some)):
        x[start : start + len(some)] = np.roll(some, start // len(some), axis=1)[: len(x) - start]
    x.flush()


def measure_here(name: str, place: str, path: str) -> dict[str, Any]:
    """One run in this process: the times of its rounds, and a digest of its last parameters."""
    import jax

    from benchmarks.fedrax_clock import time_rounds
    from fedrax import FedAvg, Federation, LocalSGD, Scaffold, Script, classification
    from fedrax.models import MLP, Logistic

    case = CASES[name]
    in_memory = name == "samples" and place == "resident"
    x = np.load(path, mmap_mode=None if in_memory else "r")
    if name == "states":
        x = np.array(x)  # the samples are no matter here
    classes = 10 if name == "samples" else 30
    y = np.arange(len(x)) % classes
    offsets = np.arange(case.clients + 1) * case.rows
    federation = Federation.from_arrays(x, y, offsets=offsets, test=(x[:500], y[:500]), shuffle=False)
    if name == "samples":
        task = classification(MLP((200,)).build((case.features,), classes))
        algorithm = FedAvg(local=LocalSGD(lr=0.01, batch_size=50))
    else:
        task = classification(Logistic().build((case.features,), classes))
        algorithm = Scaffold(local=LocalSGD(lr=0.01, steps=1, batch_size=case.rows))
    everybody = np.random.default_rng(0).permutation(case.clients)
    cohorts = [everybody[(np.arange(case.cohort) + r * case.cohort) % case.clients] for r in range(case.rounds)]
    clock, result = time_rounds(
        algorithm,
        task,
        federation,
        case.rounds,
        cohort_size=case.cohort,
        script=Script(cohorts=cohorts),
        **{case.setting: place},
    )
    leaves = jax.tree.leaves(result.params)
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    states = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(result.client_state(0)))
    bytes_a_round = case.cohort * (case.rows * case.features * 4 if name == "samples" else 2 * states)
    return clock.summary() | {"digest": digest, "bytes_a_round": bytes_a_round, "states_bytes": case.clients * states}


def sections(session: Session) -> list[str]:
    lines = []
    for name, case in CASES.items():
        runs = {
            place: [run for run in session.runs if (run["case"], run["place"]) == (name, place)]
            for place in case.places
        }
        samples = case.clients * case.rows * case.features * 4
        bulk = samples if name == "samples" else runs["resident"][0]["states_bytes"]
        usual = middle(runs["resident"], "round_median")
        lines += [
            (
                f"{bulk / 1e9:.1f} GB of {name}",
                place,
                f"{1e3 * middle(of, 'round_median'):.1f}",
                f"{middle(of, 'round_median') / usual:.2f}",
                f"{of[0]['bytes_a_round'] / 1e6:.0f}",
                f"{middle(of, 'first_round_with_import'):.1f}",
                f"{middle(of, 'peak_pss_mb'):.0f}",
                f"{max(run['foreign_cpu'] for run in of):.2f}",
            )
            for place, of in runs.items()
        ]
    cases = "; ".join(f"{name}: {c.clients:,} clients, {c.cohort:,} a round, {c.text}" for name, c in CASES.items())
    text = (
        f"Written by `python -m benchmarks.storage` on {session.header['date']} from session "
        f"`{session.header['id']}` of `storage.jsonl`; medians of {REPEATS} runs of {CASES['samples'].rounds} rounds, "
        f"each in a fresh process with an empty cache of compiled programs. {cases}. Resident is in memory, streamed "
        "from a memory-mapped file, spilled to scratch files. MB a round: what a round needs of the bulk (states: read "
        "and written). The first round counts from the start of the process. Peak memory is that of the process, pages "
        "of the file that it has mapped included. Both ways end at the same parameters, bit for bit; the command fails "
        f"where they do not.\n\n{session.machine_text()}"
    )
    head = ("", "", "ms a round", "ratio", "MB a round", "first round, s", "peak MB", "foreign CPU")
    return ["# Samples and states on disk", text, markdown_table(head, lines)]


def middle(runs: list[dict], name: str) -> float:
    return statistics.median(run[name] for run in runs)


if __name__ == "__main__":
    main()
