"""Run directories: checkpoints, resume, model files and the identity of a run."""
