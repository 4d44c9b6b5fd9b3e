"""The synthetic federated classification problem of Li et al. 2020 (FedProx), section 5.1."""

import numpy as np

from fedrax.data.dataset import Dataset, Samples, generator, share_of
from fedrax.errors import FedraxError

MAX_ROWS = 50_000_000


def load_synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    iid: bool = False,
    devices: int = 30,
    features: int = 60,
    classes: int = 10,
    test_fraction: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """Synthetic(alpha, beta), or Synthetic(iid): a softmax-linear model and a feature distribution a device.

    Device k has u_k ~ N(0, alpha), B_k ~ N(0, beta), a model W_k, b_k ~ N(u_k, 1) and feature means
    v_k ~ N(B_k, 1). Its floor(lognormal(4, 2)) + 50 samples are x ~ N(v_k, Sigma), Sigma_jj = j^-1.2, with
    labels argmax(W_k x + b_k). ``iid``: one W, b ~ N(0, 1) for all devices, and v_k = 0.

    alpha and beta are standard deviations, as in the authors' generator and the data made with it (the
    paper's notation may be read as variances; at 0 and 1 there is no difference). x is float32 [n, features];
    the devices are the natural clients, and each keeps ``test_fraction`` of its own rows for the test.
    """
    if alpha < 0 or beta < 0:
        raise FedraxError(f"alpha and beta must be 0 or more, not {alpha} and {beta}.")
    if devices < 1 or features < 1 or classes < 2:
        raise FedraxError(f"cannot make {devices} devices with {features} features and {classes} classes.")
    if not 0 <= test_fraction <= 0.9:
        raise FedraxError(f"the test fraction must lie in 0 .. 0.9, not {test_fraction}.")
    rng = generator(seed, "synthetic")
    sizes = np.floor(rng.lognormal(4, 2, devices)).astype(np.int64) + 50
    if sizes.sum() > MAX_ROWS:
        raise FedraxError(f"{devices} devices would have {sizes.sum():,} samples; the limit is {MAX_ROWS:,}.")
    model_means = rng.normal(0, alpha, devices)
    feature_means = rng.normal(rng.normal(0, beta, devices), 1, (features, devices)).T
    scale = np.arange(1, features + 1) ** -0.6  # the square root of Sigma's diagonal
    shared = rng.normal(0, 1, (features + 1, classes))

    x = np.empty((sizes.sum(), features), np.float32)
    y = np.empty(sizes.sum(), np.int32)
    start = 0
    for size, model_mean, feature_mean in zip(sizes, model_means, feature_means, strict=True):
        model = shared if iid else rng.normal(model_mean, 1, (features + 1, classes))
        inputs = rng.normal(0 if iid else feature_mean, scale, (size, features))
        x[start : start + size] = inputs
        y[start : start + size] = np.argmax(inputs @ model[1:] + model[0], axis=1)
        start += size

    device = np.repeat(np.arange(devices), sizes)
    rank = np.arange(len(y)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    train = rank < np.repeat(
        sizes - share_of(sizes, test_fraction), sizes
    )  # a device's rows are exchangeable: the first ones will do
    return Dataset(
        name="synthetic_iid" if iid else f"synthetic_{alpha:g}_{beta:g}",
        train=Samples(x[train], y[train]),
        test=Samples(x[~train], y[~train]),
        num_classes=classes,
        train_clients=device[train],
        test_clients=device[~train],
    )
