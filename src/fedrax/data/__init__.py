"""Data sets, partitions, and federations: plain NumPy arrays on the host."""

from fedrax.data.dataset import Dataset, Samples, as_samples
from fedrax.data.federation import Federation, aligned
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

__all__ = [
    "PARTITIONS",
    "ClassesPerClient",
    "Dataset",
    "DirichletClasses",
    "DirichletClients",
    "Federation",
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
]
