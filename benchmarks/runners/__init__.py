"""One module for each simulator: each runs one workload in its own process and environment.

``python -m benchmarks.runners.run_NAME --workload W1 --arrays FILE`` prints one line of results.
"""
