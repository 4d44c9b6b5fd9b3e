"""A task and its partition, measured along a short run: the constants that the methods' assumptions are about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog, nnls

from fedrax.algorithms.fedavg import FedAvg
from fedrax.analysis.dissimilarity import Clients
from fedrax.analysis.smoothness import curvature
from fedrax.contract.initialization import starting_parameters
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.data.dataset import numpy_generator
from fedrax.errors import FedraxError
from fedrax.participation import Asynchronous, Uniform
from fedrax.prng.keys import INITIALIZATION, purpose_key
from fedrax.report.runs import finite
from fedrax.simulation import Settings, simulate
from fedrax.simulation.process import arithmetic
from fedrax.simulation.settings import SettingsOptions
from fedrax.simulation.validate import changed_settings, check_arguments

MOST_CLIENTS, MOST_SAMPLES, SAMPLES_EACH = 256, 4096, 64
"""Clients measured, samples for the curvature, samples of a client for the noise: of more, as many by chance."""

ROUNDING = 8
"""Units in the last place of the largest client's gradient, up to which the mean gradient counts as zero."""


@dataclass(frozen=True)
class Point:
    """What was measured at the parameters after ``round`` rounds; f = sum_i p_i f_i over the measured clients.

    Means over clients are by the same p_i, the settings' ``weights``; f_i is a mean or a sum by ``local.reduction``.
    """

    round: int
    loss: float
    """f."""
    gradient: float
    """|grad f|."""
    largest: float
    """max_i |grad f_i|."""
    dissimilarity: float
    """B = sqrt(mean_i |grad f_i|^2) / |grad f| (Upcycled-FL, Definition 5.1)."""
    apart: float
    """sqrt(mean_i |grad f_i - grad f|^2)."""
    noise: float
    """sigma = sqrt(mean_i E |grad f_ij - grad f_i|^2) over single samples j."""
    batch_noise: float
    """The same of the batches of local steps, which hold no sample twice unless drawn with replacement."""
    curvature: float
    """|Hess f|, the spectral norm."""
    steps: float
    """T = mean_i T_i, the local steps of a client."""
    update: float
    """|mean_i Delta_i| of one round's local updates, each in its mean over draws of batches; an estimate from two
    draws, 0 where it is lost in the noise of batches."""
    drift: float
    """sqrt(mean_i |Delta_i - mean_j Delta_j|^2), of the same."""


