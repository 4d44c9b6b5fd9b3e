"""A federation that sends adapters alone: the frozen parameters are each client's own, and the same by their digest."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedrax import FedAvg, FedraxError, LocalSGD, Task, classification, simulate, tree
from fedrax.cli import main
from fedrax.flower import client_app, federate, trial
from fedrax.models import MLP, freeze, lora
from fedrax.simulation import read_events
from fedrax.simulation.persistence.run_identity import of_frozen
from tests.flower.messages import COHORT, FEDERATION, SIZES, SerializingGrid, X, Y, assert_close, client_samples

METHOD = FedAvg(local=LocalSGD(lr=0.1, steps=2, batch_size=3))
MODEL = MLP(hidden=(64, 64)).build((4,), 3)
SETTINGS: Any = dict(rounds=2, cohort_size=COHORT, seed=0)


def task_of(seed: int) -> Task:
    """Adapters of a model with the weights of a file, here of a seed."""
    return classification(lora(MODEL, MODEL.init(jax.random.key(seed)), jnp.ones((1, 4)), rank=2, trainable="output/*"))


TASK = task_of(0)


class OwnApps(SerializingGrid):
    """Each client has its own app; ``later`` has the apps after the introductions."""

    def __init__(self, apps: list[ClientApp], later: list[ClientApp] | None = None):
        super().__init__(apps[0], len(apps))
        self._apps, self._later = apps, later or apps

    def _reply(self, message: Message) -> Message:
        apps = self._apps if message.metadata.message_type == "query" else self._later
        self.app = apps[message.metadata.dst_node_id - 2]
        return super()._reply(message)


def apps(*others: int) -> list[ClientApp]:
    """The clients' apps, of which ``others`` have other weights."""
    made = [client_app(METHOD, task, client_samples, seed=0) for task in (TASK, task_of(1))]
    return [made[client in others] for client in range(len(SIZES))]


def federated(grid: SerializingGrid, **changes: Any) -> Any:
    settings: Any = SETTINGS | dict(test=(X, Y), wait=1.0, timeout=30.0) | changes
    return federate(grid, METHOD, TASK, clients=len(SIZES), **settings)


def test_messages_have_the_adapters_alone_and_rounds_are_the_simulators():
    found = federated(OwnApps(apps()))
    wanted = simulate(METHOD, TASK, FEDERATION, eval_every=2, **SETTINGS)
    assert_close(found.params, wanted.params, 1e-5)
    adapters = tree.num_bytes(jax.eval_shape(TASK.init, jax.random.key(0)))
    base = tree.num_bytes(MODEL.init(jax.random.key(0)))
    last = found.events[-1]
    assert last["bytes_up"] == 2 * COHORT * adapters == wanted.events[-1]["bytes_up"]
    assert last["wire_bytes_up"] < 2 * COHORT * (adapters + 2_000) < 2 * COHORT * base
    assert last["wire_bytes_down"] < 2 * COHORT * (adapters + 3_000) < 2 * COHORT * base


def test_a_client_with_other_weights_is_rejected_with_both_digests(caplog: pytest.LogCaptureFixture):
    ours, theirs = of_frozen(TASK.frozen), of_frozen(task_of(1).frozen)
    assert ours != theirs and re.fullmatch("[0-9a-f]{32}", ours)
    words = (
        rf"5 of 6 clients .*client 4 \(node 6\) is rejected: .* digest {theirs}, .* server digest {ours}: load the same"
    )
    with pytest.raises(FedraxError, match=words):
        federated(OwnApps(apps(4)))
    assert f"digest {theirs}" in caplog.text
    plain = client_app(METHOD, classification(MODEL), client_samples, seed=0)
    with pytest.raises(FedraxError, match=r"client 0 .* no digest, as of a model without any"):
        federated(OwnApps([plain, *apps()[1:]]))


