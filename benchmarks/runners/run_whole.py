"""fedrax: many rounds of a workload with random cohorts and an evaluation every ten rounds, as in pfl-research's
benchmarks.
"""

from __future__ import annotations

import os
import time

from benchmarks.timing import STARTED, RoundClock, report, runner_arguments


def main() -> None:
    arguments, workload, arrays = runner_arguments("fedrax, many rounds.", channels_last=True, rounds=1500)

    import jax

    import fedrax
    from benchmarks.fedrax_clock import device_peak_mb
    from benchmarks.fedrax_problems import federation_of, problem

    local = fedrax.LocalSGD(lr=workload.learning_rate, epochs=workload.epochs, batch_size=workload.batch)
    fedrax.simulation.use_all_cores()  # before the first array
    model, params = problem(workload, arrays.initial)
    started = float(os.environ.get(STARTED, time.monotonic()))
    result = fedrax.simulate(
        fedrax.FedAvg(local=local),
        fedrax.classification(model),
        federation_of(arrays),
        rounds=arguments.rounds,
        eval_every=10,
        params=params,
        cohort_size=workload.cohort,
        weights="samples",
        precision=arguments.precision,
    )
    whole = time.monotonic() - started
    clock = RoundClock([whole, whole / arguments.rounds], whole)
    last = result.events[-1]
    versions = {"fedrax": fedrax.__version__, "jax": jax.__version__}
    report(clock, versions, last["test_loss"], last["test_accuracy"], device_peak_mb())


if __name__ == "__main__":
    main()
