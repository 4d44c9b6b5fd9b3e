"""Code of other libraries on docs/coming-from.md, run if they are installed.

Data, models and loops over batches, which the page omits, are defined here.
"""

from __future__ import annotations

import copy
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"

CLIENTS, SAMPLES = 12, 30


def code_of(library: str) -> str:
    """The code block of the page whose caption begins with this name."""
    page = PAGE.read_text("utf-8")
    found = re.search(rf"```{{code-block}} python\n:caption: {library}[^\n]*\n\n(.*?)^```$", page, re.M | re.S)
    assert found, library
    return found[1]


def clients() -> list[tuple[np.ndarray, np.ndarray]]:
    """A table for each client, with classes that a linear model separates."""
    rng = np.random.default_rng(0)
    right = rng.normal(size=(8, 3))
    inputs = [rng.normal(size=(SAMPLES, 8)).astype(np.float32) for _ in range(CLIENTS)]
    return [(x, (x @ right).argmax(axis=1)) for x in inputs]


def torch_parts() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    data = torch.utils.data
    sets = [data.TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in clients()]
    loaders = [data.DataLoader(part, batch_size=10, shuffle=True) for part in sets]
    return dict(torch=torch, nn=torch.nn, F=torch.nn.functional, copy=copy, random=random, loaders=loaders)


def accuracy(model: Any, torch: Any) -> float:
    x, y = (np.concatenate(part) for part in zip(*clients(), strict=True))
    with torch.no_grad():
        return float((model(torch.tensor(x)).numpy().argmax(axis=1) == y).mean())


def test_pytorch():
    parts = torch_parts()
    parts["torch"].manual_seed(0)
    exec(code_of("PyTorch"), parts)
    assert accuracy(parts["model"], parts["torch"]) > 0.6


def train_locally(model: Any, loader: Any, lr: float, epochs: int) -> None:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


FLOWER = """
import sys
sys.path.insert(0, {root!r})
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from tests.docs.test_other_libraries import accuracy, torch_parts, train_locally

parts = torch_parts()
torch, load_data = parts["torch"], lambda client: parts["loaders"][client]
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
{client}
client_app = app
{server}
    model.load_state_dict(result.arrays.to_torch_state_dict())
    print("accuracy", accuracy(model, torch))

from flwr.simulation import run_simulation

run_simulation(server_app=app, client_app=client_app, num_supernodes=12)
"""


def test_flower(tmp_path: Path):
    """In Flower's simulation, with processes for the clients."""
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    client, server = re.split(r"(?=^app = ServerApp)", code_of("Flower"), flags=re.MULTILINE)
    (tmp_path / "app.py").write_text(FLOWER.format(root=str(PAGE.parents[1]), client=client, server=server))
    completed = subprocess.run([sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert completed.returncode == 0 and "Received error" not in completed.stdout + completed.stderr, completed.stderr[
        -5000:
    ]
    found = re.search(r"^accuracy ([\d.]+)$", completed.stdout, re.MULTILINE)
    assert found and float(found[1]) > 0.6


def test_fedjax(monkeypatch: pytest.MonkeyPatch):
    jax = pytest.importorskip("jax")
    fedjax = pytest.importorskip("fedjax")
    monkeypatch.setattr(jax, "tree_map", None, raising=False)  # restored afterwards
    jnp = jax.numpy
    data = {b"%d" % i: dict(x=x, y=y) for i, (x, y) in enumerate(clients())}

    def logits(params: dict, x: Any) -> Any:
        return x @ params["w"] + params["b"]

    def loss(params: dict, batch: dict, key: Any) -> Any:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits(params, batch["x"])), batch["y"][:, None], axis=1)
        return -chosen.mean()

    model = SimpleNamespace(init=lambda key: dict(w=0.1 * jax.random.normal(key, (8, 3)), b=jnp.zeros(3)))
    parts = dict(fedjax=fedjax, jax=jax, loss=loss, model=model, train_data=fedjax.InMemoryFederatedData(data))
    exec(code_of("FedJAX"), parts)
    x, y = (np.concatenate(part) for part in zip(*clients(), strict=True))
    assert (logits(parts["state"].params, x).argmax(axis=1) == y).mean() > 0.5


def test_pfl_research():
    pytest.importorskip("pfl")
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism

    parts = torch_parts()
    torch, nn = parts["torch"], parts["nn"]
    torch.manual_seed(0)

    class Module(nn.Linear):
        """Logistic regression with the methods that pfl-research expects of a module."""

        def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
            return nn.functional.cross_entropy(self(x), y)

        def metrics(self, x: Any, y: Any, eval: bool = True) -> dict:
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}

    tensors = [(torch.tensor(x), torch.tensor(y)) for x, y in clients()]
    users = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    train = FederatedDataset(lambda user: PyTorchTensorDataset(tensors[user], user_id=str(user)), users)
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(1.0, 0.01))
    parts |= dict(PyTorchModel=PyTorchModel, SimulatedBackend=SimulatedBackend, FederatedAveraging=FederatedAveraging)
    parts |= dict(NNAlgorithmParams=NNAlgorithmParams, NNTrainHyperParams=NNTrainHyperParams)
    parts |= dict(NNEvalHyperParams=NNEvalHyperParams, train=train, test=train, central_privacy_mechanism=noise)
    parts["module"] = module = Module(8, 3)
    exec(code_of("pfl-research"), parts)
    assert accuracy(module, torch) > 0.5
