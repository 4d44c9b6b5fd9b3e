"""Shared by server and clients: the method, the task and the number of clients."""

from fedrax import LocalSGD, Scaffold, classification
from fedrax.models import MLP

CLIENTS = 4
METHOD = Scaffold(local=LocalSGD(lr=0.05, steps=10))
TASK = classification(MLP(hidden=(32,)).build((8, 8, 1), 10))
