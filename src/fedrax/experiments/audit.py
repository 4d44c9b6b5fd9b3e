"""Audits: what attackers can prove of a private experiment, beside what its ledger claims.

Two attackers. One watches a client in many runs of a few rounds, with its own data and with other data, and knows both:
the strongest there is, against one release. The other sees the model of one whole run, in which the labels of many
canaries were exchanged by the flip of a coin, and guesses the coins.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.initialization import shapes_of, starting_parameters
from fedrax.contract.task import Batch, Task, Variables
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.privacy.accounting import Accountant, CohortSampling, about_replacement
from fedrax.privacy.audit.bounds import (
    CONFIDENCE,
    check_runs,
    distinguish,
    epsilon_of_mu,
    guess_membership,
    one_run_epsilon,
)
from fedrax.privacy.audit.game import Participation, observe_client
from fedrax.prng.keys import INITIALIZATION, purpose_key
from fedrax.simulation import Settings, simulate
from fedrax.simulation.privacy_ledger import ledger_of, private_releases
from fedrax.simulation.settings import cohort_sampler

ProtectedUnit = Literal["client", "sample"]
SHARE = 1 / 3
"""Of the canaries, about which the attacker of one run says anything."""


@dataclass(frozen=True)
class Audit:
    """What was proven, at 95 %, and what is claimed, both about one ``unit``: its presence, or other data of it."""

    attacker: Literal["watches a client", "guesses canaries"]
    unit: ProtectedUnit
    neighbors: Literal["presence", "replacement"]
    rounds: int
    trials: int
    """Runs of each world that the bound rests on, or guesses."""
    proven: float
    """epsilon is at least this."""
    claimed: float
    """epsilon is at most this, by the sound accountant."""
    claimed_paper: float | None
    """Or this, as the method's paper has it, about one sample."""
    delta: float

    @property
    def refuted(self) -> bool:
        """Whether the sound claim is wrong: the mechanism does not do what it says."""
        return self.proven > self.claimed

    @property
    def paper_refuted(self) -> bool:
        """Whether the paper's claim is wrong."""
        return self.claimed_paper is not None and self.proven > self.claimed_paper

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        made = dataclasses.asdict(self) | {"refuted": self.refuted, "paper_refuted": self.paper_refuted}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in made.items()}


def watch_a_client(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    settings: Settings,
    *,
    client: int = 0,
    unit: ProtectedUnit | None = None,
    rounds: int = 1,
    runs: int = 2000,
    drawn: Participation = "always",
    rate: float = 1.0,
    confidence: float = CONFIDENCE,
) -> Audit:
    """Tell a client's data from the same with other labels (of all samples, or of one) by what ``rounds`` let out.

    As the only client, and by many ``runs`` of each world. The server sees all that the client sends; where noise is
    added to a sum the public sees what the server sends and says, and the model after each round. drawn: "poisson", the
    client takes part in a round with the chance ``rate``, and in the other world it is not there; "fixed", another
    client is there where it is not drawn. The claim is then about rounds of such cohorts, in the first case about
    presence. So it is where samples are drawn into batches by coins: in the other world one sample is not there. unit:
    by default what the method protects.

    Raises FedraxError for a method that is not private, labels that are no classes, or draws that the server sees.
    """
    releases = _releases(algorithm)
    unit = _unit(releases, unit)
    if drawn != "always" and unit == "sample":
        raise FedraxError("the draw of cohorts hides whole clients, not one of their samples: set unit to 'client'")
    check_runs(runs)
    if rounds > 1 and (apart := max(release.apart for release in releases)) > 1:
        raise FedraxError(f"the claim is about clients that take part {apart} rounds apart: watch one round")
    if not 0 <= client < federation.num_clients:
        raise FedraxError(f"there is no client {client}: there are {federation.num_clients}")
    start = starting_parameters(task, purpose_key(settings.seed, INITIALIZATION), None)
    _check_admitted(algorithm, task, settings, start)
    start = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), start)
    coins = all((r.unit, r.neighbors, r.batches) == ("sample", "presence", "poisson") for r in releases)
    presence = drawn == "poisson" or coins
    worlds = _worlds(federation, client, unit, drawn, rate, coins)
    shared: dict[str, Any] = {"rounds": rounds, "drawn": drawn, "precision": settings.precision}
    shared["seen"] = "public" if all(release.seen == "public" for release in releases) else "server"
    own, other = (
        observe_client(algorithm, task, start, runs=runs, seed=settings.seed + k, **shared, **world)
        for k, world in enumerate(worlds)
    )
    told = distinguish(own, other, settings.delta, confidence)
    cohorts = CohortSampling() if drawn == "always" else CohortSampling(drawn, rate)
    accountant = Accountant(releases if presence else about_replacement(releases), settings.delta, cohorts)
    gaussian = drawn == "always" and not coins
    proven = max(told.epsilon, epsilon_of_mu(told.mu, settings.delta)) if gaussian else told.epsilon
    paper = accountant.epsilon_paper(rounds, int(federation.sizes[client])) if unit == "sample" else None
    about = "presence" if presence else "replacement"
    claimed = accountant.epsilon(rounds)
    return Audit("watches a client", unit, about, rounds, told.runs, proven, claimed, paper, settings.delta)


