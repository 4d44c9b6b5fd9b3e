"""Files of public data sets on web servers: download with resumption, checksums, safe unpacking.

A server, a mirror and an archive may send anything. Sizes are limited, the checksum is verified before anything is
unpacked, archives with names outside of themselves are rejected, and results have the names that `RemoteFile` states.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import io
import lzma
import os
import posixpath
import re
import stat
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from fedrax.data.readers.array_files import find_file
from fedrax.errors import FedraxError
from fedrax.files import atomic_write, decompressed_limit
from fedrax.version import VERSION

MAX_DOWNLOAD = 4 << 30
"""Most bytes of a downloaded file."""
TIMEOUT = 60.0
"""Seconds without an answer of the server after which the connection counts as lost."""
BLOCK = 1 << 20
"""Bytes that are read at a time."""
_SECONDS_PER_REPORT = 10.0
"""Time between two reports about a download in progress."""

Report = Callable[[str], None]
"""Receives one line about what happens."""
Unpack = Callable[[BinaryIO, Mapping[str, Path]], None]
"""Writes the files by name from a downloaded file; raises FedraxError if it does not contain them."""


def store(file: BinaryIO, targets: Mapping[str, Path]) -> None:
    """Keep the downloaded file as it is.

    Args:
        file: The downloaded file.
        targets: The path of the result by its name.
    """
    (target,) = targets.values()
    _write(target, file)


def unpack_tar(file: BinaryIO, targets: Mapping[str, Path]) -> None:
    """Write members of a tar archive, compressed or not, found by their file names."""
    check = _MemberCheck(file)
    with tarfile.open(fileobj=file) as archive:
        members = {}
        for member in archive:  # the whole archive is checked before any file is written
            check(member.name, member.size, member.isfile() or member.isdir())
            members |= {posixpath.basename(member.name): member} if member.isfile() else {}
        for name, target in _found(members, targets):
            content = archive.extractfile(members[name])
            assert content is not None  # of a regular file
            _write(target, content)


def unpack_zip(file: BinaryIO, targets: Mapping[str, Path]) -> None:
    """Write members of a ZIP archive, found by their file names."""
    with open_zip(file) as members:
        members = {posixpath.basename(name): opened for name, opened in members.items()}
        for name, target in _found(members, targets):
            with members[name]() as content:
                _write(target, content)


@contextmanager
def open_zip(file: BinaryIO) -> Iterator[dict[str, Callable[[], IO[bytes]]]]:
    """Functions that open the files of a ZIP archive, by name; the whole archive is checked first."""
    check = _MemberCheck(file)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            check(info.filename, info.file_size, not stat.S_ISLNK(info.external_attr >> 16))
        yield {info.filename: partial(archive.open, info) for info in archive.infolist() if not info.is_dir()}


def unpack_lzma(file: BinaryIO, targets: Mapping[str, Path]) -> None:
    """Decompress an LZMA or XZ file."""
    (target,) = targets.values()
    limit = decompressed_limit(file.seek(0, io.SEEK_END))
    file.seek(0)
    with lzma.open(file) as content:
        _write(target, content, limit)


class _MemberCheck:
    """Raises FedraxError for a member of an archive that is hostile, or with the others before too large."""

    def __init__(self, file: BinaryIO):
        self._limit, self._size = decompressed_limit(file.seek(0, io.SEEK_END)), 0
        file.seek(0)

    def __call__(self, name: str, size: int, is_plain: bool) -> None:
        """Check a member of ``size`` bytes; ``is_plain``: whether it is a regular file or a folder."""
        if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or not is_plain:
            raise FedraxError(f"the archive is rejected: its member {name!r:.200} is a link or lies outside of it")
        self._size += size
        if self._size > self._limit:
            raise FedraxError(f"the archive is rejected: it expands to more than {self._limit:,} bytes")


def _found(members: Mapping[str, object], targets: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    """The targets; raises FedraxError before the first one if the archive lacks one."""
    missing = next((name for name in targets if name not in members), None)
    if missing is not None:
        raise FedraxError(f"the archive has no file {missing}")
    yield from targets.items()


def _write(target: Path, content: IO[bytes], limit: int | None = None) -> None:
    """Write a file atomically."""
    with atomic_write(target) as file:
        written = 0
        while block := content.read(BLOCK):
            written += len(block)
            if limit is not None and written > limit:
                raise FedraxError(f"the file is rejected: it expands to more than {limit:,} bytes")
            file.write(block)


@dataclass(frozen=True)
class RemoteFile:
    """A published file and the files of the data directory that it becomes.

    Example:
        >>> remote = fedrax.data.RemoteFile("https://example.org/sites.csv", "sha256:0123", ("clinics/sites.csv",))
        >>> from pathlib import Path
        >>> remote.missing(Path("data"))
        ['clinics/sites.csv']
    """

    url: str
    """Where the publisher has it; its last part is the name of the file."""
    checksum: str
    """``"md5:..."`` or ``"sha256:..."`` in hexadecimal digits."""
    files: tuple[str, ...]
    """The resulting files, relative to the data directory."""
    unpack: Unpack = store
    """How they are made of the downloaded file."""
    of_content: bool = False
    """Whether the checksum is that of the content of a gzip file, so that it does not depend on the compression."""

    def missing(self, folder: Path) -> list[str]:
        """List the resulting files that do not exist, gzipped or not.

        Args:
            folder: The data directory.

        Returns:
            Paths relative to the data directory.
        """
        return [file for file in self.files if find_file(folder / file.removesuffix(".gz")) is None]

    def obtain(self, folder: Path, mirror: str | None = None, report: Report = print) -> bool:
        """Download, verify and unpack the file unless all of its results exist.

        Args:
            folder: The data directory.
            mirror: URL of a folder with the same file, instead of the publisher's server.
            report: Receives lines about the progress.

        Returns:
            Whether anything was downloaded.

        Raises:
            FedraxError: The file cannot be had, has another checksum, or does not contain what it should.
        """
        if not self.missing(folder):
            return False
        name = posixpath.basename(self.url)
        url = self.url if mirror is None else f"{mirror.rstrip('/')}/{name}"
        targets = {posixpath.basename(file): folder / file for file in self.files}
        with _partial_file((folder / self.files[0]).parent / f".{name}.download") as file:
            report(f"{'resuming' if file.seek(0, io.SEEK_END) else 'downloading'} {url}")
            _fetch(url, file, report)
            self._verify(file, url)
            file.seek(0)
            try:
                self.unpack(file, targets)
            except FedraxError as error:
                raise FedraxError(f"{url}: {error}.") from error
            except Exception as error:  # a damaged archive may break the decompressors in any way
                raise FedraxError(f"{url} cannot be unpacked: {error or type(error).__name__}.") from error
        for file_name in self.files:
            report(f"wrote {folder / file_name}")
        return True

    def _verify(self, file: BinaryIO, url: str) -> None:
        """Raise FedraxError for another checksum than the published one."""
        algorithm, _, expected = self.checksum.partition(":")
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for block in _gzip_content(file) if self.of_content else _blocks(file):
            digest.update(block)
        if digest.hexdigest() != expected:
            raise FedraxError(
                f"{url} has the {algorithm.upper()} checksum {digest.hexdigest()}, and not {expected} as the published"
                " file: it is damaged or another version. The download was removed; try again, or another --mirror."
            )


@contextmanager
def _partial_file(path: Path) -> Iterator[BinaryIO]:
    """An unfinished download, locked, which is kept when the connection or the process ends and removed otherwise."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise FedraxError(f"cannot write {path}: {error.strerror}.") from error
    with open(descriptor, "r+b", buffering=0) as file:  # what is received is in the file, and errors are raised at once
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FedraxError(f"another process is downloading {path}.") from error
        try:
            yield file
        except (_ConnectionLostError, KeyboardInterrupt):
            raise
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)


