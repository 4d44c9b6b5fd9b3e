"""Deployment of an experiment: a directory with a Flower app, certificates and keys, made from an experiment file.

The app holds the experiment and what its task knows of the data: shapes, classes, means. It holds no samples.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomlkit
from flwr.app import Context

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.data import Dataset, Federation, Samples
from fedrax.errors import FedraxError
from fedrax.experiments import experiment, user_code
from fedrax.experiments.comparison import safe_name
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.task_specs import balanced_weights
from fedrax.files import new_directory, read_json, write_text
from fedrax.flower.client import client_of_federation
from fedrax.flower.credentials import CA, CERTIFICATE, KEY, make_certificates, make_node_key
from fedrax.flower.server import federation_settings
from fedrax.inputs import flat_inputs, from_flat
from fedrax.simulation.settings import Settings
from fedrax.version import VERSION

APP, PACKAGE = "app", "deployment"
"""Folder of the Flower app in a deployment, and its Python package."""
CERTIFICATES, KEYS = "certificates", "keys"
"""Folders of a deployment beside the app, which Flower sends to every node."""
DATABASE = "superlink.db"
"""File of the SuperLink with the registered keys and the runs."""
CONNECTION = "federation"
"""Name of the SuperLink in Flower's config.toml."""
_EXPERIMENT, _DATA = "settings.toml", "data.json"
"""Files in the app's package: the experiment, and facts about its data. The name experiment.toml is that of runs."""
_DESCRIPTIVE = ("num_classes", "mean", "std", "class_names", "name", "pixels", "padding", "vocabulary")
"""Fields of a federation that a task may depend on, besides shapes and the true parameters."""
_PLACEMENT = ("plan", "samples", "states", "devices", "chunk", "checkpoint_every", "seed")
"""Settings that say where and when a simulation computes: without a meaning in a deployment, whatever their value."""
_WEIGHTS = """
Server and clients load the pretrained weights from a file of their own, `{path}`, or the file of this name in the
directory that the environment variable FEDRAX_DATA names. Only the trained parameters are sent.
"""
_CODE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")
_SHARED = f'''"""Shared by server and clients: the method, the task and the settings of {_EXPERIMENT}."""

from pathlib import Path

from fedrax.flower import Deployment

DEPLOYMENT = Deployment.read(Path(__file__).parent)
'''
_SERVER = f'''"""Server app: runs the rounds."""

from {PACKAGE}.shared import DEPLOYMENT

from fedrax.flower import server_app

app = server_app(
    DEPLOYMENT.algorithm,
    DEPLOYMENT.task,
    DEPLOYMENT.settings,
    clients=DEPLOYMENT.clients,
    # test samples (x, y) of the server; with None, clients evaluate on their own test samples
    test=DEPLOYMENT.test_samples(),
)
'''
_CLIENT = f'''"""Client app: its samples stay on the client."""

from {PACKAGE}.shared import DEPLOYMENT

from fedrax.flower import client_app


def data(context):
    """Return this client's samples: (x, y), ((x, y), (x_test, y_test)), or a fedrax.Dataset.

    For a trial they are this client's part of the experiment's data set. Replace the line by a reader of the client's
    own files, of the same shapes, dtypes and class numbers.
    """
    return DEPLOYMENT.client_samples(context)


app = client_app(DEPLOYMENT.algorithm, DEPLOYMENT.task, data)
'''


