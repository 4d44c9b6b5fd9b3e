"""Adapters that convert Flax and Equinox modules to models."""
