"""Experiments as files: reading and writing them, what they are made of, and comparisons of several."""
