"""The privacy that Upcycled-FL's theorems claim (Yin et al. 2024, Section 6), as printed.

They are what ``epsilon_paper`` reports, beside the sound number and never in its place. Theorem 6.2 takes a clipped
local model for an average over n_i samples, each of which moves it by tau / n_i at most. A model of several local
steps is no such average: one sample may move it by up to 2 tau, whatever n_i. Even for an average, a *changed*
sample, the paper's own neighbor, moves it by 2 tau / n_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedrax.errors import FedraxError


def moments_epsilon(kappa: float, delta: float) -> float:
    """epsilon = 2 sqrt(kappa ln(1/delta)) + kappa: of Gaussian answers whose 1 / (2 noise^2) sum up to ``kappa``."""
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

    alphas: of the noise's density, prop. to exp(-alpha |n|), one for each upload. u1, u2: bounds on the first and
    second derivative of the loss in the score. mu: strong convexity, FedProx's mu. samples: n_i.

    Raises FedraxError where its condition u2 <= n_i mu / 2 does not hold.
    """
    if u2 > 0.5 * samples * mu:
        raise FedraxError(f"Theorem 6.3 needs u2 <= n_i mu / 2: {u2:g} is above {0.5 * samples * mu:g}")
    return math.fsum((2 * alpha * u1 * mu + 2.8 * u2) / (samples * mu) for alpha in alphas)
