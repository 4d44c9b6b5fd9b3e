"""Hyper-parameter classes: annotations, bounds, and errors of user code translated into messages."""
