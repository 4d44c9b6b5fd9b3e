"""Results in Python: tables, figures, files and callbacks."""

import dataclasses
import json
import os
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import FedAvg, Federation, FedraxError, LocalSGD, Scaffold, classification, simulate
from fedrax.contract import Variables
from fedrax.data import Shards
from fedrax.models import Linear, Model
from tests.simulation.problems import LOCAL, run

rng = np.random.default_rng(0)
x = rng.normal(size=(60, 4)).astype(np.float32)
y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
owner = np.repeat([0, 1, 2, 3], [30, 15, 10, 5])
test_owner = np.array([0, 0, 0, 0, 1, 1, 3, 3, 3])
federation = Federation.from_arrays(x, y, owner, test=(x[:9], y[:9]), test_client_ids=test_owner)
task = classification(Linear().build((4,), 3))
method = FedAvg(local=LocalSGD(lr=0.1, steps=2, batch_size=5))


@pytest.fixture(scope="module")
def result():
    return simulate(method, task, federation, rounds=4, cohort_size=2, eval_every=2)


def test_events_as_tables(result):
    table = result.to_polars()
    assert table["round"].to_list() == [1, 2, 3, 4]
    assert table["test_accuracy"].is_null().to_list() == [True, False, True, False]
    frame = result.to_pandas()
    assert list(frame.columns) == table.columns
    assert frame["test_loss"].dropna().tolist() == [value for _, value in result.metric("test_loss")]


def test_curves_contain_the_values_of_the_events(result, tmp_path):
    figure = result.plot("train_loss", "test_accuracy")
    losses, accuracies = (axes.lines[0].get_xydata() for axes in figure.axes)
    np.testing.assert_allclose(losses, result.metric("train_loss"))
    np.testing.assert_allclose(accuracies, result.metric("test_accuracy"))
    figure.savefig(tmp_path / "run.png")
    assert [axes.get_ylabel() for axes in result.plot().axes] == ["test accuracy", "test loss"]
    with pytest.raises(FedraxError, match="did you mean 'test_accuracy'"):
        result.plot("test_acuracy")


def test_model_may_close_over_the_parameters_of_a_result(result):
    """Such as a teacher or pretrained parameters, which are on all devices after a run on all cores."""
    start = Linear().build((4,), 3)
    scaled = Model(lambda key: jnp.ones(3), lambda scale, x, key=None: scale * start.apply(result.params, x))
    again = simulate(method, classification(scaled), federation, rounds=1, cohort_size=2)
    assert again.params.shape == (3,) and np.isfinite(again.events[-1]["test_loss"])


def test_saved_model_can_start_another_run(result, tmp_path):
    result.save(tmp_path / "model.safetensors")
    loaded = fedrax.simulation.load_model(tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded, result.params)
    again = simulate(method, task, federation, rounds=1, params=loaded, cohort_size=2)
    before = task.metrics["accuracy"](loaded, federation.test).mean()
    assert dict(result.metric("test_accuracy"))[4] == pytest.approx(float(before))
    assert len(again.events) == 1


def test_files_of_other_structures_are_rejected(tmp_path):
    from fedrax.simulation.persistence.model_file import save_model

    params, statistics = [jnp.arange(3.0), {"a": (jnp.ones((2, 2)),)}], {"mean": jnp.array(4, jnp.int32)}
    save_model(tmp_path / "m", params, statistics)
    like = jax.tree.map(jnp.zeros_like, Variables(params, statistics))
    found = fedrax.simulation.load_model(tmp_path / "m", like=like)
    assert jax.tree.structure(found) == jax.tree.structure(like)
    jax.tree.map(np.testing.assert_array_equal, found, Variables(params, statistics))
    assert isinstance(fedrax.simulation.load_model(tmp_path / "m"), Variables)
    with pytest.raises(FedraxError, match=r"0 is of shape \(3,\), should be of shape \(5,\)"):
        fedrax.simulation.load_model(tmp_path / "m", like=Variables([jnp.zeros(5), params[1]], statistics))
    with pytest.raises(FedraxError, match="a model file cannot hold"):
        save_model(tmp_path / "k", {"key": jax.random.key(0)})
    with pytest.raises(FedraxError, match="two arrays of the model are called a/b"):
        save_model(tmp_path / "k", {"a": {"b": jnp.zeros(2)}, "a/b": jnp.ones(2)})
    assert not (tmp_path / "k").exists()


