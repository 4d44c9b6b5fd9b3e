"""``python -m benchmarks.sweep``: a grid of 16 learning rates and 4 seeds, in one compiled call and one run at a time.

It checks that both modes end at the same parameters, appends the times to ``results/sweep.jsonl`` and writes
``sweep.md``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.make_arrays import ensure_arrays
from benchmarks.pages import markdown_table, write_page
from benchmarks.points import measure_point, point_parser
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX

Way = Literal["sequential", "vectorized"]


class Model(NamedTuple):
    hidden: tuple[int, ...]
    rounds: int


MODELS = {"softmax regression 60-10": Model((), 100), "MLP 60-200-10": Model((200,), 20), "2NN": Model((200, 200), 10)}
RAW = RESULTS / "sweep.jsonl"
# Up to the largest stable learning rate: beyond it rounding errors grow and results cannot be compared.
STEP_SIZES = np.geomspace(1e-4, 0.02, 16).astype(np.float32)
SEEDS = range(4)
COHORT, STEPS, BATCH = 10, 20, 10
WAYS: tuple[Way, ...] = ("sequential", "vectorized")
TOLERANCE = 1e-3  # largest difference of a parameter, relative to the largest of its run: ReLUs amplify rounding


def main() -> None:
    arguments = point_parser(__doc__).parse_args()
    if arguments.point:
        print(RESULT_PREFIX + json.dumps(run_point(**json.loads(arguments.point))))
        return
    arrays, scratch = str(ensure_arrays("W2", arguments.cache / "arrays")), arguments.cache / "sweep"
    scratch.mkdir(parents=True, exist_ok=True)
    session = Session.start(RAW)
    for model in MODELS:
        for way in WAYS:
            point = {"model": model, "way": way, "arrays": arrays, "directory": str(scratch)}
            session.add({"model": model, "way": way} | measure_point("benchmarks.sweep", point, arguments.max_wait))
            if "failed" in session.runs[-1]:
                raise SystemExit(f"error: {model} {way} failed: {session.runs[-1]['failed']}")
    differences = {model: largest_difference(model, scratch) for model in MODELS}
    page = write_page(arguments.out / "sweep.md", sections(session, differences))
    print(page.read_text())
    if not max(differences.values()) <= TOLERANCE:
        raise SystemExit(
            f"error: the final parameters of the two modes differ by up to {max(differences.values()):.2g}"
        )


def problem(model: str, arrays: str) -> tuple[Any, Any]:
    """(task, federation): a model on the second workload's clients."""
    from benchmarks.fedrax_problems import federation_of
    from benchmarks.workloads import Arrays
    from fedrax import classification
    from fedrax.models import MLP, Logistic

    configuration = MLP(MODELS[model].hidden) if MODELS[model].hidden else Logistic()
    return classification(configuration.build((60,), 10)), federation_of(Arrays(arrays))


def run_point(model: str, way: Way, arrays: str, directory: str) -> dict[str, float]:
    """The grid twice, in one process; final parameters go to a file."""
    from fedrax import FedAvg, LocalSGD, sweep

    task, federation = problem(model, arrays)
    grid = [FedAvg(local=LocalSGD(lr=float(lr), steps=STEPS, batch_size=BATCH)) for lr in STEP_SIZES]
    seconds, results = [], []
    for _ in range(2):
        begin = time.perf_counter()
        rounds = MODELS[model].rounds
        results = sweep(grid, task, federation, SEEDS, mode=way, rounds=rounds, cohort_size=COHORT, eval_every=rounds)
        seconds.append(time.perf_counter() - begin)
    np.save(
        Path(directory) / file_name(model, way),
        [flat(run.params) for row in results for run in row],
        allow_pickle=False,
    )
    return {"seconds": seconds[0], "seconds_again": seconds[1]}


def file_name(model: str, way: str) -> str:
    return f"{model}-{way}.npy".replace(" ", "-")


def flat(params: Any) -> np.ndarray:
    import jax

    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def largest_difference(model: str, directory: Path) -> float:
    """Largest difference of final parameters between the modes, relative to the largest parameter of each run."""
    paths = [directory / file_name(model, way) for way in WAYS]
    one, other = (np.load(path, allow_pickle=False) for path in paths)
    for path in paths:
        os.remove(path)
    return float((np.abs(one - other).max(axis=1) / np.abs(one).max(axis=1)).max())


def sections(session: Session, differences: dict[str, float]) -> list[str]:
    runs = {(run["model"], run["way"]): run for run in session.runs}
    lines = []
    for model in MODELS:
        ratio = runs[model, "sequential"]["seconds"] / runs[model, "vectorized"]["seconds"]
        again = runs[model, "sequential"]["seconds_again"] / runs[model, "vectorized"]["seconds_again"]
        for way in WAYS:
            run = runs[model, way]
            lines.append(
                (
                    f"{model}, {MODELS[model].rounds} rounds",
                    way,
                    f"{run['seconds']:.2f}",
                    f"{run['seconds_again']:.2f}",
                    f"{ratio:.1f} ({again:.1f})" if way == "vectorized" else "",
                    f"{differences[model]:.1g}" if way == "vectorized" else "",
                    f"{run['peak_pss_mb']:.0f}",
                    f"{run['foreign_cpu']:.2f}",
                )
            )
    text = (
        f"Written by `python -m benchmarks.sweep` on {session.header['date']} from session "
        f"`{session.header['id']}` of `sweep.jsonl`. `fedrax.sweep` over {len(STEP_SIZES)} learning rates and "
        f"{len(SEEDS)} seeds of FedAvg on synthetic(1,1): 30 clients, a cohort of {COHORT}, {STEPS} steps on batches "
        f"of {BATCH}. Sequential: one run after another in one process. Vectorized: one compiled call for the whole "
        "grid. "
        "Seconds include compilation with an empty compilation cache; the column *again* repeats the grid in the same "
        "process, and its ratio is in parentheses. The difference is the largest difference between final parameters, "
        f"relative to the largest parameter of a run.\n\n{session.machine_text()} No accelerator is used."
    )
    head = ("model", "", "seconds", "again", "ratio", "difference", "peak MB", "foreign CPU")
    return ["# Sweep of learning rates and seeds in one call", text, markdown_table(head, lines)]


if __name__ == "__main__":
    main()
