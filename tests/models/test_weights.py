"""Pretrained weights from files of other libraries: each format, each kind of model, mistakes and hostile files."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as orbax
import pytest
from flax import nnx, serialization
from safetensors.numpy import load_file, save_file

from fedrax import FedraxError, tree
from fedrax.errors import FedraxWarning
from fedrax.models import MLP, Model, Variables, freeze, from_linen, from_torch, load_weights
from fedrax.simulation import load_model
from tests.models.test_finetuning import MODELS, Normalized, X, trained

LINEN = MODELS["linen"]


def equal(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def by_name(params: Any, separator: str = "/") -> dict[str, np.ndarray]:
    leaves = zip(tree.leaf_names(params), jax.tree.leaves(params), strict=True)
    return {name.replace("/", separator): np.asarray(leaf) for name, leaf in leaves}


def sharded(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """As ``save_pretrained`` writes a large model: files and an index of them."""
    places = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(arrays)}
    path.mkdir()
    for file in set(places.values()):
        save_file({name: a for name, a in arrays.items() if places[name] == file}, path / file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")


def orbax_save(path: Path, params: Any) -> None:
    with orbax.StandardCheckpointer() as saver:
        saver.save(path, params)


WRITERS: dict[str, Callable[[Path, Any], None]] = {
    "safetensors": lambda path, params: save_file(by_name(params), path),
    "dotted names": lambda path, params: save_file(by_name(params, "."), path),
    "sharded": lambda path, params: sharded(path, by_name(params, ".")),
    "flax": lambda path, params: path.write_bytes(serialization.to_bytes(params)) and None,
    "flax variables": lambda path, params: path.write_bytes(serialization.to_bytes({"params": params})) and None,
    "orbax": orbax_save,
    "orbax variables": lambda path, params: orbax_save(path, {"params": params}),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_each_format_is_read(kind: str, tmp_path: Path):
    model = LINEN()
    params = model.init(jax.random.key(1))
    WRITERS[kind](tmp_path / "weights", params)
    equal(load_weights(tmp_path / "weights", model.init(jax.random.key(2))), params)
    equal(load_weights(str(tmp_path / "weights"), jax.eval_shape(model.init, jax.random.key(2))), params)


@pytest.mark.parametrize("kind", MODELS)
def test_weights_of_each_kind_of_model(kind: str, tmp_path: Path):
    model = MODELS[kind]()
    given = model.init(jax.random.key(1))
    values = by_name(trained(given), ".")
    if isinstance(given, Variables):
        values |= by_name(jax.tree.map(lambda a: a + 3, given.statistics), ".")
    save_file(values, tmp_path / "weights")
    found = load_weights(tmp_path / "weights", model.init(jax.random.key(2)))
    equal(trained(found), trained(given))
    np.testing.assert_array_equal(model.apply(found, X).shape, (6, 3))
    if isinstance(given, Variables):
        equal(found.statistics, jax.tree.map(lambda a: a + 3, given.statistics))


def test_checkpoints_of_nnx_and_of_train_states(tmp_path: Path):
    network = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
    params = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    orbax_save(tmp_path / "state", nnx.state(network, nnx.Param))
    equal(load_weights(tmp_path / "state", jax.tree.map(jnp.zeros_like, params)), params)
    with orbax.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(3, args=orbax.args.StandardSave({"step": 3, "params": params, "opt_state": {"mu": params}}))
    like = jax.tree.map(jnp.zeros_like, params)
    with pytest.raises(FedraxError, match=r"steps is no checkpoint: choose .*steps/3/default"):
        load_weights(tmp_path / "steps", like)
    with pytest.raises(FedraxError, match=r"the model has no .*opt_state/mu"):
        load_weights(tmp_path / "steps" / "3" / "default", like)
    equal(load_weights(tmp_path / "steps" / "3" / "default", like, rename={"opt_state": None, "step": None}), params)


def test_a_model_file_of_fedrax_is_read_too(tmp_path: Path):
    from fedrax.simulation.persistence.model_file import save_model

    given = from_linen(Normalized(), X).init(jax.random.key(1))
    save_model(tmp_path / "model.safetensors", *given)
    equal(load_weights(tmp_path, jax.tree.map(jnp.zeros_like, given)), given)
    save_file({"fc.weight": np.zeros(2, np.float32)}, tmp_path / "plain")
    with pytest.raises(FedraxError, match=r"load_weights\(path, model.init\(key\)\) reads weights of other"):
        load_model(tmp_path / "plain")


LIKE = {"layers": [{"weight": jnp.zeros((2, 3)), "bias": jnp.ones(2)}], "head": {"weight": jnp.full((3, 2), 5.0)}}
FILE = {
    "net.layers.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "net.layers.0.bias": np.full(2, 7, np.float32),
    "net.head.weight": np.ones((3, 2), np.float32),
}


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    save_file(arrays, path)
    return path


@pytest.mark.parametrize(
    "rename",
    [{"net": ""}, {"net.layers": "layers", "net/head": "head"}, lambda name: name.removeprefix("net/")],
)
def test_names_are_changed_by_first_parts_or_a_function(rename: Any, tmp_path: Path):
    found = load_weights(write(tmp_path / "w", FILE), LIKE, rename=rename)
    np.testing.assert_array_equal(found["layers"][0]["weight"], FILE["net.layers.0.weight"])
    np.testing.assert_array_equal(found["head"]["weight"], 1)
    inner = {name.removeprefix("net."): array for name, array in FILE.items()}
    added = load_weights(write(tmp_path / "v", inner), {"net": LIKE}, rename={"": "net"})
    equal(added["net"], found)


def test_arrays_are_converted_and_take_the_dtypes_of_the_model(tmp_path: Path):
    turned = {"weight": np.arange(6, dtype=np.float64).reshape(3, 2), "step": np.array([7], np.int64)}
    like = {"weight": jnp.zeros((2, 3), jnp.bfloat16), "step": jnp.zeros(1, jnp.int32)}
    found = load_weights(write(tmp_path / "w", turned), like, convert=lambda name, a: a.T if name == "weight" else a)
    assert found["weight"].dtype == jnp.bfloat16 and found["step"].dtype == jnp.int32
    np.testing.assert_array_equal(found["weight"], turned["weight"].T)
    half = {"weight": np.asarray(jnp.asarray(turned["weight"].T, jnp.bfloat16)), "step": np.array([7], np.int32)}
    again = load_weights(write(tmp_path / "v", half), like | {"weight": jnp.zeros((2, 3))})
    assert again["weight"].dtype == jnp.float32
    np.testing.assert_array_equal(again["weight"], turned["weight"].T)


def test_partial_loading_is_explicit_and_says_what_is_left(tmp_path: Path):
    path = write(tmp_path / "w", {"layers.0.bias": np.zeros(2, np.float32), "pooler.bias": np.zeros(4, np.float32)})
    with pytest.warns(FedraxWarning, match=r"2 keep their values \(head/weight, layers/0/weight\) and 1 of its arrays"):
        found = load_weights(path, LIKE, strict=False)
    np.testing.assert_array_equal(found["layers"][0]["bias"], 0)
    np.testing.assert_array_equal(found["head"]["weight"], 5)
    other = {"layers.0.weight": np.ones((2, 3), np.float32), "layers.0.bias": np.zeros(2, np.float32)}
    found = load_weights(
        write(tmp_path / "v", other | {"head.weight": np.ones((9, 2), np.float32)}), LIKE, skip="head/*"
    )
    np.testing.assert_array_equal(found["head"]["weight"], 5)
    with pytest.raises(FedraxError, match="head/weight: params has the shape only"):
        load_weights(tmp_path / "v", jax.eval_shape(lambda: LIKE), skip="head/*")


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        (FILE, {}, r"it has no .*layers/0/bias \(closest: net.layers.0.bias\).*rename=\{'net': ''\} renames arrays"),
        (FILE, {"rename": {"met": ""}}, "no name in .* begins with 'met'; the closest one is net"),
        (FILE, {"rename": lambda name: "same"}, "gives two arrays of .* the name same"),
        (FILE, {"rename": lambda name: 3}, "rename must return a name or None, not int"),
        (FILE, {"rename": {"net": ""}, "skip": "haed/*"}, "skip: no parameter has the name 'haed/\\*'"),
        (FILE, {"rename": {"net": ""}, "convert": lambda name, a: a.tolist()}, "convert must return an array for"),
        ({"other": np.ones(3, np.float32)}, {"strict": False}, r"the model has no other: rename=\{'OLD': 'NEW'\}"),
        ({"a.b": np.zeros(1), "a/b": np.zeros(1)}, {"rename": {"a/b": "head/weight"}}, "two arrays of .* head/weight"),
        ({}, {}, "it has no head/weight, layers/0/bias, layers/0/weight"),
    ],
)
def test_mistakes_are_one_clear_sentence(arrays: Any, options: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(FedraxError, match=words):
        load_weights(write(tmp_path / "w", arrays), LIKE, **options)


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path):
    arrays = {
        "layers.0.weight": np.zeros((3, 2), np.float32),
        "layers.0.bias": np.zeros(2, np.int32),
        "haed.weight": np.zeros((3, 2), np.float32),
    }
    with pytest.raises(FedraxError) as error:
        load_weights(write(tmp_path / "w", arrays), LIKE)
    message = str(error.value)
    assert "layers/0/weight is of shape (3, 2), should be of shape (2, 3) (transpose it with convert)" in message
    assert "layers/0/bias is of dtype int32, should be float32" in message
    assert "it has no head/weight (closest: haed.weight)" in message
    assert "rename={'haed': 'head'} renames arrays" in message
    many = {f"layer{i}": np.zeros(1, np.float32) for i in range(40)}
    with pytest.raises(FedraxError, match="and 35 more") as error:
        load_weights(write(tmp_path / "many", many), LIKE)
    assert len(str(error.value)) < 1000


def test_running_statistics_need_their_place(tmp_path: Path):
    model = from_linen(Normalized(), X)
    given = model.init(jax.random.key(0))
    path = tmp_path / "w"
    path.write_bytes(serialization.to_bytes({"params": given.params, **given.statistics}))
    equal(load_weights(path, given), given)
    with pytest.raises(FedraxError, match="the model has no batch_stats/BatchNorm_0/mean"):
        load_weights(path, given.params)
    counted = {"bn.running_mean": np.ones(2, np.float32), "bn.num_batches_tracked": np.array(7)}
    found = load_weights(write(tmp_path / "v", counted), Variables({}, {"bn": {"running_mean": jnp.zeros(2)}}))
    np.testing.assert_array_equal(found.statistics["bn"]["running_mean"], 1)


def header(entries: dict[str, Any], rest: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + rest


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "noise": b"\xff" * 64,
    "huge header": (1 << 62).to_bytes(8, "little") + b"{}",
    "offsets outside": header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}),
    "overlapping": header(
        {
            "v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        bytes(4),
    ),
    "truncated": header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(8)),
    "wrong size": header({"w": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 16]}}, bytes(16)),
    "deep name": header({"a/" * 20_000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "other dtype": header({"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
    "msgpack, truncated": serialization.to_bytes({"w": np.zeros(40, np.float32)})[:-20],
    "msgpack, objects": msgpack.packb({"w": msgpack.ExtType(1, msgpack.packb(((1,), "O", bytes(8))))}),
    "msgpack, deep": b"\x81\xa1a" * 3000 + b"\xc0",
    "msgpack, count": b"\xdf\xff\xff\xff\xff",
    "msgpack, chunks": msgpack.packb({"w": {"__msgpack_chunked_array__": True, "shape": {}, "chunks": {}}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_files_raise_a_sentence(name: str, tmp_path: Path):
    (tmp_path / "weights").write_bytes(HOSTILE[name])
    with pytest.raises(FedraxError, match=r"weights (cannot be read|is not a model file|does not fit)"):
        load_weights(tmp_path / "weights", LIKE)


def test_an_index_names_only_files_beside_it(tmp_path: Path):
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index, like = folder / "model.safetensors.index.json", {"w": jnp.zeros(2)}
    for file in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "..", "", "a/b", "x\0"):
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(FedraxError, match="which is not one beside it"):
            load_weights(folder, like)
    for content, words in (
        ('{"weight_map": {"w": "missing"}}', "there is no file"),
        ('{"weight_map": {"w": "."}}', "not (one beside it|a regular file)"),
        ('{"weight_map": ["w"]}', "not an index of weights"),
        ('{"weight_map": {"w": 3}}', "not an index of weights"),
        ("[" * 100_000, "nested too deeply"),
    ):
        index.write_text(content)
        with pytest.raises(FedraxError, match=words):
            load_weights(index, like)
    save_file({"v": np.ones(2, np.float32)}, folder / "part")
    index.write_text(json.dumps({"weight_map": {"w": "part"}}))
    with pytest.raises(FedraxError, match="places w in part, which does not hold it"):
        load_weights(index, like)
    os.mkfifo(folder / "pipe")
    with pytest.raises(FedraxError, match="not a regular file"):
        load_weights(folder / "pipe", like)


def test_names_in_an_orbax_checkpoint_stay_in_it(tmp_path: Path):
    orbax_save(tmp_path / "good", {"w": jnp.ones(2)})
    for key in (str(tmp_path / "good" / "w"), "../good/w", "x/../../good"):
        orbax_save(tmp_path / f"bad{len(key)}", {"w": jnp.ones(2)})
        file = tmp_path / f"bad{len(key)}" / "_METADATA"
        content = json.loads(file.read_text())
        content["tree_metadata"]["('w',)"]["key_metadata"][0]["key"] = key
        file.write_text(json.dumps(content))
        with pytest.raises(FedraxError, match="a name that leads out of the checkpoint"):
            load_weights(file.parent, {"w": jnp.zeros(2)})
    for content in ("[]", "{}", '{"tree_metadata": {"w": 3}}'):
        (tmp_path / "good" / "_METADATA").write_text(content)
        with pytest.raises(FedraxError, match="not the metadata of an Orbax checkpoint"):
            load_weights(tmp_path / "good", {"w": jnp.zeros(2)})
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedraxError, match=r"empty is no checkpoint: it has neither one of model.safetensors"):
        load_weights(tmp_path / "empty", LIKE)


def test_a_file_of_torch_save_needs_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02.")
    with pytest.raises(FedraxError, match=r"model.pt can be read with torch only: pip install 'fedrax\[torch\]'; or"):
        load_weights(tmp_path / "model.pt", LIKE)


class Command:
    """What a malicious pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hacked",)


