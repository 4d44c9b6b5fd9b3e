"""Downloads of published data sets from a local server, with small files in the published formats."""

from __future__ import annotations

import dataclasses
import fcntl
import gzip
import hashlib
import io
import json
import lzma
import os
import sqlite3
import struct
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedrax.cli import main
from fedrax.data import download, load
from fedrax.data.readers.tff_database import parse_example
from fedrax.data.remote_files import RemoteFile, unpack_tar, unpack_zip
from fedrax.data.sources import SOURCES
from fedrax.errors import FedraxError

DATA_DIR = Path(os.environ.get("FEDRAX_DATA", "/nowhere"))


class Server:
    """An HTTP server for ``files``, with injected faults."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        """Name and Range of each request."""
        self.cuts: list[int] = []
        """Bytes after which the next connections are closed."""
        self.has_ranges = True
        self.status = 200

        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/data"
        threading.Thread(target=partial(self._server.serve_forever, poll_interval=0.01), daemon=True).start()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        name, requested_range = handler.path.rpartition("/")[2], handler.headers["Range"]
        self.requests.append((name, requested_range))
        if self.status != 200 or name not in self.files:
            handler.send_error(self.status if self.status != 200 else 404)
            return
        content, start = self.files[name], 0
        if requested_range and self.has_ranges:
            start = int(requested_range.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                handler.send_error(416)
                return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        handler.wfile.write(content[start:][: self.cuts.pop(0) if self.cuts else None])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("FEDRAX_DATA", raising=False)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    made = Server()
    yield made
    made.close()


# The published formats


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def images(rows: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (rows, *shape), np.uint8)


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def cifar(rows: int, labels: int) -> bytes:
    """Records whose last label byte is the row number."""
    head = np.stack([np.full(rows, 7, np.uint8)] * (labels - 1) + [np.arange(rows, dtype=np.uint8)], axis=1)
    return np.concatenate([head, images(rows, 3072)], axis=1).tobytes()


def field(number: int, content: bytes) -> bytes:
    """A protocol buffer field of a string or a message."""
    size, head = len(content), [number << 3 | 2]
    while size > 127:
        head, size = [*head, size & 127 | 128], size >> 7
    return bytes([*head, size]) + content


def example(**features: bytes) -> bytes:
    """A serialized ``tf.train.Example``."""
    entries = [field(1, field(1, name.encode()) + field(2, feature)) for name, feature in features.items()]
    return field(1, b"".join(entries))


def floats(values: np.ndarray) -> bytes:
    return field(2, field(1, values.astype("<f4").tobytes()))


def integer(value: int) -> bytes:
    return field(3, field(1, bytes([value])))


def text(value: str) -> bytes:
    return field(1, field(1, value.encode()))


def database(rows: list[tuple[str, str, bytes]], folder: Path) -> bytes:
    """A compressed database of TensorFlow Federated from rows (split, client, example)."""
    path = folder / "made.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB)"
        )
        connection.execute("CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id)")
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    connection.close()
    content = lzma.compress(path.read_bytes(), format=lzma.FORMAT_ALONE)
    path.unlink()
    return content


def har(rows: int) -> bytes:
    """The nested ZIP file of UCI HAR."""
    signals = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
    members = {"UCI HAR Dataset/activity_labels.txt": b"1 WALKING\n2 WALKING_UPSTAIRS\n3 A\n4 B\n5 C\n6 D\n"}

    def table(first: int, columns: int) -> bytes:
        lines = (np.arange(rows)[:, None] * 1000 + first + np.arange(columns)) / 8
        return "\n".join(" ".join(f"{value: .7e}" for value in line) for line in lines).encode()

    for part in ("train", "test"):
        for i, signal in enumerate(signals):
            members[f"UCI HAR Dataset/{part}/Inertial Signals/{signal}_{part}.txt"] = table(i, 128)
        members[f"UCI HAR Dataset/{part}/X_{part}.txt"] = table(5, 561)
        members[f"UCI HAR Dataset/{part}/y_{part}.txt"] = "\n".join(str(1 + i % 6) for i in range(rows)).encode()
        members[f"UCI HAR Dataset/{part}/subject_{part}.txt"] = "\n".join(["3"] * rows).encode()
    return zip_of({"UCI HAR Dataset.names": b"", "UCI HAR Dataset.zip": zip_of(members)})


def publish(server: Server, name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Serve small files of a data set, with their checksums instead of the published ones."""
    folder.mkdir(exist_ok=True)
    contents: list[bytes]
    if name in ("mnist", "fashion_mnist"):
        contents = [gzip.compress(idx(a)) for n in (12, 10) for a in (images(n, 28, 28), np.arange(n) % 10)]
    elif name == "emnist":
        arrays = {"images-idx3": images(47, 28, 28), "labels-idx1": np.arange(47)}
        names = [file.removeprefix("emnist/") for file in SOURCES["emnist"][0].files]
        contents = [
            zip_of({f"gzip/{n}": gzip.compress(idx(arrays[n.split("-")[3] + "-" + n.split("-")[4]])) for n in names})
        ]
    elif name == "cifar10":
        members = {f"cifar-10-batches-bin/data_batch_{i}.bin": cifar(10, 1) for i in range(1, 6)}
        classes = b"airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n"
        members |= {"cifar-10-batches-bin/test_batch.bin": cifar(4, 1), "cifar-10-batches-bin/readme.html": b"x"}
        contents = [tar_of(members | {"cifar-10-batches-bin/batches.meta.txt": classes})]
    elif name == "cifar100":
        members = {"cifar-100-binary/train.bin": cifar(100, 2), "cifar-100-binary/test.bin": cifar(5, 2)}
        classes = "\n".join(f"class_{i}" for i in range(100)).encode()
        contents = [tar_of(members | {"cifar-100-binary/fine_label_names.txt": classes})]
    elif name == "femnist":
        pixels = np.arange(784) % 256 / 255
        rows = [
            (f"{prefix}_{part}", f"f{i % 3}_00", example(label=integer(i), pixels=floats(pixels)))
            for prefix, classes in (("all", 62), ("digits_only", 10))
            for part in ("train", "test")
            for i in range(classes)
        ]
        contents = [database(rows, folder)]
    elif name == "shakespeare":
        plays = {"train": [("LEAR_KING", "abcab"), ("LEAR_FOOL", "bb")], "test": [("LEAR_KING", "az")]}
        rows = [(part, who, example(snippets=text(printed))) for part, lines in plays.items() for who, printed in lines]
        contents = [database(rows, folder)]
    else:
        contents = [har(7)]
    served = []
    for source, content in zip(SOURCES[name], contents, strict=True):
        checked = gzip.decompress(content) if source.of_content else content
        algorithm = source.checksum.partition(":")[0]
        served.append(
            dataclasses.replace(source, checksum=f"{algorithm}:{hashlib.new(algorithm, checked).hexdigest()}")
        )
        server.files[source.url.rpartition("/")[2]] = content
    monkeypatch.setitem(SOURCES, name, tuple(served))


