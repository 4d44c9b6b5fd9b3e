"""The client: its own digits, which never leave it. Here they are its part of scikit-learn's, by its number."""

from digits.federation import CLIENTS, METHOD, TASK
from fedrax import Federation
from fedrax.data import Shards, load
from fedrax.flower import client_app


def data(context):
    """The samples (x, y) of this client; a real one would read its own file."""
    parts = Federation.from_dataset(load("digits"), Shards(clients=CLIENTS, per_client=3), seed=0)
    number = int(context.node_config["partition-id"])
    own = slice(*parts.offsets[number : number + 2])
    return parts.train.x[own], parts.train.y[own]


app = client_app(METHOD, TASK, data)
