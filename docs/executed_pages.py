"""How the build runs the cells of the pages with ``file_format: mystnb``, the tutorials.

Each page is run by a kernel of its own in an empty directory. Its outputs are cached until its cells or the package
change. An error that a cell does not announce (``raises-exception``), output on standard error and a cell that takes
longer than the limit of ``conf.py`` fail the build.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from pathlib import Path

import fedrax

KERNEL = """\
c.Application.log_level = "ERROR"
c.HistoryManager.enabled = False
c.InteractiveShell.xmode = "Minimal"  # an error is its message; tracebacks would show paths of this machine
c.InlineBackend.figure_formats = {"retina"}
c.InteractiveShellApp.exec_lines = ["import os; os.environ.pop('FORCE_COLOR', None)"]  # set by IPython
"""
"""Settings of the kernels."""
SHELL = '''\
import subprocess
import sys

from IPython.core.magic import register_cell_magic


@register_cell_magic
def sh(line, cell):
    """Run shell commands; IPython's own magic sends their output in pieces of 100 bytes, which pages show as lines."""
    done = subprocess.run(["sh", "-e"], input=cell, text=True, capture_output=True)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stdout if done.returncode else sys.stderr)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}")
'''
"""What the kernels run first."""
ENVIRONMENT = {
    "COLUMNS": "92",  # of an output without a scroll bar
    "FEDRAX_PROGRESS": "0",
    "JAX_PLATFORMS": "cpu",
    "NO_COLOR": "1",
    "POLARS_FMT_TABLE_HIDE_COLUMN_DATA_TYPES": "1",
    "POLARS_FMT_TABLE_HIDE_DATAFRAME_SHAPE_INFORMATION": "1",
}


def prepare(directory: Path) -> Path:
    """Set the environment of the kernels.

    Args:
        directory: Where to write their settings and the cache.

    Returns:
        The directory of the outputs of this version of the package.
    """
    profile = directory / "ipython" / "profile_default"
    (profile / "startup").mkdir(parents=True, exist_ok=True)
    (profile / "ipython_kernel_config.py").write_text(KERNEL, encoding="utf-8")
    (profile / "startup" / "shell.py").write_text(SHELL, encoding="utf-8")
    os.environ.update(ENVIRONMENT, IPYTHONDIR=str(profile.parent))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    logging.getLogger("traitlets").setLevel(logging.WARNING)  # one line for each page
    return directory / "outputs" / _digest(Path(fedrax.__path__[0]))


def _digest(package: Path) -> str:
    """A digest of the sources of a package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
