"""``fedrax deploy``: the app, its certificates and keys, the rehearsal, and a trial whose processes all end."""

from __future__ import annotations

import json
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import textwrap
import time
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk

from fedrax import FedAvg, FedraxError, LocalSGD
from fedrax.cli import main
from fedrax.flower import Deployment, LocalGrid, client_app, processes, server_app, trial
from fedrax.flower.credentials import make_certificates, make_node_key
from fedrax.flower.deployment import supernode_command
from fedrax.report import find_runs, read_run
from fedrax.simulation import read_events
from tests.flower.messages import SIZES, TASK, X, Y, client_samples

FILE = """
name = "four hospitals"
[partition]
name = "shards"
clients = 4
[model]
name = "logistic"
[algorithm]
name = "losac"
local = { lr = 0.05, steps = 2, blocks = 3 }
[run]
rounds = 3
cohort_size = 4
eval_every = 1
"""


@pytest.fixture
def experiment_file(tmp_path: Path) -> Path:
    """File of an experiment with four clients."""
    path = tmp_path / "x.toml"
    path.write_text(FILE)
    return path


def handshake_succeeds(certificates: Path, name: str) -> bool:
    """Whether a client that trusts the authority accepts the server under this name with strict verification."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    client.load_verify_locations(certificates / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=name),
    )
    waiting = set(ends)
    for _ in range(10):
        for end in (ends[1], ends[0]):
            try:
                end.do_handshake()
                waiting.discard(end)
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return not waiting


def test_certificates_are_valid_for_the_named_hosts_and_localhost(tmp_path: Path):
    make_certificates(tmp_path, ["fl.example.org", "192.0.2.7"])
    for name in ("fl.example.org", "192.0.2.7", "localhost", "127.0.0.1"):
        assert handshake_succeeds(tmp_path, name)
    assert not handshake_succeeds(tmp_path, "other.example.org")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "server.crt", "server.key"]
    with pytest.raises(FedraxError, match="neither a host name nor an address"):
        make_certificates(tmp_path / "other", ["https://fl.example.org"])


def test_private_keys_are_readable_by_their_owner_only(tmp_path: Path):
    make_certificates(tmp_path, [])
    make_node_key(tmp_path / "keys" / "client-0")
    for path in (tmp_path / "server.key", tmp_path / "keys" / "client-0"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    private = load_ssh_private_key((tmp_path / "keys" / "client-0").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "keys" / "client-0.pub").read_bytes())
    assert private.public_key() == public
    with pytest.raises(FedraxError, match="cannot write"):
        make_node_key(tmp_path / "keys" / "client-0")


def test_app_of_an_experiment_equals_the_simulator(
    experiment_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "d"
    assert main(["deploy", str(experiment_file), "--out", str(out), "--server", "fl.example.org"]) == 0
    printed = capsys.readouterr().out
    assert "rehearsal: the losses are those of the simulator" in printed
    assert handshake_succeeds(out / "certificates", "fl.example.org")
    assert sorted(path.name for path in (out / "keys").glob("*.pub")) == [f"client-{k}.pub" for k in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # files that Flower's app needs
        bundle = build_fab_from_disk(out / "app")
    names = set(zipfile.ZipFile(BytesIO(bundle)).namelist())
    files = ("__init__.py", "shared.py", "server_app.py", "client_app.py", "settings.toml", "data.json")
    assert names == {"pyproject.toml", ".info/CONTENT", *(f"deployment/{name}" for name in files)}
    readme = (out / "README.md").read_text("utf-8")
    assert "fl.example.org:8000" in readme and "--database superlink.db" in readme  # or a restart forgets the keys
    assert "/superlink.db*" in (out / ".gitignore").read_text("utf-8")
    status = main(["deploy", str(experiment_file), "--out", str(out)])
    assert status == 2 and f"fedrax deploy {out} --trial" in capsys.readouterr().err
    # a changed app is rehearsed as it is
    client = out / "app" / "deployment" / "client_app.py"
    client.write_text(client.read_text().replace("DEPLOYMENT.client_samples(context)", "changed(context)"))
    client.write_text(client.read_text().replace("def data", textwrap.dedent(CHANGED) + "\n\ndef data"))
    assert main(["deploy", str(out)]) == 0
    assert "its losses differ from those of the simulator" in capsys.readouterr().out


def test_rehearsal_ends_at_the_first_error_of_the_data_function(
    experiment_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """With one message, and without waiting for the client."""
    assert main(["deploy", str(experiment_file), "--out", str(tmp_path / "d"), "--quiet"]) == 0
    client = tmp_path / "d" / "app" / "deployment" / "client_app.py"
    own = "open(f'hospital-{context.node_config[\"partition-id\"] + 7}.csv')"
    client.write_text(client.read_text().replace("DEPLOYMENT.client_samples(context)", own))
    line = client.read_text().partition("open(")[0].count("\n") + 1
    capfd.readouterr()
    began = time.monotonic()
    assert main(["deploy", str(tmp_path / "d")]) == 2
    assert time.monotonic() - began < 60
    printed = capfd.readouterr()
    text = "fedrax: client 0 failed: FileNotFoundError: [Errno 2] No such file or directory: 'hospital-7.csv'"
    assert printed.err == f"{text} ({client}, line {line}, in data)\n" and not printed.out


def test_the_epsilon_of_a_deployment_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It has no amplification, unlike that of a simulation with Poisson cohorts."""
    monkeypatch.chdir(tmp_path)
    flags = "--data digits --partition.clients 4 --model logistic --algorithm clientdp --algorithm.noise 2"
    flags += " --run.participation poisson --run.rounds 2 --run.cohort-size 2 --run.delta 1e-5"
    assert main(["deploy", *flags.split(), "--out", "d"]) == 0
    printed = re.search(
        r"privacy: epsilon ([\d.]+) at delta 1e-05 .*not amplified by sampling", capsys.readouterr().out
    )
    assert main(["privacy", *flags.split(), "--picture", "None", "--json", "--run.amplification", "none"]) == 0
    alone = json.loads(capsys.readouterr().out)["spent"]["epsilon"]
    assert printed is not None and float(printed[1]) == pytest.approx(alone, rel=1e-3)


