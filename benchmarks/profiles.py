"""Profiles of the benchmarks' rounds: parts of a round, kinds of time, the heaviest operations.

``python -m benchmarks.profiles`` runs ``fedrax.profiling.profile`` on the workloads of ``benchmarks.peers`` with
FedAvg, and on W1 with some of the methods of ``benchmarks.methods``, each in a fresh process on a quiet machine. It
appends the profiles to ``results/profiles.jsonl`` and writes ``profiles.md``.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.make_arrays import ensure_arrays, source_of, source_text
from benchmarks.pages import markdown_table, number, write_page
from benchmarks.points import measure_point, point_parser
from benchmarks.sessions import RESULTS, Session
from benchmarks.timing import RESULT_PREFIX
from benchmarks.workloads import ON_A_CPU, WORKLOADS

RAW = RESULTS / "profiles.jsonl"
ROUNDS = 300  # of the profiled run; only some of them are executed
POINTS = [(workload, "fedavg") for workload in ON_A_CPU]
POINTS += [("W1", name) for name in ("scaffold", "episode", "losac", "mimesvrg", "fedsaga", "mifa", "gradma")]


def main() -> None:
    parser = point_parser(__doc__)
    parser.add_argument("--report", action="store_true", help="only write the last session's page again")
    arguments = parser.parse_args()
    if arguments.point:
        print(RESULT_PREFIX + json.dumps(profile_here(**json.loads(arguments.point))))
        return
    session = Session.latest(RAW) if arguments.report else measure(arguments)
    print("wrote", write_page(arguments.out / "profiles.md", sections(session)))


def measure(arguments: argparse.Namespace) -> Session:
    """All profiles; ends the command where one fails."""
    session = Session.start(RAW, source=source_of("W1"))
    for workload, algorithm in POINTS:
        arrays = str(ensure_arrays(workload, arguments.cache / "arrays"))
        point = {"workload": workload, "algorithm": algorithm, "arrays": arrays}
        result = measure_point("benchmarks.profiles", point, arguments.max_wait)
        session.add({"workload": workload, "algorithm": algorithm} | result)
        if "failed" in result:
            raise SystemExit(f"error: {workload} {algorithm} failed: {result['failed'][-500:]}")
        print(workload, algorithm, f"{result['profile']['ms']:.2f} ms a round", flush=True)
    return session


def profile_here(workload: str, algorithm: str, arrays: str) -> dict[str, Any]:
    """The profile of one workload in this process; FedAvg as in ``peers``, other methods as in ``methods``."""
    from benchmarks.fedrax_problems import federation_of, model_of
    from benchmarks.methods import adapted
    from benchmarks.workloads import Arrays
    from fedrax import FedAvg, LocalSGD, classification
    from fedrax.experiments.method_registry import find_algorithm
    from fedrax.profiling import profile
    from fedrax.simulation import Settings

    work = WORKLOADS[workload]
    local = LocalSGD(lr=work.learning_rate, epochs=work.epochs, batch_size=work.batch, order="stored")
    method = FedAvg(local=local) if algorithm == "fedavg" else adapted(find_algorithm(algorithm)())
    settings = Settings(rounds=ROUNDS, cohort_size=work.cohort, eval_every=ROUNDS)
    federation = federation_of(Arrays(arrays, channels_last=True))
    return {"profile": profile(method, classification(model_of(work)), federation, settings).to_dict()}


def sections(session: Session) -> list[str]:
    """Sections of the page: parts of a round (summed over phases), achieved rates, heaviest operations."""
    runs = [(run["workload"], run["profile"], run["foreign_cpu"]) for run in session.runs]
    names = {f"{workload} {profile['algorithm']}": profile for workload, profile, _ in runs}
    text = (
        f"Written by `python -m benchmarks.profiles` on {session.header['date']} from session "
        f"`{session.header['id']}` of `profiles.jsonl`. FedAvg runs on the workloads of `benchmarks.peers`, other "
        f"methods with the local work of `benchmarks.methods`. {source_text(session.header.get('source'))} The section "
        "on profiling in the performance documentation explains the figures.\n\n"
        f"{session.machine_text()} No accelerator is used."
    )
    parts = list(dict.fromkeys(part["name"] for profile in names.values() for part in profile["parts"]))
    body = [
        (
            name,
            f"{profile['ms']:.2f}",
            *(percent(sum(p["share"] for p in profile["parts"] if p["name"] == part)) for part in parts),
        )
        for name, profile in names.items()
    ]
    achieved = [
        (
            f"{workload} {p['algorithm']}",
            number(p["flops_a_round"] / p["ms"] / 1e6),
            number(p["gflops_in_products"]),
            number(p["limits"]["gflops"]),
            f"{p['operations']:,.0f}",
            f"{1e3 * p['ms'] / p['operations']:.2f}",
            ", ".join(f"{kind} {ms / p['ms']:.0%}" for kind, ms in p["kinds"].items() if ms >= 0.02 * p["ms"]),
            f"{foreign:.2f}",
        )
        for workload, p, foreign in runs
    ]
    head = (
        "",
        "GFLOP/s",
        "in products",
        "limit",
        "operations a round and device",
        "µs each",
        "kinds of time",
        "foreign CPU",
    )
    return [
        "# Profiles of a round",
        text,
        "## Parts of a round",
        markdown_table(("", "ms", *parts), body),
        "## Achieved rates and kinds of time",
        markdown_table(head, achieved),
        "## The heaviest operations",
        markdown_table(("", "operation", "shapes", "share", "achieves", "of limit"), heaviest(session)),
    ]


def heaviest(session: Session) -> list[tuple[str, ...]]:
    """Rows of a table: the three operations of each run that take longest."""
    return [
        (
            f"{run['workload']} {run['profile']['algorithm']}",
            " ".join(word for word in (row["layer"], row["what"], row["direction"]) if word),
            row["shapes"],
            f"{row['share']:.0%}",
            f"{row['achieved']:.3g} {row['unit']}",
            f"{row['of_limit']:.0%}",
        )
        for run in session.runs
        for row in run["profile"]["heaviest"][:3]
    ]


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else ""


if __name__ == "__main__":
    main()
