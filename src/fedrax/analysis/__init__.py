"""Heterogeneity of a task and its partition: gradient dissimilarity, drift, noise, curvature, and trials of methods."""

from fedrax.analysis.diagnosis import Diagnosis, DiagnosisPoint, diagnose
from fedrax.analysis.dissimilarity import gradient_dissimilarity
from fedrax.analysis.method_trials import MethodTrial, MethodTrials, try_methods

__all__ = [
    "Diagnosis",
    "DiagnosisPoint",
    "MethodTrial",
    "MethodTrials",
    "diagnose",
    "gradient_dissimilarity",
    "try_methods",
]
