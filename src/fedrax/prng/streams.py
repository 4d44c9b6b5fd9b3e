"""Independent random keys by name: noise never shares a key with batches, nor one wrapper with another."""

from __future__ import annotations

import zlib

import jax
from jax import Array

FRESH, STREAMS = 0x7FFFFFFF, 0x7FFFFFFE
"""Counters that no local step reaches: of a batch besides those of the steps, and of all named streams."""


def stream_key(key: Array, name: str, depth: int = 0, phase: int = 0) -> Array:
    """The key of the stream called ``name`` in a phase, used ``depth`` wrappers deep, among those that ``key`` gives.

    A client has one key for all phases of a round: noise that came twice could be taken off again.
    """
    named = jax.random.fold_in(jax.random.fold_in(key, STREAMS), depth)
    named = jax.random.fold_in(named, phase) if phase else named
    return jax.random.fold_in(named, zlib.crc32(name.encode()))
