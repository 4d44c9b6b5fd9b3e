"""fedrax: ``FedAvg`` with the shared starting weights and cohorts, batches in stored order."""

from __future__ import annotations

import os
import shutil

from benchmarks.timing import report, runner_arguments


def main() -> None:
    arguments, workload, arrays = runner_arguments("fedrax.", channels_last=True, forget=0, plain=0)
    if arguments.forget:  # compiled programs of earlier runs on disk
        shutil.rmtree(os.path.join(os.environ["FEDRAX_CACHE"], "compiled"), ignore_errors=True)

    import jax

    import fedrax
    from benchmarks.fedrax_clock import device_peak_mb, time_rounds
    from benchmarks.fedrax_problems import federation_of, plain_problem, problem
    from fedrax.xla import applied_passes

    local = fedrax.LocalSGD(
        lr=workload.learning_rate, epochs=workload.epochs, batch_size=workload.batch, order="stored"
    )
    fedrax.simulation.use_all_cores()  # before the first array
    model, params = (plain_problem if arguments.plain else problem)(workload, arrays.initial)
    clock, result = time_rounds(
        fedrax.FedAvg(local=local),
        fedrax.classification(model),
        federation_of(arrays),
        workload.total_rounds,
        params=params,
        script=fedrax.simulation.Script(cohorts=arrays.cohorts),
        cohort_size=workload.cohort,
        weights="samples",
        precision=arguments.precision,
    )
    last = result.events[-1]
    versions = {"fedrax": fedrax.__version__, "jax": jax.__version__}
    report(
        clock,
        versions,
        last["test_loss"],
        last["test_accuracy"],
        device_peak_mb(),
        applied=sorted(applied_passes()),
    )


if __name__ == "__main__":
    main()
