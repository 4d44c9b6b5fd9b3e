"""Arrays of any dtype and shape: rejected with a FedraxError, or kept exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedrax import Federation
from fedrax.data.dataset import as_samples
from fedrax.errors import FedraxError

DTYPES = st.one_of(
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.boolean_dtypes(),
    st.sampled_from([np.dtype(name) for name in ("g", ">f8", "c8", "U3", "S2", "O", "M8[s]", "m8[s]", "V4")]),
    st.sampled_from([np.dtype(name) for name in ("f4", "f8", "i4", "i8", "u1", "u8")]),
)
LABELS = st.integers(0, 4) | st.sampled_from([-1, 2**31 - 1, 2**31, 2**63 - 1])


@st.composite
def samples(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """x, y and owners, mostly of equal length."""
    n = draw(st.integers(0, 8))
    dtype = draw(DTYPES)
    shape = (n, *draw(st.lists(st.integers(0, 3), max_size=2)))
    x: Any = np.zeros(shape, dtype) if dtype.kind in "OV" else draw(hnp.arrays(dtype, shape))
    if draw(st.booleans()):
        y: Any = np.array(draw(st.lists(LABELS, min_size=n, max_size=n)))
    else:
        y = draw(hnp.arrays(draw(st.sampled_from(["f4", "f8", "u8", "?", ">i2"])), n))
    owner = np.array(draw(st.lists(st.integers(-1, 5), min_size=n, max_size=n + draw(st.integers(0, 1)))))
    if draw(st.integers(0, 9)) == 0:
        x = x.tolist()
    return x, y, owner


def check(case: tuple[Any, Any, Any]) -> bool:
    """Assert that accepted entries are in the federation, at their client."""
    x, y, owner = case
    try:
        held = as_samples(x, y)
    except FedraxError:
        return False
    assert_equal(x, held.x)
    assert_equal(y, held.y)
    try:
        made = Federation.from_arrays(x, y, owner, shuffle=False)
    except FedraxError:
        return False
    order = np.argsort(owner, kind="stable")
    assert sorted(np.diff(made.offsets).tolist()) == sorted(np.unique(owner, return_counts=True)[1].tolist())
    assert_equal(np.asarray(x)[order], np.asarray(made.train.x))
    assert_equal(np.asarray(y)[order], np.asarray(made.train.y))
    return True


def assert_equal(given: Any, held: np.ndarray) -> None:
    """Assert equal entries for any dtypes, with NaN equal to NaN. Floats of more than 64 bits are rounded to 64."""
    given = np.asarray(given)
    if given.dtype.kind == "f" and given.dtype.itemsize > 8:
        with np.errstate(over="ignore", under="ignore"):
            given = given.astype(np.float64)
    assert given.shape == held.shape
    for one, other in zip(given.reshape(-1).tolist(), held.reshape(-1).tolist(), strict=True):
        assert one == other or (one != one and other != other), f"{one!r} became {other!r}"
