"""How the programs of tests are compiled: most run for milliseconds, so quickly rather than well.

The options are XLA's own, given with every compilation of this process; JAX has no setting for them. What the whole
compiler makes of every method is compared with NumPy in ``tests/algorithms``, see ``full_compilation``.
"""

import threading
from typing import Any

import jax
from jax._src import compiler
from jax._src.interpreters import mlir

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


_make_context = mlir.make_ir_context
_here = threading.local()
TOGETHER = 200
"""Programs whose text is kept until the last of them is written. To make room for one and to clear it takes 10 ms."""


def _context() -> Any:
    used, context = getattr(_here, "context", (TOGETHER, None))
    if used == TOGETHER:
        used, context = 0, _make_context()
    _here.context = used + 1, context
    return context


def write_quickly() -> None:
    """From now on, programs on their way to the compiler share what JAX makes anew for each."""
    mlir.make_ir_context = _context
