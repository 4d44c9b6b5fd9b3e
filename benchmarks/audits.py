"""Privacy audits of every mechanism: lower bounds on epsilon against the claimed guarantees.

``python -m benchmarks.audits`` plays the distinguishing game on the client of a small federation. The two neighboring
datasets have its own label and the other label, which give opposite clipped updates; each gets ``--runs`` runs for
every configuration of method, mechanism, noise and cohort sampling. Appends the audits to ``results/audits.jsonl`` and
writes ``audits.md``. Exits with an error if a claim is refuted, or if the audit does not detect a mechanism that is
broken on purpose. Noise, bounds and rates are inputs of the compiled programs: each mechanism is compiled once.
"""

from __future__ import annotations

import argparse
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
NOISES, RATES, ROUNDS = (0.5, 1.0, 1.5, 2.5, 4.0), (0.05, 0.1, 0.2, 0.5), 2
DELTAS = {"always": 1e-5, "fixed": 1e-2, "poisson": 1e-2}
"""delta by the sampling of the client. Bounds from error rates need a delta that the number of runs can resolve."""
CONFIDENCE = 0.95
BROKEN_NOISES = (1.0, 1.5, 2.5)
"""Noise multipliers of mechanisms that are broken on purpose: with less or more noise, this number of runs does not
prove more than the claim."""


class Configuration(NamedTuple):
    """One audited configuration."""

    method: str
    mechanism: str
    drawn: str
    noise: float
    rate: float
    private: Algorithm
    unit: str


def configurations() -> Iterator[Configuration]:
    """All configurations, grouped by compiled program."""
    from fedrax import FedAvg, LocalSGD, Scaffold
    from fedrax.privacy import ClientDP, OutputPerturbation, SampleDP
    from fedrax.privacy.mechanisms.clipping import Adaptive, Flat, PerLeaf

    local = LocalSGD(lr=1e6, steps=1, batch_size=1)  # the update always exceeds its bound
    average, scaffold = FedAvg(local=local), Scaffold(local=local)
    clips = {"flat": Flat(0.5), "per leaf": PerLeaf(0.5), "adaptive": Adaptive(bound=0.5, count_noise=4.0)}
    central: list[tuple[str, Any, str]] = [("FedAvg", average, clip) for clip in clips]
    central.append(("SCAFFOLD", scaffold, "flat"))
    for name, inner, clip in central:
        for drawn, rates in (("always", (1.0,)), ("fixed", RATES), ("poisson", RATES)):
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
    slow = FedAvg(local=LocalSGD(lr=0.05, steps=2, batch_size=1))  # gradients always exceed their bound
    for rate, batches in ((None, "shuffled"), (0.5, "Poisson")):
        for noise in NOISES:
            private = SampleDP(slow, clip=0.5, noise=noise, rate=rate)
            yield Configuration("FedAvg", f"SampleDP, {batches} batches", "always", noise, 1.0, private, "sample")
    for noise in NOISES:
        private = OutputPerturbation(average, tau=1.0, sigma=noise)
        yield Configuration("FedAvg", "OutputPerturbation", "always", noise, 1.0, private, "client")


def broken() -> Iterator[tuple[str, Configuration, Algorithm]]:
    """(fault, sound configuration, broken method), with noise at the server and at the client."""
    from benchmarks.broken_mechanisms import BROKEN
    from fedrax import FedAvg, LocalSGD
    from fedrax.privacy.mechanisms.client_level import ClientDP
    from fedrax.privacy.mechanisms.clipping import Flat

    inner = FedAvg(local=LocalSGD(lr=1e6, steps=1, batch_size=1))
    for (fault, made), at in product(BROKEN.items(), ("server", "client")):
        name = "ClientDP, flat" if at == "server" else "ClientDP at the client, flat"
        for noise in BROKEN_NOISES:
            facts: dict[str, Any] = {"clip": Flat(0.5), "noise": noise, "at": at}
            sound = Configuration("FedAvg", name, "always", noise, 1.0, ClientDP(inner, **facts), "client")
            yield fault, sound, made(inner, **facts)


def main() -> None:
    parser = point_parser(__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="for each of the two datasets (default 10000)")
    parser.add_argument("--report", action="store_true", help="only write the last session's page again")
    arguments = parser.parse_args()
    session = Session.latest(RAW) if arguments.report else measure(arguments)
    print(table(session))
    print("wrote", write_report(session, arguments.out))
    if problems := failures(session):
        raise SystemExit("\n".join(f"error: {problem}" for problem in problems))


def measure(arguments: argparse.Namespace) -> Session:
    """All configurations, and the broken mechanisms."""
    every = list(configurations())
    session = Session.start(RAW, runs=arguments.runs)
    began = time.process_time()
    for one in every:
        session.add(audit(one, one.private, arguments.runs, len(every)))
    for fault, one, runs_as in broken():
        session.add(audit(one, runs_as, arguments.runs, len(every)) | {"fault": fault})
    session.add({"seconds": time.process_time() - began})
    return session


