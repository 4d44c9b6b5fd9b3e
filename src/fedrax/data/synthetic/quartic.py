"""Two clients whose objectives are polynomials of degree four (EPISODE, section 5.1 and appendix E.1)."""

import numpy as np

from fedrax.data.dataset import Dataset, Samples
from fedrax.errors import FedraxError

MAX_SAMPLES = 10_000_000


def load_quartic_pair(heterogeneity: float = 1.0, samples: int = 1000) -> Dataset:
    """f_1 = x^4 - 3 x^3 + H x^2 + x and f_2 = x^4 - 3 x^3 - 2 H x^2 + x, with noise in the gradient.

    ``heterogeneity`` is H. A sample is a polynomial without a constant, float32 [n, 4], the coefficient of x first; its
    y is 0. Each of the two natural clients has ``samples`` of them, whose coefficients of x differ by noise uniform on
    [-1, 1] (the middles of as many intervals of one length, whose mean is exactly 0): so does the gradient on a
    sample drawn with replacement. The two test samples are f_1 and f_2. ``truth`` is the minimum of
    (f_1 + f_2) / 2, one number. Raises FedraxError for impossible sizes.
    """
    if not (np.isfinite(heterogeneity) and heterogeneity >= 0):
        raise FedraxError(f"the heterogeneity is a number of 0 or more, not {heterogeneity}.")
    if not 1 <= samples <= MAX_SAMPLES:
        raise FedraxError(f"a client has 1 to {MAX_SAMPLES:,} samples, not {samples}.")
    pair = np.array([[1, heterogeneity, -3, 1], [1, -2 * heterogeneity, -3, 1]], float)
    noise = (2 * np.arange(samples) + 1) / samples - 1
    x = np.repeat(pair, samples, axis=0)
    x[:, 0] += np.tile(noise, 2)
    owner = np.repeat(np.arange(2), samples)
    return Dataset(
        name=f"quartic_pair_{heterogeneity:g}",
        train=Samples(x.astype(np.float32), np.zeros(2 * samples, np.float32)),
        test=Samples(pair.astype(np.float32), np.zeros(2, np.float32)),
        num_classes=None,
        train_clients=owner,
        test_clients=np.arange(2),
        truth=np.array([minimum(pair.mean(0))]),
    )


def minimum(coefficients: np.ndarray) -> float:
    """Where a polynomial without a constant, the coefficient of x first, is smallest: the best of its flat points."""
    polynomial = np.polynomial.Polynomial([0, *coefficients])
    flat = polynomial.deriv().roots()
    real = flat[np.abs(flat.imag) < 1e-9].real
    return float(real[polynomial(real).argmin()])
