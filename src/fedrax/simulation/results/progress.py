"""Progress line in a terminal or a notebook; nothing is written where standard error is neither.

Not ``rich.progress``: that shows nothing in a notebook without ipywidgets, and leaves the terminal without a cursor
when the process is killed.

"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

import jax
from rich.cells import cell_len, set_cell_size

from fedrax.escaping import printable_line
from fedrax.simulation.results.events import Event, RunInfo, Sink

_PAUSE = 0.1
"""Seconds between two states of the line."""
_NOTEBOOK, _NARROWEST = 100, 20
_BAR = (10, 40)
"""Characters of a bar: fewer say nothing, more say no more."""


def progress_is_visible(file: TextIO | None = None) -> bool:
    """Whether to show progress: in a terminal or a notebook, and in the first process of several.

    Not with FEDRAX_PROGRESS=0, because a notebook that is executed unattended stores each state of the line.
    """
    if os.environ.get("FEDRAX_PROGRESS") == "0":
        return False
    return (_is_terminal(file or sys.stderr) or _in_notebook()) and jax.process_index() == 0


def _is_terminal(file: Any) -> bool:
    try:
        return file.isatty()
    except (AttributeError, ValueError):  # what stands in its place may do no more than write; it may be closed
        return False


def _in_notebook() -> bool:
    return "ipykernel" in sys.modules


class ProgressLine:
    """One line on standard error that is overwritten; permanent text is printed above it."""

    def __init__(self, file: TextIO | None = None, width: int | None = None):
        """file: where to write, standard error by default. width: in characters, the terminal's own by default."""
        self._file, self._width, self._seen = file, width, None
        self._drawn, self._text = 0, ""

    @property
    def seen(self) -> bool:
        """Whether the line is visible; determined when it is first needed."""
        if self._seen is None:
            self._seen = progress_is_visible(self._file)
        return self._seen

    @property
    def width(self) -> int:
        """How many characters fit."""
        if self._width is not None:
            return self._width
        try:
            columns = int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stderr.fileno()).columns)
        except (OSError, ValueError, AttributeError):
            columns = _NOTEBOOK
        return max(_NARROWEST, (columns or _NOTEBOOK) - 1)

    @property
    def letters(self) -> tuple[str, str]:
        """The characters of the bar: (done, remaining)."""
        encoding = getattr(self._file or sys.stderr, "encoding", None) or "utf-8"
        return ("━", "─") if encoding.lower().replace("-", "").startswith("utf") else ("#", "-")

    def show(self, text: str) -> None:
        """Replace the line by ``text``."""
        if self.seen:
            text = set_cell_size(text, self.width) if cell_len(text) > self.width else text
            length = cell_len(text)
            self._write(f"\r{text}{' ' * max(0, self._drawn - length)}")
            self._drawn, self._text = length, text

    def clear(self) -> None:
        """Erase the line."""
        if self._drawn:
            self._write(f"\r{' ' * self._drawn}\r")
            self._drawn, self._text = 0, ""

    def keep(self) -> None:
        """Leave the line as it is and start a new one below it."""
        if self._drawn:
            self._write("\n")
            self._drawn, self._text = 0, ""

    def say(self, text: str) -> None:
        """Print ``text`` above the line, also where the line itself is not visible."""
        text, before = printable_line(text), self._text
        self.clear()
        self._write(f"{text}\n")
        if before:
            self.show(before)

    def _write(self, text: str) -> None:
        file = self._file or sys.stderr
        if file is not None:
            with suppress(OSError, ValueError):  # a closed terminal does not end the run
                file.write(text)
                file.flush()


