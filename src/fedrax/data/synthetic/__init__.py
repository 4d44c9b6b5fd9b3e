"""Synthetic federated data sets of the papers."""
