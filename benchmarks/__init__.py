"""Benchmarks of fedrax: beside other simulators, against problem size, and one method against another.

Commands (each with ``--help``)::

    python -m benchmarks.machine    what this machine can do: GEMM peak, copy bandwidth
    python -m benchmarks.peers      fedrax beside other simulators on ten workloads
    python -m benchmarks.scaling    cost of a round against clients, cohort, model and devices
    python -m benchmarks.methods    cost of every algorithm against FedAvg
    python -m benchmarks.sweep      a grid of step sizes and seeds in one compiled call, or in turn
    python -m benchmarks.precision  accuracy with shorter operands of matrix products
    python -m benchmarks.storage    samples streamed from disk and states spilled to it, against memory
    python -m benchmarks.profiles   where a round's time goes, and what bounds it
"""
