"""Benchmarks of fedrax: comparison with other simulators, scaling, the cost of methods and features.

Commands (each with ``--help``)::

    python -m benchmarks.machine    speed of this machine: GEMM peak, copy bandwidth
    python -m benchmarks.peers      comparison with other simulators on ten workloads
    python -m benchmarks.scaling    cost of a round against clients, cohort, model and devices
    python -m benchmarks.methods    cost of every algorithm against FedAvg
    python -m benchmarks.sweep      a grid of learning rates and seeds, in one compiled call or one run at a time
    python -m benchmarks.precision  accuracy with reduced precision of matrix products
    python -m benchmarks.storage    samples streamed from disk and states spilled to disk, against memory
    python -m benchmarks.messages   work of a Flower client for one message
    python -m benchmarks.profiles   parts of a round, kinds of time, heaviest operations
"""