def test_an_app_that_reads_node_configs_is_rehearsed_where_no_machine_has_all_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rows = [f"{name},{row / 7},{row % 2}" for name in "ab" for row in range(20)]
    (tmp_path / "all.csv").write_text("\n".join(["who,x,label", *rows]))
    for name in "ab":
        own = [row for row in rows if row.startswith(name)]
        (tmp_path / f"own {name}.csv").write_text("\n".join(["who,x,label", *own]))
    monkeypatch.chdir(tmp_path)
    flags = "--data csv --data.path all.csv --data.client who --data.standardize client --partition natural"
    flags += " --model logistic --run.rounds 1 --run.cohort-size 2 --out d --quiet"
    assert main(["deploy", *flags.split()]) == 0
    client = tmp_path / "d" / "app" / "deployment" / "client_app.py"
    reading = (
        "__import__('fedrax').data.load('csv', path=context.node_config['path'], standardize='client', drop=('who',))"
    )
    client.write_text(client.read_text().replace("DEPLOYMENT.client_samples(context)", reading))
    server = client.with_name("server_app.py")
    server.write_text(server.read_text().replace("DEPLOYMENT.test_samples()", "None"))
    (tmp_path / "all.csv").unlink()
    assert main(["deploy", "d"]) == 2 and "KeyError: 'path'" in capsys.readouterr().err
    (tmp_path / "nodes.toml").write_text("".join(f'[[node]]\npath = "own {name}.csv"\n' for name in "ab"))
    assert main(["deploy", "d", "--nodes", "nodes.toml"]) == 0
    printed = capsys.readouterr().out
    assert "next: fedrax deploy d --nodes nodes.toml --trial" in printed
    assert "not compared with the simulator, which needs the experiment's data" in printed and "all.csv" in printed
    (tmp_path / "nodes.toml").write_text('[[node]]\npath = "own a.csv"\n')
    assert main(["deploy", "d", "--nodes", "nodes.toml"]) == 2
    assert "has 1 tables [[node]], and the deployment 2 clients" in capsys.readouterr().err


