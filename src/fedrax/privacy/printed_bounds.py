"""Epsilon as printed in the theorems of Upcycled-FL (Yin et al. 2024, Section 6).

``epsilon_paper`` reports these values in addition to the sound epsilon. Theorem 6.2 treats a clipped local model as an
average over n_i samples, each of which changes it by at most tau / n_i. The result of several local steps is no such
average: one sample may change it by up to 2 tau, whatever n_i. Even for an average, *replacing* a sample, which is the
paper's neighboring relation, changes it by 2 tau / n_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedrax.errors import FedraxError


def moments_epsilon(kappa: float, delta: float) -> float:
    """epsilon = 2 sqrt(kappa ln(1/delta)) + kappa, where ``kappa`` is the sum of 1 / (2 noise^2) over releases."""
    return 2 * math.sqrt(kappa * math.log(1 / delta)) + kappa


def output_perturbation(rounds: int, clip: float, sigma: float, samples: int, delta: float) -> float:
    """Theorem 6.2: epsilon of M = ``rounds`` uploads of a client with n_i = ``samples``.

    With kappa = M tau^2 / (2 sigma^2 n_i^2); ``clip`` is tau, ``sigma`` the standard deviation of the noise.
    """
    if sigma <= 0:
        return math.inf if rounds else 0.0
    return moments_epsilon(rounds * clip**2 / (2 * sigma**2 * samples**2), delta)


def objective_perturbation(alphas: Sequence[float], u1: float, u2: float, mu: float, samples: int) -> float:
    """Theorem 6.3: epsilon (delta = 0), the sum of (2 alpha u1 mu + 2.8 u2) / (n_i mu) over a client's uploads.

    Args:
        alphas: Rate of the noise density, proportional to exp(-alpha |n|), of each upload.
        u1: Bound on the first derivative of the loss in the score.
        u2: Bound on the second derivative of the loss in the score.
        mu: Strong convexity: FedProx's mu.
        samples: Number n_i of the client's samples.

    Raises:
        FedraxError: The condition u2 <= n_i mu / 2 does not hold.
    """
    if u2 > 0.5 * samples * mu:
        raise FedraxError(f"Theorem 6.3 needs u2 <= n_i mu / 2: {u2:g} is above {0.5 * samples * mu:g}")
    return math.fsum((2 * alpha * u1 * mu + 2.8 * u2) / (samples * mu) for alpha in alphas)