@pytest.mark.parametrize("name", SOURCES)
def test_published_formats_are_downloaded_once_and_read(
    server: Server, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(server, name, monkeypatch, tmp_path / "made")
    with pytest.raises(FedraxError, match=f"`fedrax download {name}` gets the published files"):
        load(name, tmp_path / "data")
    files = download(name, tmp_path / "data", server.url, report=print)
    assert {path for path in (tmp_path / "data").rglob("*") if path.is_file()} == set(files)  # no other files remain
    count = len(server.requests)
    assert download(name, tmp_path / "data", server.url) == files and len(server.requests) == count == len(server.files)
    CHECKS[name](load(name, tmp_path / "data"), tmp_path / "data")


def check_mnist(dataset, folder) -> None:
    assert np.array_equal(dataset.train.x[..., 0], images(12, 28, 28)) and dataset.test.y.tolist() == list(range(10))


def check_emnist(dataset, folder) -> None:
    assert np.array_equal(dataset.train.x[3, :, :, 0], images(47, 28, 28)[3].T) and dataset.num_classes == 47
    assert dataset.class_names[10] == "A" and dataset.class_names[36:39] == ("a", "b", "d")
    with pytest.raises(FedraxError, match="did you mean 'byclass'"):
        load("emnist", folder, split="by_class")


def check_cifar(dataset, folder, labels: int, classes: int) -> None:
    record = images(10 if classes == 10 else 100, 3072)[2].reshape(3, 32, 32)
    assert np.array_equal(dataset.train.x[2], record.transpose(1, 2, 0)) and dataset.train.x.dtype == np.uint8
    assert dataset.num_classes == classes and dataset.train.y[2] == 2 and len(dataset.test.y) in (4, 5)
    assert dataset.class_names[1] == ("automobile" if classes == 10 else "class_1")


def check_femnist(dataset, folder) -> None:
    assert dataset.num_classes == 62 and dataset.client_names == ("f0_00", "f1_00", "f2_00")
    assert np.array_equal(dataset.train.x[0].ravel(), np.arange(784) % 256)  # floats are bytes divided by 255
    assert (dataset.train.y % 3 == dataset.train_clients).all() and sorted(dataset.test.y) == list(range(62))
    assert load("femnist", folder, digits_only=True).num_classes == 10


def check_shakespeare(dataset, folder) -> None:
    """Characters are a, b, c (2, 3, 4); z occurs in the test part only."""
    small = load("shakespeare", folder, length=3)
    assert small.client_names == ("LEAR_FOOL", "LEAR_KING") and small.vocabulary == ("a", "b", "c")
    assert small.train.x.tolist() == [[3, 0, 0], [2, 0, 0], [2, 3, 0], [2, 3, 4], [3, 4, 2]]
    assert [small.class_names[y] for y in small.train.y] == ["b", "b", "c", "a", "b"]
    assert small.test.x.tolist() == [[2, 0, 0]] and small.class_names[small.test.y[0]] == "z"
    assert dataset.train.x.shape == (5, 80) and len(load("shakespeare", folder, stride=2).train.y) == 3


def check_har(dataset, folder) -> None:
    assert dataset.train.x.shape == (7, 128, 9) and dataset.train.y.tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert dataset.train.x[2, 5, 3] == (2000 + 5 + 3) / 8 and dataset.class_names[:2] == ("WALKING", "WALKING_UPSTAIRS")


def check_har_features(dataset, folder) -> None:
    assert dataset.train.x.shape == (7, 561) and dataset.train.x[1, 4] == (1000 + 5 + 4) / 8


CHECKS: dict[str, Callable] = {
    "mnist": check_mnist,
    "fashion_mnist": check_mnist,
    "emnist": check_emnist,
    "cifar10": partial(check_cifar, labels=1, classes=10),
    "cifar100": partial(check_cifar, labels=2, classes=100),
    "femnist": check_femnist,
    "shakespeare": check_shakespeare,
    "har_inertial": check_har,
    "har_features": check_har_features,
}


@pytest.mark.skipif(not (DATA_DIR / "mnist").is_dir(), reason="FEDRAX_DATA has no MNIST")
def test_checksums_of_mnist_do_not_depend_on_the_compression(server: Server, tmp_path: Path) -> None:
    for source in SOURCES["mnist"]:
        name = source.url.rpartition("/")[2]
        content = (DATA_DIR / "mnist" / name).read_bytes()
        server.files[name] = gzip.compress(gzip.decompress(content), 1)
    download("mnist", tmp_path, server.url)
    assert load("mnist", tmp_path).train.y[:3].tolist() == [5, 0, 4]


# Errors


CONTENT = np.random.default_rng(0).bytes(5000)
FILE = RemoteFile("https://example.org/a.bin", f"sha256:{hashlib.sha256(CONTENT).hexdigest()}", ("set/a.bin",))


def test_wrong_checksum_leaves_no_file(server: Server, tmp_path: Path) -> None:
    server.files["a.bin"] = CONTENT[:-1] + b"!"
    with pytest.raises(FedraxError, match=rf"has the SHA256 checksum \w+, and not {FILE.checksum[7:]}"):
        FILE.obtain(tmp_path, server.url)
    assert not list((tmp_path / "set").iterdir())


def test_bytes_after_a_gzip_member_are_rejected(server: Server, tmp_path: Path) -> None:
    file = RemoteFile("https://example.org/a.gz", FILE.checksum, ("set/a.gz",), of_content=True)
    server.files["a.gz"] = gzip.compress(CONTENT) + b"more"
    with pytest.raises(FedraxError, match="checksum"):
        file.obtain(tmp_path, server.url)
    server.files["a.gz"] = gzip.compress(CONTENT)
    file.obtain(tmp_path, server.url)


def test_lost_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    """Within a call as long as bytes arrive, otherwise by the next call."""
    server.files["a.bin"], server.cuts = CONTENT, [1000, 500]
    lines: list[str] = []
    assert FILE.obtain(tmp_path, server.url, lines.append)
    assert server.requests == [("a.bin", None), ("a.bin", "bytes=1000-"), ("a.bin", "bytes=1500-")]
    assert (tmp_path / "set/a.bin").read_bytes() == CONTENT and any("resuming" in line for line in lines)
    (tmp_path / "set/a.bin").unlink()

    server.requests, server.cuts = [], [700, 0]
    with pytest.raises(FedraxError, match=r"after 0.0007 MB; the same command resumes it"):
        FILE.obtain(tmp_path, server.url)
    assert [path.stat().st_size for path in (tmp_path / "set").iterdir()] == [700]
    assert FILE.obtain(tmp_path, server.url) and server.requests[-1] == ("a.bin", "bytes=700-")
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["a.bin"]


def test_server_without_range_requests_sends_the_whole_file(server: Server, tmp_path: Path) -> None:
    server.files["a.bin"], server.cuts, server.has_ranges = CONTENT, [1000], False
    assert FILE.obtain(tmp_path, server.url) and (tmp_path / "set/a.bin").read_bytes() == CONTENT


def test_partial_download_of_another_file_is_replaced(server: Server, tmp_path: Path) -> None:
    """Otherwise every further call would fail."""
    server.files["a.bin"] = CONTENT
    (tmp_path / "set").mkdir()
    (tmp_path / "set/.a.bin.download").write_bytes(b"x" * 6000)
    with pytest.raises(FedraxError, match="checksum"):
        FILE.obtain(tmp_path, server.url)
    assert FILE.obtain(tmp_path, server.url) and (tmp_path / "set/a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("status", "message"), [(404, "404 Not Found; try another"), (503, "503 Service.* resumes it")]
)
def test_server_errors_raise_a_clear_error(server: Server, tmp_path: Path, status: int, message: str) -> None:
    server.status = status
    with pytest.raises(FedraxError, match=message):
        FILE.obtain(tmp_path, server.url)


def test_invalid_mirrors_and_names_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with pytest.raises(FedraxError, match="is not an http or https URL"):
        FILE.obtain(tmp_path, f"file://{tmp_path}")
    with pytest.raises(FedraxError, match="unknown data set to download 'cifar'; did you mean"):
        download("cifar", tmp_path)
    with pytest.raises(FedraxError, match="unknown data set to download 'digits'"):
        download("digits", tmp_path)
    monkeypatch.delenv("FEDRAX_DATA", raising=False)
    with pytest.raises(FedraxError, match="set --data-dir or FEDRAX_DATA"):
        download("mnist")


def test_concurrent_downloads_of_a_file_are_rejected(server: Server, tmp_path: Path) -> None:
    server.files["a.bin"] = CONTENT
    (tmp_path / "set").mkdir()
    with open(tmp_path / "set/.a.bin.download", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FedraxError, match="another process is downloading"):
            FILE.obtain(tmp_path, server.url)
    assert FILE.obtain(tmp_path, server.url)


def hostile_archives() -> dict[str, bytes]:
    link, buffer = tarfile.TarInfo("set/a.bin"), io.BytesIO()
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(link)
    info, zipped = zipfile.ZipInfo("a.bin"), io.BytesIO()
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    return {
        "above.tar.gz": tar_of({"a.bin": b"1", "../../evil.txt": b"2"}),
        "root.tar.gz": tar_of({"/tmp/evil.txt": b"2", "a.bin": b"1"}),
        "link.tar.gz": buffer.getvalue(),
        "above.zip": zip_of({"a.bin": b"1", "x/../../evil.txt": b"2"}),
        "windows.zip": zip_of({"a.bin": b"1", "..\\evil.txt": b"2"}),
        "link.zip": zipped.getvalue(),
    }


@pytest.mark.parametrize("name", hostile_archives())
def test_archives_with_paths_outside_are_rejected(server: Server, tmp_path: Path, name: str) -> None:
    content = hostile_archives()[name]
    unpack = unpack_zip if name.endswith("zip") else unpack_tar
    source = RemoteFile(f"https://x/{name}", f"md5:{hashlib.md5(content).hexdigest()}", ("in/set/a.bin",), unpack)
    server.files[name] = content
    with pytest.raises(FedraxError, match="is a link or lies outside of it"):
        source.obtain(tmp_path / "data", server.url)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["empty.tar.gz", "empty.zip", "text.tar.gz", "text.zip"])
