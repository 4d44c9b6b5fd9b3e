"""A diagnosis as tables, sentences and a picture."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from fedrax.analysis.diagnosis import Diagnosis
from fedrax.report.curves import PALETTE

RANGE = 3.0
"""How many times the largest mean gradient must be the smallest one before a fit says what goes with it."""
STEADY = 0.1
"""The share of the largest curvature below which its growth with the gradient is none."""
CLOSE = 0.1
"""How far the mean gradient of clients by chance may be from that of all, in its own length, without a word."""
LITTLE = 0.3
"""Below it a ratio to the mean gradient, or to the mean update, counts as small."""


def points_table(made: Diagnosis) -> Table:
    """What was measured at each point of the run."""
    heads = (
        "round",
        "loss",
        "|grad f|",
        "max |grad f_i|",
        "B",
        "apart",
        "noise",
        "|Hess f|",
        "steps",
        "update",
        "drift",
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for p in made.points:
        row = (
            p.loss,
            p.gradient,
            p.largest,
            p.dissimilarity,
            p.apart,
            p.noise,
            p.curvature,
            p.steps,
            p.update,
            p.drift,
        )
        table.add_row(str(p.round), *(f"{value:.3g}" for value in row))
    return table


def lines(made: Diagnosis) -> list[str]:
    """What the measurements say of the methods' assumptions, a sentence each."""
    rounds = ", ".join(map(str, made.left_out))
    left_out = [f"left out       the mean gradient is zero, but for rounding, after rounds {rounds}"] * bool(rounds)
    sample = (
        f"measured       the mean gradient of {made.measured} of {made.clients} clients is about"
        f" {made.sampling_error:.2g} times itself away from that of all: B, kappa, rho and drift are theirs alone"
    )
    return [
        *left_out,
        *[sample] * (made.sampling_error > CLOSE),
        f"dissimilarity  B = {made.dissimilarity:.3g} at most (1: clients agree); single clients' gradients are"
        f" {made.apart:.2g} times the mean gradient away from it",
        f"bound          |grad f_i| <= {made.kappa:.3g} + {made.rho:.3g} |grad f| (EPISODE's kappa and rho"
        + (")" if _apart(made) else "): the gradients of this run are too much alike to tell one from the other"),
        f"smoothness     |Hess f| is about {made.l0:.3g} + {made.l1:.3g} |grad f| (L0 and L1): {_smooth(made)}",
        f"drift          {_drift(made)}",
        f"cohorts        the mean of {made.cohort} of {made.clients} clients is {made.cohort_noise:.2g} times the mean"
        f" gradient away from that of all: "
        + _verdict(
            made.cohort_noise,
            "who takes part matters little",
            "larger cohorts and memories of absent clients reduce it (MIFA, GradMA, LoSAC, SCAFFOLD)",
        ),
        f"noise          a local batch's gradient is {made.noise:.2g} times the mean gradient off: "
        + _verdict(
            made.noise,
            "batches are as good as whole data",
            "larger batches, more steps of a smaller size, or averaging over more clients reduce it",
        ),
    ]


def _drift(made: Diagnosis) -> str:
    if not math.isfinite(made.drift):
        return (
            "the mean update is lost in the noise of batches, so that nobody can say how far clients' updates are from"
            " it; larger batches would tell"
        )
    return f"clients' updates are {made.drift:.2g} times the mean update away from it: " + _verdict(
        made.drift,
        "local steps agree, and corrections of drift have little to correct",
        "corrections of drift have something to correct (SCAFFOLD, LoSAC, MimeSVRG, FedDyn, EPISODE)",
    )


def _apart(made: Diagnosis) -> bool:
    """Whether mean gradients differ enough to say what goes with them."""
    gradients = [point.gradient for point in made.points]
    return max(gradients) >= RANGE * min(gradients)


def _smooth(made: Diagnosis) -> str:
    if not _apart(made):
        return "the gradients of this run are too much alike to say how curvature goes with them"
    if made.growth > 0.5:
        return "curvature grows with the gradient, which is what clipping is for (CELGC, EPISODE)"
    if made.growth > STEADY:
        return (
            f"{made.growth:.0%} of the largest curvature comes with the gradient: a fixed step size serves"
            " where it is small enough for that"
        )
    return "curvature does not grow with the gradient: a fixed step size serves, and nothing asks for clipping"


def _verdict(ratio: float, little: str, much: str) -> str:
    return little if ratio < LITTLE else much


def draw(made: Diagnosis) -> Figure:
    """Gradients and their spread along the run, and curvature against the gradient."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    along, bent = figure.subplots(1, 2)
    rounds = [point.round for point in made.points]
    for i, (label, values) in enumerate(
        (
            ("mean gradient", [p.gradient for p in made.points]),
            ("largest of a client", [p.largest for p in made.points]),
            ("bound by κ and ρ", [made.kappa + made.rho * p.gradient for p in made.points]),
            ("clients from the mean", [p.apart for p in made.points]),
            ("single samples from their client", [p.noise for p in made.points]),
        )
    ):
        dashed = "--" if label.startswith("bound") else "-"
        label += " (zero)" * (not any(values))  # a logarithm has no place for it
        along.plot(rounds, values, dashed, marker="o", markersize=4, color=PALETTE[i], label=label)
    along.set(xlabel="communication rounds", ylabel="length of gradients", yscale="log")
    along.set_xscale("symlog", linthresh=1)
    ticks = sorted({0, *rounds})
    along.set_xticks(ticks, [str(r) for r in ticks])
    along.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)
    gradients = [p.gradient for p in made.points]
    bent.scatter(gradients, [p.curvature for p in made.points], color=PALETTE[0], label="measured")
    ends = [0.0, max(gradients) * 1.05]
    bent.plot(ends, [made.l0 + made.l1 * g for g in ends], "--", color=PALETTE[1], label="L0 + L1 |grad f|")
    bent.set(xlabel="length of the mean gradient", ylabel="spectral norm of the Hessian")
    bent.set(xlim=(0, ends[1]), ylim=(0, 1.1 * max(p.curvature for p in made.points) or 1))
    bent.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)
    for axes in (along, bent):
        axes.grid(color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
