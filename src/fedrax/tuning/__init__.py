"""Hyper-parameter search: compiled sweeps over float fields and seeds, and tuning by validation data."""

from fedrax.tuning.selection import TuningResult, tune
from fedrax.tuning.sweeps import sweep

__all__ = ["TuningResult", "sweep", "tune"]
