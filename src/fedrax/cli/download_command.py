"""``fedrax download``: the published files of data sets, verified by checksums."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import tyro
from rich.table import Table

from fedrax.cli import tell
from fedrax.cli.arguments import parse
from fedrax.data import DATASETS, download
from fedrax.data.readers.array_files import given_directory
from fedrax.errors import unknown
from fedrax.report.comparison_table import wide_console

DESCRIPTION = """Download published data sets: `fedrax download [NAME...]`.

Files are verified by a published checksum before they are unpacked; files that exist are not downloaded again, and the
same command resumes an interrupted download. Without names, lists the data sets and which of them the data directory
has."""


@dataclass
class DownloadOptions:
    """Arguments of ``fedrax download``."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")] = ()
    """Data sets; by default none, and a list is printed."""
    data_dir: Path | None = None
    """Directory of data files; by default $FEDRAX_DATA."""
    mirror: str | None = None
    """URL of a folder with the same files, instead of the publisher's server."""
    json: bool = False
    """Print the list, or the files, as JSON."""


def main(args: list[str]) -> int:
    """Download, or list what can be downloaded."""
    options = parse(DownloadOptions, args, "fedrax download", DESCRIPTION)
    known = {name: entry for name, entry in DATASETS.items() if entry.sources}
    for name in options.names:  # before anything is downloaded
        if name not in known:
            raise unknown("data set to download", name, known)
    if options.names:
        found = {name: download(name, options.data_dir, options.mirror, tell) for name in dict.fromkeys(options.names)}
        if options.json:
            print(json.dumps({name: [str(path) for path in paths] for name, paths in found.items()}))
        else:
            for name, paths in found.items():
                folders = sorted({str(path.parent) for path in paths})
                print(f"{name}: {len(paths)} file{'s' * (len(paths) > 1)} in {', '.join(folders)}")
        return 0
    folder = given_directory(options.data_dir)
    rows = []
    for name, entry in known.items():
        missing = [
            file for source in entry.sources for file in (source.files if folder is None else source.missing(folder))
        ]
        hosts = dict.fromkeys(str(urlsplit(source.url).hostname) for source in entry.sources)
        rows.append({"name": name, "description": entry.description, "hosts": list(hosts), "present": not missing})
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table("data set", "", "server", "here", box=None, title_justify="left", pad_edge=False)
    for row in rows:
        table.add_row(row["name"], row["description"], ", ".join(row["hosts"]), "yes" if row["present"] else "no")
    wide_console().print(table)
    return 0
