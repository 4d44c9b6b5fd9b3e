"""LEAF's JSON format: files as its scripts write them, and malformed files."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrax import FedAvg, LocalSGD, classification, simulate
from fedrax.data import Federation, Iid, Natural, load
from fedrax.errors import FedraxError
from fedrax.files import MAX_JSON
from fedrax.models import Logistic

PLAYS = {"HAMLET_Horatio": "HAMLET", "HAMLET_Ghost": "HAMLET", "LEAR_Fool": "LEAR"}


def leaf(users: dict[str, tuple[list, list]], **more: Any) -> dict[str, Any]:
    """Content of a file."""
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    return {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data, **more}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def femnist(seed: int, users: int = 3, samples: int = 6) -> dict[str, tuple[list, list]]:
    """Clients with images of 4 x 4 numbers in [0, 1] and labels below 62."""
    rng = np.random.default_rng(seed)
    return {
        f"f{seed}_{i:03}": (rng.random((samples, 16)).round(4).tolist(), rng.integers(0, 62, samples).tolist())
        for i in range(users)
    }


def shakespeare(text: str, users: dict[str, str], width: int = 8) -> dict[str, tuple[list, list]]:
    """Windows of ``width`` characters, and the next character of each."""
    at = range(len(text) - width)
    return {name: ([text[i : i + width] for i in at], [text[i + width] for i in at]) for name in users}


def test_vectors_in_several_files(tmp_path: Path) -> None:
    """Clients of all files are sorted by name; test rows belong to clients of the same name."""
    first, second = femnist(1), femnist(2)
    write(tmp_path / "train/all_data_0.json", leaf(second))
    write(tmp_path / "train/all_data_1.json", leaf(first))
    held = {name: (x[:2], y[:2]) for name, (x, y) in first.items()}
    write(tmp_path / "test/all_data_0.json", leaf(held))
    dataset = load("leaf", path=tmp_path, shape=(4, 4, 1))
    users = first | second
    assert dataset.client_names == tuple(sorted(users))
    assert dataset.train.x.shape == (36, 4, 4, 1) and dataset.train.x.dtype == np.float32 and len(dataset.test.y) == 6
    federation = Federation.from_dataset(dataset, Natural(), seed=0, shuffle=False)
    for client, name in enumerate(sorted(users)):
        rows = slice(*federation.offsets[client : client + 2])
        np.testing.assert_array_equal(federation.train.x[rows].reshape(-1, 16), np.array(users[name][0], np.float32))
        assert [int(dataset.class_names[y]) for y in federation.train.y[rows]] == users[name][1]
        assert federation.client_name(client) == name
    assert federation.test_offsets is not None
    assert np.diff(federation.test_offsets).tolist() == [2, 2, 2, 0, 0, 0]
    task = classification(Logistic().build((4, 4, 1), dataset.num_classes or 0))
    result = simulate(FedAvg(local=LocalSGD(lr=0.1, steps=2)), task, federation, rounds=2, cohort_size=2)
    assert np.isfinite(result.events[-1]["test_loss"])


def test_next_character_prediction(tmp_path: Path) -> None:
    """Characters are tokens of the alphabet of the training rows; clients may be plays."""
    printed = "To be, or not to be"
    parts = shakespeare(printed, PLAYS)
    path = write(tmp_path / "s.json", leaf(parts, hierarchies=list(PLAYS.values())))
    dataset = load("leaf", path=path, length=6, test_fraction=0.0)
    assert dataset.vocabulary == tuple(sorted(set("".join(x[-6:] for x in parts["LEAR_Fool"][0]))))
    text = ["".join(dataset.vocabulary[token - 2] for token in row) for row in dataset.train.x]
    assert text == [x[-6:] for name in PLAYS for x in parts[name][0]]  # the characters before the next one
    assert "".join(dataset.class_names[y] for y in dataset.train.y[: len(printed) - 8]) == printed[8:]
    assert dataset.client_names == tuple(sorted(PLAYS))
    plays = load("leaf", path=path, clients="hierarchies", length=10)
    assert plays.client_names == ("HAMLET", "LEAR")
    assert (plays.train.x[:, 8:] == 0).all()  # padding: texts have 8 characters
    assert np.bincount(plays.train_clients).tolist() == [18, 9]  # type: ignore[arg-type]


def test_tweets(tmp_path: Path) -> None:
    """The text is entry 4 of a list; words that are not in the training rows are 1."""

    def tweet(text: str) -> list[str]:
        return ["1467810369", "Mon Apr 06", "NO_QUERY", "ann", text, "training"]

    train = {"ann": ([tweet("good good day"), tweet("bad day")], [1, 0]), "bob": ([tweet("good")], [1])}
    write(tmp_path / "train/a.json", leaf(train))
    write(tmp_path / "test/a.json", leaf({"ann": ([tweet("Good night")], [1])}))
    dataset = load("leaf", path=tmp_path, length=4)
    assert dataset.vocabulary == ("good", "day")
    assert dataset.train.x.tolist() == [[2, 2, 3, 0], [1, 3, 0, 0], [2, 0, 0, 0]] and dataset.test.x.tolist() == [
        [2, 1, 0, 0]
    ]
    assert dataset.train.y.tolist() == [1, 0, 1] and dataset.class_names == ("0", "1")
    with pytest.raises(FedraxError, match="place 9"):
        load("leaf", path=tmp_path, text=9)


def test_float_labels_are_classes_if_they_are_integers(tmp_path: Path) -> None:
    """LEAF's Synthetic stores classes as 3.0; other floats are targets. Clients without samples are dropped."""
    users = {"u1": ([[1, 2.5], [3, 4]], [3.0, 0.0]), "none": ([], [])}
    path = write(tmp_path / "s.json", leaf(users))
    dataset = load("leaf", path=path, test_fraction=0.0)
    assert dataset.num_classes == 2 and dataset.class_names == ("0", "3") and dataset.client_names == ("u1",)
    assert load("leaf", path=path, labels="numbers", test_fraction=0.0).num_classes is None
    write(path, leaf({"u1": ([[1], [2]], [0.5, 2])}))
    assert load("leaf", path=path, test_fraction=0.0).train.y.tolist() == [0.5, 2.0]
    assert load("leaf", path=path, labels="classes", test_fraction=0.0).class_names == ("0.5", "2")


