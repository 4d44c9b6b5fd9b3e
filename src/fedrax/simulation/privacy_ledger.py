"""Privacy ledger of a run: made from the method's releases, the settings and the participation policy."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.wrapper import uploads_depend_on_state
from fedrax.data import Federation
from fedrax.errors import FedraxError, warn
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.privacy.accounting import Accountant
from fedrax.privacy.ledger import Ledger
from fedrax.privacy.releases import Release
from fedrax.simulation.results.events import Event
from fedrax.simulation.round import RoundInputs
from fedrax.simulation.settings import Settings


def private_releases(algorithm: Algorithm) -> tuple[Release, ...]:
    """The releases of a private method in a round; empty where no release of the method is protected."""
    remembers = uploads_depend_on_state(algorithm)
    releases = tuple(dataclasses.replace(r, remembers=r.remembers or remembers) for r in algorithm.releases())
    protected = any(r.noise > 0 or r.paper_noise is not None or r.paper_epsilon is not None for r in releases)
    return releases if protected else ()


def accountant_of(algorithm: Algorithm, settings: Settings, sampler: CohortSampler) -> Accountant | None:
    """What counts the run's epsilon; None for a method that is not private."""
    releases = private_releases(algorithm)
    if not releases:
        if settings.epsilon_budget is not None:
            raise FedraxError(
                f"{type(algorithm).__name__} adds no noise, so its epsilon is infinite and exceeds the budget of"
                f" {settings.epsilon_budget:g}: wrap it in a private method, or leave epsilon_budget out"
            )
        return None
    name = type(algorithm).__name__
    if sampler.adaptive:
        raise FedraxError(
            f"{type(settings.participation).__name__} samples cohorts by what clients report, which depends on their"
            f" data and which no noise of {name} covers: choose another participation"
        )
    protects_counts = any(r.unit == "sample" or r.neighbors == "replacement" for r in releases if r.seen == "server")
    if sampler.uses_sample_counts and protects_counts:
        raise FedraxError(
            f"cohorts that are sampled by numbers of samples tell the server about them, which no noise of {name}"
            " covers: choose another participation (an own policy that does not use them sets uses_sample_counts ="
            " False)"
        )
    check_apart(max(release.apart for release in releases), settings.rounds, sampler)
    accountant = Accountant(releases, settings.delta, sampler.sampling.claimed(settings.amplification))
    if settings.amplification == "fixed" and accountant.empty_place:
        raise FedraxError(
            f"amplification 'fixed' does not hold for {type(algorithm).__name__}: its clients have state, and the state"
            " of a client that replaces an absent one differs in all later rounds; leave it at 'auto', or use"
            " participation 'poisson'"
        )
    return accountant


def check_apart(apart: int, rounds: int, sampler: CohortSampler) -> None:
    """Raise FedraxError where a client participates twice within ``apart`` rounds."""
    last = np.full(sampler.num_clients, -apart)
    for r in range(rounds if apart > 1 else 0):
        cohort = sampler.cohort(r)
        early = cohort[r - last[cohort] < apart]
        if len(early):
            raise FedraxError(
                f"noise with {apart} bands needs participations of a client at least {apart} rounds apart, but client"
                f" {early[0]} participates in rounds {last[early[0]] + 1} and {r + 1}: use participation"
                " RoundRobin, or set fewer bands"
            )
        last[cohort] = r


def ledger_of(algorithm: Algorithm, settings: Settings, sampler: CohortSampler) -> Ledger | None:
    """The empty ledger of a private run; None for a method that is not private.

    Raises FedraxError for amplification that the participation policy does not give, and for a budget below the cost of
    one round. Warns about a delta so large that the data of one client or sample may be published.
    """
    accountant = accountant_of(algorithm, settings, sampler)
    if accountant is None:
        return None
    _check_room(accountant, settings.epsilon_budget)
    units = sampler.num_clients if accountant.unit == "client" else int(sampler.sizes.sum())
    if settings.delta >= 1 / units:
        warn(
            f"delta = {settings.delta:g} is not below 1/{units}: a method that publishes the data of one"
            f" {accountant.unit} of {units} would satisfy this guarantee; set a smaller delta",
        )
    return Ledger(accountant, sampler.sizes)


def warn_of_statistics(federation: Federation, unit: str) -> None:
    """Warn about statistics of samples that were computed before the run, outside of its epsilon.

    Statistics of each client's samples change with a sample, so that all of the client's inputs change: they are within
    a guarantee for a client, and outside of one for a sample.
    """
    if found := [*federation.pooled, *["the vocabulary"] * bool(federation.vocabulary)]:
        warn(f"no epsilon covers what was computed from the samples of all clients before: {'; '.join(found)}")
    if unit == "sample" and federation.client_statistics:
        found = "; ".join(federation.client_statistics)
        warn(f"epsilon of a sample does not cover what was computed from all samples of its client before: {found}")


def _check_room(accountant: Accountant, budget: float | None) -> None:
    """Raise FedraxError where one round costs more than the budget."""
    if budget is None:
        return
    if not accountant.protects:
        raise FedraxError(
            f"the epsilon of a release without noise is infinite and exceeds the budget of {budget:g}:"
            " set a noise above 0, or leave epsilon_budget out"
        )
    if (one := accountant.epsilon(1)) > budget:
        raise FedraxError(
            f"{_named_budget(budget, accountant.delta)} has no room for a round: one costs epsilon = {one:.4g}"
        )


def last_round(ledger: Ledger | None, settings: Settings, sampler: CohortSampler) -> int:
    """The last round of the run that the budget allows."""
    rounds = settings.rounds
    return rounds if ledger is None else ledger.last_round(settings.epsilon_budget, rounds, sampler.cohort)


def record_spending(ledger: Ledger | None, inputs: RoundInputs, events: list[Event], clients: int) -> None:
    """Record the rounds of ``events``, the first ones of a block, in the ledger, and their cost in the events."""
    if ledger is not None:
        for clients_of_round, event in zip(inputs.assignments.client, events, strict=False):
            here = np.asarray(clients_of_round).ravel()
            event |= ledger.spend(here[here < clients])


def _named_budget(epsilon: float | None, delta: float) -> str:
    """A budget in messages."""
    return f"the budget of epsilon = {epsilon:g} at delta = {delta:g}"


def warn_of_budget(settings: Settings, done: int) -> None:
    """Warn that the budget ended the run after ``done`` rounds."""
    budget = _named_budget(settings.epsilon_budget, settings.delta)
    warn(f"the run ended after {done} of {settings.rounds} rounds: one more would exceed {budget}")


def check_not_spent(ledger: Ledger, settings: Settings, done: int, last: int) -> None:
    """Raise FedraxError where a run is resumed whose budget is exceeded, or allows no more of its rounds."""
    if last < done or done == last < settings.rounds:
        more = "" if last < done else ", and one more would exceed it"
        raise FedraxError(
            f"{_named_budget(settings.epsilon_budget, settings.delta)} is spent: {done} rounds have cost"
            f" {ledger.spent.epsilon:.4g}{more}"
        )
