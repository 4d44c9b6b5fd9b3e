"""Gradient leakage: what an attacker makes of the messages of a client.

Messages come from ``simulate(..., record=Record(...))``. A view says how they came about, an attack looks for data
that would have made them, a score says how near it came.
"""

from fedrax.attacks.label_recovery import recover_labels
from fedrax.attacks.messages import CandidateGradient, candidate_gradients, parameter_vectors
from fedrax.attacks.observation import Observation, as_client_program, as_gradient
from fedrax.attacks.reconstruction import Attack, Reconstruction, dlg, gradient_descent, inverting_gradients
from fedrax.attacks.similarity import ReconstructionScore, frobenius, label_recovery, matching, psnr, score, ssim

__all__ = [
    "Attack",
    "CandidateGradient",
    "Observation",
    "Reconstruction",
    "ReconstructionScore",
    "as_client_program",
    "as_gradient",
    "candidate_gradients",
    "dlg",
    "frobenius",
    "gradient_descent",
    "inverting_gradients",
    "label_recovery",
    "matching",
    "parameter_vectors",
    "psnr",
    "recover_labels",
    "score",
    "ssim",
]
