"""Heterogeneity, noise and curvature of a task along a short run: the constants in the methods' assumptions."""

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
from fedrax.analysis.dissimilarity import ClientProbe
from fedrax.analysis.smoothness import curvature
from fedrax.config.arguments import checked_arguments
from fedrax.contract.initialization import initial_parameters
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.data.dataset import numpy_generator
from fedrax.errors import FedraxError
from fedrax.participation import Asynchronous, Uniform
from fedrax.prng.keys import INITIALIZATION, purpose_key
from fedrax.report.runs import finite
from fedrax.simulation import Settings, simulate
from fedrax.simulation.process import numeric_context
from fedrax.simulation.settings import SettingsOptions
from fedrax.simulation.validate import changed_settings

MOST_CLIENTS, MOST_SAMPLES, SAMPLES_EACH = 256, 4096, 64
"""Clients measured, samples for the curvature, samples of a client for the noise; larger sets are subsampled."""

ROUNDING = 8
"""Units in the last place of the largest client's gradient, up to which the mean gradient counts as zero."""


@dataclass(frozen=True)
class DiagnosisPoint:
    """Measurements at the parameters after ``round`` rounds; f = sum_i p_i f_i over the measured clients.

    Means over clients have the same weights p_i, those of the settings' ``weights``; f_i is a mean or a sum over
    samples by ``local.reduction``.

    Example:
        >>> clients = fedrax.Federation.from_arrays(np.eye(2, dtype=np.float32), np.array([0, 1]), np.arange(2))
        >>> task = fedrax.classification(fedrax.models.Logistic().build((2,), 2))
        >>> point = fedrax.analysis.diagnose(task, clients, rounds=1, cohort_size=2).points[0]
        >>> point.round, point.gradient < point.largest_gradient
        (0, True)
    """

    round: int
    """Rounds of FedAvg before the measurement."""
    loss: float
    """f."""
    gradient: float
    """|grad f|."""
    largest_gradient: float
    """max_i |grad f_i|."""
    dissimilarity: float
    """B = sqrt(mean_i |grad f_i|^2) / |grad f| (Upcycled-FL, Definition 5.1)."""
    gradient_spread: float
    """sqrt(mean_i |grad f_i - grad f|^2)."""
    noise: float
    """sigma = sqrt(mean_i E |grad f_ij - grad f_i|^2) over single samples j."""
    batch_noise: float
    """The same for the mini-batches of local steps, drawn without replacement unless ``local.order`` says so."""
    curvature: float
    """|Hess f|, the spectral norm."""
    steps: float
    """T = mean_i T_i, the local steps of a client."""
    update: float
    """|mean_i Delta_i|, the mean of one round's local updates, each in expectation over mini-batches. An estimate from
    two draws; 0 where it is below their noise."""
    drift: float
    """sqrt(mean_i |Delta_i - mean_j Delta_j|^2), of the same updates."""


