"""Files that break their readers or declare more than they contain: a clear error with little memory."""

from __future__ import annotations

import gzip
import io
import os
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from fedrax.data import load
from fedrax.data.readers.array_files import read_idx, read_npz
from fedrax.data.readers.images import read_image_table
from fedrax.errors import FedraxError
from fedrax.files import read_toml
from tests.data.test_readers import npy, npz_arrays

MEGABYTES = 1 << 20


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDRAX_CACHE", str(tmp_path / "cache"))


def assert_rejected(call: object, *arguments: object, message: str, **options: object) -> None:
    """Assert that the call raises a FedraxError and allocates little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FedraxError, match=message):
        call(*arguments, **options)  # type: ignore[operator]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


# -- ZIP and NPY ---------------------------------------------------------------------------------------------------


def header(shape: str, descr: str = "<f8") -> bytes:
    return npy(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}")


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (npy("(" * 90 + ")" * 20), "cannot be read"),
        (npy("[" * 117), "cannot be read"),
        (header(f"({2**80},)"), "bytes are not"),
        (header("(-1,)"), "bytes are not"),
        (header("(-2, -2)") + bytes(32), "bytes are not"),
        (header("(1000000000000000000,)", "<U0"), "rows of nothing"),
        (header("(1000000000000000000, 0)"), "rows of nothing"),
        (header("(4,)", "V99999999999999999999"), "cannot be read"),
    ],
)
def test_invalid_npy_headers_are_rejected(member: bytes, message: str, tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("x.npy", member)
    assert_rejected(read_npz, tmp_path / "bad.npz", ["x"], message=message)


def test_npz_members_without_suffix_npy_are_not_arrays(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("x", header("(0,)"))
    assert_rejected(read_npz, tmp_path / "bad.npz", ["x"], message="has no array 'x'; it has x")


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_unusual_zip_compressions_are_not_decompressed(method: int, tmp_path: Path):
    buffer = io.BytesIO()
    np.save(buffer, np.arange(1000.0))
    with zipfile.ZipFile(tmp_path / "bad.npz", "w", method) as archive:
        archive.writestr("x.npy", buffer.getvalue())
    content = bytearray((tmp_path / "bad.npz").read_bytes())
    content[60:90] = b"\xff" * 30
    (tmp_path / "bad.npz").write_bytes(content)
    assert_rejected(read_npz, tmp_path / "bad.npz", ["x"], message="compressed as NumPy does not")


def test_every_damaged_byte_of_a_compressed_file_raises_a_clear_error(tmp_path: Path):
    np.savez_compressed(tmp_path / "d.npz", **npz_arrays())
    whole, path = (tmp_path / "d.npz").read_bytes(), tmp_path / "d.npz"
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            load("npz", path=path)
        except FedraxError as error:
            assert str(path) in str(error)


# -- more than declared, or than is read ----------------------------------------------------------------------------


def bomb(path: Path, count: int, start: bytes) -> None:
    """A small gzip file of ``start`` followed by ``count`` megabytes of zeros."""
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(start)
        for _ in range(count):
            file.write(bytes(MEGABYTES))


def test_idx_file_is_not_decompressed_beyond_its_limit(tmp_path: Path):
    shape = (400, 1024, 1024)
    bomb(tmp_path / "images.gz", 400, bytes([0, 0, 8, 3]) + struct.pack(">3I", *shape))
    assert_rejected(
        read_idx, tmp_path / "images.gz", 3, message="256 MiB that are taken from a compressed file of its size"
    )
    (tmp_path / "images").write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", *shape) + bytes(1000))
    assert_rejected(read_idx, tmp_path / "images", 3, message="more than the file can hold")


def test_npz_file_is_not_decompressed_beyond_its_limit(tmp_path: Path):
    with (
        zipfile.ZipFile(tmp_path / "bad.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w") as file,
    ):
        file.write(header("(52428800,)"))
        for _ in range(400):
            file.write(bytes(MEGABYTES))
    assert_rejected(read_npz, tmp_path / "bad.npz", ["x"], message="more than the 268,435,456 that are taken")


def test_lengths_are_compared_before_decompression(tmp_path: Path):
    arrays = npz_arrays() | {"x_train": np.zeros((2**21, 8))}
    np.savez_compressed(tmp_path / "d.npz", **arrays)
    peak = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    code = f"""
