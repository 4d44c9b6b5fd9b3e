"""Client app: its samples stay on the client. In this example they are a part of scikit-learn's digits."""

from digits.federation import CLIENTS, METHOD, TASK
from fedrax import Federation
from fedrax.data import Shards, load
from fedrax.flower import client_app


def data(context):
    """Return the samples (x, y) of this client. A real client would read its own file."""
    parts = Federation.from_dataset(load("digits"), Shards(clients=CLIENTS, per_client=3), seed=0)
    number = int(context.node_config["partition-id"])
    own = slice(*parts.offsets[number : number + 2])
    return parts.train.x[own], parts.train.y[own]


app = client_app(METHOD, TASK, data)
