"""fedrax: federated optimisation on heterogeneous clients.

    import fedrax

    result = fedrax.simulate(fedrax.Scaffold(local=fedrax.LocalSGD(lr=0.1, steps=10)), task, federation, rounds=100)

Names are loaded when first used, so that ``import fedrax`` itself is instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedrax.errors import FedraxError, FedraxWarning
from fedrax.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from fedrax import tree
    from fedrax.algorithms.episode import Episode, NaiveParallelClip
    from fedrax.algorithms.fedadmm import FedADMM
    from fedrax.algorithms.fedavg import FedAvg, FedProx, FedSGD
    from fedrax.algorithms.fedbuff import FedBuff
    from fedrax.algorithms.fedcm import FedCM
    from fedrax.algorithms.feddyn import FedDyn
    from fedrax.algorithms.fedexp import FedExP
    from fedrax.algorithms.fedlion import FedLion
    from fedrax.algorithms.fedmlb import FedMLB
    from fedrax.algorithms.fednova import FedNova
    from fedrax.algorithms.gradma import GradMA, GradMAS, GradMAW
    from fedrax.algorithms.losac import FedSaga, LoSAC
    from fedrax.algorithms.mifa import MIFA
    from fedrax.algorithms.mime import Mime, MimeLite, MimeSVRG
    from fedrax.algorithms.moon import MOON
    from fedrax.algorithms.pfedme import PFedMe
    from fedrax.algorithms.qfedavg import QFedAvg
    from fedrax.algorithms.scaffnew import Scaffnew
    from fedrax.algorithms.scaffold import Scaffold
    from fedrax.algorithms.signsgd import SignSGD
    from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase
    from fedrax.contract.averaging import Averaging
    from fedrax.contract.client_data import ClientData
    from fedrax.contract.fields import Leaf, Static
    from fedrax.contract.hyperparameters import Count, Decay, Fraction, NonNegative, Positive, Whole, hyperparameters
    from fedrax.contract.local import LocalSGD, Step
    from fedrax.contract.optax_rule import Optax
    from fedrax.contract.requirements import Requirements
    from fedrax.contract.table import Table
    from fedrax.contract.task import Batch, Task, Variables, binary, classification, regression, scale, supervised
    from fedrax.contract.vectors import Vectors
    from fedrax.contract.wrapper import Wrapped, Wrapper
    from fedrax.data import Dataset, Federation
    from fedrax.experiments.comparing import Outcome, compare, read
    from fedrax.privacy.mechanisms.client_level import ClientDP
    from fedrax.privacy.mechanisms.perturbation import ObjectivePerturbation, OutputPerturbation
    from fedrax.privacy.mechanisms.sample_level import SampleDP
    from fedrax.simulation import (
        Record,
        Result,
        Script,
        Settings,
        Sink,
        Snapshot,
        Tuned,
        join_processes,
        load,
        per_client,
        simulate,
        sweep,
        tune,
        use_all_cores,
    )
    from fedrax.simulation.own_methods import check_algorithm
    from fedrax.wrappers.attacked import Attacked
    from fedrax.wrappers.ditto import Ditto
    from fedrax.wrappers.efsign import EFSign
    from fedrax.wrappers.personalise import Personalised
    from fedrax.wrappers.quantise import Quantised, QuantisedDown
    from fedrax.wrappers.randomk import RandomK
    from fedrax.wrappers.robust import Robust
    from fedrax.wrappers.topk import TopK
    from fedrax.wrappers.upcycle import Upcycled, upcycle

_HOMES = {
    "fedrax.algorithms.episode": "Episode NaiveParallelClip",
    "fedrax.algorithms.fedadmm": "FedADMM",
    "fedrax.algorithms.fedavg": "FedAvg FedProx FedSGD",
    "fedrax.algorithms.fedbuff": "FedBuff",
    "fedrax.algorithms.fedcm": "FedCM",
    "fedrax.algorithms.feddyn": "FedDyn",
    "fedrax.algorithms.fedexp": "FedExP",
    "fedrax.algorithms.fedlion": "FedLion",
    "fedrax.algorithms.fedmlb": "FedMLB",
    "fedrax.algorithms.fednova": "FedNova",
    "fedrax.algorithms.gradma": "GradMA GradMAS GradMAW",
    "fedrax.algorithms.losac": "FedSaga LoSAC",
    "fedrax.algorithms.mifa": "MIFA",
    "fedrax.algorithms.mime": "Mime MimeLite MimeSVRG",
    "fedrax.algorithms.moon": "MOON",
    "fedrax.algorithms.pfedme": "PFedMe",
    "fedrax.algorithms.qfedavg": "QFedAvg",
    "fedrax.algorithms.scaffnew": "Scaffnew",
    "fedrax.algorithms.scaffold": "Scaffold",
    "fedrax.algorithms.signsgd": "SignSGD",
    "fedrax.contract.algorithm": "Algorithm ClientOutput Cohort Info Phase",
    "fedrax.contract.averaging": "Averaging",
    "fedrax.contract.client_data": "ClientData",
    "fedrax.contract.fields": "Leaf Static",
    "fedrax.contract.hyperparameters": "Count Decay Fraction NonNegative Positive Whole hyperparameters",
    "fedrax.contract.local": "LocalSGD Step",
    "fedrax.contract.optax_rule": "Optax",
    "fedrax.contract.requirements": "Requirements",
    "fedrax.contract.table": "Table",
    "fedrax.contract.task": "Batch Task Variables binary classification regression scale supervised",
    "fedrax.contract.vectors": "Vectors",
    "fedrax.contract.wrapper": "Wrapped Wrapper",
    "fedrax.data": "Dataset Federation",
    "fedrax.experiments.comparing": "Outcome compare read",
    "fedrax.privacy.mechanisms.client_level": "ClientDP",
    "fedrax.privacy.mechanisms.perturbation": "ObjectivePerturbation OutputPerturbation",
    "fedrax.privacy.mechanisms.sample_level": "SampleDP",
    "fedrax.simulation": (
        "Record Result Script Settings Sink Snapshot Tuned join_processes load per_client simulate sweep tune "
        "use_all_cores"
    ),
    "fedrax.simulation.own_methods": "check_algorithm",
    "fedrax.wrappers.attacked": "Attacked",
    "fedrax.wrappers.ditto": "Ditto",
    "fedrax.wrappers.personalise": "Personalised",
    "fedrax.wrappers.efsign": "EFSign",
    "fedrax.wrappers.quantise": "Quantised QuantisedDown",
    "fedrax.wrappers.randomk": "RandomK",
    "fedrax.wrappers.robust": "Robust",
    "fedrax.wrappers.topk": "TopK",
    "fedrax.wrappers.upcycle": "Upcycled upcycle",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [  # noqa: RUF022 - by topic
    "FedraxError", "FedraxWarning", "tree",
    "Algorithm", "Averaging", "ClientData", "ClientOutput", "Cohort", "Info", "LocalSGD", "Optax", "Phase",
    "Requirements", "Step", "Table", "Vectors", "Wrapped", "Wrapper", "check_algorithm",
    "Count", "Decay", "Fraction", "Leaf", "NonNegative", "Positive", "Static", "Whole", "hyperparameters",
    "Episode", "FedADMM", "FedAvg", "FedCM", "FedDyn", "FedMLB", "FedNova", "FedProx", "FedSGD", "FedSaga",
    "GradMA", "GradMAS", "GradMAW", "LoSAC", "MIFA", "MOON", "Mime", "MimeLite", "MimeSVRG", "NaiveParallelClip",
    "PFedMe", "Scaffold",
    "FedBuff", "FedExP", "FedLion", "QFedAvg", "Scaffnew", "SignSGD",
    "Attacked", "Ditto", "EFSign", "QuantisedDown", "RandomK", "Robust",
    "Personalised", "Quantised", "TopK", "Upcycled", "upcycle",
    "ClientDP", "ObjectivePerturbation", "OutputPerturbation", "SampleDP",
    "Batch", "Dataset", "Federation", "Task", "Variables", "binary", "classification", "regression", "scale",
    "supervised",
    "Outcome", "Record", "Result", "Script", "Settings", "Sink", "Snapshot", "Tuned",
    "compare", "join_processes", "load", "per_client", "read", "simulate", "sweep", "tune", "use_all_cores",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "tree":
        return importlib.import_module("fedrax.tree")
    if name not in _HOME:
        import difflib

        near = difflib.get_close_matches(name, __all__, n=1) or [one for one in __all__ if one.lower() == name.lower()]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'fedrax' has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
