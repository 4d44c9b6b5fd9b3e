"""A diagnosis as a table, text and a figure."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from fedrax.analysis.diagnosis import Diagnosis
from fedrax.analysis.dissimilarity import describe_dissimilarity, verdict
from fedrax.analysis.method_trials import METHODS, GridPoint, MethodTrials
from fedrax.report.curves import PALETTE

RANGE = 3.0
"""Ratio of the largest to the smallest mean gradient from which on a fit over gradients is meaningful."""
STEADY = 0.1
"""Share of the largest curvature below which its growth with the gradient is not reported."""
CLOSE = 0.1
"""Relative error of the subsampled mean gradient above which it is reported."""


def points_table(made: Diagnosis) -> Table:
    """The measurements, a row for each round."""
    heads = (
        "round",
        "loss",
        "|grad f|",
        "max |grad f_i|",
        "B",
        "spread",
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
            p.largest_gradient,
            p.dissimilarity,
            p.gradient_spread,
            p.noise,
            p.curvature,
            p.steps,
            p.update,
            p.drift,
        )
        table.add_row(str(p.round), *(f"{value:.3g}" for value in row))
    return table


def lines(made: Diagnosis, model: str) -> list[str]:
    """The constants of the methods' assumptions for the model of this name and what they mean, a line each."""
    first = made.points[0]
    rounds = ", ".join(map(str, made.skipped_rounds))
    skipped = [f"skipped        the mean gradient is zero up to rounding after rounds {rounds}"] * bool(rounds)
    sample = (
        f"subsampled     the mean gradient of {made.measured} of {made.clients} clients differs by about"
        f" {made.sampling_error:.2g} times its norm from that of all: B, kappa, rho and drift hold for those clients"
    )
    return [
        *skipped,
        *[sample] * (made.sampling_error > CLOSE),
        describe_dissimilarity(first.dissimilarity, model, first.round)
        + f"; along the run B is {made.dissimilarity:.3g} at most",
        f"bound          |grad f_i| <= {made.kappa:.3g} + {made.rho:.3g} |grad f| (EPISODE's kappa and rho"
        + (")" if _varies(made) else "): the gradients of this run differ too little to separate kappa from rho"),
        f"smoothness     |Hess f| is about {made.l0:.3g} + {made.l1:.3g} |grad f| (L0 and L1): {_smooth(made)}",
        f"drift          {_drift(made)}",
        f"cohorts        the mean gradient of {made.cohort} of {made.clients} clients differs by"
        f" {made.cohort_noise:.2g} times its norm from that of all: "
        + verdict(
            made.cohort_noise,
            "client sampling matters little",
            "larger cohorts, or methods with client state or stored updates (MIFA, GradMA, LoSAC, SCAFFOLD), reduce it",
        ),
        f"noise          a mini-batch gradient has an error of {made.noise:.2g} times the mean gradient: "
        + verdict(
            made.noise,
            "mini-batches are nearly as good as full batches",
            "larger mini-batches, a smaller learning rate with more steps, or larger cohorts reduce it",
        ),
    ]


def _drift(made: Diagnosis) -> str:
    """The drift of client updates in words."""
    if not math.isfinite(made.drift):
        return (
            "the mean update is smaller than the noise of mini-batches, so the distance of client updates from it is"
            " unknown: measure with larger mini-batches"
        )
    distance = f"the distance of a client's update from the mean update is {made.drift:.2g} times the norm of the mean"
    little = "there is little drift to correct"
    much = "there is drift that SCAFFOLD, LoSAC, MimeSVRG, FedDyn or EPISODE can correct"
    return f"{distance}: {verdict(made.drift, little, much)}"


def _varies(made: Diagnosis) -> bool:
    """Whether mean gradients vary enough along the run for a fit over them."""
    gradients = [point.gradient for point in made.points]
    return max(gradients) >= RANGE * min(gradients)


