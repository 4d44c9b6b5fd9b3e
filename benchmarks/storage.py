"""Samples streamed from disk and client states spilled to disk, compared with memory.

``python -m benchmarks.storage`` runs a federation with 1.2 GB of samples, and one with 1.2 GB of client states, with
these data in memory and on disk; each run in a fresh process on a quiet machine. Every client participates once in a
pass over all clients; the rounds of the last of three passes are timed. The command checks that all placements end at
the same server state and test loss, bit for bit, appends the runs to ``results/storage.jsonl`` and writes
``storage.md``, ``storage.png`` and ``storage.svg``. It needs 1.3 GB under ``--cache`` for samples and spilled states.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.pages import markdown_table, number, save_picture, write_page
from benchmarks.points import measure_point, point_parser
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX, RoundClock
from benchmarks.workloads import read_array

if TYPE_CHECKING:
    from fedrax import Algorithm, Federation, Task

RAW = RESULTS / "storage.jsonl"
PASSES = 3  # the first writes the states, the next ones read them, and the last shares no compiled block with the first


@dataclass(frozen=True)
class Case:
    """A federation, and where its samples or client states are stored."""

    name: str  # what is stored, and the setting that chooses where: "samples" or "states"
    places: tuple[str, ...]  # the setting's value; the first is the reference
    clients: int
    rows: int  # of each client
    features: int
    classes: int
    cohort: int
    text: str

    @property
    def rounds(self) -> int:
        """Rounds of a pass over all clients."""
        return self.clients // self.cohort


SAMPLES = Case(
    name="samples",
    places=("resident", "resident, mapped", "streamed"),
    clients=1000,
    rows=300,
    features=1000,
    classes=10,
    cohort=20,
    text="FedAvg, MLP 1000-200-10, one epoch in batches of 50",
)
STATES = Case(
    name="states",
    places=("resident", "spilled"),
    clients=100_000,
    rows=2,
    features=99,
    classes=30,
    cohort=2000,
    text="SCAFFOLD, softmax regression 99-30, one step",
)
CASES = (SAMPLES, STATES)


def main() -> None:
    arguments = parse_arguments()
    if arguments.point:
        point = json.loads(arguments.point)
        print(RESULT_PREFIX + json.dumps(measure_here(Case(**point.pop("case")), **point)))
        return
    session = Session.latest(RAW) if arguments.report else measure(arguments)
    rows = list(medians(session))
    print(table(rows))
    print("wrote", *write_report(session, rows, arguments.out))
    if problems := disagreements(session):
        raise SystemExit("\n".join(f"error: {problem}" for problem in problems))


def parse_arguments() -> argparse.Namespace:
    parser = point_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of everything, in turn (default 3)")
    parser.add_argument("--report", action="store_true", help="only write the last session's page and pictures again")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> Session:
    """All cases in all placements; exits if a run fails."""
    session = Session.start(RAW)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.cache) as scratch:
        for case in CASES:
            path = Path(scratch) / f"{case.name}.npy"
            write_samples(path, case)
            for repeat in range(1, arguments.repeats + 1):
                for place in case.places:
                    point = {"case": asdict(case), "place": place, "path": str(path)}
                    # states are spilled to TMPDIR; the default directory may be in memory
                    result = measure_point("benchmarks.storage", point, arguments.max_wait, TMPDIR=scratch)
                    session.add({"case": case.name, "place": place, "repeat": repeat} | result)
                    if "failed" in result:
                        raise SystemExit(f"error: {case.name} {place} failed: {result['failed']}")
                    print(one_line(session.runs[-1]), flush=True)
            path.unlink()
    return session


def one_line(run: dict[str, Any]) -> str:
    return (
        f"{run['case']:8s} {run['place']:17s} {run['repeat']}  {run['round_median'] * 1e3:8.2f} ms a round, "
        f"first {run['first_round_with_import']:5.2f} s, {run['peak_pss_mb']:6.0f} MB, "
        f"foreign CPU {run['foreign_cpu']:.2f}"
    )


# -- one run -------------------------------------------------------------------------------------------------------


def write_samples(path: Path, case: Case) -> None:
    """Random samples in a ``.npy`` file, a thousand rows at a time."""
    rng = np.random.default_rng(0)
    x = np.lib.format.open_memmap(path, "w+", np.float32, (case.clients * case.rows, case.features))
    some = rng.standard_normal((1000, case.features), np.float32)
    for start in range(0, len(x), len(some)):
        x[start : start + len(some)] = np.roll(some, start // len(some), axis=1)[: len(x) - start]
    x.flush()


def measure_here(case: Case, place: str, path: str) -> dict[str, Any]:
    """One run in this process: times of the last pass, bytes moved in a round, final server state and test loss."""
    import jax

    from benchmarks.fedrax_clock import time_rounds
    from fedrax.simulation import Script

    algorithm, task = method(case)
    clock, result = time_rounds(
        algorithm,
        task,
        federation_of(case, place, path),
        PASSES * case.rounds,
        cohort_size=case.cohort,
        script=Script(cohorts=cohorts(case)),
        **{case.name: place.split(",")[0]},
    )
    last_pass = clock.seconds[(PASSES - 1) * case.rounds :]
    timed = RoundClock([clock.seconds[0], *last_pass], clock.first_round_since_process_start)
    server = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result.server))
    state = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(result.client_state(0)))
    client = 4 * case.rows * case.features if case.name == "samples" else state
    return timed.summary() | {
        "plan": result.plan,
        "server": hashlib.sha256(server).hexdigest(),
        "test_loss": result.events[-1]["test_loss"],
        "bulk_bytes": case.clients * client,
        # samples are read, states read and written
        "bytes_a_round": case.cohort * client * (1 if case.name == "samples" else 2),
    }


def method(case: Case) -> tuple[Algorithm, Task]:
    """The algorithm and the task that ``case.text`` describes."""
    from fedrax import FedAvg, LocalSGD, Scaffold, classification
    from fedrax.models import MLP, Logistic

    if case.name == "samples":
        model, local = MLP((200,)), LocalSGD(lr=0.01, epochs=1, batch_size=50)
        return FedAvg(local=local), classification(model.build((case.features,), case.classes))
    local = LocalSGD(lr=0.01, steps=1, batch_size=case.rows)
    return Scaffold(local=local), classification(Logistic().build((case.features,), case.classes))


def federation_of(case: Case, place: str, path: str) -> Federation:
    """The federation with samples in memory, or as a memory-mapped array if they are mapped or streamed."""
    from fedrax import Federation

    x = read_array(Path(path)) if place in ("resident", "spilled") else np.load(path, mmap_mode="r", allow_pickle=False)
    y = np.arange(len(x), dtype=np.int32) % case.classes
    offsets = np.arange(case.clients + 1) * case.rows
    test = (np.array(x[:500]), y[:500])
    return Federation.from_arrays(x, y, offsets=offsets, test=test, num_classes=case.classes, shuffle=False)


def cohorts(case: Case) -> np.ndarray:
    """int [rounds, cohort]: every client once in each pass, in random order, so that rows on disk are scattered."""
    rng, used = np.random.default_rng(0), case.rounds * case.cohort
    passes = [rng.permutation(case.clients)[:used].reshape(case.rounds, case.cohort) for _ in range(PASSES)]
    return np.concatenate(passes)


# -- the page ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A case in one placement: medians over the repeats, in seconds and MB."""

    case: str
    place: str
    round: float
    ratio: float  # relative to the first placement of the case
    bulk: float
    moved: float  # per round, to or from disk, or to the devices
    first_round_with_import: float
    peak_pss_mb: float
    foreign_cpu: float


