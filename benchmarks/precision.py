"""``python -m benchmarks.precision``: the test accuracy with reduced precision of matrix products.

Trains three workloads with float32, TensorFloat-32 and bfloat16 products, each with the same initial parameters,
cohorts and batches for several seeds. It times nothing. Appends the runs to ``results/precision.jsonl`` and writes
``precision.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.make_arrays import ensure_arrays, source_of, source_text
from benchmarks.pages import markdown_table, write_page
from benchmarks.points import measure_point, point_parser
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX

RAW = RESULTS / "precision.jsonl"
PRECISIONS = {"highest": "float32", "tensorfloat32": "TensorFloat-32", "bfloat16": "bfloat16"}
SEEDS = range(5)


class Training(NamedTuple):
    rounds: int
    learning_rate: float


WORKLOADS = {
    "W1": Training(300, 0.05),
    "W2": Training(100, 0.01),
    "W3": Training(6, 0.05),
}  # W3 reaches full accuracy soon after


def main() -> None:
    parser = point_parser(__doc__)
    parser.add_argument("--report", action="store_true", help="only write the last session's page again")
    arguments = parser.parse_args()
    if arguments.point:
        print(RESULT_PREFIX + json.dumps(train(**json.loads(arguments.point))))
        return
    session = Session.latest(RAW) if arguments.report else measure(arguments)
    print(write_page(arguments.out / "precision.md", sections(session)).read_text())


def measure(arguments: argparse.Namespace) -> Session:
    """All workloads in all formats; ends the command where a run fails."""
    session = Session.start(RAW, machine.describe(), source=source_of("W1"))
    for workload in WORKLOADS:
        arrays = str(ensure_arrays(workload, arguments.cache / "arrays"))
        for precision in PRECISIONS:
            point = {"workload": workload, "precision": precision, "arrays": arrays}
            result = measure_point("benchmarks.precision", point, arguments.max_wait, timeout=1800)
            session.add({"workload": workload, "precision": precision} | result)
            if "failed" in session.runs[-1]:
                raise SystemExit(f"error: {workload} in {precision} failed: {session.runs[-1]['failed']}")
            print(workload, precision, result["accuracy"], flush=True)
    return session


def train(workload: str, precision: str, arrays: str) -> dict[str, Any]:
    """Test accuracy and loss after the last round, one for each seed, and the platform."""
    import jax

    from benchmarks.fedrax_problems import federation_of, model_of
    from benchmarks.workloads import WORKLOADS as DEFINED
    from benchmarks.workloads import Arrays
    from fedrax import FedAvg, LocalSGD, classification, simulate

    defined, training = DEFINED[workload], WORKLOADS[workload]
    task, federation = classification(model_of(defined)), federation_of(Arrays(arrays, channels_last=True))
    local = LocalSGD(lr=training.learning_rate, epochs=defined.epochs, batch_size=defined.batch)
    ends = []
    for seed in SEEDS:
        result = simulate(
            FedAvg(local=local),
            task,
            federation,
            rounds=training.rounds,
            cohort_size=defined.cohort,
            eval_every=training.rounds,
            seed=seed,
            precision=precision,  # type: ignore[arg-type]
        )
        ends.append(result.events[-1])
    return {
        "accuracy": [end["test_accuracy"] for end in ends],
        "loss": [end["test_loss"] for end in ends],
        "platform": jax.default_backend(),
    }


def sections(session: Session) -> list[str]:
    runs = {(run["workload"], run["precision"]): run for run in session.runs}
    lines = []
    for workload, training in WORKLOADS.items():
        exact = runs[workload, "highest"]
        for precision, name in PRECISIONS.items():
            run = runs[workload, precision]
            apart = [100 * (a - b) for a, b in zip(run["accuracy"], exact["accuracy"], strict=True)]
            lines.append(
                (
                    f"{workload}, {training.rounds} rounds",
                    name,
                    spread([100 * a for a in run["accuracy"]], 2),
                    "" if precision == "highest" else spread(apart, 2),
                    spread(run["loss"], 4),
                )
            )
    text = (
        f"Written by `python -m benchmarks.precision` on {session.header['date']} from session "
        f"`{session.header['id']}` of `precision.jsonl`. FedAvg on the workloads of `benchmarks/README.md`, with "
        f"{len(SEEDS)} seeds of initial parameters, cohorts and mini-batches; mean and standard deviation over the "
        f"seeds. {source_text(session.header.get('source'))} "
        "The difference is to the accuracy of the same seed with float32 products; compare its spread with that of the "
        "accuracy itself. Products of local gradients use operands in the format; in bfloat16 their results are "
        "rounded as well, except gradients of weights. All other operations are in float32. On the device used here "
        f"({exact['platform']}) {rounding(exact['platform'])}. Machine: {session.header['machine']['cpu']}, Python "
        f"{session.header['machine']['python']}."
    )
    head = ("", "products", "test accuracy, %", "difference, points", "test loss")
    return ["# Accuracy with reduced precision", text, markdown_table(head, lines)]


def rounding(platform: str) -> str:
    """How the platform computes in the format."""
    if platform == "cpu":
        return "numbers are rounded to nearest without a gain in speed, so no times are shown"
    return "numbers are multiplied in the format"


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    main()
