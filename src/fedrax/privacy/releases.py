"""What a round lets out of a client's data: the word that mechanisms and accountants share."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Release:
    """One Gaussian answer about a client's data, given `times` times whenever the client takes part in a round.

    A private method describes what one round releases by a tuple of these (`releases()`); the accountant composes
    them over rounds, with the cohorts' sampling of the run.

    Attributes:
        noise: standard deviation of the noise over the L2 sensitivity of what it is added to, both as `neighbours`
            and `unit` define them (the noise multiplier); 0 means nothing protects the answer.
        times: how often a taking-part client's data are asked in one round (local steps of DP-SGD; else 1).
        unit: whose presence the sensitivity is about: a whole "client" or one "sample" of it.
        neighbours: what changes between two neighbouring federations: the unit is there or not ("presence"), or its
            data are others ("replacement").
        batches: how the samples of one answer were drawn: "all", "poisson" or "shuffled" (no amplification is known
            for the last that a simulator may claim, so it counts as "all").
        rate: with "poisson", the probability of each sample.
        seen: who sees the noisy answer: the "server" (noise added at the client, so the server and its knowledge of
            who took part are the adversary) or the "public" (noise added to the sum of a cohort that stays secret).
        paper_noise: the noise multiplier that the method's paper claims where it differs from the sound one, for a
            client of one sample; n_i times it for one of n_i.
        paper_epsilon: the epsilon (with delta 0) that the method's paper claims for one answer of a client of one
            sample; an n_i-th of it for one of n_i. None where its claim is another, or there is none.
    """

    noise: float
    times: int = 1
    unit: Literal["client", "sample"] = "client"
    neighbours: Literal["presence", "replacement"] = "presence"
    batches: Literal["all", "poisson", "shuffled"] = "all"
    rate: float = 1.0
    seen: Literal["server", "public"] = "server"
    paper_noise: float | None = None
    paper_epsilon: float | None = None
