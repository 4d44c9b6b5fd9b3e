"""Experiments of the EPISODE paper."""