def stored(name: str, dtype: str, array: np.ndarray) -> bytes:
    """A safetensors file with one array."""
    described = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [0, array.nbytes]}
    header = json.dumps({name: described}).encode()
    return len(header).to_bytes(8, "little") + header + array.tobytes()


def test_64_bit_arrays_of_a_file_are_kept(tmp_path):
    for dtype, array in (("I64", np.array([2**40 + 1])), ("F64", np.array([1e300, 1 / 3]))):
        (tmp_path / "model").write_bytes(stored("params/w", dtype, array))
        for found in (
            fedrax.simulation.load_model(tmp_path / "model"),
            fedrax.simulation.load_model(tmp_path / "model", like={"w": jnp.zeros(len(array), array.dtype.kind + "4")}),
        ):
            assert found["w"].dtype == array.dtype and (np.asarray(found["w"]) == array).all()
    long = simulate(method, task, federation, rounds=1, cohort_size=2, dtype="float64")
    long.save(tmp_path / "long")
    jax.tree.map(np.testing.assert_array_equal, fedrax.simulation.load_model(tmp_path / "long"), long.params)


def test_a_file_of_torch_save_raises_the_remedy(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02.")
    with pytest.raises(FedraxError, match=r"fedrax\.models\.load_weights reads files of torch\.save"):
        fedrax.simulation.load_model(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}}",
        b'\x80\x04\x95\x1e\x00\x00\x00cposix\nsystem\n(S"true"\ntR.',
        (n := json.dumps({"params/w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}).encode())
        and len(n).to_bytes(8, "little") + n,
        stored("params/w", "F8_E4M3", np.zeros(4, np.uint8)),
        stored("params/w", "C64", np.zeros(1, np.complex64)),
        stored("params/" + "a/" * 20_000, "F32", np.zeros(1, np.float32)),
    ],
)
def test_invalid_model_files_raise_a_clear_error(content, tmp_path):
    (tmp_path / "model").write_bytes(content)
    with pytest.raises(FedraxError, match="model"):
        fedrax.simulation.load_model(tmp_path / "model")
    with pytest.raises(FedraxError, match="there is no file"):
        fedrax.simulation.load_model(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FedraxError, match="not a regular file"):
        fedrax.simulation.load_model(tmp_path / "pipe")


def test_callback_receives_parameters_and_ends_the_run(tmp_path):
    seen = []

    def stop_at_four(snapshot):
        seen.append(snapshot)
        return snapshot.event["round"] == 4

    run = dict(rounds=8, cohort_size=2, eval_every=2)
    result = simulate(method, task, federation, **run, callbacks=[stop_at_four], directory=tmp_path / "run")
    assert result.stopped == "callback"
    assert [snapshot.event["round"] for snapshot in seen] == [2, 4]
    jax.tree.map(np.testing.assert_array_equal, seen[-1].params, result.params)
    assert seen[-1].model is seen[-1].params and result.model is result.params
    moved = dataclasses.replace(result, statistics={"mean": np.ones(2)})
    assert moved.model == Variables(result.params, moved.statistics)
    seen[-1].save(tmp_path / "kept.safetensors")
    jax.tree.map(
        np.testing.assert_array_equal, fedrax.simulation.load_model(tmp_path / "kept.safetensors"), result.params
    )
    whole = simulate(method, task, federation, **run)
    resumed = simulate(method, task, federation, **run, directory=tmp_path / "run", resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: simulate(method, task, federation, round=5), "unknown setting 'round'; did you mean 'rounds'"),
        (lambda: Scaffold(lr=0.1), r"'lr' is a field of Scaffold.local: Scaffold\(local=LocalSGD\(lr=0.1\)\)"),
        (lambda: LocalSGD(batchsize=3), "unknown field of LocalSGD: 'batchsize'; did you mean 'batch_size'"),
        (lambda: simulate(Scaffold, task, federation), r"the class Scaffold: give an object, Scaffold\(...\)"),
        (lambda: simulate(method, task, fedrax.data.load("digits")), "Federation.from_dataset"),
        (lambda: fedrax.Settings(round=5), "unknown field of Settings: 'round'; did you mean 'rounds'"),
        (lambda: Shards(client=5), "unknown field of Shards: 'client'; did you mean 'clients'"),
        (lambda: fedrax.Federation.from_dataset(fedrax.data.load("digits"), Shards, 0), "not the class Shards"),
        (lambda: fedrax.Federation.from_dataset(np.ones(3), Shards(), 0), "not a ndarray: Federation.from_arrays"),
        (lambda: simulate(method, task, federation, callbacks=print), "callbacks must be a list"),
        (lambda: fedrax.sweep(method, task, federation), "algorithms must be a list, not a FedAvg"),
        (
            lambda: fedrax.sweep([method], task, federation, seeds=3),
            "seeds must be a list or None, not 3: put brackets",
        ),
        (
            lambda: fedrax.tune(method, task, federation, {"local.lr": 0.1}),
            r"grid\['local.lr'\] must be a list, not 0.1",
        ),
        (lambda: simulate(method, Linear().build((4,), 3), federation), r"classification\(model\)"),
    ],
)
def test_invalid_arguments_raise_one_clear_message(mistake, message):
    with pytest.raises(FedraxError, match=message):
        mistake()


