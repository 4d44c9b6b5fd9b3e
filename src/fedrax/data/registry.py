"""Data sets by name: ``load("mnist", data_dir)``, ``load("synthetic", alpha=0.5, beta=0.5)``.

Libraries that take long to import are imported by the readers that need them.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.data.dataset import (
    Dataset,
    Samples,
    as_samples,
    check_finite,
    count_classes,
    decode_bytes,
    numpy_generator,
    train_test_split,
)
from fedrax.data.federation import check_client_ids
from fedrax.data.readers.array_files import (
    data_directory,
    find_file,
    given_directory,
    npz_names,
    read_idx,
    read_npz,
)
from fedrax.data.readers.assembly import encode_labels, make_dataset, split_rows, take_rows, to_float32
from fedrax.data.readers.huggingface import load_huggingface
from fedrax.data.readers.image_folders import load_image_folder
from fedrax.data.readers.images import channel_moments, read_cifar_binary, read_image_table
from fedrax.data.readers.leaf import load_leaf
from fedrax.data.readers.tabular import load_csv, scale_notes
from fedrax.data.readers.text_data import SENT140, SNLI, load_sent140, load_snli
from fedrax.data.readers.tff_database import CHARACTERS, load_femnist, load_shakespeare
from fedrax.data.synthetic import load_matrix_sensing, load_quartic_pair, load_synthetic
from fedrax.errors import FedraxError, unknown
from fedrax.files import MAX_FILE, cache_directory, open_regular_file
from fedrax.inputs import Inputs, arrays_of, from_flat

if TYPE_CHECKING:
    from fedrax.data.remote_files import RemoteFile

ACTIVITIES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
"""UCI HAR's classes, for files that do not name them."""
EEG_CLASSES = ("seizure", "tumor region", "healthy region", "eyes closed", "eyes open")
"""ESR's classes, which UCI numbers from 1."""


@dataclass(frozen=True)
class DatasetEntry:
    """An entry of ``DATASETS``: a data set that `load` finds by name.

    Example:
        >>> fedrax.data.DATASETS["mnist"].files[0]
        'mnist/train-images-idx3-ubyte'
    """

    name: str
    """Name for `load`."""
    description: str
    """One line about the data."""
    read: Callable[..., Dataset]
    """The reader. It takes the data directory if there are ``files``, and options by name."""
    files: tuple[str, ...] = ()
    """Required paths relative to the data directory, with options in braces; empty if none are needed."""

    @property
    def needs_files(self) -> bool:
        """Whether a data directory is needed."""
        return bool(self.files)

    @property
    def sources(self) -> "tuple[RemoteFile, ...]":
        """What `download` gets, which may replace ``files``; empty if the files are not published for download."""
        from fedrax.data.sources import SOURCES  # whose libraries for downloads take long to import

        return SOURCES.get(self.name, ())


