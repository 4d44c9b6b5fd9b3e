"""Executors of a round: compiled (scan, vmap), loop, and debug."""
