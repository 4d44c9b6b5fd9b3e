"""Tests of the data, the method and the Flower app: ``python -m pytest``."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from starter_package.method import ClippedAvg

from fedrax import FedAvg, Federation, Settings, simulate
from fedrax.experiments import experiment, read_file

ROOT = Path(__file__).parents[1]
SPEC = read_file(ROOT / "experiment.toml")
FEW = Settings(rounds=2, cohort_size=2, eval_every=2)


@pytest.fixture(scope="module")
def problem():
    """The task and the federation of experiment.toml."""
    _, task, federation = experiment.build(SPEC)
    return task, federation


def test_every_clinic_has_samples(problem):
    """Each clinic has enough rows to train on."""
    _, federation = problem
    assert min(federation.sizes) > 10


def test_a_limit_that_no_upload_reaches_gives_fedavg(problem):
    """Without clipping the method is FedAvg."""
    clipped = simulate(ClippedAvg(local=SPEC.algorithm.local, limit=1e6), *problem, FEW)
    plain = simulate(FedAvg(local=SPEC.algorithm.local), *problem, FEW)
    assert clipped.events[-1]["test_loss"] == pytest.approx(plain.events[-1]["test_loss"], rel=1e-5)


def test_the_model_learns(problem):
    """The experiment reduces the test loss by a fifth or more."""
    result = simulate(SPEC.algorithm, *problem, SPEC.run)
    first, *_, last = [loss for _, loss in result.metric("test_loss")]
    assert last < 0.8 * first


def test_the_flower_app_computes_what_a_simulation_does(problem):
    """A federation of the app's clients has the losses of a simulation with their samples."""
    pytest.importorskip("flwr", reason='the Flower app needs: pip install "fedrax[flower]"')
    from starter_package import client_app, federation

    assert problem[1].num_clients == federation.CLIENTS

    from fedrax.flower import LocalGrid, federate

    file = {"path": str(federation.DATA.path), "seed": 0}
    nodes = [{"partition-id": k, "clinic": name} | file for k, name in enumerate(problem[1].client_names)]
    own = [client_app.data(SimpleNamespace(node_config=node))[0] for node in nodes]
    x, y = (np.concatenate(parts) for parts in zip(*own, strict=True))
    clinics = np.repeat(np.arange(len(own)), [len(labels) for _, labels in own])
    together = Federation.from_arrays(x, y, clinics, shuffle=False)
    grid = LocalGrid(client_app.app, nodes)
    deployed = federate(grid, federation.METHOD, federation.TASK, FEW, clients=federation.CLIENTS, seed=0)
    simulated = simulate(federation.METHOD, federation.TASK, together, FEW)
    losses = [[event["train_loss"] for event in result.events] for result in (deployed, simulated)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
