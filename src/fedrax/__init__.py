"""fedrax: federated optimisation on heterogeneous clients.

    import fedrax

    result = fedrax.simulate(fedrax.Scaffold(local=fedrax.LocalSGD(lr=0.1, steps=10)), task, federation, rounds=100)

Names are loaded when first used, so that ``import fedrax`` itself is instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedrax.errors import FedraxError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedrax.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase
    from fedrax.algorithms.episode import Episode, NaiveParallelClip
    from fedrax.algorithms.fedavg import FedAvg, FedProx, FedSGD
    from fedrax.algorithms.gradma import GradMA, GradMAS, GradMAW
    from fedrax.algorithms.losac import FedSaga, LoSAC
    from fedrax.algorithms.mifa import MIFA
    from fedrax.algorithms.mime import MimeSVRG
    from fedrax.algorithms.scaffold import Scaffold
    from fedrax.client_data import ClientData
    from fedrax.data import Dataset, Federation
    from fedrax.local import LocalSGD, Step
    from fedrax.simulation import Result, Script, Settings, Sink, simulate, sweep, use_all_cores
    from fedrax.table import Table
    from fedrax.task import Batch, Task, classification, regression, scale
    from fedrax.vectors import Vectors
    from fedrax.wrappers.upcycle import Upcycled, upcycle

_HOMES = {
    "fedrax.algorithm": ("Algorithm", "ClientOutput", "Cohort", "Info", "Phase"),
    "fedrax.algorithms.episode": ("Episode", "NaiveParallelClip"),
    "fedrax.algorithms.fedavg": ("FedAvg", "FedProx", "FedSGD"),
    "fedrax.algorithms.gradma": ("GradMA", "GradMAS", "GradMAW"),
    "fedrax.algorithms.losac": ("FedSaga", "LoSAC"),
    "fedrax.algorithms.mifa": ("MIFA",),
    "fedrax.algorithms.mime": ("MimeSVRG",),
    "fedrax.algorithms.scaffold": ("Scaffold",),
    "fedrax.client_data": ("ClientData",),
    "fedrax.data": ("Dataset", "Federation"),
    "fedrax.local": ("LocalSGD", "Step"),
    "fedrax.simulation": ("Result", "Script", "Settings", "Sink", "simulate", "sweep", "use_all_cores"),
    "fedrax.table": ("Table",),
    "fedrax.task": ("Batch", "Task", "classification", "regression", "scale"),
    "fedrax.vectors": ("Vectors",),
    "fedrax.wrappers.upcycle": ("Upcycled", "upcycle"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - by topic
    "FedraxError",
    "Algorithm", "ClientData", "ClientOutput", "Cohort", "Info", "Phase", "Step", "Table", "Vectors",
    "Episode", "FedAvg", "FedProx", "FedSGD", "FedSaga", "GradMA", "GradMAS", "GradMAW", "LoSAC", "LocalSGD",
    "MIFA", "MimeSVRG", "NaiveParallelClip", "Scaffold", "Upcycled", "upcycle",
    "Batch", "Dataset", "Federation", "Task", "classification", "regression", "scale",
    "Result", "Script", "Settings", "Sink", "simulate", "sweep", "use_all_cores",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedrax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
