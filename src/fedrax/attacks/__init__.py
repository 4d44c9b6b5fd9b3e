"""Gradient leakage attacks: reconstruction of a client's data from its recorded messages.

``simulate(..., record=MessageSelection(...))`` records messages. An :class:`Observation` models how data produce them,
an :class:`Attack` searches for data that reproduce them, and :func:`score` compares the result with the true data.
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
