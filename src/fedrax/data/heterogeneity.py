"""How different the clients are: label distributions and sizes."""

from dataclasses import dataclass

import numpy as np

from fedrax.data.federation import Federation
from fedrax.data.partition import MAX_TABLE
from fedrax.errors import FedraxError


@dataclass(frozen=True)
class Heterogeneity:
    """Sizes of the clients, and the mean distance of their label distributions to the global one.

    Distances are unweighted means over clients and lie in [0, 1]; None for a regression, and where samples have
    several labels. Small clients are
    far from the global distribution even when they are i.i.d. samples of it.
    """

    clients: int
    samples: int
    smallest: int
    median: float
    largest: int
    size_deviation: float
    """Standard deviation of the sizes over their mean."""
    total_variation: float | None
    """Half the sum over classes of |p_i(c) - p(c)|."""
    jensen_shannon: float | None
    """Square root of the Jensen-Shannon divergence to base 2."""
    classes_per_client: float | None
    """Mean number of classes that a client holds at least one sample of."""


def label_counts(federation: Federation) -> np.ndarray:
    """Training samples of each class at each client: int64 [N, C].

    Raises FedraxError for a regression, for samples of several labels (y [n, ...]), and for a table of more than 100
    million entries.
    """
    clients, classes = federation.num_clients, federation.num_classes
    if classes is None:
        raise FedraxError(f"federation {federation.name!r} has no classes to count (a regression).")
    if not has_one_label(federation):
        raise FedraxError(
            f"federation {federation.name!r} has labels of shape {federation.train.y.shape[1:]} a sample; "
            "they are counted only where each sample has one."
        )
    if clients * classes > MAX_TABLE:
        raise FedraxError(f"a table of {clients:,} clients x {classes:,} classes is too large (limit: {MAX_TABLE:,}).")
    owner = np.repeat(np.arange(clients), federation.sizes)
    cells = np.bincount(owner * classes + federation.train.y, minlength=clients * classes)
    return cells.reshape(clients, classes)


def has_one_label(federation: Federation) -> bool:
    """Whether every sample has one class label, so that labels can be counted."""
    return federation.num_classes is not None and federation.train.y.ndim == 1


def measure_heterogeneity(federation: Federation) -> Heterogeneity:
    """Measure ``federation``; raises FedraxError for a table of labels that is too large for ``label_counts``."""
    sizes = federation.sizes
    variation, divergence, held = None, None, None
    if has_one_label(federation):
        counts = label_counts(federation)
        local = counts / sizes[:, None]
        overall = counts.sum(axis=0) / sizes.sum()
        variation = float(np.abs(local - overall).sum(axis=1).mean() / 2)
        middle = (local + overall) / 2
        bits = (_relative_entropy(local, middle) + _relative_entropy(overall, middle)) / 2
        divergence = float(np.sqrt(np.maximum(bits, 0)).mean())  # rounding may leave -1e-17
        held = float((counts > 0).sum(axis=1).mean())
    return Heterogeneity(
        clients=federation.num_clients,
        samples=int(sizes.sum()),
        smallest=int(sizes.min()),
        median=float(np.median(sizes)),
        largest=int(sizes.max()),
        size_deviation=float(sizes.std() / sizes.mean()),
        total_variation=variation,
        jensen_shannon=divergence,
        classes_per_client=held,
    )


def _relative_entropy(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) in bits along the last axis; q is positive wherever p is."""
    p, q = np.broadcast_arrays(p, q)
    ratio = np.divide(p, q, out=np.ones_like(q), where=p > 0)
    return (p * np.log2(ratio)).sum(axis=-1)
