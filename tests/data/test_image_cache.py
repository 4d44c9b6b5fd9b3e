"""The cache of decoded images: the same pixels, and never those of damaged or changed files."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedrax.data import Dataset, load
from fedrax.data.readers import image_folders, images
from tests.data.test_image_folders import picture, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve image files with old modification times."""
    monkeypatch.setenv("FEDRAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(image_folders, "MTIME_GRANULARITY", -1)
    for i in range(12):
        write(tmp_path / "scans" / "ab"[i % 2] / f"{i}.png", picture((i, 2 * i, 255 - i)))
    return tmp_path / "scans"


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of images of each decoding."""
    made: list[int] = []
    decode: Callable[..., np.ndarray] = image_folders.decode_images

    def counting_decode(paths: list[Path], *arguments: object) -> np.ndarray:
        made.append(len(paths))
        return decode(paths, *arguments)

    monkeypatch.setattr(image_folders, "decode_images", counting_decode)
    return made


def read(folder: Path, **options: object) -> Dataset:
    return load("image_folder", folder.parent, path=folder, **({"size": (3, 4), "test_fraction": 0.0} | options))


def files(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache" / "images").glob("*"))


def test_second_load_reads_the_cache(folder: Path, decodings: list[int]) -> None:
    first, second = read(folder), read(folder)
    assert decodings == [12]
    np.testing.assert_array_equal(first.train.x, second.train.x)
    assert first.mean == second.mean and first.train.y.tolist() == second.train.y.tolist()
    (file,) = files(folder)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    np.testing.assert_array_equal(np.load(file, allow_pickle=False)[:, 0, 0, 0], [0, 10, 2, 4, 6, 8, 1, 11, 3, 5, 7, 9])


def test_other_options_and_changed_files_are_decoded_again(folder: Path, decodings: list[int]) -> None:
    read(folder)
    assert read(folder, color="gray").train.x.shape[-1] == 1 and read(folder, size=(2, 2)).train.x.shape[1] == 2
    assert decodings == [12] * 3
    file, facts = folder / "a/0.png", (folder / "a/0.png").stat()
    file.write_bytes(picture((200, 0, 0)).ljust(facts.st_size, b"\0"))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # without a change of the modification time
    assert read(folder).train.x[0, 0, 0].tolist() == [200, 0, 0]
    (folder / "b/1.png").rename(folder / "b/99.png")
    assert read(folder).train.x[-1, 0, 0].tolist() == [1, 2, 254]
    (folder / "b/99.png").unlink()
    assert len(read(folder).train.y) == 11 and decodings == [12] * 5 + [11]


@pytest.mark.parametrize("place", [3, 130, -40, -3])
def test_damaged_cache_is_not_used(folder: Path, decodings: list[int], place: int) -> None:
    """A flipped bit in the header, the pixels or the digest; one byte too few or too many."""
    first = read(folder)
    (file,) = files(folder)
    whole = file.read_bytes()
    turned = bytearray(whole)
    turned[place] ^= 4
    for content in (bytes(turned), whole[:-1], whole + b"\0", b""):
        file.write_bytes(content)
        np.testing.assert_array_equal(read(folder).train.x, first.train.x)
        assert file.read_bytes() == whole
    assert decodings == [12] * 5


def test_recently_changed_files_are_not_cached(
    folder: Path, decodings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files modified in the last seconds, or while they were decoded."""
    monkeypatch.setattr(image_folders, "MTIME_GRANULARITY", 3600 * 10**9)
    read(folder)
    assert files(folder) == []
    monkeypatch.setattr(image_folders, "MTIME_GRANULARITY", -1)
    counting_decode: Callable[..., np.ndarray] = image_folders.decode_images

    def decode_and_modify(*arguments: object) -> np.ndarray:
        (folder / "a/0.png").write_bytes(picture((9, 9, 9)))
        return counting_decode(*arguments)

    monkeypatch.setattr(image_folders, "decode_images", decode_and_modify)
    read(folder)
    assert files(folder) == [] and decodings == [12, 12]


def test_least_recently_used_cache_files_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(folder)
    (first,) = files(folder)
    read(folder, size=(3, 5))
    (second,) = set(files(folder)) - {first}
    long_ago = time.time() - 1000
    os.utime(second, (long_ago, long_ago))
    monkeypatch.setattr(images, "MAX_CACHE_BYTES", 12 * 36 + first.stat().st_size)
    read(folder, size=(4, 3))
    assert second not in files(folder) and first in files(folder) and len(files(folder)) == 2
    monkeypatch.setattr(images, "MAX_CACHE_BYTES", 100)
    read(folder, size=(5, 5))
    assert len(files(folder)) == 2


def test_unwritable_cache_is_no_error(folder: Path, decodings: list[int]) -> None:
    (folder.parent / "cache").write_text("no folder")
    assert read(folder).train.x.shape == read(folder).train.x.shape and decodings == [12, 12]
