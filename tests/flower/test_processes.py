"""The example as it is deployed: a SuperLink, SuperNodes and ``flwr run`` as processes over the network."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import fedrax
from fedrax import Federation, LocalSGD, Scaffold, classification, simulate
from fedrax.data import Shards, load
from fedrax.models import MLP
from fedrax.simulation import read_events

ROOT = Path(__file__).parents[2]
CLIENTS, ROUNDS = 2, 2
_PATIENCE = 300.0


def free_port() -> int:
    """A port without listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_listening(port: int, process: subprocess.Popen) -> None:
    """Wait until a process listens at the port."""
    due = time.monotonic() + _PATIENCE
    while time.monotonic() < due and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError("a process of Flower does not listen")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment variables for processes that use this environment's commands and write below ``tmp_path``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    home = {"FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
    return os.environ | home | {"PATH": path}


@pytest.fixture
def superlink(environment: dict[str, str], tmp_path: Path) -> Iterator[int]:
    """Port of a SuperLink with two SuperNodes."""
    port = free_port()
    with ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen:
            log = stack.enter_context((tmp_path / f"{command[0]}.log").open("a"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            return process

        link = start("flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
        wait_until_listening(port, link)
        for number in range(CLIENTS):
            where = ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            start("flower-supernode", "--insecure", *where, "--node-config", f"partition-id={number}")
        yield port


def example(tmp_path: Path) -> Path:
    """The example with two clients, two rounds and a fixed seed."""
    folder = shutil.copytree(ROOT / "examples" / "flower", tmp_path / "app")
    changes = {
        "federation.py": [("CLIENTS = 4", f"CLIENTS = {CLIENTS}")],
        "client_app.py": [("TASK, data)", "TASK, data, seed=0)")],
        "server_app.py": [
            ("rounds=5", f"rounds={ROUNDS}"),
            ("eval_every=5", f'eval_every=1, seed=0, directory="{tmp_path / "run"}"'),
        ],
    }
    for name, lines in changes.items():
        path = folder / "digits" / name
        text = path.read_text("utf-8")
        for old, new in lines:
            assert text.count(old) == 1
            text = text.replace(old, new)
        path.write_text(text, "utf-8")
    return folder


@pytest.mark.slow
def test_deployed_example_agrees_with_the_simulator(superlink: int, environment: dict[str, str], tmp_path: Path):
    home = Path(environment["FLWR_HOME"])
    home.mkdir(exist_ok=True)
    connection = (
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{superlink}"\ninsecure = true\n'
    )
    (home / "config.toml").write_text(connection, "utf-8")
    run = ["flwr", "run", str(example(tmp_path)), "here", "--stream"]
    shown = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    assert shown.returncode == 0 and f"fedrax: round {ROUNDS}, " in shown.stdout + shown.stderr, shown.stdout

    digits = load("digits")
    federation = Federation.from_dataset(digits, Shards(clients=CLIENTS, per_client=3), seed=0)
    task = classification(MLP(hidden=(32,)).build((8, 8, 1), 10))
    method = Scaffold(local=LocalSGD(lr=0.05, steps=10))
    simulated = simulate(method, task, federation, rounds=ROUNDS, cohort_size=2, eval_every=1, plan="scan", devices=1)
    events, model = (
        read_events(tmp_path / "run"),
        fedrax.simulation.load_model(tmp_path / "run" / "model.safetensors", simulated.params),
    )
    for actual, desired in zip(events, simulated.events, strict=True):
        for name in desired.keys() - {"seconds"}:
            np.testing.assert_allclose(actual[name], desired[name], rtol=2e-4, err_msg=name)
    for name, layer in simulated.params.items():
        for part in layer:
            np.testing.assert_allclose(model[name][part], layer[part], rtol=1e-4, atol=1e-5)