class ProgressSink:
    """Sink that shows rounds done, training loss, test metric, rounds per second and the time left.

    ``line`` is a line shared by several runs, erased by its owner; without it the sink has its own, which stays.
    ``shows_test`` is false where settings are still being chosen, for which the test metric must not be seen.
    """

    def __init__(self, description: str | None = None, line: ProgressLine | None = None, *, shows_test: bool = True):
        self._shows_test = shows_test
        self._description, self._shared, self._line = description, line is not None, line or ProgressLine()
        self._name, self._total, self._numbers, self._test = "", 0, "", ""
        self._first: tuple[int, float] | None = None
        self._shown = 0.0
        self._passed: Event | None = None

    def start(self, run: RunInfo) -> None:
        """Show the line."""
        self._name, self._total = printable_line(self._description or run.algorithm), run.rounds
        self._line.show(self._text(run.first_round, ["compiling"]))

    def event(self, event: Event) -> None:
        """Advance to the event's round."""
        now, done = time.monotonic(), event["round"]
        for key, form in (
            ("test_accuracy", "accuracy {:.3f}"),
            ("test_mse", "mse {:.4g}"),
            ("test_loss", "loss {:.4g}"),
        ):
            if key in event and self._shows_test:
                self._test = "test " + form.format(event[key])
                break
        if self._first is None:  # the time before the first block's end includes compilation
            self._first = (done, now)
        if now - self._shown < _PAUSE and done < self._total:
            self._passed = event
        else:
            self._show(event, now)

    def _show(self, event: Event, now: float) -> None:
        self._shown, self._passed = now, None
        done = event["round"]
        self._line.show(self._text(done, self._said(event, done, now)))

    def _said(self, event: Event, done: int, now: float) -> list[str]:
        """The texts of the line, the most important first."""
        of_round = event.get("local_loss", event.get("train_loss"))
        loss = "" if of_round is None else f"loss {of_round:.4g}"
        budget = f"ε {event['epsilon']:.3g}" if event.get("epsilon") is not None else ""
        first, began = self._first or (done, now)
        speed = (done - first) / (now - began) if now > began else 0.0
        left = _clock((self._total - done) / speed) + " left" if speed and done < self._total else ""
        return [self._test or loss, left, budget, loss if self._test else "", f"{speed:.1f} rounds/s" if speed else ""]

    def _text(self, done: int, said: Sequence[str]) -> str:
        return compose_line(self._name, done, self._total, said, self._line.width, self._line.letters)

    def say(self, text: str) -> None:
        """Print ``text`` above the line."""
        self._line.say(text)

    def note(self, text: str) -> None:
        """Show what the run does after its rounds; nothing if ``text`` is empty."""
        if text:
            self._line.show(f"{self._name}  {text}")
        else:
            self._line.clear()

    def finish(self, result: Any | None) -> None:
        """Show the last round, also of a run that ended early, and leave the line."""
        if self._passed is not None:
            self._show(self._passed, time.monotonic())
        if not self._shared:
            self._line.keep()


def compose_line(
    name: str, done: int, total: int, said: Sequence[str], width: int, letters: tuple[str, str] = ("━", "─")
) -> str:
    """Compose a progress line of at most ``width`` characters.

    It has the name, shortened if necessary, the rounds, as many of the texts in ``said`` as fit, in order, and a bar
    where there is room.
    """
    rounds = f"{done}/{total} rounds"
    room = max(12, width // 3)
    name = name if cell_len(name) <= room else set_cell_size(name, room - 1) + "…"
    line = f"{name}  {rounds}"
    for part in said:
        if part and cell_len(line) + 2 + cell_len(part) <= width:
            line += f"  {part}"
    space = width - cell_len(line) - 2
    if total and space >= _BAR[0]:
        length = min(space, _BAR[1])
        full = length * min(done, total) // total
        line = f"{name}  {letters[0] * full}{letters[1] * (length - full)}{line[len(name) :]}"
    return line


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def with_progress(sinks: Sequence[Sink], progress: bool, description: str | None = None) -> list[Sink]:
    """``sinks`` with a ProgressSink added, unless progress is off, not visible, or already among them."""
    shown = progress and not any(isinstance(sink, ProgressSink) for sink in sinks) and progress_is_visible()
    return [*sinks, *([ProgressSink(description)] if shown else [])]