@dataclass(frozen=True)
class Diagnosis:
    """Heterogeneity, noise and curvature measured along a run of FedAvg, and the constants that fit them.

    Example:
        >>> clients = fedrax.Federation.from_arrays(np.eye(2, dtype=np.float32), np.array([0, 1]), np.arange(2))
        >>> task = fedrax.classification(fedrax.models.Logistic().build((2,), 2))
        >>> diagnosis = fedrax.analysis.diagnose(task, clients, rounds=1, cohort_size=2)
        >>> diagnosis.clients, diagnosis.dissimilarity > 1
        (2, True)
    """

    points: tuple[DiagnosisPoint, ...]
    """One for each round that was measured."""
    clients: int
    """N, the clients of the federation."""
    measured: int
    """Clients that were measured."""
    cohort: int
    """S, the cohort size."""
    batch: float
    """Samples in a local step: the mean over clients."""
    kappa: float
    """kappa in |grad f_i| <= kappa + rho |grad f| for all i (EPISODE, Assumption 1 iv)."""
    rho: float
    """rho of the same bound. The pair is the tightest that holds at all points: it has the least mean right side."""
    l0: float
    """L0 in |Hess f| = L0 + L1 |grad f| (EPISODE, Assumption 1 i, states it for each f_i): non-negative least
    squares."""
    l1: float
    """L1 of the same fit."""
    skipped_rounds: tuple[int, ...] = ()
    """Rounds at which the mean gradient was zero up to rounding, so that no ratio to it exists."""

    @property
    def dissimilarity(self) -> float:
        """B, the largest along the run, as Definition 5.1 of Upcycled-FL requires."""
        return max(point.dissimilarity for point in self.points)

    def _median_ratio(self, value: Callable[[DiagnosisPoint], float], unit: Callable[[DiagnosisPoint], float]) -> float:
        """The median of value / unit over points, infinite where unit is zero; 0 / 0 is ignored."""
        pairs = [(value(point), unit(point)) for point in self.points]
        ratios = [a / b if b > 0 else np.inf for a, b in pairs if a > 0 or b > 0]
        return float(np.median(ratios)) if ratios else 0.0

    @property
    def gradient_spread(self) -> float:
        """Root mean square distance of client gradients from their mean, relative to its norm; median of the run."""
        return self._median_ratio(lambda p: p.gradient_spread, lambda p: p.gradient)

    @property
    def noise(self) -> float:
        """Noise of one mini-batch gradient, relative to |grad f|; median of the run."""
        return self._median_ratio(lambda p: p.batch_noise, lambda p: p.gradient)

    @property
    def cohort_noise(self) -> float:
        """Distance of a cohort's mean gradient from that of all clients, relative to |grad f|; median of the run.

        Exact for cohorts sampled uniformly, approximate where clients are weighted by samples.
        """
        rest = (self.clients - self.cohort) / max(self.clients - 1, 1)
        return self.gradient_spread * np.sqrt(rest / self.cohort)

    @property
    def sampling_error(self) -> float:
        """Distance of the measured clients' mean gradient from that of all clients, relative to its norm."""
        rest = (self.clients - self.measured) / max(self.clients - 1, 1)
        return self.gradient_spread * float(np.sqrt(rest / self.measured))

    @property
    def drift(self) -> float:
        """Root mean square distance of client updates from their mean, relative to its norm; median of the run."""
        return self._median_ratio(lambda p: p.drift, lambda p: p.update)

    @property
    def growth(self) -> float:
        """The share of the largest curvature that grows with the gradient: L1 |grad f| / (L0 + L1 |grad f|)."""
        part = self.l1 * max(point.gradient for point in self.points)
        return part / (self.l0 + part) if part > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The measurements as JSON values, None where a value is infinite.

        Returns:
            The fields, the points as dictionaries, and the derived properties.
        """
        names = ("dissimilarity", "gradient_spread", "noise", "cohort_noise", "drift", "growth")
        return finite(dataclasses.asdict(self) | {name: float(getattr(self, name)) for name in names})


def no_progress(done: int, total: int) -> None:
    """Ignore the progress."""


@checked_arguments
def diagnose(
    task: Task,
    federation: Federation,
    settings: Settings | None = None,
    local: LocalSGD | None = None,
    *,
    progress: Callable[[int, int], None] = no_progress,
    **options: Unpack[SettingsOptions],
) -> Diagnosis:
    """Measure heterogeneity, gradient noise and curvature of a task along ``settings.rounds`` rounds of FedAvg.

    Measures at rounds 0, 1, 2, 4, 8 ... and the last: one pass over the data of at most 256 clients, two local
    trainings of each, and twenty Hessian-vector products over at most 4,096 samples. Rounds at which the mean gradient
    is zero up to rounding are skipped.

    Args:
        task: The task.
        federation: The clients and their data.
        settings: Settings of the run; 32 rounds by default.
        local: Local steps of FedAvg and of the measured updates.
        progress: Called with the number of points done and their total.
        **options: Fields of ``settings`` to replace.

    Returns:
        The measurements and the constants that fit them.

    Raises:
        FedraxError: For models with running statistics, whose clients have no gradient apart from a mini-batch, and
            where gradients overflow.

    Example:
        >>> clients = fedrax.Federation.from_arrays(np.eye(2, dtype=np.float32), np.array([0, 1]), np.arange(2))
        >>> task = fedrax.classification(fedrax.models.Logistic().build((2,), 2))
        >>> diagnosis = fedrax.analysis.diagnose(task, clients, rounds=4, cohort_size=2)
        >>> [point.round for point in diagnosis.points]
        [0, 1, 2, 4]
    """
    settings = settings_of_measurement(changed_settings(settings or Settings(rounds=32), options), 10**6)
    with numeric_context(settings.dtype):
        return _diagnosed(task, federation, settings, local or LocalSGD(), progress)


def settings_of_measurement(settings: Settings, eval_every: int) -> Settings:
    """Settings of a run without early stopping, with the task's metrics as its only evaluation.

    Asynchronous participation is replaced by uniform sampling, since most methods wait for all clients of a cohort.
    """
    unset = {"target": None, "epsilon_budget": None, "eval_train": False, "per_client": False, "finetune": None}
    asynchronous = isinstance(settings.participation, Asynchronous)
    uniform = {"participation": Uniform()} if asynchronous else {}
    return dataclasses.replace(settings, eval_every=eval_every, **unset, **uniform)


def _diagnosed(
    task: Task, federation: Federation, settings: Settings, local: LocalSGD, progress: Callable[[int, int], None]
) -> Diagnosis:
    """Run FedAvg, measure along its trajectory and fit the constants."""
    if local.batch_size != "full":  # a mini-batch has at most all samples of a client
        local = dataclasses.replace(local, batch_size=min(local.batch_size, int(federation.sizes.max())))
    measured = _subsampled_clients(federation, settings.seed)
    sizes = measured.sizes.astype(float)
    weights = sizes / sizes.mean() if settings.weights == "samples" else np.ones(len(sizes))
    probe = ClientProbe(task, measured, settings.seed, weights, local.reduction)
    start = initial_parameters(task, purpose_key(settings.seed, INITIALIZATION), None)
    start = jax.tree.map(lambda a: jnp.asarray(a, settings.dtype), start)  # the dtype of the run
    shares = weights / len(sizes) * (sizes if local.reduction == "sum" else 1)
    hessian_norm = curvature(task, measured, MOST_SAMPLES, settings.seed, shares)
    rows = _subsampled_rows(measured, settings.seed)
    when = sorted({settings.rounds, *(2**k for k in range(settings.rounds.bit_length()))})
    run = simulate(FedAvg(local=local), task, federation, settings, params=start, trajectory=when, progress=False)
    found = []
    for r, params in zip([0, *when], [start, *run.trajectory], strict=True):
        progress(len(found), len(when) + 1)
        found.append(_measure(probe, params, r, min(r, settings.rounds - 1), local, hessian_norm, rows))
    progress(len(found), len(found))
    tolerance = ROUNDING * np.finfo(settings.dtype).eps
    zero = [point.gradient <= tolerance * point.largest_gradient for point in found]
    points = [point for point, is_zero in zip(found, zero, strict=True) if not is_zero]
    skipped = tuple(point.round for point, is_zero in zip(found, zero, strict=True) if is_zero)
    if not points:
        raise FedraxError("the mean gradient is zero in all measured rounds: no ratio to it exists")
    for point in points:
        if not np.isfinite(dataclasses.astuple(point)).all():
            raise FedraxError(
                f"gradients are not finite at the parameters after {point.round} rounds: the local steps diverge, try a"
                " smaller local.lr"
            )
    batch = float(np.mean([np.mean(batch_sizes(local, int(n))) for n in measured.sizes]))
    counts = federation.num_clients, measured.num_clients, min(settings.cohort_size, federation.num_clients)
    return Diagnosis(tuple(points), *counts, batch, *bound(points), *smoothness(points), skipped)


@np.errstate(all="ignore")  # overflow is reported by an error message
def _measure(
    probe: ClientProbe, x: Any, done: int, round: int, local: LocalSGD, hessian_norm: Callable, rows: Any
) -> DiagnosisPoint:
    """The measurements at ``x``, ``done`` rounds after the start, with the local steps of ``round``."""
    gradients, updates = probe.gradients(x), probe.drift(x, local, round)
    mean, norms = float(gradients.mean), np.asarray(gradients.norms, float)
    variances = probe.variances(x, rows).astype(float)
    of_batches = np.array([batch_error(local, int(n)) for n in probe.federation.sizes])

    def over_clients(values: Any) -> Any:
        return np.average(values, weights=np.asarray(probe.weights, float))

    return DiagnosisPoint(
        round=done,
        loss=float(gradients.loss),
        gradient=mean,
        largest_gradient=float(norms.max()),
        dissimilarity=float(np.sqrt(over_clients(norms**2)) / mean) if mean > 0 else float("inf"),
        gradient_spread=float(gradients.spread),
        noise=float(np.sqrt(over_clients(variances))),
        batch_noise=float(np.sqrt(over_clients(of_batches[:, 0] * variances + of_batches[:, 1] * norms**2))),
        curvature=hessian_norm(x),
        steps=float(updates.steps),
        update=float(updates.mean),
        drift=float(updates.spread),
    )


def batch_sizes(local: LocalSGD, size: int) -> list[int]:
    """Samples in each mini-batch of an epoch over ``size`` samples, or in each block."""
    if local.blocks is not None:
        return list(np.diff(np.arange(local.blocks + 1) * size // local.blocks))
    if local.batch_size == "full":
        return [size]
    if local.order == "replacement":
        return [local.batch_size] * -(-size // local.batch_size)
    whole, rest = divmod(size, local.batch_size)
    found = [local.batch_size] * whole + [rest] * (rest > 0)
    return found if local.steps is None else found[: local.steps]


def batch_error(local: LocalSGD, size: int) -> tuple[float, float]:
    """(a, c): a mini-batch gradient has mean squared error a sigma_i^2 + c |grad f_i|^2.

    Stored order is treated as random: rows of a client are assumed to be exchangeable.
    """
    batch = np.array(batch_sizes(local, size), float)
    if local.blocks is None and local.order == "replacement" and local.batch_size != "full":
        return float(np.mean(1 / batch)), 0.0
    scales = batch * len(batch) / size if local.blocks is not None else np.ones_like(batch)
    without_replacement = (size - batch) / (np.maximum(batch, 1) * max(size - 1, 1))
    return float(np.mean(scales**2 * without_replacement)), float(np.mean(scales**2) - 1)


def bound(points: list[DiagnosisPoint]) -> tuple[float, float]:
    """(kappa, rho) with max_i |grad f_i| <= kappa + rho |grad f| at every point, kappa >= 0, rho >= 1.

    Of all such pairs the one with the least mean right side, by linear programming.
    """
    unit = max(point.largest_gradient for point in points)  # linprog has absolute tolerances for values near one
    means, largest = (
        np.array([p.gradient for p in points]) / unit,
        np.array([p.largest_gradient for p in points]) / unit,
    )
    coefficients = np.stack([np.ones_like(means), means], 1)
    found = linprog(coefficients.mean(0), A_ub=-coefficients, b_ub=-largest, bounds=[(0, None), (1, None)])
    return float(found.x[0] * unit), float(found.x[1])


def smoothness(points: list[DiagnosisPoint]) -> tuple[float, float]:
    """(L0, L1) >= 0 with L0 + L1 |grad f| nearest to the curvatures, by non-negative least squares."""
    means = np.array([p.gradient for p in points])
    found, _ = nnls(np.stack([np.ones_like(means), means], 1), np.array([p.curvature for p in points]))
    return float(found[0]), float(found[1])


def _subsampled_clients(federation: Federation, seed: int) -> Federation:
    """The federation, or ``MOST_CLIENTS`` of its clients drawn uniformly."""
    if federation.num_clients <= MOST_CLIENTS:
        return federation
    chosen = np.sort(
        numpy_generator(seed, "clients to measure").choice(federation.num_clients, MOST_CLIENTS, replace=False)
    )
    low, sizes = federation.offsets[chosen], federation.sizes[chosen]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rows = np.repeat(low - offsets[:-1], sizes) + np.arange(offsets[-1])
    train = federation.train.map(lambda part: part[rows])
    names = tuple(federation.client_names[i] for i in chosen) if federation.client_names else ()
    return dataclasses.replace(federation, train=train, offsets=offsets, test_offsets=None, client_names=names)


def _subsampled_rows(federation: Federation, seed: int) -> np.ndarray:
    """Rows of samples of each client for per-sample gradients, [N, m], -1 if a client has fewer."""
    rng, most = numpy_generator(seed, "samples to measure"), min(SAMPLES_EACH, int(federation.sizes.max()))
    rows = np.full((federation.num_clients, most), -1)
    for i, (low, size) in enumerate(zip(federation.offsets[:-1], federation.sizes, strict=True)):
        chosen = np.arange(size) if size <= most else rng.choice(size, most, replace=False)
        rows[i, : len(chosen)] = low + chosen
    return rows
