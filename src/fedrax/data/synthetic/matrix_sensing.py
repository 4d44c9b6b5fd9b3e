"""Low-rank matrix sensing: noisy inner products of a matrix of low rank with random ones (LoSAC, section 5.5)."""

import numpy as np

from fedrax.data.dataset import Dataset, Samples, generator
from fedrax.errors import FedraxError

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
    ``test_samples`` more belong to nobody. ``truth`` is X, float32 [dim, dim]. Raises FedraxError for impossible sizes.
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
    rng = generator(seed, "matrix sensing")

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
