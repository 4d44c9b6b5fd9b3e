"""Folders of images: which files are read in which order, and what is rejected before it takes memory."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedrax.data import Federation, Natural, load
from fedrax.errors import FedraxError
from tests.data.test_hostile_files import assert_rejected


def picture(color: object, size: tuple[int, int] = (4, 3), mode: str = "RGB", kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, kind)  # type: ignore[arg-type]
    return buffer.getvalue()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_classes_are_the_sorted_folder_names(tmp_path: Path) -> None:
    """In any order of creation; files that are no images are ignored and noted."""
    colors = {"b/2.JPG": (9, 9, 9), "b/10.png": (1, 2, 3), "a/z.jpeg": (200, 200, 200), "a/y.png": (0, 255, 0)}
    for name, color in colors.items():
        write(tmp_path / name, picture(color, kind="PNG" if name.endswith("png") else "JPEG"))
    write(tmp_path / "a/readme.txt", b"no image")
    write(tmp_path / "a/.hidden.png", b"")
    dataset = load("image_folder", path=tmp_path, size=(3, 4), test_fraction=0.0)
    assert dataset.class_names == ("a", "b") and dataset.train.y.tolist() == [0, 0, 1, 1] and dataset.pixels
    assert dataset.train.x.shape == (4, 3, 4, 3) and dataset.train.x.dtype == np.uint8
    assert [tuple(image[0, 0].tolist()) for image in dataset.train.x] == [
        colors[name] for name in ("a/y.png", "a/z.jpeg", "b/10.png", "b/2.JPG")
    ]
    scaled = dataset.train.x.reshape(-1, 3) / 255
    np.testing.assert_allclose(dataset.mean, scaled.mean(0))
    np.testing.assert_allclose(dataset.std, scaled.std(0))
    assert any("1 files and folders are no images" in note for note in dataset.notes)


def test_images_are_read_resized_and_converted_to_gray(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    write(tmp_path / "c/a.png", buffer.getvalue())
    same = load("image_folder", path=tmp_path, size=(6, 8), test_fraction=0.0)
    np.testing.assert_array_equal(same.train.x[0], pixels)
    gray = load("image_folder", path=tmp_path, size=(6, 8), color="gray", test_fraction=0.0).train.x[0, ..., 0]
    luma = pixels @ np.array([0.299, 0.587, 0.114])  # ITU-R 601-2
    assert np.abs(gray - luma).max() <= 1
    halved = load("image_folder", path=tmp_path, size=(3, 8), color="gray", test_fraction=0.0).train.x[0, ..., 0]
    # Bilinear interpolation to half as many rows has triangular weights 1, 3, 3, 1.
    weighed = (luma[[1, 2, 3, 4]] * np.array([[1], [3], [3], [1]])).sum(0) / 8
    assert np.abs(halved[1] - weighed).max() <= 1.5


def test_clients_have_names_and_test_images(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 1)):
        for client in ("ward 2", "ward 1"):
            for label in ("ill", "well"):
                for i in range(count):
                    write(tmp_path / part / client / label / f"{i}.png", picture(i, mode="L"))
    dataset = load("image_folder", path=tmp_path, size=(2, 2), color="gray", clients=True)
    federation = Federation.from_dataset(dataset, Natural(), seed=0)
    assert federation.client_names == ("ward 1", "ward 2") and federation.sizes.tolist() == [6, 6]
    assert federation.test_offsets is not None and federation.test_offsets.tolist() == [0, 2, 4]
    with pytest.raises(FedraxError, match="no images, files that end in"):
        load("image_folder", path=tmp_path, size=(2, 2))
    split = load("image_folder", path=tmp_path / "train", size=(2, 2), clients=True, test_fraction=0.34)
    assert np.bincount(split.test_clients).tolist() == [2, 2]  # type: ignore[arg-type]


def bomb(side: int) -> bytes:
    """A PNG file that declares side x side pixels and contains a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bomb(8_000), "8000, 8000. pixels, more than 50,000,000"),
        (bomb(60_000), "not a readable JPEG or PNG"),
        (bomb(7_000), "not a readable JPEG or PNG"),
        (b"no image", "not a readable JPEG or PNG"),
        (b"", "not a readable JPEG or PNG"),
        (picture((1, 2, 3), kind="GIF"), "not a readable JPEG or PNG"),
        (picture((1, 2, 3))[:50], "not a readable JPEG or PNG"),
        (picture(40_000, mode="I;16"), "more than 8 bits a channel"),
    ],
)
def test_files_that_are_no_images_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path / "c/a.png", picture((1, 2, 3)))
    write(tmp_path / "c/b.png", content)
    assert_rejected(load, "image_folder", path=tmp_path, size=(3, 4), message=message)


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret/a.png", picture((1, 2, 3)))
    write(tmp_path / "data/c/a.png", picture((1, 2, 3)))
    (tmp_path / "data/c/b.png").symlink_to(secret)
    with pytest.raises(FedraxError, match=r"c/b.png is a link"):
        load("image_folder", path=tmp_path / "data", size=(3, 4))
    (tmp_path / "data/c/b.png").unlink()
    (tmp_path / "data/d").symlink_to(secret.parent)
    with pytest.raises(FedraxError, match=r"data/d is a link"):
        load("image_folder", path=tmp_path / "data", size=(3, 4))
    (tmp_path / "data/d").unlink()
    os.mkfifo(tmp_path / "data/c/pipe.png")  # an endless device, no regular file
    assert len(load("image_folder", path=tmp_path / "data", size=(3, 4), test_fraction=0.0).train.y) == 1


