"""A run in a process that a test kills: python child.py DATA METHOD DIRECTORY ROUNDS [SLEEP_AT].

It resumes the run in DIRECTORY, prints each round, and writes the final state to DIRECTORY/final.npz. In round SLEEP_AT
the sink waits, prints the round again after a first Ctrl-C, and waits on. Exit status: 3 for Interrupted, 4 for a bare
KeyboardInterrupt.
"""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedrax
from fedrax import signals
from fedrax.models import Logistic
from fedrax.simulation import Interrupted

METHODS = {
    "scaffold": fedrax.Scaffold(local=fedrax.LocalSGD(lr=0.02, steps=3, batch_size=5)),
    "losac": fedrax.LoSAC(local=fedrax.LocalSGD(lr=0.02, steps=3, blocks=4)),
}
CLIENTS = 12


class Rounds:
    """A sink that prints the number of each round."""

    def __init__(self, sleep_at: int):
        self.sleep_at = sleep_at

    def start(self, run: Any) -> None:
        """Print the first round."""
        print(run.first_round, flush=True)

    def event(self, event: dict) -> None:
        """Print the number of the round."""
        print(event["round"], flush=True)
        if event["round"] == self.sleep_at:
            while not any(flag.is_set() for flag in signals._active_flags):
                time.sleep(0.01)
            time.sleep(2 * signals.ECHO_SECONDS)  # so that the next signal is another request
            print(event["round"], flush=True)
            time.sleep(600)

    def finish(self, result: Any) -> None:
        """Do nothing."""


def main(data: str, method: str, directory: str, rounds: str, sleep_at: str = "-1") -> None:
    """Run to the end, or until interrupted."""
    with np.load(data) as file:
        x, y = file["x"], file["y"]
    owner = (np.arange(len(y)) * CLIENTS) // len(y)
    federation = fedrax.Federation.from_arrays(x, y, owner, test=(x[:300], y[:300]), num_classes=10)
    task = fedrax.classification(Logistic().build(x.shape[1:], 10))
    settings = fedrax.Settings(rounds=int(rounds), cohort_size=4, checkpoint_every=1, eval_every=7, stragglers=0.3)
    result = fedrax.simulate(
        METHODS[method], task, federation, settings, directory=directory, resume=True, sinks=[Rounds(int(sleep_at))]
    )
    state = (result.params, result.server, [result.client_state(i) for i in range(CLIENTS)])
    np.savez(Path(directory) / "final.npz", *[np.asarray(a) for a in jax.tree.leaves(state)])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(*sys.argv[1:])
    except Interrupted:
        sys.exit(3)
    except KeyboardInterrupt:
        sys.exit(4)
