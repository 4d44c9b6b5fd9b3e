"""Where the public data sets are published, with checksums of their files.

The checksums are those that the publishers state (CIFAR, Fashion-MNIST), those of other libraries for the same files
(torchvision: EMNIST; FedJAX: Shakespeare) or of public reports (federated EMNIST, UCI HAR). MNIST's are of the content
of the original files, because mirrors compress them differently.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from fedrax.data.remote_files import RemoteFile, open_zip, unpack_lzma, unpack_tar, unpack_zip
from fedrax.errors import FedraxError
from fedrax.files import atomic_write, decompressed_limit

_SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""Channels of UCI HAR in the order of the arrays."""
_SIGNAL_LENGTH, _FEATURES = 128, 561


def unpack_har(file: BinaryIO, targets: Mapping[str, Path], windows: bool) -> None:
    """Convert UCI HAR's archive, a ZIP in a ZIP, to the NPZ file of its windows or of its 561 features."""
    (target,) = targets.values()
    with open_zip(file) as outer:
        content = _read(outer, "UCI HAR Dataset.zip")
    with open_zip(io.BytesIO(content)) as inner:

        def table(name: str, columns: int) -> np.ndarray:
            values = np.array(_read(inner, f"UCI HAR Dataset/{name}").split(), np.float32)
            if values.size % columns or not np.isfinite(values).all():
                raise FedraxError(f"{name} is not a table of {columns} numbers in each row")
            return values.reshape(-1, columns)

        arrays = {}
        for part in ("train", "test"):
            if windows:
                signals = [table(f"{part}/Inertial Signals/{s}_{part}.txt", _SIGNAL_LENGTH) for s in _SIGNALS]
                arrays[f"x_{part}"] = np.stack(signals, axis=1)
            else:
                arrays[f"x_{part}"] = table(f"{part}/X_{part}.txt", _FEATURES)
            for key in ("y", "subject"):
                arrays[f"{key}_{part}"] = table(f"{part}/{key}_{part}.txt", 1)[:, 0].astype(np.int64)
        labels = _read(inner, "UCI HAR Dataset/activity_labels.txt").decode().split()
        arrays["activities"] = np.array(labels[1::2])
    with atomic_write(target) as npz:
        np.savez_compressed(npz, **arrays)


def _read(members: Mapping[str, Callable[[], IO[bytes]]], name: str) -> bytes:
    """The content of a member of an archive."""
    if name not in members:
        raise FedraxError(f"the archive has no file {name}")
    with members[name]() as content:
        return content.read(decompressed_limit(0))


def _idx(
    folder: str, base: str, algorithm: str, digests: Mapping[str, str], of_content: bool
) -> tuple[RemoteFile, ...]:
    """MNIST's four files."""
    return tuple(
        RemoteFile(f"{base}/{name}.gz", f"{algorithm}:{digest}", (f"{folder}/{name}.gz",), of_content=of_content)
        for name, digest in digests.items()
    )


_TFF = "https://storage.googleapis.com/tff-datasets-public"
_HAR = RemoteFile(
    "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip",
    "sha256:c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031",
    ("har/har_inertial.npz",),
    partial(unpack_har, windows=True),
)

SOURCES: dict[str, tuple[RemoteFile, ...]] = {
    "mnist": _idx(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",  # PyTorch's mirror of LeCun's page
        "sha256",
        {
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        of_content=True,
    ),
    "fashion_mnist": _idx(
        "fashion_mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "md5",
        {
            "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        of_content=False,
    ),
    "emnist": (
        RemoteFile(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "md5:58c8d27c78d21e728a6bc7b3cc06412e",
            tuple(
                f"emnist/emnist-{split}-{part}-{kind}-ubyte.gz"
                for split in ("balanced", "byclass", "bymerge", "letters", "digits", "mnist")
                for part in ("train", "test")
                for kind in ("images-idx3", "labels-idx1")
            ),
            unpack_zip,
        ),
    ),
    "femnist": (
        RemoteFile(
            f"{_TFF}/emnist_all.sqlite.lzma",
            "sha256:c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48",
            ("femnist/emnist_all.sqlite",),
            unpack_lzma,
        ),
    ),
    "shakespeare": (
        RemoteFile(
            f"{_TFF}/shakespeare.sqlite.lzma",
            "sha256:d3d11fceb9e105439ac6f4d52af6efafed5a2a1e1eb24c5bd2dd54ced242f5c4",
            ("shakespeare/shakespeare.sqlite",),
            unpack_lzma,
        ),
    ),
    "cifar10": (
        RemoteFile(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            (
                *(f"cifar10/data_batch_{i}.bin" for i in range(1, 6)),
                "cifar10/test_batch.bin",
                "cifar10/batches.meta.txt",
            ),
            unpack_tar,
        ),
    ),
    "cifar100": (
        RemoteFile(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "md5:03b5dce01913d631647c71ecec9e9cb8",
            ("cifar100/train.bin", "cifar100/test.bin", "cifar100/fine_label_names.txt"),
            unpack_tar,
        ),
    ),
    "har_inertial": (_HAR,),
    "har_features": (
        RemoteFile(_HAR.url, _HAR.checksum, ("har/har_features561.npz",), partial(unpack_har, windows=False)),
    ),
}
"""The files of each data set that `fedrax.data.download` knows."""
