"""Differential privacy mechanisms: wrappers that clip what clients release and add noise to it."""