def _smooth(made: Diagnosis) -> str:
    """The growth of curvature with the gradient in words."""
    if not _varies(made):
        return "the gradients of this run vary too little to relate curvature to them"
    if made.growth > 0.5:
        return "curvature grows with the gradient, the case for clipping (CELGC, EPISODE)"
    if made.growth > STEADY:
        return (
            f"{made.growth:.0%} of the largest curvature grows with the gradient: a fixed learning rate works"
            " if it is small enough for the largest gradients"
        )
    return "curvature does not grow with the gradient: a fixed learning rate works without clipping"


def draw(made: Diagnosis) -> Figure:
    """Gradients and their spread along the run; curvature against the gradient."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    along, bent = figure.subplots(1, 2)
    rounds = [point.round for point in made.points]
    for i, (label, values) in enumerate(
        (
            ("mean gradient", [p.gradient for p in made.points]),
            ("largest client gradient", [p.largest_gradient for p in made.points]),
            ("bound by κ and ρ", [made.kappa + made.rho * p.gradient for p in made.points]),
            ("spread of client gradients", [p.gradient_spread for p in made.points]),
            ("noise of single samples", [p.noise for p in made.points]),
        )
    ):
        dashed = "--" if label.startswith("bound") else "-"
        label += " (zero)" * (not any(values))  # a logarithmic axis cannot show it
        along.plot(rounds, values, dashed, marker="o", markersize=4, color=PALETTE[i], label=label)
    along.set(xlabel="communication rounds", ylabel="norm", yscale="log")
    along.set_xscale("symlog", linthresh=1)
    ticks = sorted({0, *rounds})
    along.set_xticks(ticks, [str(r) for r in ticks])
    along.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)
    gradients = [p.gradient for p in made.points]
    bent.scatter(gradients, [p.curvature for p in made.points], color=PALETTE[0], label="measured")
    ends = [0.0, max(gradients) * 1.05]
    bent.plot(ends, [made.l0 + made.l1 * g for g in ends], "--", color=PALETTE[1], label="L0 + L1 |grad f|")
    bent.set(xlabel="norm of the mean gradient", ylabel="spectral norm of the Hessian")
    bent.set(xlim=(0, ends[1]), ylim=(0, 1.1 * max(p.curvature for p in made.points) or 1))
    bent.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)
    for axes in (along, bent):
        axes.grid(color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def trial_lines(trials: MethodTrials, conditions: str) -> list[str]:
    """The scores of the methods tried under ``conditions``, and the methods that were rejected."""
    unit, places = (100, 1) if trials.metric == "accuracy" else (1, 4)
    scores = [
        f"{trial.method} {unit * trial.score:.{places}f} ± {unit * trial.spread:.{places}f} ({_words(trial.point)})"
        for trial in trials.tried
    ]
    metric, deviation = "accuracy in %" if trials.metric == "accuracy" else "loss", "± over seeds"
    if trials.metric == "accuracy":
        best = trials.tried[0].score
        sampling = 100 * math.sqrt(best * (1 - best) / trials.rows)
        deviation += f"; standard error from the choice of rows about {sampling:.1f}"
    at_end = [trial.method for trial in trials.tried if trial.at_end]
    ends = f"; best at an end of the grid: {', '.join(at_end)}" if at_end else ""
    points = {trial.method: len(METHODS[trial.method].points()) for trial in trials.tried}
    counts = ", ".join(f"{method} {count}" for method, count in points.items())
    unequal = f"points         {counts}: a method with more points of its grid has a better chance to be the best"
    return [
        f"trials         {trials.rounds} rounds of each method at its best learning rate, {conditions}, {metric} on"
        f" {trials.rows} held-out rows ({deviation}): {', '.join(scores)}{ends}",
        *[unequal] * (len(set(points.values())) > 1),
        *(f"rejected       {reason}" for reason in trials.rejected),
    ]


def _words(point: GridPoint) -> str:
    """A point of a grid as text."""
    return ", ".join(f"{name} {value:g}" for name, value in point.items())