@dataclass(frozen=True, eq=False)
class Deployment:
    """The method, task and settings of an app that ``fedrax deploy`` has written.

    Example:
        >>> deployment = fedrax.flower.Deployment.read("runs/deployment/app/deployment")  # doctest: +SKIP
        >>> app = fedrax.flower.client_app(deployment.algorithm, deployment.task, data)  # doctest: +SKIP
    """

    experiment: Experiment
    """The experiment."""
    algorithm: Algorithm
    """Its method."""
    task: Task
    """Its model and loss."""
    clients: int
    """Number of clients N."""

    @property
    def settings(self) -> Settings:
        """The settings of the run, without those of simulations."""
        return _deployable(self.experiment.run)

    @classmethod
    def read(cls, folder: Path | str) -> Deployment:
        """Read the files of an app's package.

        Args:
            folder: the folder of the package.

        Returns:
            Its content.

        Raises:
            FedraxError: for missing or damaged files.
        """
        folder = Path(folder)
        spec = experiment.read(folder / _EXPERIMENT, "beside")
        facts = read_json(folder / _DATA)
        try:
            clients, federation = int(facts["clients"]), _placeholder(facts)
        except (LookupError, TypeError, ValueError) as error:
            raise FedraxError(
                f"{folder / _DATA} does not describe the data of an experiment: {error!r:.200}"
            ) from error
        return cls(spec, spec.algorithm, experiment.make_task(spec, federation), clients)

    def client_samples(self, context: Context) -> Dataset:
        """Load a client's part of the experiment's data set, for a trial.

        Args:
            context: Flower's Context, whose ``node_config["partition-id"]`` is the client's number.

        Returns:
            The samples.
        """
        own = client_of_federation(experiment.load_federation(self.experiment), context)
        fields = {name: getattr(own, name) for name in ("name", "train", "test", "num_classes", "padding", "pixels")}
        return Dataset(**fields)

    def test_samples(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Load the test samples of the experiment's data set.

        Returns:
            The samples (x, y); None if there are none or they belong to the clients.
        """
        federation = experiment.load_federation(self.experiment)
        belong = federation.test_offsets is not None or not len(federation.test.y)
        return None if belong else tuple(federation.test)  # type: ignore[return-value]


def write_deployment(spec: Experiment, federation: Federation, directory: Path, hosts: Sequence[str] = ()) -> None:
    """Write the app, certificates and keys of an experiment.

    Args:
        spec: the experiment.
        federation: its data.
        directory: a new directory.
        hosts: names and addresses of the server's machine, for its certificate.

    Raises:
        FedraxError: for settings that only simulations have, and for a directory that holds files.
    """
    federation_settings(_deployable(spec.run), {}, None)  # raises for settings without a meaning
    if getattr(spec.run.participation, "trace", None) is not None:
        raise FedraxError("the app would not contain the file run.participation.trace: choose another participation")
    if getattr(spec.task, "class_weights", None) == "balanced":  # the app knows no labels
        weights = tuple(balanced_weights(federation).tolist())
        spec = dataclasses.replace(spec, task=dataclasses.replace(spec.task, class_weights=weights))
    remedy = f"choose another --out, or start it with: fedrax deploy {directory} --trial"
    with new_directory(directory, remedy):  # an incomplete deployment cannot be started, nor written again
        _write_files(spec, federation, directory, hosts)


def _write_files(spec: Experiment, federation: Federation, directory: Path, hosts: Sequence[str]) -> None:
    """The files of a deployment."""
    make_certificates(directory / CERTIFICATES, hosts)
    for client in range(federation.num_clients):
        make_node_key(directory / KEYS / f"client-{client}")
    package = directory / APP / PACKAGE
    write_text(package / "__init__.py", '"""Deployment of an experiment as a Flower app."""\n')  # no text of the file
    for name, text in (("shared", _SHARED), ("server_app", _SERVER), ("client_app", _CLIENT)):
        write_text(package / f"{name}.py", text)
    write_text(package / _EXPERIMENT, tomlkit.dumps(_with_copied_code(experiment.to_table(spec), package)))
    write_text(package / _DATA, json.dumps(_facts(federation), indent=1) + "\n")
    write_text(directory / APP / "pyproject.toml", tomlkit.dumps(_project(spec)))
    write_text(directory / ".gitignore", f"/{KEYS}/\n/{CERTIFICATES}/{KEY}\n/{DATABASE}*\n")
    write_text(directory / "README.md", _instructions(spec, federation.num_clients, hosts))


def _deployable(settings: Settings) -> Settings:
    """The settings without those that say where a simulation computes."""
    return dataclasses.replace(settings, **{name: getattr(Settings, name) for name in _PLACEMENT})


def _facts(federation: Federation) -> dict[str, Any]:
    """What a task may know of the data, as JSON values."""
    facts: dict[str, Any] = {"clients": federation.num_clients}
    arrays = flat_inputs(federation.train.x) | {"y": federation.train.y}
    facts["samples"] = {name: {"shape": list(a.shape[1:]), "dtype": a.dtype.name} for name, a in arrays.items()}
    truth = federation.truth
    facts["truth"] = None if truth is None else {"dtype": truth.dtype.name, "values": truth.tolist()}
    return facts | {name: getattr(federation, name) for name in _DESCRIPTIVE}


def _placeholder(facts: Mapping[str, Any]) -> Federation:
    """A federation of one sample of zeros, with the facts that a task depends on."""
    arrays = {name: np.zeros((1, *fact["shape"]), fact["dtype"]) for name, fact in facts["samples"].items()}
    y = arrays.pop("y")
    train = Samples(from_flat(arrays), y)
    truth = facts["truth"]
    described: dict[str, Any] = {name: tuple(v) if isinstance(v := facts[name], list) else v for name in _DESCRIPTIVE}
    return Federation(
        train=train,
        offsets=np.array([0, 1]),
        test=train.map(lambda a: a[:0]),
        test_offsets=None,
        truth=None if truth is None else np.array(truth["values"], truth["dtype"]),
        **described,
    )


def _with_copied_code(value: Any, folder: Path) -> Any:
    """The table of an experiment whose user code is in ``folder``, to which its files are copied."""
    if isinstance(value, dict):
        return {key: _with_copied_code(item, folder) for key, item in value.items()}
    named = _CODE.fullmatch(value) if isinstance(value, str) else None
    if named is None or not user_code.was_executed(file := Path(named["file"])):
        return value  # also a text of this form, such as a name
    for source in (file, *user_code.files_imported_by(file.parent.resolve())):
        copy = folder / source.relative_to(file.parent)
        if copy.exists() and copy.read_bytes() != source.read_bytes():
            raise FedraxError(f"two files of the app would be called {copy.relative_to(folder)}: rename one")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    return f"{file.name}:{named['name']}"


def _app_name(spec: Experiment) -> str:
    """The experiment's name as Flower permits it: letters, digits and hyphens after a letter."""
    return f"fedrax-{re.sub('[^a-z0-9]+', '-', safe_name(spec.name).lower()).strip('-') or 'app'}"[:50].rstrip("-")


def _project(spec: Experiment) -> dict[str, Any]:
    """The app's pyproject.toml."""
    # flwr run --run-config accepts these keys only
    run_config = {"directory": "run", "resume": False, "seed": "none", "rounds": spec.run.rounds, "timeout": 600.0}
    run_config["wait"] = 600.0
    components = {"serverapp": f"{PACKAGE}.server_app:app", "clientapp": f"{PACKAGE}.client_app:app"}
    return {
        "project": {
            "name": _app_name(spec),
            "version": "1.0.0",
            "description": f"{spec.method_name} on the clients of {spec.name}",
            "license": "Apache-2.0",
            "requires-python": ">=3.11",
            "dependencies": [f"fedrax[flower]=={VERSION}"],
        },
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": [PACKAGE]}}}},
            "flwr": {"app": {"publisher": "fedrax", "components": components, "config": run_config}},
        },
    }


