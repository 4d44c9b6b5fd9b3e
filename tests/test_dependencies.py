"""What the project needs is bounded on both sides, and what is installed lies between."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.oldest import oldest, requirements

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
PROJECT = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
ALL = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]


@pytest.mark.parametrize("requirement", sorted({r for r in ALL if not r.startswith("fedrax[")}))
def test_both_bounds_hold(requirement: str):
    parsed = Requirement(requirement)
    assert sorted(part.operator for part in parsed.specifier) == ["<", ">="]
    try:
        assert parsed.specifier.contains(version(parsed.name), prereleases=True)
    except PackageNotFoundError:
        pytest.skip(f"{parsed.name} is not installed")


def test_the_oldest_versions_are_those_of_the_lower_bounds():
    made = [oldest(requirement) for requirement in requirements(PYPROJECT)]
    assert {"jax==0.10.2", "numpy==2.0", "pytest==8.3", "flax==0.12.2"} <= set(made)
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in made)