def test_state_dicts_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    network.eval()(torch.ones(2, 4))
    model = from_torch(network, torch.ones(2, 4))
    given = model.init(jax.random.key(0))
    like = jax.tree.map(jnp.zeros_like, given)
    optimizer = torch.optim.Adam(network.parameters())
    for content in (
        network.state_dict(),
        {"epoch": 3, "state_dict": network.state_dict(), "optimizer": optimizer.state_dict()},
    ):
        torch.save(content, "model.pt")
        equal(load_weights("model.pt", like), given)
    half = {name: p.bfloat16() if p.is_floating_point() else p for name, p in network.state_dict().items()}
    torch.save(half, "model.pt")
    found = load_weights("model.pt", like)
    for a, b in zip(*map(jax.tree.leaves, (found, given)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, np.asarray(jnp.asarray(b).astype(jnp.bfloat16), np.float32))
    for content, words in (
        ({"a": network.state_dict(), "b": network.state_dict()}, r"several state dicts \(a, b\)"),
        ({"epoch": 3}, r"no state dict \(epoch\)"),
        ([1], r"no state dict \(list\)"),
        (network, "cannot be read as a state dict of PyTorch"),
        ({"w": Command()}, "cannot be read as a state dict of PyTorch"),
        ({"w": torch.ones(2).to_sparse()}, "a tensor is sparse"),
    ):
        torch.save(content, "model.pt")
        with pytest.raises(FedraxError, match=words):
            load_weights("model.pt", like)
    assert not Path("hacked").exists()
    torch.save(network.state_dict(), "model.pt")
    Path("short.pt").write_bytes(Path("model.pt").read_bytes()[:-300])
    with pytest.raises(FedraxError, match="cannot be read as a state dict"):
        load_weights("short.pt", like)


class Tied:
    """Made where PyTorch is installed: an embedding whose weight is that of the output layer, too."""

    def __new__(cls) -> Any:
        import torch

        class Network(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.out = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
                self.out.weight = self.embed.weight

            def forward(self, x: Any) -> Any:
                return self.out(self.embed(x).mean(1))

        return Network()


def test_tied_parameters_have_one_place(tmp_path: Path):
    torch = pytest.importorskip("torch")
    network = Tied()
    model = from_torch(network, torch.ones((2, 4), dtype=torch.int64))
    given = model.init(jax.random.key(0))
    torch.save(network.state_dict(), tmp_path / "model.pt")
    assert len(network.state_dict()) == 2
    equal(load_weights(tmp_path / "model.pt", jax.tree.map(jnp.zeros_like, given)), given)


def test_directories_of_transformers(tmp_path: Path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=30, n_positions=8, n_embd=16, n_layer=2, n_head=2, num_labels=3)
    config.pad_token_id = 0
    network = transformers.GPT2ForSequenceClassification(config)
    wanted = {name: p.detach().numpy() for name, p in network.named_parameters()}
    for size in ("5GB", "20KB"):
        network.save_pretrained(tmp_path / size, max_shard_size=size)
        like = {name: jnp.zeros(array.shape) for name, array in wanted.items()}
        equal(load_weights(tmp_path / size, like), {name: jnp.asarray(array) for name, array in wanted.items()})
    assert len(list((tmp_path / "20KB").glob("*.safetensors"))) > 1
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    equal(load_weights(tmp_path, like), {name: jnp.asarray(array) for name, array in wanted.items()})


def test_loaded_weights_are_frozen_and_adapted(tmp_path: Path):
    model = MLP(hidden=(5,)).build((4,), 3)
    params = model.init(jax.random.key(1))
    save_file(by_name(params), tmp_path / "w")
    tuned = freeze(model, load_weights(tmp_path / "w", model.init(jax.random.key(0))), "output/*")
    equal(tuned.merge(tuned.init(jax.random.key(2))), params)
    assert load_file(tmp_path / "w").keys() == set(tree.leaf_names(params))


def test_what_is_no_tree_of_arrays_raises(tmp_path: Path):
    path = write(tmp_path / "w", FILE)
    with pytest.raises(FedraxError, match="it holds nothing"):
        load_weights(path, {})
    with pytest.raises(FedraxError, match="it holds Model"):
        load_weights(path, Model(lambda key: None, lambda w, x, key=None: x))