def test_unknown_names_are_rejected_with_suggestions():
    with pytest.raises(AttributeError, match="did you mean 'Scaffold'"):
        fedrax.Scafold  # noqa: B018
    result = simulate(method, task, federation, rounds=2, cohort_size=2, eval_every=2, per_client=True)
    for call in (result.metric, lambda name: result.cost_to_target(name, 0.5), result.plot):
        with pytest.raises(FedraxError, match="did you mean 'test_accuracy'"):
            call("test_acuracy")
    assert result.metric("test_loss") and "over clients: " in repr(result) and len(repr(result).splitlines()) < 12
    assert len(repr(fedrax.data.load("digits")).splitlines()) == 2
    model = fedrax.models.MLP(hidden=(8,)).build((4,), 3)
    assert repr(model) == "Model 'mlp' with features, blocks"
    assert repr(fedrax.classification(model)) == f"Task 'classification/{model.name}': loss, accuracy"


def test_model_with_too_few_outputs_is_rejected():
    few = classification(Linear().build((4,), 2))
    with pytest.raises(FedraxError, match="the model has 2 outputs per sample for 3 classes"):
        simulate(method, few, federation, rounds=1, cohort_size=2)
    simulate(
        method, classification(Linear().build((4,), 5)), federation, rounds=1, cohort_size=2
    )  # more outputs are allowed


def test_models_without_arrays_are_rejected():
    from fedrax.models import Model

    for model, message in (
        (Model(lambda key: {"w": "text"}, lambda params, x, key=None: x), "parameters must be arrays: .*'str'"),
        (Model(lambda key: {"w": jnp.ones(3)}, lambda params, x, key=None: None), "outputs are an array, not NoneType"),
        (Model(lambda key: {}, lambda params, x, key=None: x), "has no parameters"),
    ):
        with pytest.raises(FedraxError, match=message):
            simulate(method, classification(model), federation, rounds=1, cohort_size=2)


def test_code_that_jax_cannot_trace_is_reported_with_its_line():
    from fedrax.models import Model

    def apply(params, x, key=None):
        return x @ params if x.sum() > 0 else x @ -params

    place = r"\(in apply, test_result.py, line \d+\)"
    with pytest.raises(FedraxError, match=f"^the task's loss {place} asks for the truth"):
        simulate(
            method, classification(Model(lambda key: jnp.ones((4, 3)), apply)), federation, rounds=1, cohort_size=2
        )


def test_trajectory_of_selected_rounds():
    whole, some = (run(Scaffold(local=LOCAL), rounds=9, trajectory=t).trajectory for t in (True, [2, 3, 9]))
    assert len(whole) == 9 and len(some) == 3
    for r, mine in zip((2, 3, 9), some, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, whole[r - 1])
    with pytest.raises(FedraxError, match="rounds 1 to 4, not after 5"):
        run(rounds=4, trajectory=[2, 5])


def test_callback_receives_the_evaluation_that_reaches_the_target():
    seen: list[int] = []
    made = run(FedAvg(LOCAL), rounds=4, eval_every=1, target=0.01, callbacks=[lambda s: seen.append(s.event["round"])])
    assert made.stopped == "target" and seen == [event["round"] for event in made.events]
