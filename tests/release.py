"""python -m tests.release v0.1.0: check that a tag is the version's, and print its section of the changelog."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """The version of the package, without importing it."""
    (found,) = re.findall(r'^VERSION = "(.+)"$', (ROOT / "src/fedrax/version.py").read_text("utf-8"), re.MULTILINE)
    return found


def notes(changelog: str, version: str) -> str:
    """The text of a version in the changelog, which must be the first one and have a date."""
    heading, _, text = changelog.partition("\n## ")[2].partition("\n")
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        raise SystemExit(f'the first heading of CHANGELOG.md is "{heading}": make it "{version} (YYYY-MM-DD)"')
    return text.partition("\n## ")[0].strip()


if __name__ == "__main__":
    (tag,) = sys.argv[1:]
    if tag != f"v{version()}":
        raise SystemExit(f"the tag {tag} is not v{version()}, the version in src/fedrax/version.py")
    print(notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version()))