VALID = leaf({"a": ([[1.0, 2.0]], [0]), "b": ([[3.0, 4.0]], [1])})


def changed(**parts: Any) -> dict[str, Any]:
    return {**VALID, **parts}


def samples(x: Any, y: Any) -> dict[str, Any]:
    return leaf({"a": (x, y)}) | {"num_samples": [len(y) if isinstance(y, list) else 1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read as JSON"),
        ("[" * 100_000, "too deep"),
        ('{"a": ' * 100_000, "too deep"),
        ("[]", "not of LEAF's format"),
        ('{"users": ["a"], "users": ["b"]}', "'users' twice"),
        (json.dumps(VALID).replace("1.0", "NaN"), "NaN, which is not a JSON number"),
        (json.dumps(VALID).replace("1.0", "-Infinity"), "Infinity, which is not a JSON number"),
        (json.dumps(VALID).replace("1.0", "1e999"), "user 'a' has numbers that are not finite"),
        (json.dumps(VALID).replace("1.0", "1e39"), "beyond 32-bit"),
        (json.dumps(VALID).replace("1.0", "9" * 400), "not finite"),
        (json.dumps(VALID).replace("1.0", "9" * 5000), "cannot be read as JSON"),
        (json.dumps(VALID).replace('"a"', '"\\ud800"'), "characters that are none"),
        (changed(users=["a"]), "'b' must stand once"),
        (changed(users=["a", "a", "b"]), "'a' must stand once"),
        (changed(users=["a", "b", "c"]), "'c' must stand once"),
        (changed(users=["a", 1]), "a list of names"),
        (changed(users=["a", "b" * 201]), "a list of names"),
        (changed(num_samples=[1]), "an entry for each"),
        (changed(num_samples=[1, 2]), "num_samples says 2"),
        (changed(hierarchies=["g"]), "an entry for each"),
        (changed(user_data={"a": {"x": [[1]]}, "b": 3}), "'a' needs a list x"),
        (changed(user_data=[]), "not of LEAF's format"),
        (leaf({"a": ([[1.0]], [0]), "b": ([[1.0, 2.0]], [0])}), "of one kind"),
        (leaf({"a": ([[1.0]], [0]), "b": (["text"], [0])}), "of one kind"),
        (leaf({"a": ([[1.0]], [0]), "b": ([[1.0]], ["c"])}), "labels must be of one kind"),
        (leaf({"a": ([], [])}), "holds no samples"),
        (samples([[1.0], [1.0, 2.0]], [0, 1]), "all of one length"),
        (samples([[1.0], "text"], [0, 1]), "neither texts nor vectors"),
        (samples([[True]], [0]), "neither texts nor vectors"),
        (samples([[[1.0]]], [0]), "neither texts nor vectors"),
        (samples([[]], [0]), "neither texts nor vectors"),
        (samples([[1.0]], [0, 1]), "1 inputs and 2 labels"),
        (samples([[1.0]], ["x" * 201]), "a label of more than"),
        (samples([[1.0]], [None]), "labels that are neither"),
        (samples(["\ud800"], ["a"]), "characters that are none"),
    ],
)
def test_malformed_files_are_rejected(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(FedraxError, match=message) as rejected:
        load("leaf", path=path, test_fraction=0.0)
    assert len(str(rejected.value)) < 400


def test_unsuitable_folders_and_options_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FedraxError, match="no file"):
        load("leaf", path=tmp_path / "nothing.json")
    with pytest.raises(FedraxError, match="no JSON files"):
        load("leaf", path=tmp_path)
    write(tmp_path / "train/a.json", VALID)
    write(tmp_path / "train/b.json", VALID)
    with pytest.raises(FedraxError, match="another file already"):
        load("leaf", path=tmp_path)
    path = tmp_path / "train/a.json"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"shape": (3, 1)}, r"not of shape \[3, 1\]"),
        ({"clients": "plays"}, "clients must be one of 'users', 'hierarchies'"),
        ({"labels": "texts"}, "labels must be one of"),
        ({"tokens": "bytes"}, "tokens must be one of"),
    ]
    for options, message in wrong:
        with pytest.raises(FedraxError, match=message):
            load("leaf", path=path, **options)
    write(path, samples(["abc"], ["d"]))
    for length in (0, 10**12):
        with pytest.raises(FedraxError, match=r"texts of length|length must fit into 32 bits"):
            load("leaf", path=path, length=length, test_fraction=0.0)


