"""Privacy audits: lower bounds on epsilon by attacks, beside the guarantee of the ledger.

Two adversaries. The first observes a client in many runs of a few rounds, with its data and with neighboring data, both
of which it knows: the strongest attack on one release. The second sees the model after one whole run in which the
labels of canaries were flipped at random, and guesses which.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.initialization import initial_parameters, shapes_of
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
    provable_epsilon,
    provable_one_run_epsilon,
)
from fedrax.privacy.audit.game import Participation, observe_client
from fedrax.prng.keys import INITIALIZATION, purpose_key
from fedrax.simulation import Settings, simulate
from fedrax.simulation.privacy_ledger import ledger_of, private_releases
from fedrax.simulation.process import numeric_context
from fedrax.simulation.results.events import rounds_done
from fedrax.simulation.settings import cohort_sampler

ProtectedUnit = Literal["client", "sample"]
SHARE = 1 / 3
"""Share of the canaries about which the one-run adversary guesses."""


@dataclass(frozen=True)
class Audit:
    """The lower bound on epsilon that an attack proves at 95 % confidence, and the claimed upper bound.

    Example:
        >>> attack = ("client", "client", "replacement")
        >>> audit = fedrax.experiments.Audit(
        ...     *attack, rounds=1, trials=2000, proven=1.2, claimed=1.0, claimed_paper=None, delta=1e-5, provable=5.0
        ... )
        >>> audit.refuted
        True
    """

    attack: Literal["client", "canaries"]
    """The attack: on a client (:func:`audit_client`), or on canaries (:func:`audit_canaries`)."""
    unit: ProtectedUnit
    """The protected unit."""
    neighbors: Literal["presence", "replacement"]
    """Whether neighboring datasets differ in the presence of a unit or in its data."""
    rounds: int
    """Rounds that the adversary observes."""
    trials: int
    """Runs for each hypothesis, or guesses."""
    proven: float
    """Lower bound on epsilon."""
    claimed: float
    """Upper bound on epsilon by the sound accountant."""
    claimed_paper: float | None
    """Upper bound for one sample by the method's paper."""
    delta: float
    """delta of the guarantee."""
    provable: float
    """The lower bound that the best attack would prove with as many trials if ``claimed`` held exactly."""

    @property
    def refuted(self) -> bool:
        """Whether the lower bound exceeds the claim: the mechanism violates its guarantee."""
        return self.proven > self.claimed

    @property
    def paper_refuted(self) -> bool:
        """Whether the lower bound exceeds the paper's claim."""
        return self.claimed_paper is not None and self.proven > self.claimed_paper

    def to_dict(self) -> dict[str, Any]:
        """The audit as JSON values, None for infinity.

        Returns:
            The fields, ``refuted`` and ``paper_refuted``.
        """
        made = dataclasses.asdict(self) | {"refuted": self.refuted, "paper_refuted": self.paper_refuted}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in made.items()}


@checked_arguments
def audit_client(
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
    """Audit by distinguishing a client's data from neighboring data in many runs of ``rounds`` rounds.

    The client is the only one. Neighboring data have other labels (of all samples, or of one). The adversary sees every
    upload of the client; where noise is added to a sum, the broadcast messages and the model after each round.

    Args:
        algorithm: A private method.
        task: The task.
        federation: The clients and their data.
        settings: Settings of the run: seed, delta and precision.
        client: The client to attack.
        unit: The protected unit; by default that of the method.
        rounds: Rounds to observe.
        runs: Runs for each hypothesis.
        drawn: Sampling of the client: "always"; "poisson", with probability ``rate`` in a round, where neighboring data
            are without the client; "fixed", where another client replaces it when it is not sampled.
        rate: Sampling probability.
        confidence: Confidence of the lower bound.

    Returns:
        The lower bound and the claims. They are about presence for Poisson sampling of clients or of mini-batches.

    Raises:
        FedraxError: For a method without noise, labels that are not classes, or a client that does not exist.

    Example:
        >>> federation = fedrax.Federation.from_dataset(fedrax.data.load("digits"), fedrax.data.Shards(10, 2), seed=0)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((8, 8), 10))
        >>> fedrax.experiments.audit_client(fedrax.FedAvg(), task, federation, fedrax.Settings())
        Traceback (most recent call last):
        ...
        fedrax.errors.FedraxError: FedAvg adds no noise: there is no claim to audit
    """
    releases = _releases(algorithm)
    unit = _unit(releases, unit)
    if drawn != "always" and unit == "sample":
        raise FedraxError(
            "sampling of cohorts amplifies for clients, not for one of their samples: set unit to 'client'"
        )
    check_runs(runs)
    if rounds > 1 and (apart := max(release.apart for release in releases)) > 1:
        raise FedraxError(f"the guarantee is for participations {apart} rounds apart: set rounds to 1")
    if not 0 <= client < federation.num_clients:
        raise FedraxError(f"there is no client {client}: there are {federation.num_clients}")
    start = initial_parameters(task, purpose_key(settings.seed, INITIALIZATION), None)
    _check_admitted(algorithm, task, settings, start)
    start = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), start)
    coins = all((r.unit, r.neighbors, r.batches) == ("sample", "presence", "poisson") for r in releases)
    presence = drawn == "poisson" or coins
    hypotheses = _hypotheses(federation, client, unit, drawn, rate, coins)
    shared: dict[str, Any] = {"rounds": rounds, "drawn": drawn, "precision": settings.precision}
    shared["seen"] = "public" if all(release.seen == "public" for release in releases) else "server"
    own, other = (
        observe_client(algorithm, task, start, runs=runs, seed=settings.seed + k, **shared, **hypothesis)
        for k, hypothesis in enumerate(hypotheses)
    )
    bounds = distinguish(own, other, settings.delta, confidence)
    cohorts = CohortSampling() if drawn == "always" else CohortSampling(drawn, rate)
    accountant = Accountant(releases if presence else about_replacement(releases), settings.delta, cohorts)
    gaussian = drawn == "always" and not coins
    proven = max(bounds.epsilon, epsilon_of_mu(bounds.mu, settings.delta)) if gaussian else bounds.epsilon
    paper = accountant.epsilon_paper(rounds, int(federation.sizes[client])) if unit == "sample" else None
    about = "presence" if presence else "replacement"
    claimed = accountant.epsilon(rounds)
    provable = provable_epsilon(bounds.runs, claimed, settings.delta, gaussian, confidence)
    return Audit("client", unit, about, rounds, bounds.runs, proven, claimed, paper, settings.delta, provable)


