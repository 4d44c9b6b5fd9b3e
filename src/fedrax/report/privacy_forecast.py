"""The epsilon of a private experiment, computed without training, and the noise or the rounds for other values."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedrax.contract.algorithm import Algorithm
from fedrax.errors import FedraxError
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.participation.policies import Poisson
from fedrax.privacy.accounting import Accountant
from fedrax.privacy.ledger import Ledger, PrivacySpent
from fedrax.privacy.releases import Release
from fedrax.report.curves import PALETTE
from fedrax.report.runs import finite
from fedrax.simulation.privacy_ledger import accountant_of, ledger_of, private_releases
from fedrax.simulation.results.events import Event
from fedrax.simulation.settings import Settings, cohort_sampler


@dataclass(frozen=True)
class EpsilonAnswer:
    """The noise, or the number of rounds, for a given epsilon."""

    epsilon: float
    factor: float | None
    """Factor on all noise for all rounds of the run; None if no noise is enough."""
    rounds: int
    """Number of rounds with the present noise."""
    more: bool
    """Whether more rounds may be possible than were examined."""


@dataclass(frozen=True)
class ReleaseCost:
    """The epsilon of one release alone."""

    release: Release
    epsilon: float
    by: str
    """Name of the accountant with the smallest epsilon."""
    epsilon_paper: float | None
    """epsilon by the method's paper."""


@dataclass(frozen=True)
class Forecast:
    """The privacy loss of an experiment."""

    events: tuple[Event, ...]
    """For each round ``round``, ``epsilon`` and, if a paper claims one, ``epsilon_paper``, as in events of the run."""
    spent: PrivacySpent
    """The privacy loss after all rounds."""
    by_rounds: bool
    """Whether rounds are counted, amplified by sampling; otherwise the participations of a client."""
    parts: tuple[ReleaseCost, ...]
    """The releases."""
    answers: tuple[EpsilonAnswer, ...]
    """The noise and the rounds for given values of epsilon."""
    noise_fields: dict[str, float]
    """Hyper-parameters to which all noise is proportional, with their values."""
    by_poisson: float | None = None
    """Epsilon after all rounds if each client were sampled independently; None if that is no less, or not possible."""

    def to_dict(self) -> dict[str, Any]:
        """The forecast as JSON values, None for infinity."""
        return finite(dataclasses.asdict(self))


def forecast(
    algorithm: Algorithm, settings: Settings, sizes: np.ndarray, epsilons: Sequence[float] = (), most: int | None = None
) -> Forecast:
    """Compute the privacy loss of ``settings.rounds`` rounds of a private method.

    Args:
        algorithm: The method; raises FedraxError if it adds no noise.
        settings: Settings of the run.
        sizes: Number of samples of each client.
        epsilons: Values for which to compute the noise and the number of rounds.
        most: Limit of that number; by default ten times the rounds of the run, at least 1,000.

    Returns:
        The privacy loss and the answers.
    """
    sampler = cohort_sampler(settings, sizes)
    ledger = ledger_of(algorithm, dataclasses.replace(settings, epsilon_budget=None), sampler)
    if ledger is None:
        raise FedraxError(f"{type(algorithm).__name__} adds no noise: there is no epsilon to compute")
    accountant = ledger.accountant
    events = [{"round": r + 1} | ledger.spend(sampler.cohort(r)) for r in range(settings.rounds)]
    extendable = sampler.arrivals is None  # asynchronous arrivals are only known for the rounds of the run
    most = most or (max(10 * settings.rounds, 1000) if extendable else settings.rounds)
    return Forecast(
        events=tuple(events),
        spent=ledger.spent,
        by_rounds=accountant.by_rounds,
        parts=tuple(_part(release, accountant, ledger) for release in accountant.releases),
        answers=tuple(_answer(epsilon, ledger, sampler, most) for epsilon in epsilons),
        noise_fields=noise_fields(algorithm),
        by_poisson=_by_poisson(algorithm, settings, sizes, ledger.spent.epsilon),
    )


def _by_poisson(algorithm: Algorithm, settings: Settings, sizes: np.ndarray, epsilon: float) -> float | None:
    """The epsilon with Poisson sampling of cohorts, if it is less than ``epsilon`` by more than its rounding."""
    independent = dataclasses.replace(settings, participation=Poisson(), epsilon_budget=None)
    try:
        accountant = accountant_of(algorithm, independent, cohort_sampler(independent, sizes))
    except FedraxError:  # a method that needs another participation
        return None
    found = math.inf if accountant is None or not settings.rounds else accountant.epsilon(settings.rounds)
    return found if found < 0.99 * epsilon else None


def _part(release: Release, whole: Accountant, ledger: Ledger) -> ReleaseCost:
    """The epsilon of one release over all rounds."""
    alone = Ledger(Accountant([release], whole.delta, whole.cohorts), ledger.sizes)
    alone.restore(ledger.counts, ledger.rounds)
    epsilon, by = alone.accountant.bound(alone.count)
    return ReleaseCost(release, epsilon, by, alone.epsilon_paper)


def _answer(epsilon: float, ledger: Ledger, sampler: CohortSampler, most: int) -> EpsilonAnswer:
    """The noise and the rounds for one epsilon."""
    accountant = ledger.accountant
    try:
        factor = accountant.factor_for(epsilon, ledger.count) if accountant.protects else None
    except FedraxError:  # no noise is enough
        factor = None
    rounds = ledger.last_round(epsilon, most, sampler.cohort)
    return EpsilonAnswer(epsilon, factor, rounds, more=rounds == most)


def noise_fields(algorithm: Algorithm) -> dict[str, float]:
    """Hyper-parameters to which the noise of all releases is proportional, by path, found by doubling each."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(algorithm)
    before, found = [release.noise for release in private_releases(algorithm)], {}
    for i, (path, value) in enumerate(leaves):
        if isinstance(value, int | float) and value > 0:
            doubled = [2 * v if i == k else v for k, (_, v) in enumerate(leaves)]
            after = [release.noise for release in private_releases(jax.tree.unflatten(structure, doubled))]
            if len(after) == len(before) and all(math.isclose(b, 2 * a) for a, b in zip(before, after, strict=True)):
                found[jax.tree_util.keystr(path, simple=True, separator=".")] = value
    return found if any(before) else {}


def draw(made: Forecast, budget: float | None = None) -> Figure:
    """Draw the sound and the paper's epsilon against rounds, with a dotted line at the ``budget``."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    lines = (("epsilon", f"sound ({made.spent.by})", "-"), ("epsilon_paper", "by the paper", "--"))
    shown = []
    for i, (name, label, dash) in enumerate(lines):
        points = [(event["round"], event[name]) for event in made.events if event.get(name) is not None]
        if points:
            style = {"drawstyle": "steps-post", "linestyle": dash, "linewidth": 1.8}
            axes.plot(*zip(*points, strict=True), color=PALETTE[i], label=label, **style)
            shown += [value for _, value in points]
    if budget is not None:
        axes.axhline(budget, color="0.45", linewidth=0.8, linestyle=(0, (2, 2)), label=f"budget {budget:g}")
    if shown and 0 < 20 * min(shown) < max(shown):
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("communication rounds")
    axes.set_ylabel(textwrap.fill(f"ε at δ = {made.spent.delta:g}, {made.spent.about}", 44))
    axes.grid(color="0.92", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return figure
