"""A task and its partition measured: what the methods' assumptions are about, and which of them hold."""

from fedrax.diagnosis.diagnosis import Diagnosis, Point, diagnose
from fedrax.diagnosis.gradients import gradient_dissimilarity

__all__ = ["Diagnosis", "Point", "diagnose", "gradient_dissimilarity"]
