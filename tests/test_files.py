"""Atomic writes: special files as targets, concurrent writers, and file systems without features."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from fedrax import FedraxError
from fedrax.files import atomic_write, write_text


def test_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices, and only root could lose them")
    with pytest.raises(FedraxError, match="is a device: choose another path"):
        write_text(tmp_path / "null", "a page")
    assert (tmp_path / "null").is_char_device()


def test_concurrently_written_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    path.write_text("old")
    one, other = atomic_write(path), atomic_write(path)
    one.__enter__().write(b"one")
    file = other.__enter__()
    file.write(b"oth")
    with pytest.raises(FedraxError, match="another process is writing it"):
        one.__exit__(None, None, None)
    assert path.read_text() == "old"
    file.write(b"er")
    other.__exit__(None, None, None)
    assert path.read_text() == "other" and not list(tmp_path.glob(".*"))


def test_file_systems_without_fsync_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def of_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    write_text(tmp_path / "page", "new")
    assert (tmp_path / "page").read_text() == "new"


def test_file_name_that_is_not_utf8_raises_a_clear_error(tmp_path: Path) -> None:
    """For example an argument in another encoding."""
    with pytest.raises(FedraxError, match="cannot be encoded as UTF-8"):
        write_text(tmp_path / "page", os.fsdecode(b"name = 'n\xff'"))
    assert not list(tmp_path.iterdir())
