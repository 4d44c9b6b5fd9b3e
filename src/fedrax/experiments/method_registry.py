"""Registry of methods: all algorithms and wrappers of the package by name."""

from __future__ import annotations

import importlib
import pkgutil

import fedrax.algorithms
import fedrax.compression
import fedrax.personalization
import fedrax.privacy.mechanisms
import fedrax.robust
from fedrax.contract.algorithm import Algorithm, is_algorithm
from fedrax.errors import unknown

_MOMENTUM = "server_optimizer = { name = 'sgd', momentum = 0.9 }"

KNOWN_AS = {
    "fedavgm": f"fedavg with {_MOMENTUM}",
    "fedproxm": f"fedprox with {_MOMENTUM}",
    "mifam": f"mifa with {_MOMENTUM}",
    "moonm": f"moon with {_MOMENTUM}",
    "fedmlbm": f"fedmlb with {_MOMENTUM}",
    "fedadagrad": "fedavg with server_optimizer = { name = 'adagrad' }",
    "fedadam": "fedavg with server_optimizer = { name = 'adam' }",
    "fedyogi": "fedavg with server_optimizer = { name = 'yogi' }",
    "fedopt": "fedavg with a server_optimizer",
    "dsgd": "fedsgd",
    "celgc": "fedavg with local.clip",
    "qffl": "qfedavg",
    "proxskip": "scaffnew",
    "signum": "signsgd with beta",
    "fedper": "personalized with personal_params = ['output/*']",
    "fedrep": "personalized with personal_params = ['output/*'] and alternate = { epochs = 1 }",
    "lgfedavg": "personalized with the first layers in personal_params",
    "fedbn": "personalized with normalization in personal_params and statistics = true",
    "fedmedian": "robust with rule = { name = 'median' }",
    "fedtrimmedavg": "robust with rule = { name = 'trimmed_mean' }",
    "krum": "robust with rule = { name = 'krum' }",
    "multikrum": "robust with rule = { name = 'krum' } and its keep",
    "rfa": "robust with rule = { name = 'geometric_median' }",
    "qsgd": "quantized",
    "fedpaq": "quantized",
    "efsignsgd": "efsign",
    "dpfedavg": "clientdp",
    "dpfedsgd": "clientdp around fedsgd",
    "ldpfl": "clientdp with at = 'client'",
    "dpsgd": "sampledp",
}
"""Methods of the literature that are options of methods here; keys in lower case. docs/choosing.md has the table."""

_PACKAGES = (
    fedrax.algorithms,
    fedrax.compression,
    fedrax.personalization,
    fedrax.privacy.mechanisms,
    fedrax.robust,
)
"""Packages whose modules have methods."""


def algorithms() -> dict[str, type[Algorithm]]:
    """All public algorithms by name, found by importing every module of the packages."""
    found: dict[str, type[Algorithm]] = {}
    for package in _PACKAGES:
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if is_algorithm(value) and value.__module__ == module.name and not name.startswith("_"):
                    found[value.__name__.lower()] = value
    return dict(sorted(found.items()))


def find_algorithm(name: str) -> type[Algorithm]:
    """The algorithm class called ``name``, ignoring case; raises FedraxError with the nearest name for others."""
    known = algorithms()
    if name.lower() not in known:
        raise unknown("algorithm", name, known)
    return known[name.lower()]
