"""Table 2, and what the paper concludes from it: rounds to 85 %, loss and accuracy of LoSAC and SCAFFOLD.

ESR has no published split, scaling or number of classes; ``esr-search`` compares what the text leaves open.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

from fedrax import FedraxError, files
from fedrax.report import curves
from fedrax.report.runs import MethodRuns
from papers.losac import sensitivity
from papers.losac.running import TARGET, few_seeds, final, run, spread, stored, write_table

HERE = Path(__file__).parent
SETS = ("MNIST", "HAR", "ESR")
MEASURED_AT = 500
"""The round whose loss and accuracy the table prints."""
NOTES = {"HAR": f" {sensitivity.RECOMPUTED}", "ESR": f" {sensitivity.DRAWN}"}
FILES = {"MNIST": "table2", "HAR": "table2-har", "ESR": "table2-esr"}
"""The command of each set and the names of its results."""
Printed = dict[str, str]


def printed_rows(data: str) -> list[Printed]:
    """The paper's rows of a data set, in its order."""
    with (HERE / "table2_printed.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["data"] == data]


def label_of(row: Printed) -> str:
    """A row's label in the experiment file."""
    return f"{row['method']}, T={row['T']}, M={row['M']}"


def mnist(arguments: argparse.Namespace) -> int:
    """Rounds to 85 %, final loss and accuracy of SCAFFOLD and LoSAC for T in {2, 4, 6}, M in {2, 3, 5}."""
    return ablation(arguments, "MNIST", run(HERE / "table2.toml", arguments.out / "table2", arguments))


def har(arguments: argparse.Namespace) -> int:
    """The same on HAR's 561 features, which are not UCI's own but recomputed from its windows."""
    flags = ["--data", sensitivity.HAR]
    return ablation(arguments, "HAR", run(HERE / "table2.toml", arguments.out / "table2-har", arguments, *flags))


def esr(arguments: argparse.Namespace) -> int:
    """The same on ESR, with as many rounds as the printed numbers need; the training loss is measured, too."""
    return ablation(arguments, "ESR", experiment(arguments, of_esr(), arguments.out / "table2-esr"))


def of_esr() -> dict[str, Any]:
    """Table 2's experiment on ESR, with as many rounds as the printed numbers to 85 %, and 500 at least."""
    table = files.read_toml(HERE / "table2.toml")
    table["data"] = dict(sensitivity.ESR)
    table["model"]["initialization"] = sensitivity.ESR_START
    table["run"] |= {"eval_every": 10, "eval_train": True, "rounds": MEASURED_AT}
    wanted = {label_of(row): 100 * math.ceil(int(row["rounds"]) / 100) for row in printed_rows("ESR")}
    for entry in table["compare"]:
        if wanted.get(entry["label"], 0) > MEASURED_AT:
            entry["run"] = {"rounds": wanted[entry["label"]]}
    return table


def experiment(arguments: argparse.Namespace, table: dict[str, Any], out: Path, *flags: str) -> list[MethodRuns]:
    """Write a comparison's file to ``out`` and run it there."""
    files.write_text(out / "comparison.toml", tomlkit.dumps(table))
    return run(out / "comparison.toml", out, arguments, *flags)


def ablation(arguments: argparse.Namespace, data: str, methods: list[MethodRuns]) -> int:
    """Table 2's rows of a data set, and curves of those with M = 5."""
    rows = []
    for row in printed_rows(data):
        method = next(m for m in methods if m.label == label_of(row))
        of, rounds = len(method.runs), final(method)[0]
        loss, accuracy = (measured(method, name) for name in ("test_loss", "test_accuracy"))
        rows.append(
            [
                label_of(row),
                *against(float(row["rounds"]), rounds, ".0f", of),
                *against(float(row["loss"]), loss, ".4f", of),
                *against(float(row["accuracy"]), [100 * a for a in accuracy], ".2f", of),
            ]
        )
    columns = ["", "rounds to 85 %", "ours", "gap", "loss", "ours", "gap", "accuracy %", "ours", "gap"]
    note = "Paper, ours (mean ± standard deviation over seeds) and gap (ours - paper)." + few_seeds(methods)
    note += NOTES.get(data, "")
    write_table(arguments, arguments.what, f"LoSAC, Table 2 ({data})", note, columns, rows)
    shown = [m for m in methods if "M=5" in m.label]
    drawn = curves.draw_curves(shown, TARGET, title=f"LoSAC, Table 2, {data}, M = 5")
    curves.save_curves(drawn, arguments.results / arguments.what)
    return 0


def measured(method: MethodRuns, name: str) -> list[float]:
    """A metric of every run that ended, at its last evaluation up to round ``MEASURED_AT``."""
    found = []
    for one in method.runs:
        values = [event[name] for event in one.events if name in event and event["round"] <= MEASURED_AT]
        if one.failure is None and values:
            found.append(values[-1])
    return found


def against(paper: float, ours: Sequence[float], form: str, runs: int) -> list[str]:
    """Paper, ours ± deviation, gap, as text; how many of the ``runs`` have a value where that is not all."""
    if not ours:
        return [format(paper, form), "not reached", ""]
    some = "" if len(ours) == runs else f" ({len(ours)} runs)"
    return [format(paper, form), spread(ours, form) + some, format(statistics.mean(ours) - paper, "+" + form)]


# -- what the paper does not say of ESR ------------------------------------------------------------------------------


def esr_search(arguments: argparse.Namespace) -> int:
    """Two rows of the table under each scaling and initialization, with one seed."""
    rows = []
    printed = {label_of(row): row for row in printed_rows("ESR")}
    arguments.seeds = arguments.seeds or [0]
    for scaling in ("standard", "range", "unit"):
        for start in ("glorot", "he", "pytorch"):
            table = of_esr()
            table["data"]["scaling"], table["model"]["initialization"] = scaling, start
            shown = ("SCAFFOLD, T=6, M=5", "LoSAC, T=6, M=5")
            table["compare"] = [
                entry | {"run": {"rounds": 700}} for entry in table["compare"] if entry["label"] in shown
            ]
            for method in experiment(arguments, table, arguments.out / "esr-search" / f"{scaling},{start}"):
                row, of = printed[method.label], len(method.runs)
                cells = against(float(row["rounds"]), final(method)[0], ".0f", of)
                cells += against(float(row["loss"]), measured(method, "test_loss"), ".4f", of)
                cells += [spread(measured(method, "train_loss"), ".4f")]
                accuracy = [100 * a for a in measured(method, "test_accuracy")]
                rows.append(
                    [scaling, start, method.label, *cells, *against(float(row["accuracy"]), accuracy, ".2f", of)]
                )
    columns = ["scaling", "initialization", "", "rounds to 85 %", "ours", "gap", "loss", "ours", "gap"]
    columns += ["training loss, ours", "accuracy %", "ours", "gap"]
    note = "Seizure or not; loss and accuracy after 500 rounds, one seed. " + sensitivity.DRAWN
    write_table(arguments, "esr-search", "LoSAC's Table 2 on ESR: what the paper does not say", note, columns, rows)
    return 0


# -- is the printed loss that of the test rows? ----------------------------------------------------------------------


def losses(arguments: argparse.Namespace) -> int:
    """The printed losses beside ours on test rows and on training rows."""
    kept: dict[str, list[MethodRuns]] = {}
    for data in arguments.data or SETS:
        for blocks, steps in itertools.product(arguments.blocks or (2, 3, 5), arguments.local_steps or (2, 4, 6)):
            out = arguments.out / "losses" / f"{data},T={steps},M={blocks}"
            experiment(arguments, at_the_end(data, blocks, steps), out)
    for data in SETS:
        places = sorted((arguments.out / "losses").glob(f"{data},T=*,M=*/comparison.json"))
        kept[data] = [method for place in places for method in stored(place.parent)]
    rows, nearer = [], 0
    for data, methods in kept.items():
        by_label = {method.label: method for method in methods}
        for row in printed_rows(data):
            if (method := by_label.get(label_of(row))) is None:
                continue
            paper, test, train = float(row["loss"]), measured(method, "test_loss"), measured(method, "train_loss")
            cells = [against(paper, ours, ".4f", len(method.runs))[1:] for ours in (test, train)]
            closer = abs(statistics.mean(train) - paper) < abs(statistics.mean(test) - paper)
            nearer += closer
            seeds = str(len(method.runs))
            rows.append(
                [data, label_of(row), row["loss"], *cells[0], *cells[1], "training" if closer else "test", seeds]
            )
    columns = ["data", "", "loss", "ours, test rows", "gap", "ours, training rows", "gap", "nearer", "seeds"]
    note = (
        f"The paper does not say on which rows its losses are. Loss after {MEASURED_AT} rounds, gap (ours - paper); "
        f"{nearer} of {len(rows)} printed losses are nearer to that on the training rows. Mean ± standard deviation "
        "where there is more than one seed." + NOTES["HAR"]
    )
    write_table(arguments, "losses", "LoSAC, Table 2: test loss or training loss", note, columns, rows)
    return 0


def at_the_end(data: str, blocks: int, steps: int) -> dict[str, Any]:
    """Table 2's rows with so many blocks and local steps, measured once at the end, on training rows, too."""
    table = files.read_toml(HERE / "table2.toml") if data != "ESR" else of_esr()
    if data == "HAR":
        table["data"] = {"name": sensitivity.HAR}
    table["run"] |= {"eval_train": True, "eval_every": MEASURED_AT, "rounds": MEASURED_AT}
    entries = [entry for entry in table["compare"] if entry["label"].endswith(f"T={steps}, M={blocks}")]
    table["compare"] = [{key: value for key, value in entry.items() if key != "run"} for entry in entries]
    return table


# -- blocks drawn without replacement --------------------------------------------------------------------------------


def block_order(arguments: argparse.Namespace) -> int:
    """Rounds to 85 % with M = 2 where each block is drawn once before any again, beside Table 2's."""
    rows = []
    for data in arguments.data or ("MNIST",):
        table = files.read_toml(HERE / "table2.toml") | {"name": "LoSAC Table 2, block order"}
        if data == "HAR":
            table["data"] = {"name": sensitivity.HAR}
        elif data == "ESR":
            table = of_esr() | {"name": table["name"]}
        table["run"] |= {"rounds": 4 * MEASURED_AT if data == "ESR" else MEASURED_AT, "target": TARGET}
        ends = tuple(f"T={steps}, M=2" for steps in arguments.local_steps or (2, 4, 6))
        table["compare"] = [entry for entry in table["compare"] if entry["label"].endswith(ends)]
        for entry in table["compare"]:
            entry["local"]["block_order"] = "shuffle"
            entry.pop("run", None)
        methods = experiment(arguments, table, arguments.out / "block-order" / data)
        drawn = rounds_of(arguments, data)
        found = {method.label: Rounds.of(final(method)[0]) for method in methods}
        for row in printed_rows(data):
            if label_of(row) in found:
                before, after = drawn.get(label_of(row)), found[label_of(row)]
                rows.append([data, label_of(row), row["rounds"], str(before or "-"), str(after or "not reached")])
        for steps in arguments.local_steps or (2, 4, 6):
            pair = [f"{method}, T={steps}, M=2" for method in ("SCAFFOLD", "LoSAC")]
            printed = {label_of(row): Rounds(float(row["rounds"])) for row in printed_rows(data)}
            cells = [quotient(*(of.get(label) for label in pair)) for of in (printed, drawn, found)]
            rows.append([data, f"speed-up, T={steps}, M=2", *cells])
    columns = ["data", "", "paper", "drawn with replacement", "each once before any again"]
    note = (
        "Rounds to 85 % (mean ± standard deviation over seeds), and SCAFFOLD's over LoSAC's. Algorithm 2 draws a block "
        "in each step, so that with T = M = 2 half of the rounds refresh only one of the two stored gradients; in the "
        'last column (`local.block_order = "shuffle"`) every round refreshes both. The column before it is Table 2\'s.'
    )
    write_table(arguments, "block-order", "LoSAC, Table 2: blocks without replacement", note, columns, rows)
    return 0


# -- the conclusions of Section 5.3 ----------------------------------------------------------------------------------


class Rounds(NamedTuple):
    """Rounds to 85 %: mean, and deviation over seeds where there is one."""

    mean: float
    deviation: float = 0.0

    @staticmethod
    def of(values: Sequence[float]) -> Rounds | None:
        """Of the runs that reached it; None where none did."""
        return Rounds(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0) if values else None

    def __str__(self) -> str:
        return f"{self.mean:.0f}" + (f" ± {self.deviation:.0f}" if self.deviation else "")


def rounds_of(arguments: argparse.Namespace, data: str) -> dict[str, Rounds]:
    """Our rounds of a set's rows, from the table in results/; nothing where there is none."""
    for folder in (arguments.results, HERE / "results"):
        place = folder / f"{FILES[data]}.md"
        if place.is_file():
            lines = place.read_text().splitlines()
            cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
            read = {row[0]: re.match(r"(\d+)(?: ± (\d+))?", row[2]) for row in cells if len(row) > 2}
            return {label: Rounds(float(found[1]), float(found[2] or 0)) for label, found in read.items() if found}
    return {}


def quotient(scaffold: Rounds | None, losac: Rounds | None) -> str:
    """SCAFFOLD's rounds over LoSAC's, with the deviation that follows from theirs."""
    if scaffold is None or losac is None:
        return "-"
    ratio = scaffold.mean / losac.mean
    deviation = ratio * math.hypot(scaffold.deviation / scaffold.mean, losac.deviation / losac.mean)
    return f"{ratio:.2f}×" + (f" ± {deviation:.2f}" if deviation else "")


def claims(arguments: argparse.Namespace) -> int:
    """Table 2's speed-up column, and Sections 5.3.1 to 5.3.3 with our numbers; from the tables in results/."""
    rows, means = [], []
    ours = {data: found for data in SETS if (found := rounds_of(arguments, data))}
    if not ours:
        raise FedraxError("there is no Table 2 in results/ yet: run table2, table2-har or table2-esr")
    for data, found in ours.items():
        printed = {label_of(row): Rounds(float(row["rounds"])) for row in printed_rows(data)}
        for blocks, steps in ((blocks, steps) for blocks in (2, 3, 5) for steps in (2, 4, 6)):
            pair = [f"{method}, T={steps}, M={blocks}" for method in ("SCAFFOLD", "LoSAC")]
            sides = [[of.get(label) for label in pair] for of in (printed, found)]
            rows.append([data, str(steps), str(blocks), *(quotient(*side) for side in sides)])
        for blocks in (2, 3, 5, None):
            cells = [mean_speed_up(of, blocks) for of in (printed, found)]
            means.append([f"mean, {data}", "2, 4, 6", "2, 3, 5" if blocks is None else str(blocks), *cells])
    rows += means
    columns = ["data", "T", "M", "speed-up", "ours"]
    note = (
        "SCAFFOLD's rounds to 85 % over LoSAC's at the same T and M, from the rounds of `table2.md`, `table2-har.md` "
        "and `table2-esr.md`; ± follows from their deviations over seeds. The last rows are means over the pairs that "
        "both reached. At one learning rate the printed scaling makes LoSAC's steps about M times longer, which is the "
        "speed-up on ESR, the paper's and ours."
    )
    more = ["", *conclusions(ours)]
    write_table(arguments, "claims", "LoSAC, Table 2: speed-ups", note, columns, rows, more)
    return 0


def mean_speed_up(found: dict[str, Rounds], blocks: int | None) -> str:
    """The mean over all pairs (T, M) that both methods reached, or over those with so many blocks."""
    ratios = [ratio for (_, m), ratio in ratios_of(found).items() if blocks in (None, m)]
    return f"{statistics.mean(ratios):.2f}×" if ratios else "-"


def ratios_of(found: dict[str, Rounds]) -> dict[tuple[int, int], float]:
    """SCAFFOLD's rounds over LoSAC's by (T, M)."""
    made = {}
    for steps in (2, 4, 6):
        for blocks in (2, 3, 5):
            pair = [found.get(f"{method}, T={steps}, M={blocks}") for method in ("SCAFFOLD", "LoSAC")]
            if pair[0] is not None and pair[1] is not None:
                made[steps, blocks] = pair[0].mean / pair[1].mean
    return made


def conclusions(ours: dict[str, dict[str, Rounds]]) -> Iterator[str]:
    """What Section 5.3 says, printed and measured."""
    yield "## The claims of Section 5.3"
    yield ""
    yield "Printed: from the table's own rounds. Ours: from our rounds of the same sets."
    yield ""
    yield "| claim | data | printed | ours | holds |"
    yield "|---|---|---|---|---|"
    papers = {data: {label_of(row): Rounds(float(row["rounds"])) for row in printed_rows(data)} for data in ours}
    both = [[ratio for data in ours for ratio in ratios_of(of[data]).values()] for of in (papers, ours)]
    gains = [100 * (statistics.mean(ratios) - 1) for ratios in both]
    holds = "yes" if gains[1] > 100 else "no"
    where = ", ".join(ours)
    yield f"| 5.3.1: 100 % more efficient on average | {where} | {gains[0]:+.0f} % | {gains[1]:+.0f} % | {holds} |"
    if "ESR" in ours:
        best = [max(ratios_of(of["ESR"]).values()) for of in (papers, ours)]
        holds = "yes" if best[1] > 4 else "no"
        cells = [f"{100 * (ratio - 1):+.0f} %" for ratio in best]
        yield f"| 5.3.1: more than 300 % on ESR (the best pair) | ESR | {cells[0]} | {cells[1]} | {holds} |"
    fewer = [statistics.mean(100 * (1 - 1 / ratio) for ratio in ratios) for ratios in both]
    holds = "yes" if fewer[1] > 50 else "no"
    yield f"| abstract: more than 50 % fewer rounds | {where} | {fewer[0]:.0f} % | {fewer[1]:.0f} % | {holds} |"
    for data, found in ours.items():
        pairs = [[of.get(label) for label in ("LoSAC, T=2, M=3", "SCAFFOLD, T=6, M=3")] for of in (papers[data], found)]
        if None not in pairs[1]:
            losac, scaffold = pairs[1]
            holds = "yes" if losac.mean <= scaffold.mean else "no"
            if losac.mean > scaffold.mean and losac.mean - losac.deviation <= scaffold.mean + scaffold.deviation:
                holds = "within the spread"
            cells = [f"{a} against {b}" for a, b in pairs]
            claim = "5.3.2: LoSAC at T = 2, M = 3 as fast as SCAFFOLD at T = 6"
            yield f"| {claim} | {data} | {cells[0]} | {cells[1]} | {holds} |"
    for data, found in ours.items():
        with_two = [
            [ratio for (_, blocks), ratio in ratios_of(of).items() if blocks == 2] for of in (papers[data], found)
        ]
        if with_two[1]:
            gains = [100 * (statistics.mean(ratios) - 1) for ratios in with_two]
            holds = "yes" if gains[1] > 40 else "in part" if gains[1] > 0 else "no"
            yield f"| 5.3.3: with M = 2 still 40 % better | {data} | {gains[0]:+.0f} % | {gains[1]:+.0f} % | {holds} |"