def medians(session: Session) -> Iterator[Row]:
    for case in CASES:
        places = {place: runs_of(session, case, place) for place in case.places}
        reference = middle(places[case.places[0]], "round_median")
        for place, runs in places.items():
            round_median = middle(runs, "round_median")
            yield Row(
                case=case.name,
                place=place,
                round=round_median,
                ratio=round_median / reference,
                bulk=runs[0]["bulk_bytes"] / 1e6,
                moved=runs[0]["bytes_a_round"] / 1e6,
                first_round_with_import=middle(runs, "first_round_with_import"),
                peak_pss_mb=middle(runs, "peak_pss_mb"),
                foreign_cpu=middle(runs, "foreign_cpu"),
            )


def runs_of(session: Session, case: Case, place: str) -> list[dict[str, Any]]:
    """The finished runs; exits if there is none."""
    runs = [run for run in session.runs if (run["case"], run["place"]) == (case.name, place) and "server" in run]
    if not runs:
        raise SystemExit(f"error: the session holds no finished run of {case.name} {place}")
    return runs


def middle(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def disagreements(session: Session) -> list[str]:
    """A sentence for each case whose finished runs end at different server states or test losses."""
    finished = [run for run in session.runs if "server" in run]
    return [
        f"{case.name}: the placements do not all end at the same server state and test loss"
        for case in CASES
        if len({(run["server"], run["test_loss"]) for run in finished if run["case"] == case.name}) > 1
    ]


def table(rows: list[Row]) -> str:
    head = ("", "", "ms a round", "ratio", "MB a round", "first round s", "peak MB", "foreign CPU")
    lines = [
        (
            f"{row.bulk / 1e3:.1f} GB of {row.case}",
            row.place,
            number(row.round * 1e3),
            f"{row.ratio:.2f}",
            number(row.moved),
            f"{row.first_round_with_import:.2f}",
            f"{row.peak_pss_mb:.0f}",
            f"{row.foreign_cpu:.2f}",
        )
        for row in rows
    ]
    return markdown_table(head, lines)


def write_report(session: Session, rows: list[Row], out: Path) -> list[Path]:
    repeats = min(len(runs_of(session, case, place)) for case in CASES for place in case.places)
    cases = "\n".join(f"- {c.name}: {c.clients:,} clients, {c.cohort:,} a round; {c.text}." for c in CASES)
    introduction = (
        f"Written by `python -m benchmarks.storage` on {session.header['date']} from session "
        f"`{session.header['id']}` of `storage.jsonl`. Medians of {repeats} runs, each in a fresh process with an "
        "empty compilation cache. Every client participates once in a pass, in random order; the rounds of the last of "
        f"{PASSES} passes are timed. The ratio is relative to the first row of a group. MB a round are the cohort's "
        "samples (read) or states (read and written). The time of the first round counts from process start.\n\n"
        f"{cases}\n\n"
        "*Resident*: in memory. *Resident, mapped*: a memory-mapped file, read in place. *Streamed*: each block of "
        "rounds copies its samples from that file. *Spilled*: states in scratch files on disk. The system's page cache "
        "is active: if free memory holds all of these files, the figures measure copies and system calls, not the "
        "disk.\n\n"
        "Peak memory is the process's proportional set size, sampled four times a second. It includes pages of a "
        "mapped file that the process has read and the system could reclaim, so *resident, mapped* grows to the file's "
        "size if memory is free; streaming releases them after each block. It does not include the page cache of "
        "spilled states, which are read and written by system calls.\n\n"
        f"{session.machine_text()} No accelerator is used."
    )
    problems = disagreements(session)
    agreement = "All placements end at the same server state and test loss, bit for bit."
    if problems:
        agreement = "**Not all agree**"
    sections = [
        "# Samples and client states on disk",
        introduction,
        table(rows),
        "![Samples and states on disk](storage.svg)",
        agreement,
        *(f"- {problem}" for problem in problems),
    ]
    return [write_page(out / "storage.md", sections), *draw(rows, out / "storage")]


def draw(rows: list[Row], path: Path) -> list[Path]:
    """Milliseconds a round and peak memory, a bar for each placement."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(8, 0.35 * len(rows) + 1), sharey=True)
    colors = ["tab:gray" if row.place.startswith("resident") else "tab:orange" for row in rows]
    figures = {"ms a round": [row.round * 1e3 for row in rows], "peak MB": [row.peak_pss_mb for row in rows]}
    for panel, (label, values) in zip(panels, figures.items(), strict=True):
        bars = panel.barh(range(len(rows)), values, color=colors)
        panel.bar_label(bars, [number(value) for value in values], padding=2, fontsize=7)
        panel.set_xlabel(label)
        panel.margins(x=0.15)
        panel.grid(axis="x", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [f"{row.case} {row.place}" for row in rows], fontsize=8)
    panels[0].invert_yaxis()
    plt.close(figure)
    return save_picture(figure, path)


if __name__ == "__main__":
    main()