def test_weights_that_change_after_the_introduction_are_noticed(caplog: pytest.LogCaptureFixture):
    result = federated(OwnApps(apps(), later=apps(2)), cohort_size=len(SIZES), rounds=1)
    assert result.events[-1]["clients"] == len(SIZES) - 1
    assert re.search(f"client 2 .*this client is rejected: .*{of_frozen(task_of(1).frozen)}", caplog.text)


def test_a_federation_with_other_weights_is_not_resumed(tmp_path: Path):
    federated(OwnApps(apps()), directory=tmp_path)
    other: Any = SETTINGS | dict(test=(X, Y), wait=1.0, timeout=30.0, rounds=3)
    grid = SerializingGrid(client_app(METHOD, task_of(1), client_samples, seed=0), len(SIZES))
    with pytest.raises(FedraxError, match="frozen parameters"):
        federate(grid, METHOD, task_of(1), clients=len(SIZES), directory=tmp_path, resume=True, **other)
    assert len(federated(OwnApps(apps()), directory=tmp_path, resume=True, rounds=3).events) == 3


def test_digests_tell_names_shapes_types_and_values_apart():
    w = jnp.arange(6.0)
    same = [{"a": w}, {"a": np.arange(6, dtype=np.float32)}]
    others = [{"b": w}, {"a": w.reshape(2, 3)}, {"a": w + 1}, {"a": w.astype(jnp.bfloat16)}, {"a": w, "b": w}]
    assert len({of_frozen(one) for one in same}) == 1
    assert len({of_frozen(one) for one in [*same, *others]}) == 1 + len(others)
    assert of_frozen(()) == "" == of_frozen(freeze(MODEL, MODEL.init(jax.random.key(0)), "*").frozen)


TRANSFORMER = """
import jax.numpy as jnp
from flax import linen as nn
from fedrax.models import from_linen


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x[..., 0]) + self.param("positions", nn.initializers.normal(0.1), (8, 16))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(axis=1))


def transformer(input_shape):
    return from_linen(Transformer(), jnp.zeros((1, *input_shape)))
"""
FILE = """
name = "adapters"
[partition]
name = "shards"
clients = 2
[model]
name = "model.py:transformer"
[algorithm]
local = { lr = 0.1, steps = 2, batch_size = 8 }
[run]
rounds = 2
cohort_size = 2
eval_every = 1
"""
LORA = """
[finetuning]
name = "lora"
weights = "pretrained/model.safetensors"
rank = 2
trainable = ["head/*"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment that fine-tunes the model of another one's run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(textwrap.dedent(TRANSFORMER))
    (tmp_path / "pretraining.toml").write_text(FILE)
    (tmp_path / "adapters.toml").write_text(FILE + LORA)
    assert main(["run", "pretraining.toml", "--quiet", "--out", "pretrained"]) == 0
    return tmp_path


@pytest.mark.slow
def test_an_experiment_with_adapters_is_deployed(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["deploy", "adapters.toml", "--out", "d"]) == 0
    assert "rehearsal: the losses are those of the simulator" in capsys.readouterr().out
    assert not list((folder / "d").rglob("*.safetensors"))
    # on another machine, the file is in the data directory
    (folder / "pretrained").rename(folder / "moved")
    assert main(["deploy", "d"]) == 2
    assert "finetuning.weights: there is no" in capsys.readouterr().err
    assert main(["deploy", "d", "--data-dir", "moved"]) == 0


@pytest.mark.slow
def test_a_trial_with_processes_sends_adapters_alone(folder: Path):
    """Server and clients are processes that load the weights from the file."""
    assert main(["deploy", "adapters.toml", "--out", "d", "--trial"]) == 0
    ours, theirs = (read_events(folder / "d" / "trial" / name) for name in ("run", "simulation"))
    assert trial.largest_difference(ours, theirs) < 1e-5
    assert [event["bytes_up"] for event in ours] == [event["bytes_up"] for event in theirs]
    whole = (folder / "pretrained" / "model.safetensors").stat().st_size
    assert ours[-1]["wire_bytes_up"] < 4 * whole
