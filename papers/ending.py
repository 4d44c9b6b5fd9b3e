"""Exit of the papers' commands after errors: with one clear message, as the command line of fedrax."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable

from fedrax import FedraxError


def in_a_sentence(name: str) -> Callable[[Callable[[], int]], Callable[[], int]]:
    """A decorator for the main function of a command: status 1 for invalid input, that of the signal for an
    interruption.
    """

    def decorated(main: Callable[[], int]) -> Callable[[], int]:
        @functools.wraps(main)
        def ended() -> int:
            try:
                return main()
            except FedraxError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt as stop:
                print(f"{name}: stopped; runs that are finished and kept are not run again", file=sys.stderr)
                return 128 + getattr(stop, "signal", signal.SIGINT)

        return ended

    return decorated
