"""The papers' experiments, one folder a paper."""
