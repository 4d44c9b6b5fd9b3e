"""Wrappers: an algorithm in, an algorithm out."""
