"""Metrics of reconstructions against direct computation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedrax import FedraxError
from fedrax.attacks import frobenius, matching, psnr, score, ssim


def test_distance_is_minimal_over_all_orders() -> None:
    rng = np.random.default_rng(0)
    true, found = rng.normal(size=(4, 3, 2)), rng.normal(size=(4, 3, 2))
    least = min(np.linalg.norm(found[list(order)] - true) for order in itertools.permutations(range(4)))
    assert frobenius(found, true) == pytest.approx(least)
    assert matching(true[[2, 0, 1, 3]], true).tolist() == [1, 2, 0, 3]
    with pytest.raises(FedraxError, match="must have one shape"):
        frobenius(found[:2], true)


def test_psnr_of_a_known_error() -> None:
    true = np.zeros((4, 4))
    assert psnr(true + 0.1, true) == pytest.approx(20)
    assert psnr(true + 25.5, true, span=255) == pytest.approx(20)
    assert psnr(true, true) == float("inf")


def test_ssim_agrees_with_its_definition() -> None:
    """Gaussian windows of 11 x 11 pixels, summed one by one, with mirrored borders."""
    rng = np.random.default_rng(1)
    a, b = rng.uniform(size=(2, 13, 12))
    offsets = np.arange(-5, 6)
    kernel = np.exp(-(offsets**2) / (2 * 1.5**2))
    weights = np.outer(kernel, kernel) / kernel.sum() ** 2
    wide_a, wide_b = (np.pad(image, 5, mode="symmetric") for image in (a, b))
    values = []
    for i, j in itertools.product(range(13), range(12)):
        u, v = wide_a[i : i + 11, j : j + 11], wide_b[i : i + 11, j : j + 11]
        mu, mv = (weights * u).sum(), (weights * v).sum()
        suu, svv = (weights * (u - mu) ** 2).sum(), (weights * (v - mv) ** 2).sum()
        suv = (weights * (u - mu) * (v - mv)).sum()
        values.append((2 * mu * mv + 1e-4) * (2 * suv + 9e-4) / ((mu**2 + mv**2 + 1e-4) * (suu + svv + 9e-4)))
    assert ssim(a, b) == pytest.approx(np.mean(values), abs=1e-9)
    assert ssim(a, a) == pytest.approx(1)
    color = ssim(np.stack([a, b], -1), np.stack([b, a], -1))
    assert color == pytest.approx(np.mean(values), abs=1e-9)


def test_scores_match_samples_first() -> None:
    rng = np.random.default_rng(2)
    true = rng.uniform(size=(3, 9, 9))
    whole = score(true[[1, 2, 0]], true, [5, 6, 4], [4, 5, 6])
    assert whole.frobenius == pytest.approx(0, abs=1e-12) and whole.psnr == float("inf")
    assert whole.ssim == pytest.approx(1) and whole.labels == 1
    assert np.isnan(score(true[:, 0], true[:, 0]).ssim)  # vectors, not images
