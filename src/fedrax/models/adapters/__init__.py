"""Adapters that turn Flax and Equinox modules into models."""
