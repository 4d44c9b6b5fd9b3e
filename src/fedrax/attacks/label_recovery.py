"""Labels read off a gradient, without any search (iDLG: Zhao et al. 2020; batches as in LLG: Wainakh et al. 2022)."""

from __future__ import annotations

import jax
import numpy as np

from fedrax import tree
from fedrax.errors import FedraxError
from fedrax.tree import Tree


def recover_labels(gradient: Tree, samples: int, leaf: str = "output/bias") -> np.ndarray:
    """The labels [samples] behind a gradient of the mean cross entropy, in rising order.

    ``leaf`` names the bias [C] of the last layer. Its gradient is, for each class, the mean predicted chance less the
    class's share of the samples. So of a single sample the one negative entry is its label, whatever the model says;
    of several, the lowest entry is taken as often as there are samples, each time lifted by a sample's share, which
    is right as long as the model is not yet sure of anything.

    Args:
        gradient: The gradient, with the structure of the parameters.
        samples: Samples behind the gradient.
        leaf: The path of the last layer's bias.

    Returns:
        The labels, int [samples].

    Raises:
        FedraxError: The gradient has no vector ``leaf``.

    Example:
        >>> gradient = {"output": {"bias": jnp.array([0.3, -0.7, 0.4])}}
        >>> fedrax.attacks.recover_labels(gradient, samples=1).tolist()
        [1]
    """
    found = dict(zip(tree.leaf_names(gradient), map(np.array, jax.tree.leaves(gradient)), strict=True))
    if leaf not in found or found[leaf].ndim != 1 or len(found[leaf]) < 2:
        names = ", ".join(found)
        raise FedraxError(f"the gradient has no vector {leaf!r} with an entry for each class: it has {names}")
    bias, labels = found[leaf].astype(float), []
    for _ in range(samples):
        lowest = int(bias.argmin())
        bias[lowest] += 1 / samples
        labels.append(lowest)
    return np.sort(np.asarray(labels))