@checked_arguments
def load(name: str, /, data_dir: str | Path | None = None, **options: object) -> Dataset:
    """Load a data set by name.

    Args:
        name: A key of ``fedrax.data.DATASETS``.
        data_dir: Directory of the data sets' files; by default that of the environment variable FEDRAX_DATA.
        **options: Options of the data set's reader.

    Returns:
        The data set.

    Raises:
        FedraxError: The name or an option is unknown, or a file is missing or malformed.

    Example:
        >>> fedrax.data.load("digits", test_fraction=0.5).num_classes
        10
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    entry = DATASETS[name]
    accepted = dict(inspect.signature(entry.read).parameters)
    accepted.pop("data_dir", None)
    for option in options:
        if option not in accepted:
            raise unknown(f"option of data set {name!r}:", option, accepted)
    missing = [k for k, p in accepted.items() if p.default is p.empty and k not in options]
    if missing:
        raise FedraxError(f"data set {name!r} needs the option {missing[0]!r}.")
    read = checked_arguments(entry.read)
    if not entry.needs_files:
        return read(**options)
    chosen = {option: parameter.default for option, parameter in accepted.items()} | options
    published = [file for source in entry.sources for file in source.files]
    files = [file.format(**chosen) for file in entry.files]
    return read(data_directory(data_dir, name, files, published), **options)


@checked_arguments
def download(
    name: str, data_dir: str | Path | None = None, mirror: str | None = None, report: Callable[[str], None] = print
) -> tuple[Path, ...]:
    """Download the published files of a data set into the data directory.

    Files that exist are not downloaded again. A download that is interrupted is resumed by the next call. Each file is
    verified by a published checksum before it is unpacked.

    Args:
        name: A key of ``fedrax.data.DATASETS`` whose entry has ``sources``.
        data_dir: Directory of the data sets' files; by default that of the environment variable FEDRAX_DATA.
        mirror: URL of a folder with files of the same names, instead of the publisher's server.
        report: Receives lines about the progress.

    Returns:
        The files.

    Raises:
        FedraxError: There is no such data set or no data directory, the server cannot be reached, or a file has another
            checksum than the published one.

    Example:
        >>> fedrax.data.download("mnist", data_dir="data")  # doctest: +SKIP
    """
    known = {entry.name: entry for entry in DATASETS.values() if entry.sources}
    if name not in known:
        raise unknown("data set to download", name, known)
    folder = given_directory(data_dir)
    if folder is None:
        raise FedraxError("a download needs a data directory: set --data-dir or FEDRAX_DATA.")
    for source in known[name].sources:
        source.obtain(folder, mirror, report)
    return tuple(folder / file for source in known[name].sources for file in source.files)


def load_digits(test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """The 1,797 handwritten digits bundled with scikit-learn: float32 [n, 8, 8, 1] in [0, 1], 10 classes.

    Pixels are the original 0 .. 16 divided by 16, which is exact. The test part is stratified by class.

    Args:
        test_fraction: Share of the rows of each class that is held out as test data.
        seed: Seed of the choice of the test rows.
    """
    pixels, labels = _bundled_digits()
    x = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    train, test = train_test_split(labels, test_fraction, numpy_generator(seed, "test split"))
    samples = as_samples(x, labels)
    return Dataset("digits", take_rows(samples, train), take_rows(samples, test), 10, class_names=tuple("0123456789"))


def _bundled_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels [n, 64] and labels [n] of scikit-learn's digits.

    They are read from scikit-learn's file: importing the library takes about a second, and a client of a deployed
    federation would do it for every message.
    """
    found = find_spec("sklearn")
    for place in (found and found.submodule_search_locations) or ():
        if (file := Path(place) / "datasets" / "data" / "digits.csv.gz").is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(int)
    from sklearn.datasets import load_digits as bundled  # a version that stores them elsewhere

    x, y = bundled(return_X_y=True)
    return np.asarray(x), np.asarray(y)


def load_mnist(data_dir: Path) -> Dataset:
    """MNIST (LeCun et al.): uint8 [60000, 28, 28, 1] and [10000, 28, 28, 1], 10 classes, from mnist/."""
    return load_idx(data_dir / "mnist", mean=(0.1307,), std=(0.3081,), class_names=tuple("0123456789"))


def load_fashion_mnist(data_dir: Path) -> Dataset:
    """Fashion-MNIST (Xiao et al. 2017), MNIST's shapes and file names, from fashion_mnist/."""
    names = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
    folder = data_dir / "fashion_mnist"
    return load_idx(folder, mean=(0.2860,), std=(0.3530,), class_names=tuple(names.split(",")))


def load_idx(
    folder: Path, mean: tuple[float, ...] = (), std: tuple[float, ...] = (), class_names: tuple[str, ...] = ()
) -> Dataset:
    """Grayscale images in the four IDX files of MNIST, gzipped or not: x is uint8 [n, height, width, 1]."""
    train, test = (as_samples(*_read_idx_pair(folder, part)) for part in ("train", "t10k"))
    classes = len(class_names) or int(train.y.max(initial=0)) + 1
    return Dataset(folder.name, train, test, classes, mean, std, class_names=class_names, pixels=True)


