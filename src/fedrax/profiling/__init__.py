"""Where a round's time goes, what the devices achieve of what they can do, and what bounds the round."""

from fedrax.profiling.limits import Limits
from fedrax.profiling.profile import Part, Profile, profile
from fedrax.profiling.verdict import Verdict

__all__ = ["Limits", "Part", "Profile", "Verdict", "profile"]
