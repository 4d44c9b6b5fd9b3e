"""Statistical heterogeneity of a federation: label distributions and client sizes."""

from dataclasses import dataclass

import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.data.federation import Federation
from fedrax.data.partition import MAX_TABLE
from fedrax.errors import FedraxError


@dataclass(frozen=True)
class Heterogeneity:
    """Client sizes, and how far the clients' label distributions p_i are from the global one p.

    Both distances are unweighted means over clients, in [0, 1]. They are None for a regression and where samples have
    several labels. A small client has a large distance even if its samples are drawn i.i.d. from p.

    Example:
        >>> federation = fedrax.data.Federation.from_arrays(np.zeros((4, 2)), [0, 0, 1, 1], client_ids=[0, 0, 1, 1])
        >>> found = fedrax.data.measure_heterogeneity(federation)
        >>> found.total_variation, found.classes_per_client
        (0.5, 1.0)
    """

    clients: int
    """Number of clients."""
    samples: int
    """Number of training samples of all clients."""
    smallest: int
    """Training samples of the smallest client."""
    median: float
    """Median of the clients' numbers of training samples."""
    largest: int
    """Training samples of the largest client."""
    size_deviation: float
    """Coefficient of variation of the client sizes: their standard deviation over their mean."""
    total_variation: float | None
    """Mean total variation distance: half the sum over classes c of ``|p_i(c) - p(c)|``."""
    jensen_shannon: float | None
    """Mean Jensen-Shannon distance: the square root of the divergence of p_i and p to base 2."""
    classes_per_client: float | None
    """Mean number of classes of which a client holds at least one sample."""


@checked_arguments
def label_counts(federation: Federation) -> np.ndarray:
    """Count the training samples of each class at each client.

    Args:
        federation: A federation with one class label per sample.

    Returns:
        Counts, int64 [N, C].

    Raises:
        FedraxError: The federation is a regression, has several labels per sample (y [n, ...]), or N * C is above
            100 million.

    Example:
        >>> federation = fedrax.data.Federation.from_arrays(np.zeros((4, 2)), [0, 1, 1, 1], client_ids=[0, 0, 1, 1])
        >>> fedrax.data.label_counts(federation).tolist()
        [[1, 1], [0, 2]]
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


@checked_arguments
def has_one_label(federation: Federation) -> bool:
    """Whether every sample has exactly one class label, as `label_counts` needs.

    Args:
        federation: Any federation.

    Returns:
        False for a regression and for labels [n, ...], else True.

    Example:
        >>> federation = fedrax.data.Federation.from_arrays(np.zeros((2, 2)), [0.5, 1.5], client_ids=[0, 1])
        >>> fedrax.data.has_one_label(federation)
        False
    """
    return federation.num_classes is not None and federation.train.y.ndim == 1


@checked_arguments
def measure_heterogeneity(federation: Federation) -> Heterogeneity:
    """Measure client sizes and label heterogeneity of the training samples.

    Args:
        federation: Any federation; distances of label distributions need one class label per sample.

    Returns:
        The measurements.

    Raises:
        FedraxError: There are too many clients and classes for `label_counts`.

    Example:
        >>> dataset = fedrax.data.load("digits")
        >>> federation = fedrax.data.Federation.from_dataset(dataset, fedrax.data.Shards(clients=10), seed=0)
        >>> fedrax.data.measure_heterogeneity(federation).clients
        10
    """
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
