"""Client app: the samples of a clinic stay on its machine."""

from fedrax.flower import client_app
from starter_package.data import read, split
from starter_package.federation import DATA, METHOD, TASK


def data(context):
    """The training and test samples of this clinic, from the file that its SuperNode names."""
    x, y, clinics = read(context.node_config["path"], DATA.client, DATA.label, DATA.classes, DATA.features)
    own = clinics == context.node_config["clinic"]  # a clinic's own file has no other rows
    x, y, test = x[own], y[own], split(y[own])
    return (x[~test], y[~test]), (x[test], y[test])


app = client_app(METHOD, TASK, data)