def load_emnist(
    data_dir: Path, split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
) -> Dataset:
    """EMNIST (Cohen et al. 2017), MNIST's shapes, from emnist/: 47 balanced classes, or another of NIST's splits.

    The images are upright; NIST stores them transposed. The labels of "letters" start at 0.

    Args:
        data_dir: Directory of data files.
        split: NIST's split of the data, which determines the classes.
    """
    if split not in EMNIST_CLASSES:
        raise unknown("split of emnist", split, EMNIST_CLASSES)
    names = EMNIST_CLASSES[split]
    parts = []
    for part in ("train", "test"):
        x, y = _read_idx_pair(data_dir / "emnist", f"emnist-{split}-{part}")
        parts.append(as_samples(x.transpose(0, 2, 1, 3).copy(), y.astype(np.int32) - (split == "letters")))
    mean, std = channel_moments(parts[0].x, np.arange(len(parts[0].x)))
    train, test = parts
    return Dataset(f"emnist_{split}", train, test, len(names), mean, std, class_names=tuple(names), pixels=True)


EMNIST_CLASSES = {
    "balanced": CHARACTERS[:36] + "abdefghnqrt",
    "byclass": CHARACTERS,
    "bymerge": CHARACTERS[:36] + "abdefghnqrt",
    "letters": CHARACTERS[10:36],
    "digits": CHARACTERS[:10],
    "mnist": CHARACTERS[:10],
}
"""The classes of EMNIST's splits; the merged ones have one class for letters that look alike in both cases."""


def load_cifar10(data_dir: Path) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009): uint8 [50000, 32, 32, 3] and [10000, 32, 32, 3], 10 classes; cifar10/."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    folder = data_dir / "cifar10"
    if (folder / "batches.meta.txt").is_file():
        train = [f"data_batch_{i}.bin" for i in range(1, 6)]
        return _load_cifar_binary(folder, train, "test_batch.bin", "batches.meta.txt", 1, 10, mean, std)
    return _load_images(folder, "test", "label", (32, 32), 10, mean, std)


def load_cifar100(data_dir: Path) -> Dataset:
    """CIFAR-100 (Krizhevsky 2009), CIFAR-10's shapes, the 100 fine labels, from cifar100/."""
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    folder = data_dir / "cifar100"
    if (folder / "fine_label_names.txt").is_file():
        return _load_cifar_binary(folder, ["train.bin"], "test.bin", "fine_label_names.txt", 2, 100, mean, std)
    return _load_images(folder, "test", "fine_label", (32, 32), 100, mean, std)


def load_tiny_imagenet(data_dir: Path) -> Dataset:
    """Tiny-ImageNet: uint8 [n, 64, 64, 3], 200 classes, the validation part as test, from tiny_imagenet/."""
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    return _load_images(data_dir / "tiny_imagenet", "val", "label", (64, 64), 200, mean, std)


def load_upcycled_synthetic(data_dir: Path, variant: str = "0.5_0.5") -> Dataset:
    """The synthetic data of Upcycled-FL (2024), section 7, as published: ``variant`` "iid", "0_0", "0.5_0.5" or "1_1".

    x is float32 [n, 20], with 2 classes and 30 natural clients.

    Args:
        data_dir: Directory of data files.
        variant: Alpha and beta of the published data, "iid", "0_0", "0.5_0.5" or "1_1".
    """
    variants = ("iid", "0_0", "0.5_0.5", "1_1")
    if variant not in variants:
        raise unknown("variant of upcycled_synthetic", variant, variants)
    name = f"synthetic_{variant}"
    return load_npz(data_dir / "upcycled_synthetic" / f"{name}.npz", name=f"upcycled_{name}")


