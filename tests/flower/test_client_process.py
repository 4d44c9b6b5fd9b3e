"""Work of a client in the process that Flower starts for each message."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from flwr.app import Message, MessageType

from fedrax import LocalSGD, Scaffold
from fedrax.flower import client as client_module
from fedrax.flower import client_app
from tests.flower.messages import SIZES, TASK, SerializingGrid, X, Y, client_samples, run_federation

METHOD = Scaffold(local=LocalSGD(lr=0.05, steps=2, batch_size=4))
HEAVY = (
    *("matplotlib", "polars", "sklearn", "torch", "flax", "equinox"),
    *("fedrax.experiments", "fedrax.report", "fedrax.flower.server", "fedrax.simulation.run", "fedrax.models.pytorch"),
)
PROGRAM = """
import sys
from fedrax import LocalSGD, Scaffold, classification
from fedrax.data import load
from fedrax.flower import client_app
from fedrax.models import MLP
client_app(Scaffold(), classification(MLP(hidden=(3,)).build((4,), 3)), lambda context: load("digits").train)
load("digits")
print(*sys.modules)
"""


def test_app_imports_only_what_it_uses():
    shown = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert not set(shown.stdout.split()) & set(HEAVY)


def test_evaluation_traces_no_training(monkeypatch: pytest.MonkeyPatch):
    grid = SerializingGrid(
        client_app(METHOD, TASK, lambda context: (client_samples(context), (X[:3], Y[:3])), seed=0), len(SIZES)
    )
    kinds, schemas = [], client_module.message_schemas

    def count_traces(*arguments: Any) -> Any:
        assert kinds[-1] == MessageType.TRAIN
        return schemas(*arguments)

    answer = grid._reply

    def reply(message: Message) -> Message:
        kinds.append(message.metadata.message_type)
        return answer(message)

    monkeypatch.setattr(grid, "_reply", reply)
    monkeypatch.setattr(client_module, "message_schemas", count_traces)
    federated = run_federation(METHOD, grid, test=None, rounds=1)
    assert {MessageType.TRAIN, MessageType.EVALUATE} <= set(kinds) and "test_loss" in federated.events[0]
