"""What a private experiment will spend, without training: the ledger of its cohorts, and inverse questions."""

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
from fedrax.privacy.accounting import Accountant
from fedrax.privacy.ledger import Ledger, PrivacySpent
from fedrax.privacy.releases import Release
from fedrax.report.curves import PALETTE
from fedrax.report.runs import finite
from fedrax.simulation.privacy_ledger import ledger_of, private_releases
from fedrax.simulation.results.events import Event
from fedrax.simulation.settings import Settings, cohort_sampler


@dataclass(frozen=True)
class EpsilonAnswer:
    """What an asked-for epsilon takes: more noise, or fewer rounds."""

    epsilon: float
    factor: float | None
    """On all noise, for all rounds of the run; None where no noise is enough."""
    rounds: int
    """With the noise as it is."""
    more: bool
    """Whether there may be more rounds than could be looked at."""


@dataclass(frozen=True)
class ReleaseCost:
    """One release, by itself."""

    release: Release
    epsilon: float
    by: str
    epsilon_paper: float | None


@dataclass(frozen=True)
class Forecast:
    """What the rounds of an experiment will spend."""

    events: tuple[Event, ...]
    """Of each round: ``round``, ``epsilon`` and maybe ``epsilon_paper``, as those of the run."""
    spent: PrivacySpent
    by_rounds: bool
    """Whether the draw of cohorts amplifies; else it is participations that count."""
    parts: tuple[ReleaseCost, ...]
    answers: tuple[EpsilonAnswer, ...]
    noise_fields: dict[str, float]
    """Hyper-parameters with which all noise grows in proportion, and their values."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON: no number is infinite, null stands for it."""
        return finite(dataclasses.asdict(self))


def forecast(
    algorithm: Algorithm, settings: Settings, sizes: np.ndarray, epsilons: Sequence[float] = (), most: int | None = None
) -> Forecast:
    """What ``settings.rounds`` rounds of a private method cost among clients of ``sizes`` samples.

    epsilons: for which to ask what they take. most: the rounds to look at for that; ten times the run's by default.

    Raises FedraxError for a method that is not private.
    """
    sampler = cohort_sampler(settings, sizes)
    ledger = ledger_of(algorithm, dataclasses.replace(settings, epsilon_budget=None), sampler)
    if ledger is None:
        raise FedraxError(f"{type(algorithm).__name__} adds no noise: there is no epsilon to compute")
    accountant = ledger.accountant
    events = [{"round": r + 1} | ledger.spend(sampler.cohort(r)) for r in range(settings.rounds)]
    further = sampler.arrivals is None  # whose uploads arrive later is not known
    most = most or (max(10 * settings.rounds, 1000) if further else settings.rounds)
    return Forecast(
        events=tuple(events),
        spent=ledger.spent,
        by_rounds=accountant.by_rounds,
        parts=tuple(_part(release, accountant, ledger) for release in accountant.releases),
        answers=tuple(_answer(epsilon, ledger, sampler, most) for epsilon in epsilons),
        noise_fields=noise_fields(algorithm),
    )


def _part(release: Release, whole: Accountant, ledger: Ledger) -> ReleaseCost:
    alone = Ledger(Accountant([release], whole.delta, whole.cohorts), ledger.sizes)
    alone.restore(ledger.counts, ledger.rounds)
    epsilon, by = alone.accountant.bound(alone.count)
    return ReleaseCost(release, epsilon, by, alone.epsilon_paper)


def _answer(epsilon: float, ledger: Ledger, sampler: CohortSampler, most: int) -> EpsilonAnswer:
    accountant = ledger.accountant
    try:
        factor = accountant.factor_for(epsilon, ledger.count) if accountant.protects else None
    except FedraxError:  # that no noise is enough
        factor = None
    rounds = ledger.last_round(epsilon, most, sampler.cohort)
    return EpsilonAnswer(epsilon, factor, rounds, more=rounds == most)


def noise_fields(algorithm: Algorithm) -> dict[str, float]:
    """The numbers among the method's leaves, by their path, with which all noise grows in proportion."""
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
    """The sound epsilon beside the paper's, against rounds; a dotted line at the ``budget``."""
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
