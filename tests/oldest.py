"""python tests/oldest.py pyproject.toml: print the oldest allowed version of each package as requirements for pip."""

import re
import sys
import tomllib
from pathlib import Path

EXTRA, GROUP = "all", "test"
"""The extra and the dependency group that the test suite uses."""


def requirements(path: Path) -> list[str]:
    """Requirements of the project, and of the extra and the group that the tests use."""
    settings = tomllib.loads(path.read_text("utf-8"))
    extras = settings["project"]["optional-dependencies"]
    found = [*settings["project"]["dependencies"], *settings["dependency-groups"][GROUP]]
    expected = [EXTRA]
    for extra in expected:
        for requirement in extras[extra]:
            if own := re.fullmatch(r"fedrax\[(.*)\]", requirement):
                expected += own.group(1).split(",")
            else:
                found.append(requirement)
    return found


def oldest(requirement: str) -> str:
    """Convert ``name>=version,<...`` to ``name==version``."""
    name, version = re.match(r"([\w\[\]-]+)>=([\d.]+),<[\d.]+$", requirement).groups()  # type: ignore[union-attr]
    return f"{name}=={version}"


if __name__ == "__main__":
    print("\n".join(map(oldest, requirements(Path(sys.argv[1])))))
