"""Convolution and pooling lowerings that are fast on XLA's CPU backend."""
