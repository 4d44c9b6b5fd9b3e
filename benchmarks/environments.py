"""One virtual environment for each simulator, with pinned versions, created on first use.

Packages come from the index that pip is configured for. PyTorch is always installed first and alone, so that the other
packages use the configured build (a CPU build is enough).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TORCH = ("torch==2.13.0",)
NUMPY = "numpy==2.4.6"

# Environment -> one pip command each, in this order.
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "torch": (TORCH, (NUMPY,)),
    "pfl": (TORCH, ("pfl==0.6.0", NUMPY)),
    "fedjax": (("fedjax==0.0.17", "jax==0.10.2", "flax==0.12.8", NUMPY),),
    # FedLab pins an old torchvision and other packages that it does not need to simulate.
    "fedlab": (
        TORCH,
        ("--no-deps", "fedlab==1.3.0"),
        (
            NUMPY,
            "pandas==3.1.1",
            "scikit-learn==1.9.1",
            "pynvml==13.0.1",
            "tqdm",
            "munch==4.0.0",
            "pillow==13.0.0",
        ),
    ),
    "opacus": (TORCH, ("opacus==1.6.0", NUMPY)),
    "flower": (TORCH, ("flwr[simulation]==1.41.0", "ray==2.55.1", NUMPY)),
}


def cache_directory() -> Path:
    """Directory of environments and arrays: ``$XDG_CACHE_HOME/fedrax-benchmarks`` or its default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedrax-benchmarks"


def ensure_environment(name: str, directory: Path) -> Path:
    """The ``bin`` folder of environment ``name`` under ``directory``, created or completed if necessary."""
    home = directory / name
    done, recipe = home / "recipe.json", json.dumps(ENVIRONMENTS[name])
    if done.exists() and done.read_text() == recipe:
        return home / "bin"
    print(f"making the environment of {name} in {home}", flush=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    for requirements in ENVIRONMENTS[name]:
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *requirements], check=True)
    done.write_text(recipe)
    return home / "bin"


def packages(bin_directory: Path) -> list[str]:
    """Everything installed there, as ``name==version``."""
    command = [str(bin_directory / "python"), "-m", "pip", "list", "--format=freeze"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
