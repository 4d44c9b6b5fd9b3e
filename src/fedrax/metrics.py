"""Metrics of a complete data set, as functions of NumPy arrays: (outputs [n, ...], y [n]) -> a number or None.

They are values of ``Task.whole_set``. Outputs are logits: one per sample for labels 0 and 1, or one per class. The
values are those of scikit-learn's ``roc_auc_score``, ``f1_score`` and ``r2_score``, which tests compare. They are
computed here because scikit-learn raises for outputs that are not finite, as those of a diverged run, and takes
milliseconds for each client of a per-client evaluation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedrax.errors import FedraxError


def auc(outputs: np.ndarray, y: np.ndarray) -> float | None:
    """Area under the ROC curve: the fraction of (positive, negative) pairs ranked correctly, ties counting half.

    For more than two classes it is the mean over the classes in ``y`` of each class against the rest, ranked by the
    log-probability of the class.

    Args:
        outputs: Logits [n], [n, 1] or [n, 2] for two classes, [n, C] for C classes.
        y: Labels [n].

    Returns:
        A number from 0 to 1, or None where ``y`` holds one class only.

    Raises:
        FedraxError: The shapes are not those of a classification.

    Example:
        >>> fedrax.metrics.auc(np.array([-1.0, 0.5, 0.2, 2.0]), np.array([0, 0, 1, 1]))
        0.75
    """
    scores = _scores(outputs, y, "auc")
    if scores.ndim == 1:
        return _auc(scores, y > 0)
    shifted = scores - scores.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    per_class = [_auc(logs[:, label], y == label) for label in np.unique(y)]
    return None if None in per_class else float(np.mean(per_class))  # type: ignore[arg-type]


def _auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    """Mann-Whitney form of the area under the curve, by ranks."""
    from scipy.stats import rankdata

    count = int(positive.sum())
    negatives = len(positive) - count
    if not count or not negatives:
        return None
    return float((rankdata(scores)[positive].sum() - count * (count + 1) / 2) / (count * negatives))


def f1(outputs: np.ndarray, y: np.ndarray, positive: int | None = None) -> float | None:
    """F1 score of a class, 2 TP / (2 TP + FP + FN).

    Args:
        outputs: Logits [n], [n, 1] or [n, 2] for two classes, [n, C] for C classes.
        y: Labels [n].
        positive: The class; by default class 1 of two, and of more classes the mean over those in ``y`` or predicted.

    Returns:
        A number from 0 to 1, or None where the class is neither in ``y`` nor predicted.

    Raises:
        FedraxError: The shapes are not those of a classification.

    Example:
        >>> fedrax.metrics.f1(np.array([-1.0, 0.5, 0.2, 2.0]), np.array([0, 0, 1, 1]))
        0.8
    """
    scores = _scores(outputs, y, "f1")
    predicted = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
    if positive is None and scores.ndim == 1:
        positive = 1
    if positive is not None:
        return _f1(predicted == positive, y == positive)
    labels = np.union1d(y, predicted)
    return float(np.mean([_f1(predicted == label, y == label) or 0.0 for label in labels]))


def _f1(predicted: np.ndarray, actual: np.ndarray) -> float | None:
    """F1 score of Boolean predictions."""
    total = predicted.sum() + actual.sum()
    return float(2 * (predicted & actual).sum() / total) if total else None


def r2(outputs: np.ndarray, y: np.ndarray) -> float | None:
    """Coefficient of determination, 1 - sum (y - output)² / sum (y - mean y)², summed over all targets.

    Args:
        outputs: One output per target.
        y: Targets [n] or [n, k].

    Returns:
        A number of at most 1, or None where the targets do not vary.

    Raises:
        FedraxError: The numbers of outputs and targets differ.

    Example:
        >>> fedrax.metrics.r2(np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 3.0]))
        0.5
    """
    if outputs.size != y.size:
        raise FedraxError(f"r2 needs one output per target, not outputs {outputs.shape} for targets {y.shape}")
    variation = ((y - y.mean(0)) ** 2).sum()
    return float(1 - ((outputs.reshape(y.shape) - y) ** 2).sum() / variation) if variation else None


def _scores(outputs: np.ndarray, y: np.ndarray, name: str) -> np.ndarray:
    """Scores of the positive class [n], or of each of several classes [n, C]."""
    if y.ndim != 1 or outputs.ndim > 2 or len(outputs) != len(y):
        raise FedraxError(
            f"{name} needs one label and one vector of outputs per sample, not labels {y.shape} and outputs"
            f" {outputs.shape}"
        )
    outputs = outputs.reshape(len(y), -1)
    if outputs.shape[1] == 1:
        return outputs[:, 0]
    return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float | None]] = {"auc": auc, "f1": f1, "r2": r2}
"""Metrics by the names that experiment files use."""
