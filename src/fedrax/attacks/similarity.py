"""Similarity of reconstructed and true data, after the best matching of samples."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.ndimage import gaussian_filter
from scipy.optimize import linear_sum_assignment

from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError


class ReconstructionScore(NamedTuple):
    """Similarity of reconstructed and true data.

    Example:
        >>> fedrax.attacks.score(np.zeros((1, 3)), np.ones((1, 3))).psnr
        0.0
    """

    frobenius: float
    """Frobenius norm of the difference, over all samples."""
    psnr: float
    """Peak signal-to-noise ratio in dB, averaged over samples; infinite for an exact reconstruction."""
    ssim: float
    """Structural similarity, averaged over samples; NaN unless samples are images."""
    labels: float
    """Fraction of labels recovered, as a multiset; NaN without labels."""


def _of_one_shape(found: np.ndarray, true: np.ndarray, axes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Both as floats of NumPy; raises FedraxError unless they have one shape with at least so many axes."""
    if found.shape != true.shape or found.ndim < axes:
        raise FedraxError(f"reconstructed and true data must have one shape, not {found.shape} and {true.shape}")
    return np.asarray(found, float), np.asarray(true, float)


@checked_arguments
def matching(found: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Assign reconstructed to true samples with the smallest Frobenius norm of the difference.

    Args:
        found: Reconstructed data [n, ...].
        true: True data [n, ...].

    Returns:
        For each true sample the index of the reconstructed one, int [n].

    Raises:
        FedraxError: The shapes differ.

    Example:
        >>> fedrax.attacks.matching(np.array([[1.0], [0.0]]), np.array([[0.1], [0.9]])).tolist()
        [1, 0]
    """
    found, true = _of_one_shape(found, true)
    a, b = (data.reshape(len(data), -1) for data in (found, true))
    squared = (b**2).sum(1)[:, None] + (a**2).sum(1)[None] - 2 * b @ a.T
    return linear_sum_assignment(squared)[1]


@checked_arguments
def frobenius(found: np.ndarray, true: np.ndarray) -> float:
    """Frobenius norm of the difference after the best matching.

    Args:
        found: Reconstructed data [n, ...].
        true: True data [n, ...].

    Returns:
        The Frobenius norm of the difference, over all samples.

    Example:
        >>> fedrax.attacks.frobenius(np.array([[1.0], [0.0]]), np.array([[0.0], [3.0]]))
        2.0
    """
    order = matching(found, true)
    return float(np.linalg.norm(np.asarray(found, float)[order] - np.asarray(true, float)))


@checked_arguments
def score(
    found: np.ndarray,
    true: np.ndarray,
    labels: np.ndarray | None = None,
    true_labels: np.ndarray | None = None,
    span: float = 1.0,
) -> ReconstructionScore:
    """Compare reconstructed and true data of the same scale.

    Args:
        found: Reconstructed data [n, ...].
        true: True data [n, ...].
        labels: Reconstructed labels [n].
        true_labels: True labels [n].
        span: Largest minus smallest possible value of a pixel.

    Returns:
        The measures of similarity.

    Raises:
        FedraxError: The shapes of the data differ.

    Example:
        >>> fedrax.attacks.score(np.ones((2, 3)), np.ones((2, 3)), labels=[0, 1], true_labels=[1, 1]).labels
        0.5
    """
    found, true = np.asarray(found, float), np.asarray(true, float)
    order = matching(found, true)
    pairs = list(zip(found[order], true, strict=True))
    images = true.ndim in (3, 4) and min(true.shape[1:3]) > 1
    return ReconstructionScore(
        float(np.linalg.norm(found[order] - true)),
        float(np.mean([psnr(a, b, span) for a, b in pairs])),
        float(np.mean([ssim(a, b, span) for a, b in pairs])) if images else float("nan"),
        float("nan") if labels is None or true_labels is None else label_recovery(labels, true_labels),
    )


@checked_arguments
def psnr(found: np.ndarray, true: np.ndarray, span: float = 1.0) -> float:
    """The peak signal-to-noise ratio of one sample: 10 log10(span² / mean squared error).

    Args:
        found: The reconstructed sample.
        true: The true sample.
        span: Largest minus smallest possible value of a pixel.

    Returns:
        The ratio in dB; inf if the samples are equal.

    Example:
        >>> round(float(fedrax.attacks.psnr(np.full(4, 0.1), np.zeros(4))), 6)
        20.0
    """
    found, true = _of_one_shape(found, true, axes=0)
    error = float(np.mean((found - true) ** 2))
    return float("inf") if error == 0 else 10 * np.log10(span**2 / error)


@checked_arguments
def ssim(found: np.ndarray, true: np.ndarray, span: float = 1.0) -> float:
    """Structural similarity of two images [H, W] or [H, W, C] (Wang et al. 2004), with their Gaussian window.

    The window has sigma = 1.5 and 11 x 11 pixels, the constants are 0.01 and 0.03, and images are reflected at the
    border.

    Args:
        found: The reconstructed image.
        true: The true image.
        span: Largest minus smallest possible value of a pixel.

    Returns:
        The mean similarity over the pixels; 1 for equal images.

    Example:
        >>> image = np.eye(8)
        >>> round(fedrax.attacks.ssim(image, image), 6)
        1.0
    """
    axes = (0, 1)
    blur = partial(gaussian_filter, sigma=1.5, radius=5, axes=axes, mode="reflect")
    a, b = _of_one_shape(found, true, axes=2)
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    covariance = blur(a * b) - mean_a * mean_b
    numerator = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return float((numerator / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean())


@checked_arguments
def label_recovery(labels: np.ndarray, true: np.ndarray) -> float:
    """Fraction of the true labels that are recovered, as a multiset.

    Args:
        labels: Reconstructed labels [n].
        true: True labels [n].

    Returns:
        The fraction, from 0 to 1.

    Example:
        >>> fedrax.attacks.label_recovery([1, 0, 2, 2], [0, 1, 1, 2])
        0.75
    """
    labels, true = np.asarray(labels).ravel(), np.asarray(true).ravel()
    hits = sum(min((labels == c).sum(), (true == c).sum()) for c in np.unique(true))
    return float(hits / len(true))
