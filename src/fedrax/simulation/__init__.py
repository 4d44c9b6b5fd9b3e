"""The simulator: cohorts, execution plans, evaluation, checkpoints, events."""

from fedrax.devices import join_processes, use_all_cores
from fedrax.participation.policies import (
    Asynchronous,
    Availability,
    FixedList,
    Poisson,
    Turns,
    Uniform,
    WeightedBySamples,
)
from fedrax.simulation.client_metrics import per_client
from fedrax.simulation.executors.debug import NonFiniteError
from fedrax.simulation.persistence.model_file import load_model
from fedrax.simulation.process import Interrupted
from fedrax.simulation.results.events import Event, RunInfo, Sink, read_events
from fedrax.simulation.results.message_recorder import Exchange, Record, Sent
from fedrax.simulation.results.result import Result, Snapshot, to_target
from fedrax.simulation.run import simulate
from fedrax.simulation.settings import Script, Settings

__all__ = [
    "Asynchronous",
    "Availability",
    "Event",
    "Exchange",
    "FixedList",
    "Interrupted",
    "NonFiniteError",
    "Poisson",
    "Record",
    "Result",
    "RunInfo",
    "Script",
    "Sent",
    "Settings",
    "Sink",
    "Snapshot",
    "Turns",
    "Uniform",
    "WeightedBySamples",
    "join_processes",
    "load_model",
    "per_client",
    "read_events",
    "simulate",
    "to_target",
    "use_all_cores",
]
