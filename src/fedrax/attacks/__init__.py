"""Gradient leakage: what an attacker makes of the messages of a client.

Messages come from ``simulate(..., record=Record(...))``. A view says how they came about, an attack looks for data
that would have made them, a score says how near it came.
"""

from fedrax.attacks.label_recovery import labels_of
from fedrax.attacks.messages import Seen, gradients_seen, vectors
from fedrax.attacks.observation import View, as_client_program, as_gradient
from fedrax.attacks.reconstruction import Attack, Reconstruction, descent, dlg, inverting_gradients
from fedrax.attacks.similarity import Score, frobenius, label_recovery, matching, psnr, score, ssim

__all__ = [
    "Attack",
    "Reconstruction",
    "Score",
    "Seen",
    "View",
    "as_client_program",
    "as_gradient",
    "descent",
    "dlg",
    "frobenius",
    "gradients_seen",
    "inverting_gradients",
    "label_recovery",
    "labels_of",
    "matching",
    "psnr",
    "score",
    "ssim",
    "vectors",
]
