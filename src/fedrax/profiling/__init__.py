"""Where a round's time goes, which operations are far from what the machine can do, and what helps."""

from fedrax.profiling.advice import Heavy, Verdict
from fedrax.profiling.machine_limits import Limits
from fedrax.profiling.profiler import Part, Profile, profile

__all__ = ["Heavy", "Limits", "Part", "Profile", "Verdict", "profile"]
