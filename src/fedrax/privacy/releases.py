"""Release: what one round reveals about a client's data, as mechanisms state it to the accountant."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Release:
    """A Gaussian mechanism that is applied to a client's data ``times`` times in each round with this client.

    ``releases()`` of a private method returns the releases of one round as a tuple. The accountant composes them over
    the rounds, given how cohorts are sampled.

    Example:
        >>> fedrax.privacy.ClientDP(noise=2.0).releases()[0].noise
        2.0
    """

    noise: float
    """Noise multiplier: the standard deviation of the noise divided by the L2 sensitivity with respect to ``unit`` and
    ``neighbors``; 0 means no protection."""
    times: int = 1
    """Applications in one round: the local steps of DP-SGD, otherwise 1."""
    unit: Literal["client", "sample"] = "client"
    """Unit of privacy: a whole "client" or one "sample" of it."""
    neighbors: Literal["presence", "replacement"] = "presence"
    """Neighboring federations differ in the "presence" of one unit or in the "replacement" of its data."""
    batches: Literal["all", "poisson", "shuffled"] = "all"
    """How the samples of one application are drawn: "all", "poisson" or "shuffled". Shuffled batches are accounted as
    "all", without amplification."""
    rate: float = 1.0
    """With "poisson", the probability of each sample."""
    seen: Literal["server", "public"] = "server"
    """The adversary: the "server", which knows the cohort (noise is added by clients), or the "public", which does not
    (noise is added to the sum over the cohort)."""
    apart: int = 1
    """Minimum number of rounds between a client's participations. Above 1 the noise of rounds is correlated, and
    sampling does not amplify."""
    remembers: bool = False
    """Whether uploads depend on client state. Then a client that is sampled instead of another also changes later
    rounds, and no amplification is known for cohorts of fixed size; the guarantee is stated for an empty place."""
    paper_noise: float | None = None
    """Noise multiplier that the method's paper claims for a client with one sample, if it differs from the sound one.
    The claim for n_i samples is n_i times as large."""
    paper_epsilon: float | None = None
    """Epsilon (delta 0) that the method's paper claims for one application on a client with one sample. The claim for
    n_i samples is n_i times smaller. None if there is no such claim."""
    paper_samples: float = 0.0
    """Minimum number of samples of a client for the paper's claim."""
