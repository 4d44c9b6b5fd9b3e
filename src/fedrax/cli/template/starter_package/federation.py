"""Shared by the server and the clients of the Flower app: the method, the task and the settings of experiment.toml."""

from pathlib import Path

from fedrax import classification
from fedrax.experiments import read_file

EXPERIMENT = read_file(Path(__file__).parents[1] / "experiment.toml")
METHOD, DATA = EXPERIMENT.algorithm, EXPERIMENT.data
TASK = classification(EXPERIMENT.model.build(input_shape=(len(DATA.features),), num_outputs=len(DATA.classes)))
CLIENTS = 6
"""Number of clinics, for which the server waits."""