CHANGED = """
def changed(context):
    own = DEPLOYMENT.client_samples(context)
    return own.train.x, 9 - own.train.y
"""


def test_texts_of_the_experiment_are_no_code_of_the_app(tmp_path: Path):
    """Neither a name that ends a docstring nor one with the form of user code."""
    (tmp_path / "secret.py").write_text("KEY = 1\n")
    hostile = f"name = '{tmp_path}/secret.py:KEY'"
    (tmp_path / "x.toml").write_text(FILE.replace('name = "four hospitals"', hostile))
    out = tmp_path / "d"
    assert main(["deploy", str(tmp_path / "x.toml"), "--out", str(out), "--quiet"]) == 0
    package = out / "app" / "deployment"
    assert not (package / "secret.py").exists()
    assert all("secret" not in path.read_text() for path in package.glob("*.py"))


def test_user_code_is_copied_to_the_app(tmp_path: Path):
    (tmp_path / "widths.py").write_text("HIDDEN = 3\n")
    model = """
    from widths import HIDDEN
    from fedrax.models import MLP

    def small(input_shape, num_outputs):
        return MLP(hidden=(HIDDEN,)).build(input_shape, num_outputs)
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(model))
    (tmp_path / "x.toml").write_text(FILE.replace('name = "logistic"', 'name = "own.py:small"'))
    assert main(["deploy", str(tmp_path / "x.toml"), "--out", str(tmp_path / "d"), "--quiet"]) == 0
    package = shutil.move(tmp_path / "d" / "app" / "deployment", tmp_path / "elsewhere")
    for name in ("own.py", "widths.py", "x.toml"):
        (tmp_path / name).unlink()
    assert "own.py:small" in (Path(package) / "settings.toml").read_text()
    shapes = [leaf.shape for leaf in jax.tree.leaves(Deployment.read(package).task.init(jax.random.key(0)))]
    assert (3,) in shapes


def test_samples_with_several_inputs_are_deployed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(0)
    inputs = {"row": rng.normal(size=(24, 3)).astype(np.float32), "mask": rng.random((24, 3)) < 0.5}
    arrays = {f"x_{name}_{part}": a for name, a in inputs.items() for part in ("train", "test")}
    labels = {f"y_{part}": np.arange(24) % 2 for part in ("train", "test")}
    np.savez(tmp_path / "data.npz", client_train=np.arange(24) % 4, **arrays, **labels)
    model = """
    import jax.numpy as jnp
    from fedrax.models import Model

    def masked(input_shape, num_outputs):
        def apply(w, x, key=None):
            return jnp.where(x["mask"], x["row"], 0) @ w
        return Model(lambda key: jnp.zeros((*input_shape["row"], num_outputs)), apply)
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(model))
    data = f'[data]\nname = "npz"\npath = "{tmp_path / "data.npz"}"\n[partition]\nname = "natural"\n'
    text = data + FILE.partition("[model]")[2].replace('name = "logistic"', '[model]\nname = "own.py:masked"')
    (tmp_path / "x.toml").write_text(text)
    assert main(["deploy", str(tmp_path / "x.toml"), "--out", str(tmp_path / "d")]) == 0
    assert "rehearsal: the losses are those of the simulator" in capsys.readouterr().out
    # without the path of the data, which clients of a real federation do not read
    settings = tmp_path / "d" / "app" / "deployment" / "settings.toml"
    settings.write_text(settings.read_text().replace(str(tmp_path), "replaced"))
    assert Deployment.read(settings.parent).clients == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--run.stragglers", "0.5"], "stragglers is a setting of simulations"),
        (["--run.participation", "asynchronous", "--run.participation.trace", "t.csv"], "when uploads arrive"),
        (["--run.participation", "availability", "--run.participation.trace", "t.csv"], "would not contain the file"),
        (["--server", "two words"], "neither a host name nor an address"),
    ],
)
def test_unsupported_settings_are_rejected_before_files_are_written(
    flags: list[str], words: str, experiment_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["deploy", str(experiment_file), "--out", str(tmp_path / "d"), *flags]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "d" / "app").exists()