import sys
from fedrax.data import load
from fedrax.errors import FedraxError
{peak}
try:
    load("npz", path={str(tmp_path / "d.npz")!r})
except FedraxError as error:
    assert "are not n samples with n labels" in str(error)
    {peak}
"""
    paths = os.pathsep.join(path for path in sys.path if path)
    completed = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE
    )
    before, after = map(int, completed.stdout.split())
    assert after - before < 50_000  # KiB; the array has 128 MiB


@pytest.mark.parametrize("packed", [gzip.compress, zlib.compress])
def test_compressed_table_is_not_decompressed(packed: object, tmp_path: Path):
    (tmp_path / "d.csv").write_bytes(packed(b"a,label\n" + b"1,0\n" * 1000))  # type: ignore[operator]
    assert_rejected(load, "csv", path=tmp_path / "d.csv", message="is compressed: unpack it first")


def test_table_with_too_many_columns_is_rejected(tmp_path: Path):
    (tmp_path / "d.csv").write_text(",".join(f"c{i:x}" for i in range(110_000)) + ",label\n")
    assert_rejected(load, "csv", path=tmp_path / "d.csv", message="has 110,001 columns, where at most 100,000 are read")


def picture(width: int, height: int) -> bytes:
    """The header of a PNG file with these dimensions."""
    content = b"IHDR" + struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    end = b"IEND"
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (content, end)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(("side", "message"), [(65_000, "not a readable JPEG or PNG"), (12_000, r"\(12000, 12000\)")])
def test_image_with_too_many_pixels_is_not_decoded(side: int, message: str, tmp_path: Path):
    table = pl.DataFrame({"img": [{"bytes": picture(side, side), "path": None}], "label": [0]})
    table.write_parquet(tmp_path / "train.parquet")
    assert_rejected(read_image_table, tmp_path / "train.parquet", "label", (32, 32), message=message)


def test_image_table_that_declares_too_many_rows_is_rejected(tmp_path: Path):
    rows = 2_000_000
    image = pl.DataFrame({"img": [{"bytes": b"", "path": None}], "label": [0]})
    pl.concat([image] * 1).select(pl.all().repeat_by(rows).explode()).write_parquet(tmp_path / "train.parquet")
    assert (tmp_path / "train.parquet").stat().st_size < rows
    assert_rejected(
        read_image_table, tmp_path / "train.parquet", "label", (32, 32), message="announces 2,000,000 images"
    )


def test_parquet_file_with_a_damaged_footer_is_rejected(tmp_path: Path, capfd: pytest.CaptureFixture):
    """Offsets outside of the file make polars panic, with an error that is no Exception and that its threads print."""
    path, small = tmp_path / "train.parquet", io.BytesIO()
    Image.new("RGB", (2, 2)).save(small, "PNG")
    pl.DataFrame({"img": [{"bytes": small.getvalue(), "path": None}] * 3, "label": [0, 1, 2]}).write_parquet(path)
    whole, panics = path.read_bytes(), 0
    (length,) = struct.unpack("<I", whole[-8:-4])
    for at in range(len(whole) - 8 - length, len(whole) - 8):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            read_image_table(path, "label", (2, 2))
        except FedraxError as error:
            panics += "it is damaged" in str(error)
        if panics == 3:
            break
    assert panics == 3 and capfd.readouterr().err == ""


# -- special files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", ["/dev/zero", "fifo", "folder", "link"])
@pytest.mark.parametrize("reader", ["csv", "npz", "idx", "parquet", "toml"])
def test_pipes_devices_and_folders_are_not_read(reader: str, special: str, tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    path = tmp_path / special
    calls = {
        "csv": lambda: load("csv", path=path),
        "npz": lambda: load("npz", path=path),
        "idx": lambda: read_idx(path, 3),
        "parquet": lambda: read_image_table(path, "label", (32, 32)),
        "toml": lambda: read_toml(path),
    }
    assert_rejected(
        calls[reader],
        message=r"cannot be read: (it is not a regular file|Is a directory)|a folder without a file \*\.csv",
    )


# -- OpenML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two words", "../../etc/passwd", "a?b=c", "", "a\nb"])
def test_openml_names_are_validated(name: str):
    assert_rejected(load, "openml", dataset=name, message="is not a name of openml.org")


def test_malformed_openml_responses_raise_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: object, **options: object) -> None:
        raise KeyError("data_set_description")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", broken)
    assert_rejected(load, "openml", dataset="iris", message="could not be fetched")
