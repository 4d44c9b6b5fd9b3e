"""Metrics of all samples together, as functions of NumPy arrays: (outputs [n, ...], y [n]) -> a number or None.

They go into ``Task.whole_set``. Outputs are logits: one a sample against labels 0 and 1, or one for each class.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedrax.errors import FedraxError


def auc(outputs: np.ndarray, y: np.ndarray) -> float | None:
    """Area under the ROC curve, by ranks with ties halved (Mann and Whitney); None where y is of one class.

    Of more than two classes the mean over those in y of each class against the rest, by the logarithm of its
    probability.
    """
    scores = _scores(outputs, y, "auc")
    if scores.ndim == 1:
        return _auc(scores, y > 0)
    shifted = scores - scores.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    found = [_auc(logs[:, label], y == label) for label in np.unique(y)]
    return None if None in found else float(np.mean(found))  # type: ignore[arg-type]


def _auc(scores: np.ndarray, positive: np.ndarray) -> float | None:
    from scipy.stats import rankdata

    count = int(positive.sum())
    rest = len(positive) - count
    if not count or not rest:
        return None
    return float((rankdata(scores)[positive].sum() - count * (count + 1) / 2) / (count * rest))


def f1(outputs: np.ndarray, y: np.ndarray, positive: int | None = None) -> float | None:
    """F1 of the class ``positive``, 2 TP / (2 TP + FP + FN), None where it is neither in y nor predicted.

    By default of class 1 of two; of more classes the mean over those in y or predicted.
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
    total = predicted.sum() + actual.sum()
    return float(2 * (predicted & actual).sum() / total) if total else None


def r2(outputs: np.ndarray, y: np.ndarray) -> float | None:
    """Coefficient of determination, 1 - sum (y - output)² / sum (y - mean y)²; None where all y are equal."""
    if outputs.size != y.size:
        raise FedraxError(f"r2 needs an output a target, not outputs {outputs.shape} for targets {y.shape}")
    spread = ((y - y.mean(0)) ** 2).sum()
    return float(1 - ((outputs.reshape(y.shape) - y) ** 2).sum() / spread) if spread else None


def _scores(outputs: np.ndarray, y: np.ndarray, name: str) -> np.ndarray:
    """Scores of the positive class [n], or of each of several classes [n, C]."""
    if y.ndim != 1 or outputs.ndim > 2 or len(outputs) != len(y):
        raise FedraxError(f"{name} needs one label and one vector of outputs a sample, not {y.shape}, {outputs.shape}")
    outputs = outputs.reshape(len(y), -1)
    if outputs.shape[1] == 1:
        return outputs[:, 0]
    return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float | None]] = {"auc": auc, "f1": f1, "r2": r2}
"""By name, as files say them."""
