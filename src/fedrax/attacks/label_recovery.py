"""Analytic label recovery from a gradient (iDLG: Zhao et al. 2020; batches as in LLG: Wainakh et al. 2022)."""

from __future__ import annotations

import jax
import numpy as np

from fedrax import tree
from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError
from fedrax.tree import Tree


@checked_arguments
def recover_labels(gradient: Tree, samples: int, leaf: str = "output/bias") -> np.ndarray:
    """Recover the labels of a batch from the gradient of the mean cross entropy.

    The gradient of the last layer's bias [C] is, for each class, the mean predicted probability minus the fraction of
    samples with this label. For a single sample, the only negative entry is its label. For n samples, the class with
    the lowest entry is chosen n times, and each time 1 / n is added to its entry; this is accurate while predictions
    are nearly uniform, as at initialization.

    Args:
        gradient: The gradient, with the structure of the parameters.
        samples: Number n of samples in the batch.
        leaf: Path of the last layer's bias.

    Returns:
        The labels in ascending order, int [samples].

    Raises:
        FedraxError: The gradient has no vector ``leaf``.

    Example:
        >>> gradient = {"output": {"bias": jnp.array([0.3, -0.7, 0.4])}}
        >>> fedrax.attacks.recover_labels(gradient, samples=1).tolist()
        [1]
    """
    leaves = dict(zip(tree.leaf_names(gradient), map(np.array, jax.tree.leaves(gradient)), strict=True))
    if leaf not in leaves or leaves[leaf].ndim != 1 or len(leaves[leaf]) < 2:
        names = ", ".join(leaves)
        raise FedraxError(f"the gradient has no vector {leaf!r} with an entry for each class: it has {names}")
    bias, labels = leaves[leaf].astype(float), []
    for _ in range(samples):
        lowest = int(bias.argmin())
        bias[lowest] += 1 / samples
        labels.append(lowest)
    return np.sort(np.asarray(labels))
