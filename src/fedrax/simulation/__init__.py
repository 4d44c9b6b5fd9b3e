"""The simulator: cohorts, execution plans, evaluation, checkpoints, events."""

from fedrax.devices import join_processes, use_all_cores
from fedrax.participation import (
    Asynchronous,
    Availability,
    FixedList,
    Poisson,
    RoundRobin,
    Uniform,
    WeightedBySamples,
)
from fedrax.simulation.client_evaluation import client_metrics
from fedrax.simulation.executors.debug import NonFiniteError
from fedrax.simulation.persistence.model_file import load_model
from fedrax.simulation.process import Interrupted
from fedrax.simulation.results.events import Event, RunInfo, Sink, read_events
from fedrax.simulation.results.message_recorder import MessageSelection, RecordedExchange, RecordedUpload
from fedrax.simulation.results.result import Result, Snapshot, cost_to_target
from fedrax.simulation.run import simulate
from fedrax.simulation.settings import Script, Settings

__all__ = [
    "Asynchronous",
    "Availability",
    "Event",
    "FixedList",
    "Interrupted",
    "MessageSelection",
    "NonFiniteError",
    "Poisson",
    "RecordedExchange",
    "RecordedUpload",
    "Result",
    "RoundRobin",
    "RunInfo",
    "Script",
    "Settings",
    "Sink",
    "Snapshot",
    "Uniform",
    "WeightedBySamples",
    "client_metrics",
    "cost_to_target",
    "join_processes",
    "load_model",
    "read_events",
    "simulate",
    "use_all_cores",
]