def load_esr(
    data_dir: Path,
    classes: Literal[2, 5] = 2,
    scaling: Literal["standard", "range", "unit", "none"] = "standard",
    seed: int = 0,
) -> Dataset:
    """UCI's Epileptic Seizure Recognition (Andrzejak et al. 2001): seconds of EEG, float32 [n, 178], from esr/esr.npz.

    Two ``classes`` are seizure (label 1, a fifth of the rows) or not, five are UCI's. UCI has no test part: ``seed``
    draws a fifth of the rows of each of its classes, 2,300 of 11,500, so that most recordings have rows in both parts.
    Natural clients are the 500 recordings. The 178 numbers are samples of one signal, so that all are scaled alike:
    "standard" subtracts the mean of the training rows and divides by their standard deviation, "range" maps their
    smallest and largest number to -1 and 1, "unit" to 0 and 1.

    Args:
        data_dir: Directory of data files.
        classes: 2, seizure or not, or UCI's 5 classes.
        scaling: How the numbers are scaled by those of the training rows.
        seed: Seed of the choice of the test rows.
    """
    path = data_dir / "esr" / "esr.npz"
    arrays = read_npz(path, ("X", "y"), ("recording",))
    signal, label, owner = arrays["X"], arrays["y"], arrays.get("recording")
    whole = label.dtype.kind in "iu" and label.ndim == 1 and len(label) > 0
    if signal.ndim != 2 or signal.dtype.kind not in "iuf" or not whole or len(label) != len(signal):
        raise FedraxError(f"{path}: X must be numbers [n, 178] and y integers 1 .. 5 [n].")
    if label.min() < 1 or label.max() > len(EEG_CLASSES):
        raise FedraxError(f"{path}: y must lie in 1 .. 5, found {label.min()} .. {label.max()}.")
    clients = None if owner is None else check_client_ids(f"{path}: recording", owner, len(label))
    if clients is not None:
        clients = np.unique(clients, return_inverse=True)[1]
    train, test = split_rows(label.astype(np.int32), None, 0.2, seed)
    x = _scaled(to_float32(signal, "features"), train, scaling)
    if classes == 2:
        y, names = (label == 1).astype(np.int32), ("no seizure", "seizure")
    else:
        y, names = label.astype(np.int32) - 1, EEG_CLASSES
    return make_dataset("esr", as_samples(x, y), clients, train, test, names)


def _scaled(x: np.ndarray, train: np.ndarray, scaling: str) -> np.ndarray:
    """Features [n, d] shifted and divided by one number each, which the rows ``train`` give."""
    if scaling == "none":
        return x
    rows = x[train]
    if scaling == "standard":
        shift, width = rows.mean(dtype=float), rows.std(dtype=float)
    else:
        low, high = float(rows.min()), float(rows.max())
        shift, width = (low, high - low) if scaling == "unit" else ((low + high) / 2, (high - low) / 2)
    return ((x - shift) / (width or 1)).astype(np.float32)


def load_har(data_dir: Path) -> Dataset:
    """UCI HAR (Anguita et al. 2013), raw inertial windows: float32 [n, 128, 9] (time, channel), 6 activities.

    Natural clients are the subjects; the official test subjects are all different from the training ones.
    """
    return _load_har(data_dir / "har" / "har_inertial.npz", "har_inertial", windows=True)


def load_har_features(data_dir: Path) -> Dataset:
    """561 features of UCI HAR's windows: float32 [n, 561] in [-1, 1]; clients as in har_inertial.

    Read from har/har_features561.npz, UCI's own features, or else from har/har_features561_recomputed.npz.
    """
    paths = [data_dir / "har" / f"har_features561{name}.npz" for name in ("", "_recomputed")]
    return _load_har(paths[0] if paths[0].is_file() else paths[1], "har_features", windows=False)


def _load_har(path: Path, name: str, windows: bool) -> Dataset:
    """UCI HAR from an NPZ file of windows or features."""
    keys = ("x_train", "y_train", "subject_train", "x_test", "y_test", "subject_test")
    arrays = read_npz(path, keys, ("activities",))
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.ndim != (3 if windows else 2) or y.dtype.kind not in "iu":
            shape = "[n, 9, 128]" if windows else "[n, 561]"
            raise FedraxError(f"{path}: x_{part} must be {shape} and y_{part} integers 1 .. 6.")
        if windows:
            arrays[f"x_{part}"] = np.ascontiguousarray(x.transpose(0, 2, 1))
        arrays[f"y_{part}"] = y.astype(np.int64) - 1  # UCI counts from 1
    names = tuple(str(name) for name in arrays.pop("activities", ACTIVITIES))
    return _from_npz(arrays, name, path, client="subject", class_names=names)


