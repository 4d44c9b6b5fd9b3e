"""``fedrax new``: writes a starting project."""

from __future__ import annotations

import csv
import io
import keyword
import math
import random
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Annotated

import tyro

from fedrax.cli.arguments import parse
from fedrax.errors import FedraxError
from fedrax.files import new_directory, write_text

DESCRIPTION = """Write a starting project: `fedrax new DIR`.

The project runs as it is: a table of six simulated clinics and the function that reads it, a model, a method, an
experiment file, tests, and a Flower app of the same method and model. Its Python package has the name of DIR. Replace
the parts by your own, one at a time; the README.md of the project has the commands."""
TEMPLATE = Path(__file__).with_name("template")
"""The project, with these two names in its files and paths."""
PACKAGE, PROJECT = "starter_package", "starter-project"
LONGEST = 32
"""Most characters of a name, of which Flower permits so many."""
CLINICS, PATIENTS = 6, (50, 100)
"""Number of simulated clinics, and of patients of small and large ones. There are two sizes because a Flower client
compiles a program for each number of samples, and the project's tests should take seconds."""


@dataclass
class NewOptions:
    """Arguments of ``fedrax new``."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(name="DIR")]
    """A new or empty directory."""
    name: str | None = None
    """Name of the project; by default that of DIR."""


def main(args: list[str]) -> int:
    """Write the project."""
    options = parse(NewOptions, args, "fedrax new", DESCRIPTION)
    project, package = names(options.directory.resolve().name if options.name is None else options.name)
    with new_directory(options.directory, "choose another one"):
        for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            relative = str(source.relative_to(TEMPLATE)).replace(PACKAGE, package)
            text = source.read_text("utf-8").replace(PACKAGE, package).replace(PROJECT, project)
            write_text(options.directory / relative, text)
        write_text(options.directory / "data.csv", simulated_table())
        write_text(options.directory / ".gitignore", "/runs/\n/deployment/\n__pycache__/\n")
    print(f"{options.directory}: project {project!r} with the package {package!r}; README.md has its commands")
    print(f"next: cd {shlex.quote(str(options.directory))} && fedrax run experiment.toml")
    return 0


def names(name: str) -> tuple[str, str]:
    """The project's name with hyphens, as Flower needs it, and its package's with underscores.

    Raises:
        FedraxError: for a name that is no name of a Python package, or is taken by another package.
    """
    if not re.fullmatch(rf"[A-Za-z][A-Za-z0-9_-]{{0,{LONGEST - 1}}}", name) or name.endswith(("-", "_")):
        raise FedraxError(
            f"{name!r} cannot name a project: --name takes a letter and then at most {LONGEST - 1} letters, digits,"
            " hyphens or underscores, without one at the end"
        )
    project = re.sub("[-_]+", "-", name.lower())
    package = project.replace("-", "_")
    if keyword.iskeyword(package):
        raise FedraxError(f"{name!r} cannot name a package, because it is a keyword of Python: choose another --name")
    if package in ("fedrax", "tests", *sys.stdlib_module_names, *packages_distributions()):
        raise FedraxError(f"there is another package {package!r}, which the project would hide: choose another --name")
    return project, package


def simulated_table() -> str:
    """A CSV table of patients. The clinics differ in size, in the means of features, and in the share of ill ones."""
    rng = random.Random(0)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("clinic", "age", "pressure", "glucose", "activity", "ill"))
    for clinic in range(CLINICS):
        shift = [rng.gauss(0, 0.7) for _ in range(4)]
        for _ in range(PATIENTS[clinic % 2]):
            age, pressure, glucose, activity = (rng.gauss(mean, 1) for mean in shift)
            risk = 1.5 * age + pressure + 2 * glucose * max(age, 0) - activity - 1
            ill = rng.random() < 1 / (1 + math.exp(-2 * risk))
            numbers = (f"{value:.3f}" for value in (age, pressure, glucose, activity))
            writer.writerow((clinic, *numbers, "yes" if ill else "no"))
    return table.getvalue()
