"""The server: it leads the rounds, evaluates on test samples of its own, and keeps the model."""

from digits.federation import CLIENTS, METHOD, TASK
from fedrax.data import load
from fedrax.flower import server_app

app = server_app(METHOD, TASK, clients=CLIENTS, rounds=5, cohort_size=2, eval_every=5, test=tuple(load("digits").test))
