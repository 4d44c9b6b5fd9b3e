"""How the programs of tests are compiled: most run for milliseconds, so quickly rather than well.

The options are XLA's own, given with every compilation of this process; JAX has no setting for them. What the whole
compiler makes of every method is compared with NumPy in ``tests/algorithms``, see ``full_compilation``.
"""

from typing import Any

import jax
from jax._src import compiler

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False  # later ones know no such option
_options_of = compiler.get_compile_options


def _quick_options(*args: Any, env_options_overrides: dict | None = None, **more: Any) -> Any:
    return _options_of(*args, env_options_overrides=QUICK | (env_options_overrides or {}), **more)


def compile_quickly(quickly: bool = True) -> None:
    """From now on, or as users do."""
    compiler.get_compile_options = _quick_options if quickly else _options_of