def _worlds(
    federation: Federation, client: int, unit: ProtectedUnit, drawn: Participation, rate: float, coins: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is watched in either world. coins: whether samples come into batches by coins of their own."""
    mine = slice(*federation.offsets[client : client + 2])
    x, y = federation.train.x[mine], federation.train.y[mine]
    changed = np.arange(len(y)) if unit == "client" else np.arange(1)
    if coins:  # the first sample comes last, and is there or not
        samples = Batch(np.roll(x, -1, 0), np.roll(y, -1, 0))
        return {"client": samples, "size": len(y)}, {"client": samples, "size": len(y) - 1}
    if drawn == "poisson":
        return {"client": Batch(x, y), "rate": rate}, {"client": Batch(x, y), "rate": 0.0}
    other = _other_labels(federation, y, changed)
    bystander = Batch(x, _other_labels(federation, other, changed))
    drawing = {"rate": rate, "bystander": bystander}
    return {"client": Batch(x, y)} | drawing, {"client": Batch(x, other)} | drawing


def guess_canaries(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    settings: Settings,
    *,
    unit: ProtectedUnit | None = None,
    canaries: int = 200,
) -> Audit:
    """Train once, with the labels of each canary (a client or a sample) exchanged or not, and guess which were.

    By the loss of the last model on either version, over what is usual for canaries of the same class. unit: by
    default what the method protects.

    Raises FedraxError for a method that is not private, or more canaries than there are clients or samples.
    """
    releases = _releases(algorithm)
    unit = _unit(releases, unit)
    _check_admitted(algorithm, task, settings, shapes_of(task))
    many = federation.num_clients if unit == "client" else len(federation.train.y)
    if not 2 <= canaries <= many:
        raise FedraxError(f"there are {many} {unit}s: take 2 to {many} canaries, not {canaries}")
    rng = np.random.default_rng([settings.seed, canaries])
    chosen, coins = np.sort(rng.choice(many, canaries, replace=False)), rng.random(canaries) < 0.5
    owner = np.arange(many) if unit == "sample" else np.repeat(np.arange(many), federation.sizes)
    rows = np.flatnonzero(np.isin(owner, chosen))
    exchanged = _other_labels(federation, federation.train.y, rows)
    y = np.where(np.isin(owner, chosen[coins]), exchanged, federation.train.y)
    train = federation.train._replace(y=y.astype(federation.train.y.dtype))
    result = simulate(algorithm, task, dataclasses.replace(federation, train=train), settings, progress=False)

    def losses(labels: np.ndarray) -> np.ndarray:
        batch = Batch(federation.train.x[rows], labels[rows])
        return np.asarray(task.loss(result.params, batch, jax.random.key(0)), float)

    gains, mine = losses(federation.train.y) - losses(exchanged), federation.train.y[rows]
    # over the mean of the same exchange: how much one class gained over another tells nothing of a canary
    gains -= (np.bincount(mine, gains) / np.maximum(np.bincount(mine), 1))[mine]
    place = np.searchsorted(chosen, owner[rows])
    guesses = guess_membership(np.bincount(place, gains, canaries) / np.bincount(place, minlength=canaries), SHARE)
    right, said = int(((guesses > 0) == coins)[guesses != 0].sum()), int((guesses != 0).sum())
    claimed, paper = _claims(algorithm, releases, federation, settings, len(result.events))
    return Audit(
        "guesses canaries",
        unit,
        "replacement",
        len(result.events),
        said,
        one_run_epsilon(canaries, said, right, settings.delta),
        claimed,
        paper if unit == "sample" else None,
        settings.delta,
    )


def _claims(
    algorithm: Algorithm, releases: tuple, federation: Federation, settings: Settings, rounds: int
) -> tuple[float, float | None]:
    """What the ledger of ``rounds`` rounds claims about other data: soundly, and by the paper."""
    sampler = cohort_sampler(settings, federation.sizes)
    ledger = ledger_of(algorithm, dataclasses.replace(settings, epsilon_budget=None), sampler)
    assert ledger is not None
    for r in range(rounds):
        ledger.spend(sampler.cohort(r))
    drawn = ledger.accountant.cohorts
    about = Accountant(
        about_replacement(releases), settings.delta, drawn if drawn.drawn == "fixed" else CohortSampling()
    )
    count = rounds if about.by_rounds else int(ledger.counts.max())
    return about.epsilon(count), ledger.epsilon_paper


def _releases(algorithm: Algorithm) -> tuple:
    releases = private_releases(algorithm)
    if not releases:
        raise FedraxError(f"{type(algorithm).__name__} adds no noise: there is no claim to audit")
    return releases


def _unit(releases: tuple, unit: ProtectedUnit | None) -> ProtectedUnit:
    """Whose labels are exchanged, where the claim is about that."""
    protected: ProtectedUnit = "sample" if any(release.unit == "sample" for release in releases) else "client"
    if unit == "client" and protected == "sample":
        raise FedraxError("the claim is about one sample, not about all of a client's: set unit to 'sample'")
    return unit or protected


def _check_admitted(algorithm: Algorithm, task: Task, settings: Settings, start: Any) -> None:
    """Refuse what a run of the method would."""
    name, needs = type(algorithm).__name__, algorithm.traits
    statistics = start.statistics if isinstance(start, Variables) else ()
    needs.check_run(name, settings.weights, 1, varying_cohort=False)
    needs.check_task(name, task, statistics)
    if statistics:
        raise FedraxError("an audit takes models without running statistics: use group norm instead of batch norm")


def _other_labels(federation: Federation, y: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """``y`` with the next class at ``rows``."""
    classes = federation.num_classes
    if classes is None or y.ndim != 1 or federation.padding is not None:
        raise FedraxError("an audit exchanges classes: it takes a classification with one label for each sample")
    changed = np.array(y)
    changed[rows] = (changed[rows] + 1) % classes
    return changed
