"""Hyper-parameter search of comparison files: grids, trials on validation data, and Optuna."""
