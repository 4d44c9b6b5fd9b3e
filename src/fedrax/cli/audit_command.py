"""``fedrax audit``: attacks on a private experiment, lower bounds on epsilon beside its guarantee."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich import box
from rich.table import Table

from fedrax.cli.arguments import parse_experiment
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.experiments.audit import Audit, audit_canaries, audit_client
from fedrax.report.comparison_table import wide_console
from fedrax.simulation import Settings, use_all_cores
from fedrax.simulation.settings import cohort_sampler

DESCRIPTION = """Attack a private experiment: `fedrax audit [FILE.toml] [flags]`.

Takes the flags of `fedrax run`. One adversary observes a client in many runs of a few rounds, with its own labels and
with other labels. With --canaries, a second one guesses from the model of one whole run which canaries had their labels
changed. Each attack proves a lower bound on epsilon at 95 % confidence, printed beside the guaranteed upper bound.
Neighboring datasets differ in the labels of a client or of a sample, or in its presence under Poisson sampling (of
clients with --drawn, of samples in mini-batches). The exit status is 1 if a lower bound exceeds the guarantee: the
mechanism then violates it."""


@dataclass
class AuditOptions:
    """Options of ``fedrax audit``."""

    data_dir: Path | None = None
    """Directory of data files; by default $FEDRAX_DATA."""
    unit: Literal["client", "sample"] | None = None
    """Whose labels are changed: all of a client, or of one sample; by default the protected unit of the method."""
    client: int = 0
    """The client to attack."""
    runs: int = 2000
    """Runs for each hypothesis."""
    rounds: int = 1
    """Rounds of each run."""
    drawn: bool = False
    """Sample the attacked client as the experiment's participation does (poisson or uniform): audits the amplification
    by sampling. Without it the client is in every cohort."""
    canaries: int | None = None
    """Also attack one whole run with this many canaries."""
    json: bool = False
    """Print JSON."""


def main(args: list[str]) -> int:
    """Parse, attack, print."""
    parsed = parse_experiment(AuditOptions, args, "fedrax audit", DESCRIPTION, comparisons=True)
    spec, options = parsed.experiment, parsed.options
    if options.rounds < 1:
        raise FedraxError(f"--rounds must be 1 or more, not {options.rounds}")
    use_all_cores()
    problem = experiment.build(spec, options.data_dir)
    observation: dict[str, Any] = {"client": options.client, "rounds": options.rounds, "runs": options.runs}
    if options.drawn:
        observation |= _client_sampling(spec.run, problem[2].sizes)
    audits = [audit_client(*problem, spec.run, unit=options.unit, **observation)]
    if options.canaries is not None:
        audits.append(audit_canaries(*problem, spec.run, unit=options.unit, canaries=options.canaries))
    if options.json:
        print(json.dumps([audit.to_dict() for audit in audits]))
    else:
        _print(audits)
    return int(any(audit.refuted for audit in audits))


def _client_sampling(run: Settings, sizes: np.ndarray) -> dict[str, Any]:
    """How the experiment samples a client, as arguments of `audit_client`."""
    cohorts = cohort_sampler(run, sizes).sampling
    if cohorts.drawn not in ("poisson", "fixed"):
        raise FedraxError(
            "--drawn is for cohorts of participation 'poisson' or 'uniform': other policies do not amplify privacy"
        )
    return {"drawn": cohorts.drawn, "rate": cohorts.rate}


def _print(audits: list[Audit]) -> None:
    """Print the table of attacks."""
    console, paper = wide_console(), any(audit.claimed_paper is not None for audit in audits)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    heads = ["attack on", "neighboring data", "rounds", "trials", "epsilon proven", "provable", "guaranteed"]
    for head in heads + ["by the paper"] * paper:
        table.add_column(head, justify="left" if head in heads[:2] else "right")
    for a in audits:
        about = f"{a.neighbors} of a {a.unit}"
        bounds = [f"≥ {a.proven:.4g}", f"{a.provable:.4g}", f"≤ {a.claimed:.4g}"]
        cells = [a.attack, about, str(a.rounds), str(a.trials), *bounds]
        claim = "–" if a.claimed_paper is None else f"≤ {a.claimed_paper:.4g}"
        table.add_row(*cells, *[claim + (" refuted" if a.paper_refuted else "")] * paper)
    console.print(table)
    console.print(f"at delta {audits[0].delta:g}, each bound with 95 % confidence")
    console.print("provable: the bound of the best attack with as many trials, if the guarantee holds exactly")
    if any(audit.neighbors == "replacement" for audit in audits):
        console.print("guarantees about replaced data are weaker than those about presence that fedrax privacy prints")
    if any(audit.refuted for audit in audits):
        console.print("REFUTED: a lower bound exceeds the guarantee, so the mechanism violates it.")