def test_unsuitable_folders_and_options_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FedraxError, match="needs the option 'size'"):
        load("image_folder", path=tmp_path)
    for size in ((0, 3), (5000, 3), (3,)):
        with pytest.raises(FedraxError, match=r"a height and a width|a list of 2 whole numbers"):
            load("image_folder", path=tmp_path, size=size)
    with pytest.raises(FedraxError, match="did you mean 'gray'"):
        load("image_folder", path=tmp_path, size=(3, 4), color="grey")
    with pytest.raises(FedraxError, match="holds no images in folders"):
        load("image_folder", path=tmp_path, size=(3, 4))
    with pytest.raises(FedraxError, match="cannot be read as a folder"):
        load("image_folder", path=tmp_path / "nothing", size=(3, 4))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedraxError, match="empty holds no images"):
        load("image_folder", path=tmp_path, size=(3, 4))


@pytest.mark.parametrize("size", [(1.5, 2), ("a", "b"), 5, None, (2,), (0, 1)])
def test_malformed_sizes_are_rejected(size: object, tmp_path: Path) -> None:
    with pytest.raises(FedraxError, match=r"a height and a width of 1 to|size must be a list of 2 whole numbers"):
        load("image_folder", path=tmp_path, size=size)
    with pytest.raises(FedraxError, match="cannot be read as a folder"):
        load("image_folder", path="nul\0", size=(1, 1))


@pytest.mark.parametrize("way", range(1, 9))
def test_images_are_rotated_by_their_exif_orientation(tmp_path: Path, way: int) -> None:
    """A damaged EXIF block is ignored."""
    upright = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    # For each orientation (EXIF 2.3), the row and column of the displayed image at which the stored one begins.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[way]
    exif = Image.Exif()
    exif[0x0112] = way
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(stored)).save(buffer, "PNG", exif=exif)
    write(tmp_path / "c/a.png", buffer.getvalue())
    dataset = load("image_folder", path=tmp_path, size=(4, 6), test_fraction=0.0)
    np.testing.assert_array_equal(dataset.train.x[0], upright)
    broken = io.BytesIO()
    Image.fromarray(upright).save(broken, "PNG", exif=b"Exif\0\0no block")
    write(tmp_path / "c/a.png", broken.getvalue())
    np.testing.assert_array_equal(
        load("image_folder", path=tmp_path, size=(4, 6), test_fraction=0.0).train.x[0], upright
    )


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_validation_folder_is_the_test_part_if_there_is_no_other(tmp_path: Path, name: str) -> None:
    """With a test folder, it is ignored and noted."""
    for i, place in enumerate(("train/a/1", "train/b/2", f"{name}/a/3", f"{name}/b/4")):
        write(tmp_path / f"{place}.png", picture((i, 0, 0)))
    dataset = load("image_folder", path=tmp_path, size=(3, 4))
    assert dataset.test.x[:, 0, 0, 0].tolist() == [2, 3] and not any("left out" in note for note in dataset.notes)
    with pytest.raises(FedraxError, match=f"test_fraction has no effect where .*{name} holds the test images"):
        load("image_folder", path=tmp_path, size=(3, 4), test_fraction=0.4)
    assert len(load("image_folder", path=tmp_path, size=(3, 4), test_fraction=0.0).test.y) == 2
    write(tmp_path / "train/a/0.png", b"damaged")
    with pytest.raises(FedraxError, match="test_fraction has no effect"):  # before images are decoded
        load("image_folder", path=tmp_path, size=(3, 4), test_fraction=0.4)
    (tmp_path / "train/a/0.png").unlink()
    write(tmp_path / "test/a/5.png", picture((7, 0, 0)))
    both = load("image_folder", path=tmp_path, size=(3, 4))
    assert both.test.x[:, 0, 0, 0].tolist() == [7] and any(f"left out: {name}" in note for note in both.notes)


def test_unknown_folders_and_an_empty_test_part_are_noted(tmp_path: Path) -> None:
    """Names of parts are case-insensitive; unknown folders, ignored client folders and an empty test are reported."""
    for place in ("Train/a/1", "Train/b/2", "Test/a/3", "more/training/a/4"):
        write(tmp_path / f"{place}.png", picture((1, 0, 0)))
    dataset = load("image_folder", path=tmp_path, size=(3, 4))
    assert dataset.class_names == ("a", "b") and len(dataset.test.y) == 1
    with pytest.raises(FedraxError, match=r"training holds no images, .* but folders: parts are called train and test"):
        load("image_folder", path=tmp_path / "more", size=(3, 4))
    write(tmp_path / "more/deep/training/a/4.png", picture((1, 0, 0)))
    with pytest.raises(FedraxError, match=r"training holds no images, .* parts are called train and test\.$"):
        load("image_folder", path=tmp_path / "more", size=(3, 4), clients=True)
    whole = load("image_folder", path=tmp_path / "Train", size=(3, 4))
    assert any("there are too few rows to keep 0.2 of them for the test, which is empty" in n for n in whole.notes)
    write(tmp_path / "train/c/5.png", picture((1, 2, 3)))
    if not (tmp_path / "train/a").exists():  # on a case-sensitive file system
        with pytest.raises(FedraxError, match="Train and train are both called train: rename one of them"):
            load("image_folder", path=tmp_path, size=(3, 4))


def png16(value: int) -> bytes:
    """A PNG of 2 x 2 pixels with 16 bits per channel."""
    part = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    body = zlib.compress((b"\0" + struct.pack(">6H", *[value] * 6)) * 2)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", body) + part(b"IEND", b"")


def test_images_of_16_bits_per_channel_are_rejected(tmp_path: Path):
    for name, value in (("a", 200), ("b", 4000)):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_bytes(png16(value))
    with pytest.raises(FedraxError, match="more than 8 bits a channel"):
        load("image_folder", path=tmp_path / "images", size=(2, 2), test_fraction=0.0)