@dataclass(frozen=True)
class Diagnosis:
    """Measurements along a run of FedAvg, and the constants that fit them."""

    points: tuple[Point, ...]
    clients: int
    """N."""
    measured: int
    """Clients that were measured."""
    cohort: int
    """S."""
    batch: float
    """Samples in a local step (their mean over clients, where batches are whole clients)."""
    kappa: float
    rho: float
    """|grad f_i| <= kappa + rho |grad f| for all i (EPISODE, Assumption 1 iv), as tight as one pair can be at all
    points: the least mean of the right side."""
    l0: float
    l1: float
    """|Hess f| is about L0 + L1 |grad f| (EPISODE, Assumption 1 i, has it of each f_i): least squares with neither
    negative."""
    left_out: tuple[int, ...] = ()
    """Rounds after which the mean gradient was zero, but for rounding, which leaves nothing to compare with."""

    @property
    def dissimilarity(self) -> float:
        """B, the largest along the run, which is where Definition 5.1 wants it."""
        return max(point.dissimilarity for point in self.points)

    def typical(self, value: Callable[[Point], float], unit: Callable[[Point], float]) -> float:
        """Its median over the points, in units of something else, of which nothing is infinitely much; points where
        both are zero do not count.
        """
        pairs = [(value(point), unit(point)) for point in self.points]
        ratios = [a / b if b > 0 else np.inf for a, b in pairs if a > 0 or b > 0]
        return float(np.median(ratios)) if ratios else 0.0

    @property
    def apart(self) -> float:
        """How far clients' gradients are from their mean, in units of its length; typical of the run."""
        return self.typical(lambda p: p.apart, lambda p: p.gradient)

    @property
    def noise(self) -> float:
        """The noise of one local batch's gradient, in units of |grad f|; typical of the run."""
        return self.typical(lambda p: p.batch_noise, lambda p: p.gradient)

    @property
    def cohort_noise(self) -> float:
        """How far a cohort's mean gradient is from that of all clients, in units of |grad f|; typical of the run.

        Of cohorts that are drawn uniformly, and roughly so where clients are weighed by samples.
        """
        left = (self.clients - self.cohort) / max(self.clients - 1, 1)
        return self.apart * np.sqrt(left / self.cohort)

    @property
    def sampling_error(self) -> float:
        """How far the mean gradient of the measured clients is from that of all, in units of its length."""
        left = (self.clients - self.measured) / max(self.clients - 1, 1)
        return self.apart * float(np.sqrt(left / self.measured))

    @property
    def drift(self) -> float:
        """How far clients' updates are from their mean, in units of its length; typical of the run."""
        return self.typical(lambda p: p.drift, lambda p: p.update)

    @property
    def growth(self) -> float:
        """The share of the largest curvature that grows with the gradient: L1 |grad f| / (L0 + L1 |grad f|)."""
        part = self.l1 * max(point.gradient for point in self.points)
        return part / (self.l0 + part) if part > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, null where something is infinite."""
        names = ("dissimilarity", "apart", "noise", "cohort_noise", "drift", "growth")
        return finite(dataclasses.asdict(self) | {name: float(getattr(self, name)) for name in names})


def diagnose(
    task: Task,
    federation: Federation,
    settings: Settings | None = None,
    local: LocalSGD | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, of: None,
    **options: Unpack[SettingsOptions],
) -> Diagnosis:
    """Measure a task and its partition along ``settings.rounds`` rounds of FedAvg with the local steps ``local``.

    At rounds 0, 1, 2, 4, 8 ... and the last: one pass over the data of at most 256 clients, two of their local work,
    and twenty products with the Hessian over at most 4,096 samples. Points where the mean gradient is zero, but for
    rounding, are left out. progress: told points done and to do. FedraxError for models with running statistics, whose
    clients have no gradients without their batches.
    """
    settings = plain(changed_settings(settings or Settings(rounds=32), options), 10**6)
    check_arguments(FedAvg(), task, federation)
    with arithmetic(settings.dtype):
        return _diagnosed(task, federation, settings, local or LocalSGD(), progress)


def plain(settings: Settings, eval_every: int) -> Settings:
    """The settings of a run that ends after its rounds and reports nothing but the task's metrics.

    With cohorts drawn uniformly where clients would work at their own pace, for most methods wait for all.
    """
    left_out = {"target": None, "epsilon_budget": None, "eval_train": False, "per_client": False, "finetune": None}
    asynchronous = isinstance(settings.participation, Asynchronous)
    drawn = {"participation": Uniform()} if asynchronous else {}
    return dataclasses.replace(settings, eval_every=eval_every, **left_out, **drawn)


def _diagnosed(
    task: Task, federation: Federation, settings: Settings, local: LocalSGD, progress: Callable[[int, int], None]
) -> Diagnosis:
    if local.batch_size != "full":  # as batches are
        local = dataclasses.replace(local, batch_size=min(local.batch_size, int(federation.sizes.max())))
    seen = _measured(federation, settings.seed)
    sizes = seen.sizes.astype(float)
    weights = sizes / sizes.mean() if settings.weights == "samples" else np.ones(len(sizes))
    clients = Clients(task, seen, settings.seed, weights, local.reduction)
    start = starting_parameters(task, purpose_key(settings.seed, INITIALIZATION), None)
    start = jax.tree.map(lambda a: jnp.asarray(a, settings.dtype), start)  # as the run holds them
    shares = weights / len(sizes) * (sizes if local.reduction == "sum" else 1)
    bend, rows = curvature(task, seen, MOST_SAMPLES, settings.seed, shares), _rows(seen, settings.seed)
    when = sorted({settings.rounds, *(2**k for k in range(settings.rounds.bit_length()))})
    run = simulate(FedAvg(local=local), task, federation, settings, params=start, trajectory=when, progress=False)
    found = []
    for r, params in zip([0, *when], [start, *run.trajectory], strict=True):
        progress(len(found), len(when) + 1)
        found.append(_point(clients, params, r, min(r, settings.rounds - 1), local, bend, rows))
    progress(len(found), len(found))
    least = ROUNDING * np.finfo(settings.dtype).eps
    zero = [point.gradient <= least * point.largest for point in found]
    points = [point for point, is_zero in zip(found, zero, strict=True) if not is_zero]
    left_out = tuple(point.round for point, is_zero in zip(found, zero, strict=True) if is_zero)
    if not points:
        raise FedraxError("the mean gradient is zero all along the run: there is nothing to compare clients with")
    for point in points:
        if not np.isfinite(dataclasses.astuple(point)).all():
            raise FedraxError(
                f"gradients are too large for numbers at the parameters after {point.round} rounds: the local steps"
                " diverge, try a smaller local.lr"
            )
    batch = float(np.mean([np.mean(batches(local, int(n))) for n in seen.sizes]))
    counts = federation.num_clients, seen.num_clients, min(settings.cohort_size, federation.num_clients)
    return Diagnosis(tuple(points), *counts, batch, *bound(points), *smoothness(points), left_out)


@np.errstate(all="ignore")  # what overflows is told of in a sentence
def _point(clients: Clients, x: Any, done: int, round: int, local: LocalSGD, bend: Callable, rows: Any) -> Point:
    """What is measured at ``x``, ``done`` rounds from the start, with the local steps of ``round``."""
    found, walked = clients.gradients(x), clients.drift(x, local, round)
    mean, norms = float(found.mean), np.asarray(found.norms, float)
    variances = clients.variances(x, rows).astype(float)
    of_batches = np.array([of_batch(local, int(n)) for n in clients.federation.sizes])
    over_clients = lambda values: np.average(values, weights=np.asarray(clients.weights, float))  # noqa: E731
    return Point(
        round=done,
        loss=float(found.loss),
        gradient=mean,
        largest=float(norms.max()),
        dissimilarity=float(np.sqrt(over_clients(norms**2)) / mean) if mean > 0 else float("inf"),
        apart=float(found.apart),
        noise=float(np.sqrt(over_clients(variances))),
        batch_noise=float(np.sqrt(over_clients(of_batches[:, 0] * variances + of_batches[:, 1] * norms**2))),
        curvature=bend(x),
        steps=float(walked.steps),
        update=float(walked.mean),
        drift=float(walked.apart),
    )


def batches(local: LocalSGD, size: int) -> list[int]:
    """Samples in each batch of an epoch over ``size`` samples, or in each block."""
    if local.blocks is not None:
        return list(np.diff(np.arange(local.blocks + 1) * size // local.blocks))
    if local.batch_size == "full":
        return [size]
    if local.order == "replacement":
        return [local.batch_size] * -(-size // local.batch_size)
    whole, rest = divmod(size, local.batch_size)
    found = [local.batch_size] * whole + [rest] * (rest > 0)
    return found if local.steps is None else found[: local.steps]


def of_batch(local: LocalSGD, size: int) -> tuple[float, float]:
    """(a, c): the estimate of one of :func:`batches` is off by a sigma_i^2 + c |grad f_i|^2 in the mean square.

    Rows lie in no order, so that those next to each other are like some by chance.
    """
    held = np.array(batches(local, size), float)
    if local.blocks is None and local.order == "replacement" and local.batch_size != "full":
        return float(np.mean(1 / held)), 0.0
    counts = held * len(held) / size if local.blocks is not None else np.ones_like(held)
    apart = (size - held) / (np.maximum(held, 1) * max(size - 1, 1))
    return float(np.mean(counts**2 * apart)), float(np.mean(counts**2) - 1)


def bound(points: list[Point]) -> tuple[float, float]:
    """(kappa, rho) with max_i |grad f_i| <= kappa + rho |grad f| at every point, kappa >= 0, rho >= 1; the pair with
    the least mean of the right side.
    """
    unit = max(point.largest for point in points)  # the program's tolerances are of numbers about one
    means, largest = np.array([p.gradient for p in points]) / unit, np.array([p.largest for p in points]) / unit
    sides = np.stack([np.ones_like(means), means], 1)
    found = linprog(sides.mean(0), A_ub=-sides, b_ub=-largest, bounds=[(0, None), (1, None)])
    return float(found.x[0] * unit), float(found.x[1])


def smoothness(points: list[Point]) -> tuple[float, float]:
    """(L0, L1), neither negative, whose L0 + L1 |grad f| is nearest to the curvatures in the mean square."""
    means = np.array([p.gradient for p in points])
    found, _ = nnls(np.stack([np.ones_like(means), means], 1), np.array([p.curvature for p in points]))
    return float(found[0]), float(found[1])


def _measured(federation: Federation, seed: int) -> Federation:
    """The federation, or some of its clients by chance."""
    if federation.num_clients <= MOST_CLIENTS:
        return federation
    chosen = np.sort(
        numpy_generator(seed, "clients to measure").choice(federation.num_clients, MOST_CLIENTS, replace=False)
    )
    low, sizes = federation.offsets[chosen], federation.sizes[chosen]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rows = np.repeat(low - offsets[:-1], sizes) + np.arange(offsets[-1])
    train = type(federation.train)(*(part[rows] for part in federation.train))
    names = tuple(federation.client_names[i] for i in chosen) if federation.client_names else ()
    return dataclasses.replace(federation, train=train, offsets=offsets, test_offsets=None, client_names=names)


def _rows(federation: Federation, seed: int) -> np.ndarray:
    """Rows of each client to take single gradients of, [N, m], -1 where it has fewer."""
    rng, most = numpy_generator(seed, "samples to measure"), min(SAMPLES_EACH, int(federation.sizes.max()))
    rows = np.full((federation.num_clients, most), -1)
    for i, (low, size) in enumerate(zip(federation.offsets[:-1], federation.sizes, strict=True)):
        chosen = np.arange(size) if size <= most else rng.choice(size, most, replace=False)
        rows[i, : len(chosen)] = low + chosen
    return rows
