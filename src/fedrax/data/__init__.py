"""Data sets, partitions, and federations: plain NumPy arrays on the host.

Pictures are in ``fedrax.data.plot``, apart so that a run does not wait for matplotlib.
"""

from fedrax.data.dataset import Dataset, Samples, as_samples
from fedrax.data.federation import Federation, aligned
from fedrax.data.heterogeneity import Heterogeneity, has_one_label, heterogeneity, label_counts
from fedrax.data.partition import (
    PARTITIONS,
    ClassesPerClient,
    DirichletClasses,
    DirichletClients,
    Iid,
    LogNormal,
    Mix,
    Natural,
    Partition,
    Partitioner,
    Shards,
    Similarity,
)
from fedrax.data.readers.huggingface import from_huggingface
from fedrax.data.registry import DATASETS, DatasetEntry, load
from fedrax.data.validation import hold_out

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "ClassesPerClient",
    "Dataset",
    "DatasetEntry",
    "DirichletClasses",
    "DirichletClients",
    "Federation",
    "Heterogeneity",
    "Iid",
    "LogNormal",
    "Mix",
    "Natural",
    "Partition",
    "Partitioner",
    "Samples",
    "Shards",
    "Similarity",
    "aligned",
    "as_samples",
    "from_huggingface",
    "has_one_label",
    "heterogeneity",
    "hold_out",
    "label_counts",
    "load",
]