def test_run_and_node_config_override_arguments(tmp_path: Path):
    """The server reads its run config, a client its node config; a client never takes its seed from the server."""
    method = FedAvg(local=LocalSGD(lr=0.05, steps=2, batch_size=2))  # other samples with another seed
    config = {"rounds": 2, "seed": 3, "directory": str(tmp_path / "run"), "target": "none", "of the app": 1}
    events = []
    for node_config in ({"seed": 3}, {"seed": 3, "directory": str(tmp_path / "clients")}, {}):
        nodes = [{"partition-id": k, **node_config} for k in range(len(SIZES))]
        app = server_app(method, TASK, clients=len(SIZES), rounds=9, cohort_size=3, test=(X, Y), target=0.01)
        config["directory"] = str(tmp_path / f"run{len(events)}")
        context = Context(1, 1, {}, RecordDict(), config)
        app(LocalGrid(client_app(method, TASK, client_samples), nodes), context)
        events.append([event["train_loss"] for event in read_events(config["directory"])])
    assert events[0] == events[1] != events[2] and len(events[0]) == 2
    assert read_run(tmp_path / "run0").seed == 3
    assert (tmp_path / "clients").is_dir()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"resume": "yes"}, "resume in the run config must be true or false, not 'yes'"),
        ({"seed": 1.5}, "seed in the run config must be a whole number"),
        ({"timeout": "long"}, "timeout in the run config must be seconds"),
        ({"directory": 3}, "directory in the run config must be a path"),
        ({"rounds": -1}, "rounds must be"),
    ],
)
def test_run_config_with_wrong_types_raises_a_clear_error(config: dict[str, Any], message: str):
    app = server_app(FedAvg(), TASK, clients=1, rounds=1, cohort_size=1, wait=1.0)
    grid = LocalGrid(client_app(FedAvg(), TASK, client_samples), 1)
    with pytest.raises(FedraxError, match=message):
        app(grid, Context(1, 1, {}, RecordDict(), config))


def test_seed_of_a_client_must_be_an_integer():
    app = server_app(FedAvg(), TASK, clients=1, rounds=1, cohort_size=1, test=(X, Y))
    grid = LocalGrid(client_app(FedAvg(), TASK, client_samples), [{"partition-id": 0, "seed": "none"}])
    with pytest.raises(FedraxError, match=r"client 0 failed: node_config\['seed'\] must be a whole number, not 'none'"):
        app(grid, Context(1, 1, {}, RecordDict(), {}))


SLEEPER = """
import signal, subprocess, sys, time
{ignored}
child = [] if sys.argv[2:] else [subprocess.Popen([sys.executable, *sys.argv, "grandchild"], start_new_session=True)]
open(sys.argv[1], "a").write(str(__import__("os").getpid()) + "\\n")
time.sleep(600)
"""
OWNER = """
import os, signal, sys
from pathlib import Path
from fedrax.flower import processes
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # some of them may be ignored where tests run
    signal.signal(number, signal.default_int_handler)
processes._GRACE_SECONDS = 0.5
with processes.ProcessSet(Path(sys.argv[1]), os.environ) as started:
    for name in ("polite", "stubborn"):
        started.start(name, [sys.executable, f"{name}.py", "pids"])
    started.wait(lambda: Path("pids").exists() and len(Path("pids").read_text().split()) == 4, 60, "the start")
    Path("ready").touch()
    if sys.argv[2] == "error":
        raise RuntimeError("an error")
    if sys.argv[2] == "crash":
        started.start("crash", [sys.executable, "-c", "raise SystemExit(3)"])
    started.wait(lambda: False, 60, "nothing")
"""


