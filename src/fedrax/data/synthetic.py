"""Synthetic federated problems of the papers: FedProx's classification, matrix sensing, two quartic clients."""

import numpy as np

from fedrax.data.dataset import Dataset, Samples, floor_fractions, numpy_generator
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

    Args:
        alpha: Standard deviation of the means of the devices' models.
        beta: Standard deviation of the means of the devices' features.
        iid: Whether all devices have one model and one feature distribution.
        devices: Number of devices, the natural clients.
        features: Number of features.
        classes: Number of classes.
        test_fraction: Share of the rows of each device that is held out as test data.
        seed: Seed of the generated data.
    """
    if alpha < 0 or beta < 0:
        raise FedraxError(f"alpha and beta must be 0 or more, not {alpha} and {beta}.")
    if devices < 1 or features < 1 or classes < 2:
        raise FedraxError(f"cannot make {devices} devices with {features} features and {classes} classes.")
    if not 0 <= test_fraction <= 0.9:
        raise FedraxError(f"the test fraction must lie in 0 .. 0.9, not {test_fraction}.")
    rng = numpy_generator(seed, "synthetic")
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
        sizes - floor_fractions(sizes, test_fraction), sizes
    )  # a device's rows are exchangeable: the first ones will do
    return Dataset(
        name="synthetic_iid" if iid else f"synthetic_{alpha:g}_{beta:g}",
        train=Samples(x[train], y[train]),
        test=Samples(x[~train], y[~train]),
        num_classes=classes,
        train_clients=device[train],
        test_clients=device[~train],
    )


MAX_BYTES = 16 << 30


def load_matrix_sensing(
    dim: int = 64,
    rank: int = 4,
    clients: int = 100,
    samples: int = 100,
    test_samples: int = 500,
    mean: float = 0.1,
    noise: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """y = <X, D> + N(0, noise), where X has ``rank`` ones on its diagonal and zeros elsewhere (Eq. 21).

    The entries of D are N(mean, 1), float32 [n, dim, dim]; ``noise`` is a variance; y is float32 [n]. Each of
    ``clients`` natural clients has ``samples`` samples of its own (the paper does not say how many), and
    ``test_samples`` more are test data of no client. ``truth`` is X, float32 [dim, dim]. Raises FedraxError for
    impossible sizes.

    Args:
        dim: Number of rows and columns of the matrices.
        rank: Rank of X, the number of ones on its diagonal.
        clients: Number of clients.
        samples: Number of samples of each client.
        test_samples: Number of test samples.
        mean: Mean of the entries of D.
        noise: Variance of the noise in y.
        seed: Seed of the generated data.
    """
    if not 1 <= rank <= dim:
        raise FedraxError(f"a matrix of {dim} rows has a rank of 1 to {dim}, not {rank}.")
    if clients < 1 or samples < 1 or test_samples < 0:
        raise FedraxError(f"cannot make {clients} clients of {samples} samples with {test_samples} test samples.")
    if noise < 0:
        raise FedraxError(f"the noise is a variance of 0 or more, not {noise}.")
    rows = clients * samples
    if 4 * dim**2 * (rows + test_samples) > MAX_BYTES:
        raise FedraxError(f"{rows + test_samples:,} matrices of {dim} x {dim} take more than {MAX_BYTES >> 30} GiB.")
    truth = np.diag(np.arange(dim) < rank).astype(np.float32)
    rng = numpy_generator(seed, "matrix sensing")

    def draw(count: int) -> Samples:
        x = rng.standard_normal((count, dim, dim), np.float32)
        x += np.float32(mean)
        clean = x[:, range(rank), range(rank)].sum(1, dtype=np.float64)
        return Samples(x, (clean + np.sqrt(noise) * rng.standard_normal(count)).astype(np.float32))

    return Dataset(
        name=f"matrix_sensing_{dim}_{rank}",
        train=draw(rows),
        test=draw(test_samples),
        num_classes=None,
        train_clients=np.repeat(np.arange(clients), samples),
        truth=truth,
    )


MAX_SAMPLES = 10_000_000


def load_quartic_pair(heterogeneity: float = 1.0, samples: int = 1000) -> Dataset:
    """f_1 = x^4 - 3 x^3 + H x^2 + x and f_2 = x^4 - 3 x^3 - 2 H x^2 + x, with noise in the gradient.

    ``heterogeneity`` is H. A sample is a polynomial without a constant, float32 [n, 4], the coefficient of x first; its
    y is 0. Each of the two natural clients has ``samples`` of them, whose coefficients of x differ by noise uniform on
    [-1, 1] (the middles of as many intervals of one length, whose mean is exactly 0): so does the gradient on a
    sample drawn with replacement. The two test samples are f_1 and f_2. ``truth`` is the minimum of
    (f_1 + f_2) / 2, one number. Raises FedraxError for impossible sizes.

    Args:
        heterogeneity: H, by which the two polynomials differ.
        samples: Number of samples of each client.
    """
    if not (np.isfinite(heterogeneity) and heterogeneity >= 0):
        raise FedraxError(f"the heterogeneity is a number of 0 or more, not {heterogeneity}.")
    if not 1 <= samples <= MAX_SAMPLES:
        raise FedraxError(f"a client has 1 to {MAX_SAMPLES:,} samples, not {samples}.")
    pair = np.array([[1, heterogeneity, -3, 1], [1, -2 * heterogeneity, -3, 1]], float)
    noise = (2 * np.arange(samples) + 1) / samples - 1
    x = np.repeat(pair, samples, axis=0)
    x[:, 0] += np.tile(noise, 2)
    owner = np.repeat(np.arange(2), samples)
    return Dataset(
        name=f"quartic_pair_{heterogeneity:g}",
        train=Samples(x.astype(np.float32), np.zeros(2 * samples, np.float32)),
        test=Samples(pair.astype(np.float32), np.zeros(2, np.float32)),
        num_classes=None,
        train_clients=owner,
        test_clients=np.arange(2),
        truth=np.array([polynomial_minimum(pair.mean(0))]),
    )


def polynomial_minimum(coefficients: np.ndarray) -> float:
    """Where a polynomial without a constant, the coefficient of x first, is smallest: the best of its flat points."""
    polynomial = np.polynomial.Polynomial([0, *coefficients])
    flat = polynomial.deriv().roots()
    real = flat[np.abs(flat.imag) < 1e-9].real
    return float(real[polynomial(real).argmin()])