def audit(one: Configuration, runs_as: Algorithm, runs: int, many: int) -> dict[str, Any]:
    """The lower bound at 95 % and, if it exceeds the claim, the bound corrected for ``many`` audits."""
    from fedrax import Settings
    from fedrax.experiments.audit import audit_client

    settings = Settings(cohort_size=1, delta=DELTAS[one.drawn], seed=1)
    facts = {key: value for key, value in one._asdict().items() if key != "private"}
    watched: dict[str, Any] = {"unit": one.unit, "rounds": ROUNDS, "runs": runs, "drawn": one.drawn, "rate": one.rate}
    task = pair()
    found = audit_client(runs_as, task, federation(), settings, **watched)
    together = found.proven
    if found.proven > found.claimed:
        level = 1 - (1 - CONFIDENCE) / many
        together = audit_client(runs_as, task, federation(), settings, confidence=level, **watched).proven
    claimed = found.claimed if math.isfinite(found.claimed) else None
    return facts | {"proven": found.proven, "together": together, "claimed": claimed}


@cache
def pair() -> Any:
    """A task with two parameter vectors of one shape, so that reused noise between leaves would be detected."""
    import jax.numpy as jnp

    from fedrax import classification
    from fedrax.models import Model

    logits = lambda params, x, key=None: x[:, :1] * params["a"] + x[:, 1:] * params["b"]  # noqa: E731
    return classification(Model(lambda key: {"a": jnp.zeros(2), "b": jnp.zeros(2)}, logits))


@cache
def federation() -> Any:
    """One client with one sample; the other label gives the opposite update."""
    from fedrax import Federation

    return Federation.from_arrays(np.array([[1.0, -1.0]], np.float32), np.array([0]), np.zeros(1, int), num_classes=2)


# -- the page ------------------------------------------------------------------------------------------------------


def audits_of(session: Session, broken: bool) -> list[dict[str, Any]]:
    return [run for run in session.runs if "mechanism" in run and ("fault" in run) is broken]


def refuted(run: dict[str, Any]) -> bool:
    """Whether the bound corrected for multiple tests exceeds the claim."""
    return run["claimed"] is not None and run["together"] > run["claimed"]


def failures(session: Session) -> list[str]:
    """Sound claims that are refuted, and broken mechanisms that are not detected."""
    sound = [f"{run['mechanism']} of {run['method']} is refuted" for run in audits_of(session, False) if refuted(run)]
    missed = [run for run in audits_of(session, True) if not refuted(run)]
    return sound + [f"{run['mechanism']} with {run['fault']}, noise {run['noise']}, is not detected" for run in missed]


def table(session: Session) -> str:
    """A row for each mechanism and cohort sampling, and for each fault."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in audits_of(session, False) + audits_of(session, True):
        fault = f", {run['fault']}" if "fault" in run else ""
        groups.setdefault((run["mechanism"] + fault, run["drawn"]), []).append(run)
    rows = []
    for (name, drawn), runs in groups.items():
        share = [run["proven"] / run["claimed"] for run in runs if run["claimed"]]
        above = sum(run["proven"] > run["claimed"] for run in runs if run["claimed"])
        spread = f"{min(share):.2f} to {max(share):.2f}"
        rows.append((name, drawn, str(len(runs)), spread, str(above), str(sum(map(refuted, runs)))))
    head = ("mechanism", "client sampling", "configurations", "proven / claimed", "above claim, 95 % each", "refuted")
    return markdown_table(head, rows)


def write_report(session: Session, out: Path) -> Path:
    header, sound = session.header, audits_of(session, False)
    seconds = next(run["seconds"] for run in session.runs if "seconds" in run)
    above = sum(run["proven"] > run["claimed"] for run in sound if run["claimed"])
    noises, rates = (", ".join(map(str, values)) for values in (NOISES, RATES))
    wrong = audits_of(session, True)
    introduction = (
        f"Written by `python -m benchmarks.audits` on {header['date']} from session `{header['id']}` of "
        f"`audits.jsonl`: {len(sound)} configurations of FedAvg and SCAFFOLD with the mechanisms below, noise "
        f"multipliers {noises} (for OutputPerturbation these are sigma, with tau = 1: multipliers of half that), and "
        f"client sampling rates {rates} and 1. {ROUNDS} rounds in each run, {header['runs']} runs with each of two "
        f"neighboring datasets, delta = {DELTAS['always']:g} for a client that always participates and "
        f"{DELTAS['fixed']:g} for one that is sampled; {number(seconds / 60)} minutes of processor time.\n\n"
        "Each lower bound on epsilon has a confidence of 95 %, so at most 5 % of sound configurations are expected "
        f"above their claim by chance; {above} of {len(sound)} are. A claim is refuted if a bound with confidence 1 - "
        f"0.05 / {len(sound)} exceeds it (Bonferroni): all such bounds hold together with 95 %. The client has one "
        "sample. In the second dataset it has the other label, which reverses the clipped update, the largest change "
        "that the clipping bound allows. For a client that always participates, the test is the likelihood ratio of "
        "Gaussian observations, a threshold along a direction that is estimated on the first half of the runs, and the "
        "bound follows from a mean shift. For a sampled client, which replaces another one (fixed) or is absent from "
        "the second dataset (poisson), the bound follows from error rates. "
        f"Of {len(wrong)} audits of mechanisms that are broken on purpose, {sum(map(refuted, wrong))} "
        "refute the claim.\n\n"
        f"{session.machine_text()} No accelerator is used."
    )
    return write_page(out / "audits.md", ["# Privacy audits", introduction, table(session)])


if __name__ == "__main__":
    main()
