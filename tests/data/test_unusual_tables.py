"""Tables, images and files of unusual kinds: right numbers, or a sentence."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedrax.data import DirichletClasses, load
from fedrax.data.columns import classes_or_targets
from fedrax.data.huggingface import _kind
from fedrax.data.tables import spread_notes
from fedrax.errors import FedraxError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_feature_that_is_constant_but_for_rounding(tmp_path: Path):
    """The mean of three times 0.1 is not 0.1: its deviation is none all the same, and that of all clients serves."""
    train = write(
        tmp_path / "tr.csv", "c,a,b,label\nA,0.1,1,x\nA,0.1,2,y\nA,0.1,4,x\nB,0.3,5,y\nB,0.5,3,x\nB,0.9,2,y\n"
    )
    test = write(tmp_path / "te.csv", "c,a,b,label\nA,0.2,1,x\n")
    found = load("csv", path=train, test_path=test, client="c", standardise="client")
    np.testing.assert_array_equal(found.train.x[:3, 0], 0)
    overall = np.std([0.1, 0.1, 0.1, 0.3, 0.5, 0.9])
    np.testing.assert_allclose(found.test.x[:, 0], 0.1 / overall, rtol=1e-5)
    one = write(tmp_path / "t2.csv", "a,b,label\n0.1,1,x\n0.1,2,y\n0.1,5,x\n")
    other = write(tmp_path / "e2.csv", "a,b,label\n0.2,1,x\n")
    found = load("csv", path=one, test_path=other)
    np.testing.assert_array_equal(found.train.x[:, 0], 0)
    np.testing.assert_allclose(found.test.x[:, 0], 0.1, rtol=1e-5)
    assert spread_notes(np.array([[0.1, 1.0], [0.1, 2.0], [0.1, 3.0]])) == []


def test_a_column_without_values_in_one_file(tmp_path: Path):
    full = write(tmp_path / "a.csv", "x,dose,label\n1,10,a\n2,20,b\n3,30,a\n")
    empty = write(tmp_path / "b.csv", "x,dose,label\n1,,a\n2,,b\n")
    found = load("csv", path=full, test_path=empty, missing="mean")
    np.testing.assert_allclose(found.test.x[:, 1], 0, atol=1e-6)
    assert found.train.x.shape == (3, 2)


def test_one_long_text(tmp_path: Path):
    """As arrays of texts of one length, these would take terabytes."""
    rows = "ok,1,a\n" * 3000 + "z" * 2_000_000 + ",2,b\n"
    found = load("csv", path=write(tmp_path / "m.csv", "note,x,label\n" + rows))
    assert found.train.x.shape[1] == 3
    labels = np.array(["b", "a", "z" * 10_000_000, "a"], object)
    codes, names = classes_or_targets(labels)
    assert codes.tolist() == [1, 0, 2, 0] and names[:2] == ("a", "b")


def png16(value: int) -> bytes:
    """2 x 2 pixels of 16 bits a channel."""
    part = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    body = zlib.compress((b"\0" + struct.pack(">6H", *[value] * 6)) * 2)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", body) + part(b"IEND", b"")


def test_colours_of_sixteen_bits_are_refused(tmp_path: Path):
    for name, value in (("a", 200), ("b", 4000)):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_bytes(png16(value))
    with pytest.raises(FedraxError, match="more than 8 bits a channel"):
        load("image_folder", path=tmp_path / "images", size=(2, 2), test_fraction=0.0)


def test_groups_that_a_file_does_not_name(tmp_path: Path):
    data = {"users": ["u1", "u2"], "user_data": {u: {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]} for u in ("u1", "u2")}}
    file = write(tmp_path / "one.json", json.dumps(data))
    with pytest.raises(FedraxError, match="names no hierarchies for its users"):
        load("leaf", path=file, clients="hierarchies")
    assert load("leaf", path=file).client_names == ("u1", "u2")


def test_kinds_of_whole_numbers_without_a_sign():
    digits = load("digits")
    by = np.arange(len(digits.train.y)) % 3
    one, other = (replace(digits, partition_by=by.astype(kind)) for kind in (np.uint64, np.int32))
    parts = [DirichletClasses(5, 0.5).assign(data, 0) for data in (one, other)]
    for mine, theirs in zip(*parts, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_bytes_are_images_and_no_texts():
    pl = pytest.importorskip("polars")
    assert [_kind(dtype) for dtype in (pl.Binary, pl.String, pl.Int8, pl.List(pl.Int8))] == [
        "image", "text", "number", "list",
    ]  # fmt: skip
