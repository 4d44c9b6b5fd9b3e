"""Gradient leakage: what an attacker makes of the messages of a client.

Messages come from ``simulate(..., record=Record(...))``. A view says how they came about, an attack looks for data
that would have made them, a score says how near it came.
"""

from fedrax.attacks.attack import Attack, Reconstruction, descent, dlg, inverting_gradients
from fedrax.attacks.labels import labels_of
from fedrax.attacks.messages import Seen, gradients_seen, vectors
from fedrax.attacks.metrics import Score, frobenius, label_recovery, matching, psnr, score, ssim
from fedrax.attacks.view import View, as_client_program, as_gradient

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
