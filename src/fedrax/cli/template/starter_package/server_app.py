"""Server app: runs the rounds. It has no samples; the clients evaluate the model on their own test samples."""

from fedrax.flower import server_app
from starter_package.federation import CLIENTS, EXPERIMENT, METHOD, TASK

app = server_app(METHOD, TASK, EXPERIMENT.run, clients=CLIENTS)
