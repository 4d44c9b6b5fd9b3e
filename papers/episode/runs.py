"""Runs stored as lines of JSON, so that a command can continue on another machine."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrax import FedraxError, files, sweep
from fedrax.data import hold_out
from fedrax.experiments import comparison, experiment
from fedrax.experiments.comparison import merge_tables
from papers.losac.running import processor

CURVES = ("test_accuracy", "test_loss", "train_loss")
"""Metrics of which every evaluation is kept."""


class Kept:
    """Runs of the methods of an experiment file with changes of its table.

    kept: the file of their lines. rounds: overrides the rounds of the settings, to try a command. validation: share of
    the training rows on which runs are evaluated instead of the test rows.
    """

    def __init__(self, file: Path, kept: Path, rounds: int | None, data_dir: str | None, validation: float = 0):
        self.file, self.kept, self.rounds, self.validation = file, kept, rounds, validation
        self.data_dir = data_dir or os.environ.get("FEDRAX_DATA")
        self.table = files.read_toml(file)
        self._built: tuple[str, Any, Any] = ("", None, None)
        self._read: tuple[int, dict[tuple[str, str, int], dict[str, Any]]] = (0, {})

    def get(self, setting: str, changes: Mapping[str, Any], method: str, seed: int) -> dict[str, Any] | None:
        """The record of a run, or None; FedraxError if it belongs to another experiment."""
        record = self._records().get((setting, method, seed))
        if record is not None and record["experiment"] != self._digest(changes, method, seed):
            raise FedraxError(
                f"{self.kept} holds a run of another experiment, {setting}, {method}, seed {seed}: choose another "
                "--results"
            )
        return record

    def run(self, setting: str, changes: Mapping[str, Any], method: str, seed: int) -> dict[str, Any]:
        """Run it if it is not stored, and store it."""
        if (record := self.get(setting, changes, method, seed)) is not None:
            return record
        made = self._experiment(changes, method, seed)
        key = json.dumps([self._table(changes, method, seed)[part] for part in ("data", "partition", "model")])
        if self._built[0] != key:
            _, task, federation = experiment.build(made, self.data_dir)
            self._built = (key, task, hold_out(federation, self.validation) if self.validation else federation)
        _, task, federation = self._built
        began = time.monotonic()
        ((result,),) = sweep([made.algorithm], task, federation, (seed,), made.run, progress=False)
        took = time.monotonic() - began
        evaluated = [event for event in result.events if "test_accuracy" in event]
        clipped = [float(event["clipped"]) for event in result.events if "clipped" in event]
        record = {
            "setting": setting,
            "method": method,
            "seed": seed,
            "rounds": [event["round"] for event in evaluated],
            **{key: [round(float(event[key]), 5) for event in evaluated if key in event] for key in CURVES},
            "clipped": round(100 * sum(clipped) / len(clipped), 1) if clipped else None,
            "megabytes": round(sum(result.events[-1][way] for way in ("bytes_down", "bytes_up")) / 1e6, 3),
            "diverged": result.stopped == "diverged",
            "seconds": round(took, 1),
            "experiment": self._digest(changes, method, seed),
            "processor": processor(),
            "date": datetime.date.today().isoformat(),
        }
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        with files.open_to_append(self.kept) as file:
            file.write(json.dumps(record) + "\n")
        print(f"{setting}, {method}, seed {seed}, {took:.0f} s: {last(record)}", flush=True)
        return record

    def machines(self) -> str:
        """Machines and dates of the runs."""
        records = self._records().values()
        dates = sorted({record["date"] for record in records})
        processors = " and ".join(sorted({record["processor"] for record in records}))
        return f"{processors}, {' to '.join(dates[:1] + dates[1:][-1:])}"

    def _records(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        size = self.kept.stat().st_size if self.kept.exists() else 0
        if size != self._read[0]:
            with files.open_regular_file(self.kept, files.MAX_JSON) as file:
                self._read = (size, dict(self._record(number, line) for number, line in enumerate(file, 1)))
        return self._read[1]

    def _record(self, number: int, line: bytes) -> tuple[tuple[str, str, int], dict[str, Any]]:
        try:
            record = json.loads(line)
            return (record["setting"], record["method"], record["seed"]), record
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FedraxError(f"{self.kept}: line {number} is not a run; take it out and go on.") from error

    def _table(self, changes: Mapping[str, Any], method: str, seed: int) -> dict[str, Any]:
        """The run as an experiment file with one method; its ``vectors`` are relative to the data directory."""
        table = merge_tables(self.table, changes)
        fewer = {"run": {"rounds": self.rounds}} if self.rounds else {}
        chosen = [merge_tables(entry, fewer) for entry in table["compare"] if entry["label"] == method]
        rest = {key: value for key, value in table.items() if key not in ("seeds", "compare")}
        return rest | {"compare": chosen, "run": table["run"] | {"seed": seed}}

    def _experiment(self, changes: Mapping[str, Any], method: str, seed: int) -> experiment.Experiment:
        table = self._table(changes, method, seed)
        if "vectors" in table["model"] and self.data_dir:
            table["model"] = table["model"] | {"vectors": str(Path(self.data_dir, table["model"]["vectors"]).resolve())}
        (made,) = comparison.from_table(table, str(self.file), self.file.parent).methods
        made.check()
        return dataclasses.replace(made, run=dataclasses.replace(made.run, seed=seed))

    def _digest(self, changes: Mapping[str, Any], method: str, seed: int) -> str:
        table = self._table(changes, method, seed)
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def last(record: Mapping[str, Any]) -> str:
    """Final values of a run, for the terminal."""
    shown = [f"{key} {record[key][-1]:.4f}" for key in CURVES if record[key]]
    return ", ".join(shown) + (", diverged" if record["diverged"] else "")
