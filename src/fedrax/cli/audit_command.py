"""``fedrax audit``: what attackers prove of a private experiment, beside what it claims."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich import box
from rich.table import Table

from fedrax.cli.arguments import parse_experiment
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.experiments.audit import Audit, guess_canaries, watch_a_client
from fedrax.report.comparison_table import wide_console
from fedrax.simulation import Settings, use_all_cores
from fedrax.simulation.settings import cohort_sampler

DESCRIPTION = """Attack a private experiment: `fedrax audit [FILE.toml] [flags]`.

With the flags of `fedrax run`. One attacker watches a client, with its own labels and with others, in many runs of a
few rounds; the other guesses, from the model of one whole run, of which canaries the labels were exchanged. Each proves
a lower bound on epsilon at 95 % confidence, printed beside what the ledger claims: about other data of a client or of a
sample, or about its presence where a coin decides on it (of a client with `--drawn`, of a sample in batches at a rate).
The exit status is 1 where a bound is above the sound claim: the mechanism then does not do what it says."""


@dataclass
class AuditOptions:
    """Options of ``fedrax audit``."""

    data_dir: Path | None = None
    """Where data files lie; by default $FEDRAX_DATA."""
    unit: Literal["client", "sample"] | None = None
    """Whose labels are exchanged: all of a client, or those of one sample; by default what the method protects."""
    client: int = 0
    """The client that is watched."""
    runs: int = 2000
    """Of each world."""
    watched: Annotated[int, tyro.conf.arg(name="rounds")] = 1
    """Rounds of each of these runs."""
    drawn: bool = False
    """Let a coin decide whether the watched client is in a round, as where cohorts are drawn by `poisson` or of a fixed
    size: audits the amplification that is claimed for the draw."""
    canaries: int | None = None
    """Also train once, with so many canaries; with as many rounds as the experiment has."""
    json: bool = False
    """Print JSON."""


def main(args: list[str]) -> int:
    """Parse, attack, print."""
    parsed = parse_experiment(AuditOptions, args, "fedrax audit", DESCRIPTION, comparisons=True)
    spec, options = parsed.experiment, parsed.options
    if options.watched < 1:
        raise FedraxError(f"--rounds must be 1 or more, not {options.watched}")
    use_all_cores()
    problem = experiment.build(spec, options.data_dir)
    watching: dict[str, Any] = {"client": options.client, "rounds": options.watched, "runs": options.runs}
    if options.drawn:
        watching |= _draw(spec.run, problem[2].sizes)
    audits = [watch_a_client(*problem, spec.run, unit=options.unit, **watching)]
    if options.canaries is not None:
        audits.append(guess_canaries(*problem, spec.run, unit=options.unit, canaries=options.canaries))
    if options.json:
        print(json.dumps([audit.to_dict() for audit in audits]))
    else:
        _print(audits)
    return int(any(audit.refuted for audit in audits))


def _draw(run: Settings, sizes: np.ndarray) -> dict[str, Any]:
    """How the experiment draws a client, as a watcher is told it."""
    cohorts = cohort_sampler(run, sizes).sampling
    if cohorts.drawn not in ("poisson", "fixed"):
        raise FedraxError("--drawn is for cohorts of participation 'poisson' or 'uniform': others hide nobody")
    return {"drawn": cohorts.drawn, "rate": cohorts.rate}


def _print(audits: list[Audit]) -> None:
    console, paper = wide_console(), any(audit.claimed_paper is not None for audit in audits)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    heads = ["an attacker who", "about", "rounds", "trials", "proves epsilon", "claimed"]
    for head in heads + ["by the paper"] * paper:
        table.add_column(head, justify="left" if head in heads[:2] else "right")
    for a in audits:
        about = f"{a.neighbors} of a {a.unit}"
        cells = [a.attacker, about, str(a.rounds), str(a.trials), f"≥ {a.proven:.4g}", f"≤ {a.claimed:.4g}"]
        claim = "–" if a.claimed_paper is None else f"≤ {a.claimed_paper:.4g}"
        table.add_row(*cells, *[claim + (" refuted" if a.paper_refuted else "")] * paper)
    console.print(table)
    console.print(f"at delta {audits[0].delta:g}, each bound with 95 % confidence")
    if any(audit.refuted for audit in audits):
        console.print("REFUTED: more leaks than the sound claim allows. The mechanism does not do what it says.")
