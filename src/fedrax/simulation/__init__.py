"""The simulator: cohorts, execution plans, evaluation, checkpoints, events."""

from fedrax.compiled.cores import join_processes, use_all_cores
from fedrax.simulation.clients import per_client
from fedrax.simulation.debug import NonFiniteError
from fedrax.simulation.events import Event, RunInfo, Sink, read_events
from fedrax.simulation.model_file import load
from fedrax.simulation.process import Interrupted
from fedrax.simulation.recording import Exchange, Record, Sent
from fedrax.simulation.result import Result, Snapshot, to_target
from fedrax.simulation.run import simulate
from fedrax.simulation.settings import (
    Asynchronous,
    Availability,
    FixedList,
    Poisson,
    Script,
    Settings,
    Turns,
    Uniform,
    WeightedBySamples,
)
from fedrax.simulation.sweep import sweep
from fedrax.simulation.tuning import Tuned, tune

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
    "Tuned",
    "Turns",
    "Uniform",
    "WeightedBySamples",
    "join_processes",
    "load",
    "per_client",
    "read_events",
    "simulate",
    "sweep",
    "to_target",
    "tune",
    "use_all_cores",
]
