"""The time of a round by its parts, the heaviest operations, and what to do about them."""

from fedrax.profiling.advice import HeavyOperation
from fedrax.profiling.machine_limits import MachineLimits
from fedrax.profiling.profiler import Profile, RoundPart, profile

__all__ = ["HeavyOperation", "MachineLimits", "Profile", "RoundPart", "profile"]