def test_too_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON + 1)  # a sparse file
    tracemalloc.start()
    with pytest.raises(FedraxError, match="too large"):
        load("leaf", path=path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20
    monkeypatch.setattr("fedrax.files.MAX_VALUES", 1000)
    with pytest.raises(FedraxError, match="more than 1,000 values"):
        load("leaf", path=write(path, "[" + "[]," * 500 + "[]]"))


def test_a_thousand_clients_are_read_without_quadratic_time(tmp_path: Path) -> None:
    path = write(tmp_path / "many.json", leaf(femnist(0, users=1000, samples=2)))
    federation = Federation.from_dataset(load("leaf", path=path, test_fraction=0.0), Iid(10), seed=0)
    assert len(federation.train.y) == 2000


def test_integers_beyond_float64_are_rejected_as_labels(tmp_path: Path) -> None:
    content = samples([[1.0], [2.0]], [2**53 + 1, 2**53])
    with pytest.raises(FedraxError, match=r"whole numbers beyond 2\^53"):
        load("leaf", path=write(tmp_path / "x.json", content))
    floats = samples([[1.0], [2.0], [3.0]], [0.12345678, 0.12345679, 3.0])
    dataset = load("leaf", path=write(tmp_path / "y.json", floats), labels="classes", test_fraction=0.0)
    assert dataset.class_names == ("0.12345678", "0.12345679", "3")


def test_clients_by_hierarchy_require_hierarchies_in_the_file(tmp_path: Path):
    data = {"users": ["u1", "u2"], "user_data": {u: {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]} for u in ("u1", "u2")}}
    file = write(tmp_path / "one.json", json.dumps(data))
    with pytest.raises(FedraxError, match="names no hierarchies for its users"):
        load("leaf", path=file, clients="hierarchies")
    assert load("leaf", path=file).client_names == ("u1", "u2")


def test_options_without_effect_are_rejected(tmp_path: Path):
    vectors = json.dumps({"users": ["u"], "user_data": {"u": {"x": [[1.0], [2.0]], "y": [0, 1]}}})
    with pytest.raises(FedraxError, match="tokens, length have no effect on vectors of numbers: leave them out"):
        load("leaf", path=write(tmp_path / "v.json", vectors), tokens="words", length=3)
    texts = json.dumps({"users": ["u"], "user_data": {"u": {"x": ["ab", "cd"], "y": [0, 1]}}})
    with pytest.raises(FedraxError, match="shape has no effect on texts"):
        load("leaf", path=write(tmp_path / "t.json", texts), shape=[2])
    with pytest.raises(FedraxError, match="min_count has no effect on characters"):
        load("leaf", path=tmp_path / "t.json", tokens="characters", min_count=1)
