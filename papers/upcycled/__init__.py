"""Experiments of the Upcycled-FL paper."""
