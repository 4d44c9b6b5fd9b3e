"""Experiments of the GradMA paper."""
