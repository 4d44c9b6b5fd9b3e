"""Hyper-parameter search: compiled sweeps over float fields and seeds, and tuning by validation data."""

from fedrax.tuning.selection import Tuned, tune
from fedrax.tuning.sweeps import sweep

__all__ = ["Tuned", "sweep", "tune"]
