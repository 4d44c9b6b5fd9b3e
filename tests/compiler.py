"""Faster compilation for tests, whose programs run for milliseconds.

The options are those of XLA, passed with every compilation of this process; JAX has no setting for them. Programs with
XLA's default optimizations are tested in ``tests/algorithms`` against NumPy, see the fixture ``full_compilation``.
"""

import os
import threading
from typing import Any

import jax
from jax._src import compiler
from jax._src.interpreters import mlir

ON_GPU = "cuda" in os.environ.get("JAX_PLATFORMS", "")
FAST_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):
    FAST_OPTIONS["xla_cpu_use_fusion_emitters"] = False  # XLA has no such option from jaxlib 0.11 on

_get_compile_options = compiler.get_compile_options
_make_ir_context = mlir.make_ir_context
_thread = threading.local()

PROGRAMS_PER_CONTEXT = 200
"""Programs that are lowered in one MLIR context, which keeps their modules in memory. To create and destroy a context
takes 10 ms.
"""


def set_fast_compilation(fast: bool = True) -> None:
    """Compile all later programs with ``FAST_OPTIONS``, or with XLA's defaults, as always on a GPU."""
    compiler.get_compile_options = _fast_compile_options if fast and not ON_GPU else _get_compile_options


def share_mlir_contexts() -> None:
    """Lower the programs of a thread in shared MLIR contexts, where JAX creates one for each program."""
    mlir.make_ir_context = _shared_ir_context


def _fast_compile_options(*args: Any, env_options_overrides: dict | None = None, **more: Any) -> Any:
    return _get_compile_options(*args, env_options_overrides=FAST_OPTIONS | (env_options_overrides or {}), **more)


def _shared_ir_context() -> Any:
    programs, context = getattr(_thread, "context", (PROGRAMS_PER_CONTEXT, None))
    if programs == PROGRAMS_PER_CONTEXT:
        programs, context = 0, _make_ir_context()
    _thread.context = programs + 1, context
    return context
