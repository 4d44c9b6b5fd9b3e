"""Every dependency has a lower and an upper bound, and the installed versions satisfy them."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.oldest import oldest, requirements

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
SETTINGS = tomllib.loads(PYPROJECT.read_text("utf-8"))
PROJECT, GROUPS = SETTINGS["project"], SETTINGS["dependency-groups"]
GROUPED = [r for group in GROUPS.values() for r in group if isinstance(r, str)]
ALL = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra), *GROUPED]
LOCK = [
    Requirement(line)
    for line in (PYPROJECT.parent / "requirements.lock").read_text("utf-8").splitlines()
    if line[0].isalnum()
]


@pytest.mark.parametrize("requirement", sorted({r for r in ALL if not r.startswith("fedrax[")}))
def test_installed_versions_satisfy_both_bounds(requirement: str):
    parsed = Requirement(requirement)
    assert sorted(part.operator for part in parsed.specifier) == ["<", ">="]
    try:
        assert parsed.specifier.contains(version(parsed.name), prereleases=True)
    except PackageNotFoundError:
        pytest.skip(f"{parsed.name} is not installed")


def test_lock_satisfies_the_requirements_of_the_tests():
    locked = {pin.name.lower().replace("_", "-"): [] for pin in LOCK}
    for pin in LOCK:
        (part,) = pin.specifier
        assert part.operator == "==" and pin.url is None
        locked[pin.name.lower().replace("_", "-")].append(part.version)
    for requirement in map(Requirement, [*requirements(PYPROJECT), *GROUPED]):
        versions = locked[requirement.name.lower()]
        assert versions and all(requirement.specifier.contains(v, prereleases=True) for v in versions), requirement


def test_oldest_versions_are_the_lower_bounds():
    made = [oldest(requirement) for requirement in requirements(PYPROJECT)]
    assert {"jax==0.10.2", "numpy==2.0", "pytest==8.3", "flax==0.12.2"} <= set(made)
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in made)
