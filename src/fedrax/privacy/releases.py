"""What a round lets out of a client's data: the word that mechanisms and accountants share."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Release:
    """One Gaussian answer about a client's data, given ``times`` times whenever the client takes part in a round.

    A private method describes what one round releases by a tuple of these (``releases()``); the accountant composes
    them over rounds, with the cohorts' sampling of the run.

    Example:
        >>> fedrax.privacy.ClientDP(noise=2.0).releases()[0].noise
        2.0
    """

    noise: float
    """Standard deviation of the noise over the L2 sensitivity of what it is added to, both as ``neighbors`` and
    ``unit`` define them (the noise multiplier); 0 means nothing protects the answer."""
    times: int = 1
    """How often a taking-part client's data are asked in one round (local steps of DP-SGD; else 1)."""
    unit: Literal["client", "sample"] = "client"
    """Whose presence the sensitivity is about: a whole "client" or one "sample" of it."""
    neighbors: Literal["presence", "replacement"] = "presence"
    """What changes between two neighboring federations: the unit is there or not ("presence"), or its data are others
    ("replacement")."""
    batches: Literal["all", "poisson", "shuffled"] = "all"
    """How the samples of one answer were drawn: "all", "poisson" or "shuffled" (no amplification is known for the last
    that a simulator may claim, so it counts as "all")."""
    rate: float = 1.0
    """With "poisson", the probability of each sample."""
    seen: Literal["server", "public"] = "server"
    """Who sees the noisy answer: the "server" (noise added at the client, so the server and its knowledge of who took
    part are the adversary) or the "public" (noise added to the sum of a cohort that stays secret)."""
    apart: int = 1
    """How many rounds a client's participations must lie apart for the number to hold; above 1 the noise of rounds is
    not independent, and nothing is amplified."""
    remembers: bool = False
    """Whether it depends on what clients keep from round to round. One that takes another's place keeps other things
    ever after, so nothing is known of draws in which places are taken, and who is not there leaves its place empty."""
    paper_noise: float | None = None
    """The noise multiplier that the method's paper claims where it differs from the sound one, for a client of one
    sample; n_i times it for one of n_i."""
    paper_epsilon: float | None = None
    """The epsilon (with delta 0) that the method's paper claims for one answer of a client of one sample; an n_i-th of
    it for one of n_i. None where its claim is another, or there is none."""
    paper_samples: float = 0.0
    """The least samples of a client that the claim holds for: the paper claims nothing of those with fewer."""