def load_npz(
    path: str | Path,
    name: str | None = None,
    pixels: bool | str = False,
    padding: int | None = None,
    num_classes: int | None = None,
) -> Dataset:
    """Plain arrays x_train, y_train, x_test, y_test and optionally client_train, client_test of an NPZ file.

    Several inputs of a sample are arrays x_NAME_train and x_NAME_test, or x_0_train, x_1_train, ... for a tuple.

    Integer labels are classes 0, 1, ..., of which there are ``num_classes`` or by default as many as the largest label
    needs; strings are classes in sorted order, and floats are regression targets. Clients are integers or strings;
    without ``client_test`` test rows belong to no client. With ``pixels``, x holds image bytes; of several inputs
    ``pixels`` names the one that does. ``padding`` is the label of y [n, ...] that loss and metrics ignore.

    Args:
        path: The NPZ file.
        name: Name of the data set; by default that of the file.
        pixels: Whether x holds image bytes, or the name of the input that does.
        padding: Label that loss and metrics ignore.
        num_classes: Number of classes; by default as many as the largest label needs.
    """
    path = Path(path)
    inputs = ["x_train"]
    if "x_train" not in (names := npz_names(path)):
        inputs = [name for name in names if name.startswith("x_") and name.endswith("_train")] or inputs
    keys = [name for key in inputs for name in (key, f"{key.removesuffix('train')}test")]
    arrays = read_npz(path, (*keys, "y_train", "y_test"), ("client_train", "client_test"))
    return _from_npz(arrays, name or path.stem, path, pixels=pixels, padding=padding, num_classes=num_classes)