def _hypotheses(
    federation: Federation, client: int, unit: ProtectedUnit, drawn: Participation, rate: float, coins: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `observe_client` for both hypotheses. coins: whether mini-batches are Poisson samples."""
    rows = slice(*federation.offsets[client : client + 2])
    x, y = federation.train.map(lambda a: a[rows])
    changed = np.arange(len(y)) if unit == "client" else np.arange(1)
    if coins:  # the first sample is moved to the end, where it is present or not
        samples = Batch(*federation.train.map(lambda a: np.roll(a[rows], -1, 0)))
        return {"client": samples, "size": len(y)}, {"client": samples, "size": len(y) - 1}
    if drawn == "poisson":
        return {"client": Batch(x, y), "rate": rate}, {"client": Batch(x, y), "rate": 0.0}
    other = _other_labels(federation, y, changed)
    bystander = Batch(x, _other_labels(federation, other, changed))
    drawing = {"rate": rate, "bystander": bystander}
    return {"client": Batch(x, y)} | drawing, {"client": Batch(x, other)} | drawing


@checked_arguments
def audit_canaries(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    settings: Settings,
    *,
    unit: ProtectedUnit | None = None,
    canaries: int = 200,
) -> Audit:
    """Audit with one run: flip the labels of random canaries, train, and guess which were flipped.

    The guess compares the final model's loss on both versions with the mean over canaries of the same class.

    Args:
        algorithm: A private method.
        task: The task.
        federation: The clients and their data.
        settings: Settings of the run.
        unit: What a canary is; by default the protected unit of the method.
        canaries: Number of canaries.

    Returns:
        The lower bound and the claims.

    Raises:
        FedraxError: For a method without noise, or more canaries than clients or samples.

    Example:
        >>> federation = fedrax.Federation.from_dataset(fedrax.data.load("digits"), fedrax.data.Shards(10, 2), seed=0)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((8, 8), 10))
        >>> fedrax.experiments.audit_canaries(fedrax.FedAvg(), task, federation, fedrax.Settings())
        Traceback (most recent call last):
        ...
        fedrax.errors.FedraxError: FedAvg adds no noise: there is no claim to audit
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
    flipped = _other_labels(federation, federation.train.y, rows)
    y = np.where(np.isin(owner, chosen[coins]), flipped, federation.train.y)
    train = federation.train._replace(y=y.astype(federation.train.y.dtype))
    result = simulate(algorithm, task, dataclasses.replace(federation, train=train), settings, progress=False)

    def losses(labels: np.ndarray) -> np.ndarray:
        batch = Batch(federation.train.map(lambda a: a[rows]).x, labels[rows])
        with numeric_context(settings.dtype):
            return np.asarray(task.loss(result.params, batch, jax.random.key(0)), float)

    gains, classes = losses(federation.train.y) - losses(flipped), federation.train.y[rows]
    # minus the mean over the class: the fit of a class is no information about a canary
    gains -= (np.bincount(classes, gains) / np.maximum(np.bincount(classes), 1))[classes]
    canary = np.searchsorted(chosen, owner[rows])
    guesses = guess_membership(np.bincount(canary, gains, canaries) / np.bincount(canary, minlength=canaries), SHARE)
    right, made = int(((guesses > 0) == coins)[guesses != 0].sum()), int((guesses != 0).sum())
    claimed, paper = _claims(algorithm, releases, federation, settings, rounds_done(result.events))
    return Audit(
        "canaries",
        unit,
        "replacement",
        rounds_done(result.events),
        made,
        one_run_epsilon(canaries, made, right, settings.delta),
        claimed,
        paper if unit == "sample" else None,
        settings.delta,
        provable_one_run_epsilon(canaries, made, claimed, settings.delta),
    )


def _claims(
    algorithm: Algorithm, releases: tuple, federation: Federation, settings: Settings, rounds: int
) -> tuple[float, float | None]:
    """Claims of the ledger after ``rounds`` rounds about replacement: sound, and by the paper."""
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
    """The releases of a private method; raises FedraxError for others."""
    releases = private_releases(algorithm)
    if not releases:
        raise FedraxError(f"{type(algorithm).__name__} adds no noise: there is no claim to audit")
    return releases


def _unit(releases: tuple, unit: ProtectedUnit | None) -> ProtectedUnit:
    """The unit whose labels are flipped, checked against the claim."""
    protected: ProtectedUnit = "sample" if any(release.unit == "sample" for release in releases) else "client"
    if unit == "client" and protected == "sample":
        raise FedraxError("the guarantee is for one sample, not for all samples of a client: set unit to 'sample'")
    return unit or protected


def _check_admitted(algorithm: Algorithm, task: Task, settings: Settings, start: Any) -> None:
    """Check that a run of the method would accept the task and settings."""
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
        raise FedraxError("an audit changes labels: it needs a classification with one label for each sample")
    changed = np.array(y)
    changed[rows] = (changed[rows] + 1) % classes
    return changed