def superlink_command(port: int, host: str, certificates: str, database: str) -> list[str]:
    """The command that starts a SuperLink which accepts registered SuperNodes only.

    Without a database, a SuperLink that is restarted has forgotten all registered keys.
    """
    return [
        *("flower-superlink", "--host", host, "--port", str(port)),
        *("--ssl-ca-certfile", f"{certificates}/{CA}"),
        *("--ssl-certfile", f"{certificates}/{CERTIFICATE}", "--ssl-keyfile", f"{certificates}/{KEY}"),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation", "--database", database),
    ]


def supernode_command(superlink: str, port: int, certificate: str, key: str, node_config: str) -> list[str]:
    """The command that starts the SuperNode of a client."""
    return [
        *("flower-supernode", "--superlink", superlink, "--port", str(port)),
        *("--root-certificates", certificate, "--auth-supernode-private-key", key, "--node-config", node_config),
    ]


def connection(superlink: str, certificate: str) -> str:
    """The entry of a SuperLink in Flower's config.toml."""
    return tomlkit.dumps({"superlink": {CONNECTION: {"address": superlink, "root-certificates": certificate}}})


def _instructions(spec: Experiment, clients: int, hosts: Sequence[str]) -> str:
    """README.md of a deployment: the commands, machine by machine."""
    host = hosts[0] if hosts else "localhost"
    at = f"[{host}]:8000" if ":" in host else f"{host}:8000"
    node = supernode_command(at, 9094, CA, "client-0", "'partition-id=0 directory=\"client-state\"'")
    weights = "" if spec.finetuning is None else _WEIGHTS.format(path=spec.finetuning.weights)
    return f"""# {spec.name}: {spec.method_name} on {clients} clients

Try everything on one machine, over TLS and with registered keys:

    fedrax deploy . --trial

`{APP}/{PACKAGE}/client_app.py` loads a client's samples: replace its function `data` for real clients.
{weights}
On the server's machine ({", ".join(hosts) or "for others than this one, make the deployment with --server NAME"}):

    {" ".join(superlink_command(8000, "0.0.0.0", CERTIFICATES, DATABASE))}

`{DATABASE}` keeps the registered keys: with the same file, a restarted SuperLink accepts the SuperNodes again. Paths in
the run config, such as `directory`, are relative to the directory in which this command was started.

Wherever you start runs, this entry of `~/.flwr/config.toml` names the SuperLink (with an absolute path):

{"".join(f"    {line}{chr(10)}" for line in connection(at, f"/path/to/{CERTIFICATES}/{CA}").splitlines() if line)}
Register the key of every client (`{KEYS}/client-0.pub`, ...) once:

    flwr supernode register {KEYS}/client-0.pub federation

A client needs `{CERTIFICATES}/{CA}` and its own private key, `{KEYS}/client-0`, which only its owner may read. It can
also make a key itself, `ssh-keygen -t ecdsa -b 384 -N "" -f client-0`, and send you the file `client-0.pub` only:

    {" ".join(node)}

`partition-id` is the client's number, 0 to {clients - 1}: keep a list of which client has which number.

Start the run, or resume it with `--run-config resume=true`:

    flwr run {APP} federation --stream

Stop it by `flwr stop RUN_ID federation` (`flwr list federation` shows the IDs), and then the SuperLink by Ctrl-C.
"""