def test_archives_without_the_expected_files_are_rejected(server: Server, tmp_path: Path, name: str) -> None:
    made = tar_of({"b": b"1"}) if "tar" in name else zip_of({"b": b"1"})
    content = made if "empty" in name else b"no archive" * 100
    unpack = unpack_zip if name.endswith("zip") else unpack_tar
    source = RemoteFile(f"https://x/{name}", f"md5:{hashlib.md5(content).hexdigest()}", ("set/a.bin",), unpack)
    server.files[name] = content
    with pytest.raises(FedraxError, match=r"has no file a.bin|cannot be unpacked"):
        source.obtain(tmp_path, server.url)
    assert not list((tmp_path / "set").iterdir())


def test_damaged_examples_and_databases_are_rejected(tmp_path: Path) -> None:
    whole = example(label=integer(5), pixels=floats(np.ones(3)), name=text("x"))
    found = parse_example(whole)
    assert np.asarray(found["label"]).tolist() == [5] and np.asarray(found["pixels"]).tolist() == [1, 1, 1]
    assert found["name"] == b"x"
    unpacked = field(
        2, b"".join(b"\x0d" + struct.pack("<f", v) for v in (0.5, 2.0))
    )  # unpacked encoding of old writers
    assert np.asarray(parse_example(example(x=unpacked))["x"]).tolist() == [0.5, 2.0]
    minus = field(3, b"\x08" + b"\xff" * 9 + b"\x01")
    assert np.asarray(parse_example(example(x=minus))["x"]).tolist() == [-1]
    for end in range(1, len(whole)):
        with pytest.raises(FedraxError, match=r"truncated|damaged"):
            parse_example(whole[:end])
    (tmp_path / "femnist").mkdir()
    path = tmp_path / "femnist/emnist_all.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(FedraxError, match="cannot be read as an SQLite database"):
        load("femnist", tmp_path)
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE VIEW examples AS SELECT 'all_train' AS split_name, 1 AS client_id")
    connection.close()
    with pytest.raises(FedraxError, match="has no table 'examples'"):
        load("femnist", tmp_path)


def test_download_command(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(server, "cifar10", monkeypatch, tmp_path / "made")
    flags = ["--data-dir", str(tmp_path / "data"), "--mirror", server.url]
    assert main(["download", "--json", *flags[:2]]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(SOURCES) and not any(row["present"] for row in rows.values())
    assert rows["cifar10"]["hosts"] == ["www.cs.toronto.edu"]
    assert main(["download", "cifar10", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"cifar10: 7 files in {tmp_path / 'data/cifar10'}\n" and "downloading http" in captured.err
    assert main(["download", "cifar10", *flags]) == 0 and not capsys.readouterr().err and len(server.requests) == 1
    assert main(["download", *flags[:2]]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines() if "toronto" in line] == ["yes", "no"]
    assert (
        main(["download", "cifar10", "cifr100", *flags]) == 2 and "did you mean 'cifar100'" in capsys.readouterr().err
    )
