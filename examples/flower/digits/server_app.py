"""Server app: runs the rounds and evaluates the global model on its own test samples."""

from digits.federation import CLIENTS, METHOD, TASK
from fedrax.data import load
from fedrax.flower import server_app

app = server_app(METHOD, TASK, clients=CLIENTS, rounds=5, cohort_size=2, eval_every=5, test=tuple(load("digits").test))
