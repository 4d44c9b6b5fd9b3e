"""Tables of encoded images in the Hugging Face layout, hostile until parsed, and their decoded copies."""

import hashlib
import io
import json
import math
import os
import warnings
from pathlib import Path

import numpy as np
import polars as pl
from PIL import Image

from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.csv_parquet import reading_parquet
from fedrax.data.readers.image_cache import kept_images
from fedrax.errors import FedraxError, unknown
from fedrax.files import inflated_limit, reading


def read_image_table(path: Path, label: str, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Images uint8 [n, height, width, 3], labels int64 [n] and class names of a Hugging Face image parquet.

    The table has a column ``img``, a struct with the encoded ``bytes``, and an integer column ``label``.
    Decoded images are kept under the checksum of the file, so that a second load is a memory map.
    Raises FedraxError if a column is missing or an image is not a JPEG or PNG of ``size``.
    """
    with reading(path) as file:
        stored = os.fstat(file.fileno()).st_size
    with reading_parquet(path):
        schema = pl.read_parquet_schema(path)
        for column in ("img", label):
            if column not in schema:
                raise unknown(f"column of {path}", column, schema)
        if not schema[label].is_integer() or "bytes" not in getattr(schema["img"], "to_schema", dict)():
            raise FedraxError(f"{path} needs a column 'img' with encoded bytes and an integer column {label!r}.")
        rows = int(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item())
        shape = (rows, size[1], size[0], 3)
        if rows > stored or math.prod(shape) > min(MAX_BYTES, inflated_limit(stored)):
            raise FedraxError(f"{path} announces {rows:,} images, more than its {stored:,} bytes can hold.")
        labels = pl.read_parquet(path, columns=[label], glob=False)[label]
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        images = kept_images(checksum, shape, lambda: _decode_images(path, shape))
        names = _class_names(pl.read_parquet_metadata(path), label)
    if labels.null_count():
        raise FedraxError(f"{path}: column {label!r} has missing values.")
    return images, labels.to_numpy(), names


def _decode_images(path: Path, shape: tuple[int, int, int, int]) -> np.ndarray:
    encoded = pl.read_parquet(path, columns=["img"], glob=False)["img"].struct.field("bytes")
    images = np.empty(shape, np.uint8)
    size = (shape[2], shape[1])
    for row, data in enumerate(encoded):
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                Image.open(io.BytesIO(data or b""), formats=("JPEG", "PNG")) as image,
            ):
                if image.size != size:  # known before any pixel is decompressed
                    raise FedraxError(f"{path}, row {row}: the image is {image.size}, not {size} pixels.")
                images[row] = np.asarray(image.convert("RGB"))
        except FedraxError:
            raise
        except Exception as error:  # a damaged image may break the decoders in any way; too large ones have their own
            raise FedraxError(f"{path}, row {row}: not a readable JPEG or PNG image ({error}).") from error
    return images


def _class_names(metadata: dict[str, str], label: str) -> tuple[str, ...]:
    """Names from the ``huggingface`` entry of a parquet's metadata; none if it is absent or malformed."""
    try:
        names = json.loads(metadata["huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(n, str) for n in names) else ()
