"""fedrax: many rounds of a workload with random cohorts and an evaluation every ten rounds, as in pfl-research's
benchmarks.
"""

from __future__ import annotations

from typing import Any

from benchmarks.timing import RoundClock, TargetClock, report, runner_arguments
from benchmarks.workloads import EVALUATE_EVERY, TARGET_ACCURACY


class Evaluations:
    """Sink that reads the clock at each evaluation."""

    def __init__(self, clock: TargetClock) -> None:
        self.clock = clock

    def start(self, run: Any) -> None:
        pass

    def event(self, event: Any) -> None:
        if "test_accuracy" in event:
            self.clock.reached(event["test_accuracy"])

    def finish(self, result: Any) -> None:
        pass


def main() -> None:
    arguments, workload, arrays = runner_arguments("fedrax, many rounds.", channels_last=True, rounds=1500)
    target = TargetClock(TARGET_ACCURACY)

    import jax

    import fedrax
    from benchmarks.fedrax_clock import device_peak_mb
    from benchmarks.fedrax_problems import federation_of, problem

    local = fedrax.LocalSGD(lr=workload.learning_rate, epochs=workload.epochs, batch_size=workload.batch)
    fedrax.simulation.use_all_cores()  # before the first array
    model, params = problem(workload, arrays.initial)
    result = fedrax.simulate(
        fedrax.FedAvg(local=local),
        fedrax.classification(model),
        federation_of(arrays),
        rounds=arguments.rounds,
        eval_every=EVALUATE_EVERY,
        params=params,
        cohort_size=workload.cohort,
        weights="samples",
        precision=arguments.precision,
        sinks=[Evaluations(target)],
    )
    whole = target.elapsed
    clock = RoundClock([whole, whole / arguments.rounds], whole)
    last = result.events[-1]
    versions = {"fedrax": fedrax.__version__, "jax": jax.__version__}
    report(clock, versions, last["test_loss"], last["test_accuracy"], device_peak_mb(), **target.summary())


if __name__ == "__main__":
    main()
