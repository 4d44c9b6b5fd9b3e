"""Audits of every private form: what an attacker proves of epsilon, beside what is claimed.

``python -m benchmarks.audits`` watches a client of a small federation, with its own data and with other data, in
``--runs`` runs of each, for every configuration of method, mechanism, noise and draw of cohorts; appends the audits to
``results/audits.jsonl`` and writes ``audits.md``. It ends with an error where a claim is refuted, or where the audit
does not catch the mechanisms that are broken on purpose. Noise, bounds and rates are inputs of the compiled programs:
each kind of mechanism is compiled once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.pages import markdown_table, number, write_page
from benchmarks.points import point_parser
from benchmarks.sessions import RESULTS, Session

if TYPE_CHECKING:
    from fedrax import Algorithm

RAW = RESULTS / "audits.jsonl"
NOISES, RATES, ROUNDS, DELTA = (0.5, 1.0, 1.5, 2.5, 4.0), (0.05, 0.1, 0.2, 0.5), 2, 1e-5
CONFIDENCE = 0.95


class Configuration(NamedTuple):
    """What is audited."""

    method: str
    mechanism: str
    drawn: str
    noise: float
    rate: float
    private: Algorithm
    unit: str


def configurations() -> Iterator[Configuration]:
    """All of them, those of one compiled program together."""
    from fedrax import ClientDP, FedAvg, LocalSGD, OutputPerturbation, SampleDP, Scaffold
    from fedrax.privacy.mechanisms.clipping import Adaptive, Flat, PerLeaf

    local = LocalSGD(lr=2.0, steps=2, batch_size=4)
    average, scaffold = FedAvg(local=local), Scaffold(local=local)
    clips = {"flat": Flat(0.5), "per leaf": PerLeaf(0.5), "adaptive": Adaptive(bound=0.5, count_noise=4.0)}
    central: list[tuple[str, Any, str]] = [("FedAvg", average, clip) for clip in clips]
    central.append(("SCAFFOLD", scaffold, "flat"))
    for name, inner, clip in central:
        for drawn, rates in (("fixed", (1.0, *RATES)), ("poisson", RATES)):
            for noise, rate in product(NOISES, rates):
                private: Any = ClientDP(inner, clip=clips[clip], noise=noise)
                yield Configuration(name, f"ClientDP, {clip}", drawn, noise, rate, private, "client")
    for name, inner, clip in (
        ("FedAvg", average, "flat"),
        ("FedAvg", average, "adaptive"),
        ("SCAFFOLD", scaffold, "flat"),
    ):
        for noise in NOISES:
            private = ClientDP(inner, clip=clips[clip], noise=noise, at="client")
            yield Configuration(name, f"ClientDP at the client, {clip}", "always", noise, 1.0, private, "client")
    for rate, batches in ((None, "shuffled"), (0.5, "Poisson")):
        for noise in NOISES:
            private = SampleDP(average, clip=0.5, noise=noise, rate=rate)
            yield Configuration("FedAvg", f"SampleDP, {batches} batches", "always", noise, 1.0, private, "sample")
    for noise in NOISES:
        private = OutputPerturbation(average, tau=1.0, sigma=noise)
        yield Configuration("FedAvg", "OutputPerturbation", "always", noise, 1.0, private, "client")


def main() -> None:
    parser = point_parser(__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="of each world (default 2000)")
    parser.add_argument("--report", action="store_true", help="only write the last session's page again")
    arguments = parser.parse_args()
    session = Session.latest(RAW) if arguments.report else measure(arguments)
    print(table(session))
    print("wrote", write_report(session, arguments.out))
    if problems := failures(session):
        raise SystemExit("\n".join(f"error: {problem}" for problem in problems))


def measure(arguments: argparse.Namespace) -> Session:
    """All configurations, and some with less noise than they claim."""
    every = list(configurations())
    session = Session.start(RAW, runs=arguments.runs)
    began = time.monotonic()
    for one in every:
        found = audit(one, one.private, arguments.runs, len(every))
        session.add(found | {"broken": False})
        if one.method == "FedAvg" and one.mechanism.endswith("flat") and one.rate == 1:
            quiet: Any = dataclasses.replace(one.private, noise=one.noise / 2**0.5)  # type: ignore[call-arg]
            session.add(audit(one, quiet, arguments.runs, len(every)) | {"broken": True, "claimed": found["claimed"]})
    session.add({"seconds": time.monotonic() - began})
    return session


def audit(one: Configuration, runs_as: Algorithm, runs: int, many: int) -> dict[str, Any]:
    """What is proven of a method at 95 %, and together with ``many`` others where the first is above the claim."""
    from fedrax import Settings, classification
    from fedrax.experiments.audit import watch_a_client
    from fedrax.models import Logistic

    settings = Settings(cohort_size=1, delta=DELTA, seed=1)
    facts = {key: value for key, value in one._asdict().items() if key != "private"}
    watched: dict[str, Any] = {"unit": one.unit, "rounds": ROUNDS, "runs": runs, "drawn": one.drawn, "rate": one.rate}
    task = _task(classification, Logistic)
    found = watch_a_client(runs_as, task, federation(), settings, **watched)
    together = found.proven
    if found.proven > found.claimed:
        level = 1 - (1 - CONFIDENCE) / many
        together = watch_a_client(runs_as, task, federation(), settings, confidence=level, **watched).proven
    claimed = found.claimed if math.isfinite(found.claimed) else None
    return facts | {"proven": found.proven, "together": together, "claimed": claimed}


@cache
def _task(classification: Any, model: Any) -> Any:
    """One for all audits, whose programs are then shared."""
    return classification(model().build((3,), 3))


@cache
def federation() -> Any:
    """One client of four samples, three features and three classes."""
    from fedrax import Federation

    x = 3 * np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    return Federation.from_arrays(x, np.array([0, 0, 1, 2]), np.zeros(4, int), num_classes=3)


# -- the page ------------------------------------------------------------------------------------------------------


def audits_of(session: Session, broken: bool) -> list[dict[str, Any]]:
    return [run for run in session.runs if run.get("broken") is broken]


def refuted(run: dict[str, Any]) -> bool:
    """Whether what holds together with all others is above the claim."""
    return run["claimed"] is not None and run["together"] > run["claimed"]


def failures(session: Session) -> list[str]:
    """Sound claims that are refuted; and that nothing broken is caught."""
    found = [f"{run['mechanism']} of {run['method']} is refuted" for run in audits_of(session, False) if refuted(run)]
    broken = audits_of(session, True)
    return found + (
        ["no mechanism with too little noise was caught"] if broken and not any(map(refuted, broken)) else []
    )


def table(session: Session) -> str:
    """A row for each mechanism and draw of cohorts."""
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for broken in (False, True):
        for run in audits_of(session, broken):
            groups.setdefault((run["mechanism"], run["drawn"], broken), []).append(run)
    rows = []
    for (mechanism, drawn, broken), runs in groups.items():
        share = [run["proven"] / run["claimed"] for run in runs if run["claimed"]]
        above = sum(run["proven"] > run["claimed"] for run in runs if run["claimed"])
        name = mechanism + (", noise too small by √2" if broken else "")
        spread = f"{min(share):.2f} to {max(share):.2f}"
        rows.append((name, drawn, str(len(runs)), spread, str(above), str(sum(map(refuted, runs)))))
    head = ("mechanism", "client is drawn", "configurations", "proven / claimed", "above claim, 95 % each", "refuted")
    return markdown_table(head, rows)


def write_report(session: Session, out: Path) -> Path:
    header, sound = session.header, audits_of(session, False)
    seconds = next(run["seconds"] for run in session.runs if "seconds" in run)
    above = sum(run["proven"] > run["claimed"] for run in sound if run["claimed"])
    noises, rates = (", ".join(map(str, values)) for values in (NOISES, RATES))
    introduction = (
        f"Written by `python -m benchmarks.audits` on {header['date']} from session `{header['id']}` of "
        f"`audits.jsonl`: {len(sound)} configurations of FedAvg and SCAFFOLD, of mechanisms, of noise multipliers "
        f"{noises} and of draws of a client with rates {rates} and 1; {ROUNDS} rounds each, {header['runs']} runs of "
        f"each of two worlds, delta = {DELTA:g}; {number(seconds / 60)} minutes.\n\n"
        f"At 95 % each, a bound is above its claim by chance in at most 5 % of sound configurations; {above} of "
        f"{len(sound)} are. A claim counts as refuted where a bound with confidence 1 - 0.05 / {len(sound)} is above "
        "it (Bonferroni): all such bounds hold together with 95 %. A client that is always there, or drawn in another "
        "one's place (fixed), has other labels in the second world; one that is drawn by a coin of its own (poisson) "
        "is not there. Mechanisms with less noise than they claim are among them to show that such are caught.\n\n"
        f"{session.machine_text()} No accelerator is used."
    )
    return write_page(out / "audits.md", ["# Audits of what is claimed", introduction, table(session)])


if __name__ == "__main__":
    main()
