"""One module a simulator: each runs one workload in its own process, in its own environment.

``python -m benchmarks.runners.run_NAME --workload W1 --arrays FILE`` prints one line of results.
"""
