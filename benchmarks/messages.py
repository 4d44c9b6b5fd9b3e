"""The work of a client for one message of a Flower federation, part by part.

``python -m benchmarks.messages`` takes the first training message of ``examples/flower`` and starts a process for it,
as a SuperNode does, several times with a warm compilation cache. It appends the times to ``results/messages.jsonl`` and
writes ``messages.md``, which has a line for each session; ``--label`` names one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.pages import markdown_table, write_page
from benchmarks.sessions import RESULTS, Session

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "flower"
RAW = RESULTS / "messages.jsonl"
STARTED = "BENCHMARK_STARTED"  # environment: time.monotonic() just before the parent started the process
PARTS = {
    "flower": "Python and Flower",
    "app": "import of the app",
    "data": "samples",
    "program": "check, trace, load the program",
    "work": "training, reply",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="processes, of which the median is shown")
    parser.add_argument("--label", default="this version", help="name of the line in the table")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--message", type=Path, help=argparse.SUPPRESS)  # the child's
    arguments = parser.parse_args()
    if arguments.message:
        print(json.dumps(measure(arguments.message)))
        return
    session = Session.start(RAW, label=arguments.label)
    with tempfile.TemporaryDirectory() as folder:
        message = Path(folder) / "message"
        message.write_bytes(first_training_message())
        child = [sys.executable, "-m", "benchmarks.messages", "--message", str(message)]
        environment = os.environ | {"FEDRAX_CACHE": folder, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), *sys.path])}
        for repeat in range(arguments.repeats + 1):
            begun = {STARTED: repr(time.monotonic())}
            printed = subprocess.run(child, env=environment | begun, cwd=ROOT, check=True, stdout=subprocess.PIPE)
            if repeat:  # the first one fills the compilation cache
                session.add(json.loads(printed.stdout.splitlines()[-1]))
    print(write_page(arguments.out / "messages.md", sections()).read_text())


def first_training_message() -> bytes:
    """The message of the example's first round to its first client, as bytes."""
    from flwr.app import Context, Message, MessageType, RecordDict
    from flwr.common.serde import message_to_proto

    from fedrax.flower import LocalGrid

    sys.path.insert(0, str(EXAMPLE))
    from digits.client_app import app as client
    from digits.federation import CLIENTS
    from digits.server_app import app as server

    found: list[bytes] = []

    class Recorded(LocalGrid):
        def _reply(self, message: Message) -> Message:
            if message.metadata.message_type == MessageType.TRAIN:
                found.append(message_to_proto(message).SerializeToString())
                raise StopIteration
            return super()._reply(message)

    try:
        server(Recorded(client, CLIENTS), Context(1, 1, {}, RecordDict(), {}))
    except StopIteration:
        return found[0]
    raise SystemExit("error: the example sends no training message")


def measure(path: Path) -> dict[str, float]:
    """Seconds of each part, in a process that handles the message twice, the second time without set-up."""
    from flwr.app import Context, RecordDict
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import Message as Proto
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp  # noqa: F401 - the process of a SuperNode imports it

    times = [float(os.environ[STARTED]), time.monotonic()]

    def lap() -> None:
        times.append(time.monotonic())

    from digits.client_app import app, data

    lap()
    proto = Proto()
    proto.ParseFromString(path.read_bytes())
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    contexts = [Context(1, 2, {"partition-id": 0}, RecordDict(), {}) for _ in range(2)]
    data(contexts[0])
    lap()
    for context in contexts:
        if app(message_from_proto(proto), context).has_error():
            raise SystemExit("error: the client fails")
        lap()
    flower, imports, samples, first, second = (b - a for a, b in itertools.pairwise(times))
    return dict(zip(PARTS, (flower, imports, samples, first - second, second), strict=True))


def sections() -> list[str]:
    """The page."""
    rows = []
    for line in RAW.read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        if record["kind"] == "session":
            rows.append((record["label"], record["date"], record["id"], []))
        else:
            next(row for row in rows if row[2] == record["session"])[3].append(record)
    body = []
    for label, date, _, runs in rows:
        medians = [statistics.median(run[part] for run in runs) for part in PARTS]
        total = statistics.median(sum(run[part] for part in PARTS) for run in runs)
        body.append([label, date, *(f"{seconds:.2f}" for seconds in (*medians, total))])
    return [
        "# Work of a client for a message",
        "Seconds of a client of `examples/flower` (SCAFFOLD, an MLP) for one training message, in a process of its own"
        " as a SuperNode starts it, with a warm compilation cache: medians. The times at which Flower looks for"
        " messages and tasks come in addition.",
        markdown_table(["", "date", *PARTS.values(), "sum"], body),
        Session.latest(RAW).machine_text(),
    ]


if __name__ == "__main__":
    main()
