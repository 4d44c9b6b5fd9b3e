"""``python -m benchmarks.advice``: which method to try first, learnt from some tasks and tried on others.

Methods are tuned on pairs of data and partition (``advice_study.py``): a grid over the step size and one more number,
chosen by rows that clients hold out, with two seeds; then scored by test rows with other seeds. Goes on with
``results/advice.jsonl``, which a clone has whole, so that there it measures nothing, and writes ``advice.md`` and the
rule that ``fedrax diagnose`` reads (``src/fedrax/analysis/advice.json``). Pairs that need files of $FEDRAX_DATA are
left out where that is not set.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from benchmarks.sessions import RESULTS, Session

if TYPE_CHECKING:
    from benchmarks.advice_study import Pair
    from fedrax import Federation, Result, Task
    from fedrax.analysis.shortlist import Method

RAW = RESULTS / "advice.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--report", action="store_true", help="only write the last session's page and rule again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the page is written")
    arguments = parser.parse_args()
    session = Session.latest(RAW) if arguments.report else measure()
    from benchmarks.advice_report import write

    print("wrote", *write(session, arguments.out))


def measure() -> Session:
    """What the last session has not of all pairs and methods, or all of it anew where there is none."""
    from benchmarks.advice_study import AT_THEIRS, PAIRS, TRIALS, definition
    from fedrax.analysis.shortlist import METHODS

    session = Session.latest(RAW) if RAW.exists() else Session.start(RAW)
    done = {run["definition"] for run in session.runs}
    for pair in PAIRS:
        if pair.needs_files and "FEDRAX_DATA" not in os.environ:
            continue
        names = (None, *METHODS, TRIALS, AT_THEIRS)
        digests = {name: hashlib.sha256(definition(pair, name).encode()).hexdigest()[:12] for name in names}
        missing = [name for name, digest in digests.items() if digest not in done]
        if not missing:
            continue
        task, federation = pair.build()
        for name in missing:
            facts = {"pair": pair.name, "method": name, "definition": digests[name]}
            if name is None:
                session.add(facts | {"diagnosis": diagnosed(pair, task, federation)})
                continue
            if name == TRIALS:
                session.add(facts | tried(pair, task, federation))
            elif name == AT_THEIRS:
                mine = {run["method"]: run for run in session.runs if run["pair"] == pair.name}
                session.add(facts | at_their_points(pair, mine, task, federation))
            else:
                session.add(facts | trained(pair, METHODS[name], task, federation))
            print(f"{pair.name}: {name}, {session.runs[-1]['seconds']:.0f} s", flush=True)
    return session


def diagnosed(pair: Pair, task: Task, federation: Federation) -> dict[str, Any]:
    """What ``fedrax diagnose`` measures with its defaults, with the first seed."""
    from benchmarks.advice_study import LOCAL, TUNING
    from fedrax.analysis import diagnose

    found = diagnose(task, federation, local=LOCAL, rounds=32, cohort_size=pair.cohort, seed=TUNING[0])
    return {name: value for name, value in found.to_dict().items() if name != "points"}


def tried(pair: Pair, task: Task, federation: Federation) -> dict[str, Any]:
    """What ``fedrax diagnose`` tries, of all methods that a shortlist may have: with seeds that serve nothing else."""
    from benchmarks.advice_study import CANDIDATES, LOCAL, ROUNDS, SCORING
    from fedrax import Settings
    from fedrax.analysis import try_methods

    began = time.perf_counter()
    settings = Settings(rounds=ROUNDS, cohort_size=pair.cohort, seed=max(SCORING) + 1)
    found = try_methods(task, federation, settings, LOCAL, methods=CANDIDATES)
    scores = {
        trial.method: {"point": trial.point, "score": trial.score, "spread": trial.spread} for trial in found.tried
    }
    return {"trials": scores, "seconds": time.perf_counter() - began}


def trained(pair: Pair, method: Method, task: Task, federation: Federation) -> dict[str, Any]:
    """The method tuned and scored.

    validation: accuracy on held-out rows of each of the method's points, mean over the tuning seeds, None where one
    diverged. best: the point chosen by it. test: its accuracy on test rows by seed, 0 where it diverged.
    """
    from benchmarks.advice_study import TUNING

    began, points = time.perf_counter(), method.points()
    results = swept(pair, method, points, task, federation)
    validation = []
    for runs in results:
        tuning = runs[: len(TUNING)]
        sound = all(run.stopped != "diverged" for run in tuning)
        validation.append(round(mean(run.events[-1]["test_accuracy"] for run in tuning), 6) if sound else None)
    best = max(range(len(points)), key=lambda i: -1.0 if validation[i] is None else validation[i])
    return {
        "validation": validation,
        "best": points[best],
        "chosen": validation[best],
        "test": by_seed(results[best], task, federation),
        "seconds": time.perf_counter() - began,
    }


def at_their_points(pair: Pair, runs: dict[str, Any], task: Task, federation: Federation) -> dict[str, Any]:
    """test: accuracy on test rows by seed, of each method at the point that the trials chose for it."""
    from benchmarks.advice_study import TRIALS
    from fedrax.analysis.shortlist import METHODS

    began, test = time.perf_counter(), {}
    for name, trial in runs[TRIALS]["trials"].items():
        if trial["point"] == runs[name]["best"]:
            test[name] = runs[name]["test"]
        else:
            (results,) = swept(pair, METHODS[name], [trial["point"]], task, federation)
            test[name] = by_seed(results, task, federation)
    return {"test": test, "seconds": time.perf_counter() - began}


def swept(
    pair: Pair, method: Method, points: list[dict[str, float]], task: Task, federation: Federation
) -> list[list[Result]]:
    """Runs of each point with the seeds of tuning and of scoring."""
    from benchmarks.advice_study import LOCAL, ROUNDS, SCORING, TUNING, VALIDATION
    from fedrax import sweep
    from fedrax.data import hold_out

    return sweep(
        [method.at(point, LOCAL, federation.num_clients) for point in points],
        task,
        hold_out(federation, VALIDATION),
        (*TUNING, *SCORING),
        rounds=ROUNDS,
        cohort_size=pair.cohort,
        eval_every=ROUNDS,
        mode="vectorized",
    )


def by_seed(runs: list[Result], task: Task, federation: Federation) -> dict[str, float]:
    """Accuracy on test rows; 0 where a run diverged."""
    import jax

    from benchmarks.advice_study import SCORING, TUNING
    from fedrax.contract import Batch

    accuracy = jax.jit(lambda params: task.metrics["accuracy"](params, Batch(*federation.test)).mean())
    ends = zip((*TUNING, *SCORING), runs, strict=True)
    return {str(s): 0.0 if run.stopped == "diverged" else round(float(accuracy(run.params)), 6) for s, run in ends}


if __name__ == "__main__":
    main()