def load_openml(dataset: str, version: int = 1, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """A data set of openml.org by its name, with features float32 [n, features]; downloads are cached.

    A nominal target gives classes, a numeric one a regression. The test part is stratified by class.

    Args:
        dataset: Name of the data set at openml.org.
        version: Version of the data set.
        test_fraction: Share of the rows of each class that is held out as test data.
        seed: Seed of the choice of the test rows.
    """
    from sklearn.datasets import fetch_openml

    if not re.fullmatch(r"[\w.()+,=-]+", dataset):  # it is part of a URL and of a file name
        raise FedraxError(f"{dataset!r} is not a name of openml.org: use letters, digits and ._-+,=().")
    cache = cache_directory() / "openml"
    try:
        fetched: Any = fetch_openml(
            dataset,
            version=version,
            data_home=str(cache),
            as_frame=False,
            parser="liac-arff",
            n_retries=1,
        )
    except Exception as error:  # malformed responses can raise anything
        raise FedraxError(
            f"OpenML data set {dataset!r}, version {version}, could not be fetched ({error}): "
            f"its first use needs the network, later ones the cache {cache}."
        ) from error
    x, y, nominal = fetched.data, fetched.target, set(fetched.categories or ()) & set(fetched.feature_names)
    if nominal:  # category codes are no numeric features
        raise FedraxError(
            f"OpenML data set {dataset!r} has nominal features ({', '.join(sorted(map(str, nominal)))}): read it from a"
            " csv file, which one-hot encodes categories."
        )
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "buif" or not np.isfinite(x).all():
        raise FedraxError(f"OpenML data set {dataset!r} has missing, sparse or non-numeric features.")
    y, names = encode_labels(np.asarray(y))
    train, test = split_rows(y, None, test_fraction, seed)
    notes = tuple(scale_notes(x[train]))
    return make_dataset(dataset, as_samples(to_float32(x, "features"), y), None, train, test, names, notes=notes)


def _read_idx_pair(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, height, width, 1] and labels of a part, from two IDX files, gzipped or not."""
    images, labels = (find_file(folder / name) for name in (_idx_images(part), _idx_labels(part)))
    if images is None or labels is None:
        raise FedraxError(f"{folder} needs {_idx_images(part)} and {_idx_labels(part)}, gzipped or not.")
    x, y = read_idx(images, ndim=3), read_idx(labels, ndim=1)
    if len(x) != len(y):
        raise FedraxError(f"{images} holds {len(x)} images, but {labels} holds {len(y)} labels.")
    return x[..., None], y


def _load_cifar_binary(
    folder: Path,
    train: Sequence[str],
    test: str,
    names: str,
    label_bytes: int,
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    """CIFAR from its binary files and the file of the names of its classes."""
    with open_regular_file(folder / names, MAX_FILE) as file:
        class_names = tuple(file.read().decode("utf-8", "backslashreplace").split())
    parts = [Samples(*read_cifar_binary([folder / file for file in files], label_bytes)) for files in (train, [test])]
    return Dataset(folder.name, parts[0], parts[1], classes, mean, std, class_names=class_names, pixels=True)


_IDX_KINDS = ("images-idx3", "labels-idx1")
"""Kinds of MNIST's files in their names."""


def _idx_images(part: str) -> str:
    """MNIST's file name of images."""
    return f"{part}-images-idx3-ubyte"


def _idx_labels(part: str) -> str:
    """MNIST's file name of labels."""
    return f"{part}-labels-idx1-ubyte"


def _load_images(
    folder: Path,
    test: str,
    label: str,
    size: tuple[int, int],
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    x, y, names = read_image_table(folder / "train.parquet", label, size)
    x_test, y_test, _ = read_image_table(folder / f"{test}.parquet", label, size)
    names = names if len(names) == classes else ()
    train, test_samples = as_samples(x, y), as_samples(x_test, y_test)
    return Dataset(folder.name, train, test_samples, classes, mean, std, class_names=names, pixels=True)


def _from_npz(
    arrays: dict[str, np.ndarray],
    name: str,
    path: Path,
    client: str = "client",
    class_names: tuple[str, ...] = (),
    pixels: bool | str = False,
    padding: int | None = None,
    num_classes: int | None = None,
) -> Dataset:
    labels = [decode_bytes(arrays[f"y_{part}"]) for part in _PARTS]
    if all(y.ndim == 1 and y.dtype.kind == "U" for y in labels):
        found, y = np.unique(np.concatenate(labels), return_inverse=True)
        class_names, labels = tuple(map(str, found)), [y[: len(labels[0])], y[len(labels[0]) :]]
    train, test = (as_samples(_inputs_of(arrays, part), y, padding) for part, y in zip(_PARTS, labels, strict=True))
    for part, samples in (("train", train), ("test", test)):
        check_finite(samples, str(path), names=(f"x_{part}", f"y_{part}"))
    if not len(train.y):
        raise FedraxError(f"{path} holds no training samples.")
    classes = num_classes  # of integers: Dataset rejects floats with a number of classes
    if train.y.dtype.kind == "i" and classes is None:
        classes = len(class_names) or count_classes([train.y, test.y], padding, str(path))
    keys = [key for key in (f"{client}_train", f"{client}_test") if key in arrays]
    if keys == [f"{client}_test"]:
        raise FedraxError(f"{path} holds {client}_test without {client}_train: give both, only the latter, or neither.")
    ids = [
        check_client_ids(f"{path}: {key}", arrays[key], len(part.y))
        for key, part in zip(keys, (train, test), strict=False)
    ]
    codes: list[np.ndarray | None] = [None, None]
    names: tuple[str, ...] = ()
    if ids:
        found, inverse = np.unique(np.concatenate(ids), return_inverse=True)
        names = tuple(str(name) for name in found) if found.dtype.kind == "U" else ()
        codes = [inverse[: len(ids[0])], inverse[len(ids[0]) :] if len(ids) == 2 else None]
    return Dataset(
        name,
        train,
        test,
        classes,
        train_clients=codes[0],
        test_clients=codes[1],
        class_names=class_names,
        pixels=pixels,
        padding=padding,
        client_names=names,
        notes=_npz_notes(train, test, padding, class_names),
    )


_PARTS = ("train", "test")


def _inputs_of(arrays: dict[str, np.ndarray], part: str) -> Inputs:
    """The inputs of a part: x_train, or x_NAME_train."""
    found = {key.removesuffix(f"_{part}"): a for key, a in arrays.items() if key.endswith(f"_{part}")}
    return from_flat({key: a for key, a in found.items() if key == "x" or key.startswith("x_")})


def _npz_notes(train: Samples, test: Samples, padding: int | None, class_names: tuple[str, ...]) -> tuple[str, ...]:
    """Warnings for arrays that may be misinterpreted: features of unlike scales, labels not from 0."""
    x, y = train
    notes = [note for a in arrays_of(x) if a.ndim == 2 and a.dtype.kind == "f" for note in scale_notes(a)]
    counted = y.dtype.kind == "i" and padding is None and not class_names  # the smallest label may be padding
    lowest = int(min(part.y.min() for part in (train, test) if part.y.size)) if counted else 0
    if lowest:
        notes.append(f"warning: labels must start at 0, and the smallest label is {lowest}: subtract {lowest}")
    return tuple(notes)


def _idx_files(folder: str) -> tuple[str, ...]:
    """The four IDX files of MNIST."""
    return tuple(f"{folder}/{name(part)}" for part in ("train", "t10k") for name in (_idx_images, _idx_labels))


DATASETS: dict[str, DatasetEntry] = {
    entry.name: entry
    for entry in (
        DatasetEntry("digits", "1,797 8x8 digits bundled with scikit-learn; needs no files", load_digits),
        DatasetEntry("synthetic", "Synthetic(alpha, beta) of FedProx, generated", load_synthetic),
        DatasetEntry("matrix_sensing", "inner products with a low-rank matrix, generated", load_matrix_sensing),
        DatasetEntry("quartic_pair", "two polynomials of degree four with noise, generated", load_quartic_pair),
        DatasetEntry("mnist", "70,000 28x28 grayscale digits", load_mnist, _idx_files("mnist")),
        DatasetEntry(
            "fashion_mnist",
            "70,000 28x28 images of garments",
            load_fashion_mnist,
            _idx_files("fashion_mnist"),
        ),
        DatasetEntry(
            "emnist",
            "28x28 grayscale digits and letters, without their writers",
            load_emnist,
            tuple(f"emnist/emnist-{{split}}-{part}-{kind}-ubyte" for part in ("train", "test") for kind in _IDX_KINDS),
        ),
        DatasetEntry(
            "femnist",
            "28x28 grayscale digits and letters of 3,400 writers (federated EMNIST)",
            load_femnist,
            ("femnist/emnist_all.sqlite",),
        ),
        DatasetEntry(
            "shakespeare",
            "the next character in lines of 715 roles",
            load_shakespeare,
            ("shakespeare/shakespeare.sqlite",),
        ),
        DatasetEntry(
            "cifar10",
            "60,000 32x32 color images, 10 classes",
            load_cifar10,
            ("cifar10/train.parquet", "cifar10/test.parquet"),
        ),
        DatasetEntry(
            "cifar100",
            "60,000 32x32 color images, 100 classes",
            load_cifar100,
            ("cifar100/train.parquet", "cifar100/test.parquet"),
        ),
        DatasetEntry(
            "tiny_imagenet",
            "64x64 color images, 200 classes",
            load_tiny_imagenet,
            ("tiny_imagenet/train.parquet", "tiny_imagenet/val.parquet"),
        ),
        DatasetEntry(
            "upcycled_synthetic",
            "the published synthetic data of Upcycled-FL, 30 clients",
            load_upcycled_synthetic,
            ("upcycled_synthetic/synthetic_{variant}.npz",),
        ),
        DatasetEntry(
            "esr",
            "11,500 seconds of EEG, seizure or not; recordings as clients",
            load_esr,
            ("esr/esr.npz",),
        ),
        DatasetEntry("snli", "SNLI's sentence pairs as words, 3 classes", load_snli, SNLI),
        DatasetEntry("sent140", "tweets as words, negative or positive; users as clients", load_sent140, SENT140),
        DatasetEntry(
            "har_inertial",
            "UCI human activity windows, 30 subjects",
            load_har,
            ("har/har_inertial.npz",),
        ),
        DatasetEntry(
            "har_features",
            "561 features of those windows",
            load_har_features,
            ("har/har_features561_recomputed.npz",),
        ),
        DatasetEntry("npz", "your arrays x_train, y_train, client_train, ... in an NPZ file", load_npz),
        DatasetEntry("csv", "your table: numbers and text, a label column and optionally a client column", load_csv),
        DatasetEntry("leaf", "LEAF's JSON files: users with vectors or text (FEMNIST, Shakespeare, ...)", load_leaf),
        DatasetEntry("image_folder", "your PNG and JPEG files, a folder for each class", load_image_folder),
        DatasetEntry("huggingface", "a data set of Hugging Face's datasets on your disk", load_huggingface),
        DatasetEntry("openml", "any numeric data set of openml.org (needs the network once)", load_openml),
    )
}