_RETRIED = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)
"""Statuses of a server that may answer later."""


class _ConnectionLostError(FedraxError):
    """A download that can be resumed."""


def _fetch(url: str, file: BinaryIO, report: Report) -> None:
    """Append the rest of the file at a URL; a lost connection is resumed while each attempt receives data."""
    if not re.match(r"https?://[^/]", url):
        raise FedraxError(f"{url!r} is not an http or https URL.")
    while True:
        before, total = file.seek(0, io.SEEK_END), None
        try:
            total, reason = _receive(url, file, report), "the connection was lost"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and before:
                return  # nothing is missing, or the checksum differs
            reason = f"the server answered {error.code} {error.reason}"
            if error.code < http.client.INTERNAL_SERVER_ERROR and error.code not in _RETRIED:
                raise FedraxError(f"{url}: {reason}; try another server with --mirror URL.") from error
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            reason = str(getattr(error, "reason", None) or error or type(error).__name__)
        size = file.seek(0, io.SEEK_END)
        if size == total:
            return
        if size <= before:
            raise _ConnectionLostError(f"{url}: {reason} after {_megabytes(size)}; the same command resumes it.")
        report(f"{reason} after {_megabytes(size)}: resuming")


def _receive(url: str, file: BinaryIO, report: Report) -> int:
    """Receive what the file lacks, and return the size of the whole file."""
    start = file.seek(0, io.SEEK_END)
    request = urllib.request.Request(url, headers={"User-Agent": f"fedrax/{VERSION}", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        if start and not (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-"):
            start = 0  # the server sends the whole file
            file.seek(0)
            file.truncate()
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None and length.isdecimal() else None
        if max(total or 0, start) > MAX_DOWNLOAD:
            raise FedraxError(f"{url} has {_megabytes(total or 0)}, more than {_megabytes(MAX_DOWNLOAD)}.")
        size, reported = start, time.monotonic()
        while block := response.read(BLOCK):
            size += len(block)
            if size > MAX_DOWNLOAD:
                raise FedraxError(f"{url} has more than {_megabytes(MAX_DOWNLOAD)}.")
            _append(file, block)
            if time.monotonic() - reported > _SECONDS_PER_REPORT:
                reported = time.monotonic()
                report(f"{_megabytes(size)}{'' if total is None else f' of {_megabytes(total)}'}")
    return size if total is None else total


def _append(file: BinaryIO, block: bytes) -> None:
    """Write a block to an unbuffered file; a full disk raises FedraxError, unlike a lost connection."""
    left = memoryview(block)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise FedraxError(f"cannot write {file.name}: {error.strerror}; the download was removed.") from error


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.4g} MB"


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """The content of a file from its beginning."""
    file.seek(0)
    while block := file.read(BLOCK):
        yield block


def _gzip_content(file: BinaryIO) -> Iterator[bytes]:
    """The decompressed content of a gzip file; nothing more where it is damaged, so that the checksum differs."""
    inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    left = decompressed_limit(file.seek(0, io.SEEK_END))
    try:
        for block in _blocks(file):
            while block and left > 0:
                content = inflate.decompress(block, BLOCK)
                left -= len(content)
                yield content
                block = inflate.unconsumed_tail
            if inflate.unused_data:
                yield inflate.unused_data  # what follows the gzip member, which the checksum does not cover
                return
    except zlib.error:
        return
