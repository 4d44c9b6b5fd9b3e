"""Placement of samples and client states: devices, memory budget, streaming from host and disk."""
