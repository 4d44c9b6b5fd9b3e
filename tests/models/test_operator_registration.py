"""The translator of PyTorch modules knows the operators of all its modules; needs no torch."""

from pathlib import Path

from fedrax.models.pytorch import traced_module
from fedrax.models.pytorch.operators import OPERATORS


def test_all_operator_modules_are_registered():
    modules = {path.stem for path in Path(traced_module.__file__).parent.glob("*_ops.py")}
    assert modules and modules <= vars(traced_module).keys()
    for name in ("view", "convolution", "embedding", "max_pool2d_with_indices", "randn_like", "sort", "var"):
        assert name in OPERATORS, name
