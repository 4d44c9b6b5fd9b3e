"""Shared by the server and the clients of the Flower app: the method, the task and the settings of experiment.toml."""

from pathlib import Path

from fedrax import classification
from fedrax.experiments import read_file
from starter_package.data import CLASSES, FEATURES

EXPERIMENT = read_file(Path(__file__).parents[1] / "experiment.toml")
METHOD = EXPERIMENT.algorithm
TASK = classification(EXPERIMENT.model.build(input_shape=(len(FEATURES),), num_outputs=len(CLASSES)))
CLIENTS = 6
