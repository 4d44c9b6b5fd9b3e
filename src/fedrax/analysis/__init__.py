"""A task and its partition measured: what the methods' assumptions are about, and which of them hold."""

from fedrax.analysis.diagnosis import Diagnosis, Point, diagnose
from fedrax.analysis.dissimilarity import gradient_dissimilarity
from fedrax.analysis.trials import Trials, Tried, try_methods

__all__ = ["Diagnosis", "Point", "Trials", "Tried", "diagnose", "gradient_dissimilarity", "try_methods"]
