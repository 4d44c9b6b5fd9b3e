"""The algorithms, one file a family."""