def is_running(number: int) -> bool:
    """Whether a process runs."""
    return any(one.number == number for one in processes._running())


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGHUP", "error", "crash"])
def test_child_processes_end_with_their_parent(end: str, tmp_path: Path):
    """Also those that ignore SIGTERM, and leaders of process groups."""
    for name, ignored in (("polite", ""), ("stubborn", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")):
        (tmp_path / f"{name}.py").write_text(SLEEPER.format(ignored=ignored))
    (tmp_path / "owner.py").write_text(OWNER)
    owner = subprocess.Popen([sys.executable, "owner.py", "logs", end], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    due = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < due:
        time.sleep(0.05)
    numbers = list(map(int, (tmp_path / "pids").read_text().split()))
    if end.startswith("SIG"):
        assert len(numbers) == 4 and all(map(is_running, numbers))
        owner.send_signal(getattr(signal, end))
    _, printed = owner.communicate(timeout=60)
    words = {"error": "an error", "crash": "crash ended with status 3"}.get(end, "Interrupted")
    assert owner.returncode != 0 and words in printed, printed
    assert not any(map(is_running, numbers))


@pytest.mark.slow
def test_trial_equals_the_simulator_and_leaves_no_process(
    experiment_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Four clients of LoSAC over TLS, with registered keys."""
    before = {one.number for one in processes._running()}
    assert main(["deploy", str(experiment_file), "--out", str(tmp_path / "d"), "--trial"]) == 0
    assert "trial: the losses are those of the simulator" in capsys.readouterr().out
    place = tmp_path / "d" / "trial"
    actual, desired = read_events(place / "run"), read_events(place / "simulation")
    assert [event["clients"] for event in actual] == [4, 4, 4]
    assert trial.largest_difference(actual, desired) < 1e-5
    assert [run.federation for run in find_runs(place)] == [True, False]
    left = [one for one in processes._running() if one.number not in before]
    assert not [one for one in left if b"flwr" in Path(f"/proc/{one.number}/cmdline").read_bytes()]


@pytest.mark.slow
def test_trial_ends_at_the_first_error_of_the_data_function(
    experiment_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One that a rehearsal does not have. The text of the error is in the client's log, and not in the server's."""
    monkeypatch.delenv("FLWR_HOME", raising=False)
    two = ["--partition.clients", "2", "--run.cohort-size", "2", "--quiet"]
    assert main(["deploy", str(experiment_file), "--out", str(tmp_path / "d"), *two]) == 0
    client = tmp_path / "d" / "app" / "deployment" / "client_app.py"
    client.write_text(client.read_text() + textwrap.dedent(FAILING))
    assert main(["deploy", str(tmp_path / "d"), "--trial"]) == 2
    words = (
        "did not introduce itself: DataFunctionError: the function data of client 1 failed (ValueError in client_app.py"
    )
    assert words in capsys.readouterr().err
    logs = tmp_path / "d" / "trial" / "logs"
    texts = {name: (logs / f"{name}.log").read_text() for name in ("client-1", "superlink", "run")}
    assert ["Jane Doe" in text for text in texts.values()] == [True, False, False]


FAILING = """

import os


def failing(context):
    if "FLWR_HOME" in os.environ and context.node_config["partition-id"] == 1:
        raise ValueError("could not convert 'Jane Doe' to a number")
    return data(context)


app = client_app(DEPLOYMENT.algorithm, DEPLOYMENT.task, failing)
"""


@pytest.mark.slow
def test_supernode_without_a_registered_key_is_rejected(experiment_file: Path, tmp_path: Path):
    directory, place = tmp_path / "d", tmp_path / "place"
    one = ["--partition.clients", "1", "--run.cohort-size", "1", "--quiet"]
    assert main(["deploy", str(experiment_file), "--out", str(directory), *one]) == 0
    make_node_key(tmp_path / "stranger")
    with processes.ProcessSet(place / "logs", trial._environment(place / "flower")) as started:
        configs = trial.read_nodes(None, trial.read_deployment(directory).clients, seed=0)
        at = trial.start_federation(started, directory, place, configs)
        certificate, port = str(directory / "certificates" / "ca.crt"), trial._free_port()
        command = supernode_command(at, port, certificate, str(tmp_path / "stranger"), "partition-id=0")
        stranger = started.start("stranger", command)
        with pytest.raises(FedraxError, match="stranger ended with status"):
            started.wait(lambda: False, 120, "the refusal")
        assert stranger.returncode
