"""Audits of every private form: what an attacker proves of epsilon, beside what is claimed.

``python -m benchmarks.audits`` watches the client of a small federation, with its own label and with the other one,
whose clipped updates are opposite, in ``--runs`` runs of each, for every configuration of method, mechanism, noise and
draw of cohorts; appends the audits to ``results/audits.jsonl`` and writes ``audits.md``. It ends with an error where a
claim is refuted, or where a mechanism that is broken on purpose is not caught. Noise, bounds and rates are inputs of
the compiled programs: each kind of mechanism is compiled once.
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
"""By the draw of the client: what error rates prove, they prove at a delta that can be counted."""
CONFIDENCE = 0.95
BROKEN_NOISES = (1.0, 1.5, 2.5)
"""Of mechanisms that are broken on purpose: with less noise so few runs prove no more than the claim, and with more
they do not prove that."""


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
    from fedrax import FedAvg, LocalSGD, Scaffold
    from fedrax.privacy import ClientDP, OutputPerturbation, SampleDP
    from fedrax.privacy.mechanisms.clipping import Adaptive, Flat, PerLeaf

    local = LocalSGD(lr=1e6, steps=1, batch_size=1)  # whatever the model, the update is longer than its bound
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
    slow = FedAvg(local=LocalSGD(lr=0.05, steps=2, batch_size=1))  # gradients stay longer than theirs
    for rate, batches in ((None, "shuffled"), (0.5, "Poisson")):
        for noise in NOISES:
            private = SampleDP(slow, clip=0.5, noise=noise, rate=rate)
            yield Configuration("FedAvg", f"SampleDP, {batches} batches", "always", noise, 1.0, private, "sample")
    for noise in NOISES:
        private = OutputPerturbation(average, tau=1.0, sigma=noise)
        yield Configuration("FedAvg", "OutputPerturbation", "always", noise, 1.0, private, "client")


def broken() -> Iterator[tuple[str, Configuration, Algorithm]]:
    """What is wrong, what is claimed, and what is run in its place: at the server and at the client."""
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
    parser.add_argument("--runs", type=int, default=10_000, help="of each world (default 10000)")
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
    """What is proven of a method at 95 %, and together with ``many`` others where the first is above the claim."""
    from fedrax import Settings
    from fedrax.experiments.audit import watch_a_client

    settings = Settings(cohort_size=1, delta=DELTAS[one.drawn], seed=1)
    facts = {key: value for key, value in one._asdict().items() if key != "private"}
    watched: dict[str, Any] = {"unit": one.unit, "rounds": ROUNDS, "runs": runs, "drawn": one.drawn, "rate": one.rate}
    task = pair()
    found = watch_a_client(runs_as, task, federation(), settings, **watched)
    together = found.proven
    if found.proven > found.claimed:
        level = 1 - (1 - CONFIDENCE) / many
        together = watch_a_client(runs_as, task, federation(), settings, confidence=level, **watched).proven
    claimed = found.claimed if math.isfinite(found.claimed) else None
    return facts | {"proven": found.proven, "together": together, "claimed": claimed}


@cache
def pair() -> Any:
    """Two classes by two vectors of one shape: an upload of two leaves, whose noise could be the same."""
    import jax.numpy as jnp

    from fedrax import classification
    from fedrax.models import Model

    logits = lambda params, x, key=None: x[:, :1] * params["a"] + x[:, 1:] * params["b"]  # noqa: E731
    return classification(Model(lambda key: {"a": jnp.zeros(2), "b": jnp.zeros(2)}, logits))


@cache
def federation() -> Any:
    """One client of one sample; with its other label it moves the model by as much the other way."""
    from fedrax import Federation

    return Federation.from_arrays(np.array([[1.0, -1.0]], np.float32), np.array([0]), np.zeros(1, int), num_classes=2)


# -- the page ------------------------------------------------------------------------------------------------------


def audits_of(session: Session, broken: bool) -> list[dict[str, Any]]:
    return [run for run in session.runs if "mechanism" in run and ("fault" in run) is broken]


def refuted(run: dict[str, Any]) -> bool:
    """Whether what holds together with all others is above the claim."""
    return run["claimed"] is not None and run["together"] > run["claimed"]


def failures(session: Session) -> list[str]:
    """Sound claims that are refuted; and what is broken and not caught."""
    sound = [f"{run['mechanism']} of {run['method']} is refuted" for run in audits_of(session, False) if refuted(run)]
    missed = [run for run in audits_of(session, True) if not refuted(run)]
    return sound + [f"{run['mechanism']} with {run['fault']}, noise {run['noise']}, is not caught" for run in missed]


def table(session: Session) -> str:
    """A row for each mechanism and draw of cohorts, and for each fault."""
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
    head = ("mechanism", "client is drawn", "configurations", "proven / claimed", "above claim, 95 % each", "refuted")
    return markdown_table(head, rows)


def write_report(session: Session, out: Path) -> Path:
    header, sound = session.header, audits_of(session, False)
    seconds = next(run["seconds"] for run in session.runs if "seconds" in run)
    above = sum(run["proven"] > run["claimed"] for run in sound if run["claimed"])
    noises, rates = (", ".join(map(str, values)) for values in (NOISES, RATES))
    wrong = audits_of(session, True)
    introduction = (
        f"Written by `python -m benchmarks.audits` on {header['date']} from session `{header['id']}` of "
        f"`audits.jsonl`: {len(sound)} configurations of FedAvg and SCAFFOLD, of mechanisms, of noise multipliers "
        f"{noises} (for OutputPerturbation they are sigma, with tau = 1: multipliers of half that) and "
        f"of draws of a client with rates {rates} and 1; {ROUNDS} rounds each, {header['runs']} runs of "
        f"each of two worlds, delta = {DELTAS['always']:g} for a client that is always there and "
        f"{DELTAS['fixed']:g} for one that is drawn; {number(seconds / 60)} minutes of processor time.\n\n"
        f"At 95 % each, a bound is above its claim by chance in at most 5 % of sound configurations; {above} of "
        f"{len(sound)} are. A claim counts as refuted where a bound with confidence 1 - 0.05 / {len(sound)} is above "
        "it (Bonferroni): all such bounds hold together with 95 %. The client has one sample, whose other label, in "
        "the second world, turns its clipped update around: the two worlds are as far apart as a bound allows. One "
        "that is always there is told from the other by the likelihood ratio of Gaussian answers, a threshold in the "
        "direction that the first runs show, and what is proven is a mean shift; of one that is drawn in another "
        "one's place (fixed) or by a coin of its own (poisson; in the second world it is not there) error rates prove "
        f"epsilon itself. Of {len(wrong)} audits of mechanisms that are broken on purpose {sum(map(refuted, wrong))} "
        "refute the claim.\n\n"
        f"{session.machine_text()} No accelerator is used."
    )
    return write_page(out / "audits.md", ["# Audits of what is claimed", introduction, table(session)])


if __name__ == "__main__":
    main()
