"""Lowerings of convolutions and pooling for the CPU backend of XLA."""
