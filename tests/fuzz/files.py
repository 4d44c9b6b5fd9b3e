"""Damaged data files and experiments: a FedraxError, or data with valid entries."""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
from hypothesis import strategies as st
from PIL import Image

from fedrax.data import Dataset, load
from fedrax.data.readers.images import read_image_table
from fedrax.data.registry import load_idx
from fedrax.errors import FedraxError
from fedrax.files import read_toml
from fedrax.participation.availability import Availability, read_trace
from tests.fuzz.damage import damaged


def _bytes(save: object, *arguments: object, **options: object) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arguments, **options)  # type: ignore[operator]
    return buffer.getvalue()


@cache
def valid_files() -> dict[str, bytes]:
    """A valid file of each kind, by name."""
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.random((6, 3)), "y_train": np.arange(6) % 3, "x_test": rng.random((3, 3))}
    arrays |= {"y_test": np.arange(3), "client_train": np.array(list("aabbcc")), "client_test": np.array(list("abc"))}
    rows = "".join(f"{a:.2f},{b},u{i % 2},{i % 3}\n" for i, (a, b) in enumerate(rng.random((12, 2))))
    image = _bytes(Image.new("RGB", (32, 32), (1, 2, 3)).save, "PNG")
    table = pl.DataFrame({"img": [{"bytes": image, "path": None}] * 2, "label": [0, 1]})
    idx = bytes([0, 0, 8, 3, 0, 0, 0, 5, 0, 0, 0, 4, 0, 0, 0, 4]) + bytes(range(80))
    users = {"a": {"x": [[0.5, 1]] * 3, "y": [0, 1, 2]}, "b": {"x": [[1e-3, -2]], "y": [1]}}
    texts = {"a": {"x": ["to be", "o be,"], "y": [",", " "]}, "b": {"x": ["be, o"], "y": ["r"]}}
    vectors, printed = (
        json.dumps({"users": ["a", "b"], "num_samples": [len(d["y"]) for d in data.values()], "user_data": data})
        for data in (users, texts)
    )
    return {
        "vectors.leaf": vectors.encode(),
        "texts.leaf": printed.encode(),
        "d.csv": ("a,b,user,label\n" + rows).encode(),
        "plain.npz": _bytes(np.savez, **arrays),
        "packed.npz": _bytes(np.savez_compressed, **arrays),
        "train-images-idx3-ubyte": idx,
        "train-images-idx3-ubyte.gz": gzip.compress(idx, mtime=0),
        "train.parquet": _bytes(table.write_parquet),
        "picture.png": _bytes(Image.new("RGB", (5, 4), (1, 2, 3)).save, "PNG"),
        "picture.jpg": _bytes(Image.new("L", (5, 4), 9).save, "JPEG"),
        "trace.csv": b"round,client\n0,0\n0,2\n1,1\n2,0\n",
        "x.toml": b"name = 'x'\n[algorithm]\nname = 'fedavg'\nlocal = { lr = 0.1, steps = 2 }\n[run]\nrounds = 4\n",
    }


@st.composite
def contents(draw: st.DrawFn) -> tuple[str, bytes]:
    """Name and content of a file."""
    name = draw(st.sampled_from(sorted(valid_files())))
    return name, draw(damaged(valid_files()[name]))


def check(case: tuple[str, bytes]) -> bool:
    """Whether the file is accepted."""
    name, content = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        os.environ["FEDRAX_CACHE"] = folder
        try:
            read(path)
        except FedraxError:
            return False
    return True


def read(path: Path) -> None:
    """Read the file as users do."""
    match path.name:
        case "trace.csv":
            assert all(len(clients) for clients in read_trace(Availability(path), 3))
        case "x.toml":
            assert isinstance(read_toml(path), dict)
        case "train.parquet":
            images, labels, _ = read_image_table(path, "label", (32, 32))
            assert images.shape[1:] == (32, 32, 3) and len(images) == len(labels)
        case "picture.png" | "picture.jpg":
            folder = path.parent / "of" / "class"
            folder.mkdir(parents=True)
            path.rename(folder / path.name)
            assert_sound(load("image_folder", path=folder.parent, size=(3, 2), test_fraction=0.0))
        case name if "idx" in name:
            labels = bytes([0, 0, 8, 1, 0, 0, 0, 5, 0, 1, 2, 0, 1])
            for other, content in (("train-labels-idx1", labels), ("t10k-labels-idx1", labels)):
                (path.parent / f"{other}-ubyte").write_bytes(content)
            (path.parent / "t10k-images-idx3-ubyte").write_bytes(valid_files()["train-images-idx3-ubyte"])
            assert_sound(load_idx(path.parent))
        case name:
            options = {"client": "user"} if name == "d.csv" else {}
            assert_sound(load(name.rpartition(".")[2], path=path, **options))


def assert_sound(dataset: Dataset) -> None:
    """Assert finite entries and labels within their range."""
    for part in (dataset.train, dataset.test):
        assert np.isfinite(part.x).all() and np.isfinite(part.y).all() and len(part.x) == len(part.y)
        assert dataset.num_classes is None or not len(part.y) or 0 <= part.y.min() <= part.y.max() < dataset.num_classes
