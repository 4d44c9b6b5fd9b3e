"""Comparison with other simulators, and with a round written by hand, on one GPU.

``python -m benchmarks.gpu`` runs fedrax, two forms of PyTorch (one client after another, and all side by side by
``torch.func``), a round written by hand in JAX and pfl-research on the workloads G1 to G6. Each run is a fresh process
in the environment of the command, which needs builds of JAX and PyTorch for the GPU; ``benchmarks/README.md`` lists
them. It checks that all end at the same test loss, appends every run to ``results/gpu.jsonl`` and writes
``results/gpu.md``. fedrax and pfl-research also run all 1,500 rounds of pfl-research's benchmark (G1).

``--quick`` runs each workload once, with the fastest forms alone. ``--small --device cpu`` tries everything on a CPU.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from benchmarks.card import PRECISIONS
from benchmarks.environments import cache_directory
from benchmarks.machine import cores, processor
from benchmarks.make_arrays import ensure_arrays
from benchmarks.pages import markdown_table, number, write_page
from benchmarks.peers import facts, one_line
from benchmarks.peers_report import Row, best_peers, disagreements, identity, pivot, rows, table
from benchmarks.points import REPOSITORY
from benchmarks.quiet import run_quietly
from benchmarks.sessions import RESULTS, Session
from benchmarks.simulators import OURS, Setting
from benchmarks.workloads import (
    EVALUATE_EVERY,
    GPU_WORKLOADS,
    ON_A_CPU,
    ON_A_GPU,
    SMALL_WORKLOADS,
    TARGET_ACCURACY,
    WORKLOADS,
    Arrays,
    bytes_per_round,
)

TOLERANCES = {"highest": 5e-3, "tensorfloat32": 5e-3, "bfloat16": 3e-2}
"""Relative tolerance of test losses by precision; TensorFloat-32 has 10 bits of mantissa, bfloat16 7."""
ROUNDS = 1500
"""Of pfl-research's CIFAR-10 benchmark, which G1 is."""
WHOLE = "1,500 rounds"
"""All of them, from the start of the process to its end."""
G = (*GPU_WORKLOADS, *SMALL_WORKLOADS)
WHOLE_WORKLOADS = ("W11", "G1", "G1-small")
NO_VMAP = ("G4", "G4-small")
"""torch.func.vmap has no rule for PyTorch's LSTM."""
HANDWRITTEN = "JAX by hand"
VMAP = "PyTorch vmap"
PACKAGES = {"PyTorch loop": "torch", VMAP: "torch", HANDWRITTEN: "flax", "pfl-research": "pfl", "FedJAX": "fedjax"}
"""The package that a simulator needs beside fedrax and JAX."""
QUICK = {(OURS, "nothing compiled before"), (OURS, "bfloat16"), (VMAP, "compiled"), (HANDWRITTEN, "jit")}


def main() -> int:
    arguments = parse_arguments()
    raw = arguments.out / "gpu.jsonl"
    if arguments.report:
        return conclude(Session.latest(raw), arguments.out)
    arrays = {name: ensure_arrays(name, arguments.cache / "arrays") for name in arguments.workloads}
    session = Session.latest(raw) if arguments.resume else start(raw, arrays, arguments)
    done = {identity(run) for run in session.runs if "failed" not in run}
    for repeat in range(1, arguments.repeats + 1):
        for workload in arguments.workloads:
            for setting in chosen_settings(arguments, repeat):
                names = {"workload": workload, "simulator": setting.simulator, "setting": setting.label}
                names |= {"repeat": repeat, "precision": precision_of(setting)}
                if workload in setting.workloads and identity(names) not in done:
                    measure(session, setting, names, arrays[workload], arguments)
    return conclude(session, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    peers = list(dict.fromkeys(setting.simulator for setting in settings("cuda", cache_directory(), ROUNDS)))
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, help="default: G1 to G6")
    add("--small", action="store_true", help="the networks of G1 to G6 with few and narrow layers")
    add("--peers", nargs="+", choices=peers, help="default: all that are installed")
    add("--quick", action="store_true", help="one repeat of the fastest forms alone, without all 1,500 rounds")
    add("--repeats", type=int, default=3, help="runs of everything, in turn (default 3)")
    add("--rounds", type=int, default=ROUNDS, help=f"rounds of the whole benchmark, 0 for none (default {ROUNDS:,})")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the command without a GPU")
    add("--cache", type=Path, default=cache_directory(), help="where arrays and compiled programs are kept")
    add("--out", type=Path, default=RESULTS, help="where runs are kept and the page is written")
    add("--max-wait", type=float, default=60, help="seconds to wait for a quiet machine (default 60)")
    add("--timeout", type=float, default=1800, help="seconds a run may take (default 1800)")
    add("--resume", action="store_true", help="continue the last session")
    add("--report", action="store_true", help="only write the last session's page again")
    arguments = parser.parse_args()
    arguments.workloads = arguments.workloads or list(SMALL_WORKLOADS if arguments.small else GPU_WORKLOADS)
    if not arguments.peers:
        arguments.peers = [peer for peer in peers if peer == OURS or find_spec(PACKAGES[peer])]
        for peer in set(peers) - set(arguments.peers):
            print(f"left out: {peer}, since {PACKAGES[peer]} is not installed", flush=True)
    if arguments.quick:
        arguments.repeats, arguments.rounds = 1, 0
    return arguments


def settings(device: str, cache: Path, rounds: int) -> list[Setting]:
    """Every simulator in TensorFloat-32, the default of PyTorch's convolutions; fedrax in other precisions as well."""
    short, half = ("--precision", "tensorfloat32"), ("--precision", "bfloat16")
    on = ("--device", device, *short)
    ours = {"FEDRAX_CACHE": str(cache / "fedrax-gpu")}
    # No preallocation: otherwise the peak memory would be all of the GPU's memory
    jax = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({"JAX_PLATFORMS": "cpu"} if device == "cpu" else {})
    side_by_side = tuple(name for name in (*G, "W11") if name not in NO_VMAP)
    by_pfl = (*ON_A_CPU, *WHOLE_WORKLOADS)
    whole = ("--rounds", str(rounds))
    found = [
        Setting(OURS, "nothing compiled before", "run_fedrax", None, (*short, "--forget", "1"), variables=ours | jax),
        Setting(OURS, "compiled before", "run_fedrax", None, short, variables=ours | jax),
        Setting(OURS, "bfloat16", "run_fedrax", None, half, workloads=G, variables=ours | jax),
        Setting(OURS, "float32", "run_fedrax", None, workloads=(*G, *ON_A_GPU), variables=ours | jax),
        Setting("PyTorch loop", "one client after another", "run_torch", None, on),
        Setting(VMAP, "eager", "run_torch_vmap", None, on, workloads=side_by_side),
        Setting(VMAP, "compiled", "run_torch_vmap", None, (*on, "--compiled", "1"), workloads=side_by_side),
        Setting(HANDWRITTEN, "jit", "run_jax_round", None, short, workloads=(*G, "W11"), variables=jax),
        Setting("pfl-research", "one process", "run_pfl", None, on, workloads=by_pfl),
        Setting("FedJAX", "jit", "run_fedjax", None, workloads=(*ON_A_CPU, *ON_A_GPU), variables=jax),
    ]
    if rounds:
        found += [
            Setting(OURS, WHOLE, "run_whole", None, (*short, *whole), workloads=WHOLE_WORKLOADS, variables=ours | jax),
            Setting("pfl-research", WHOLE, "run_pfl", None, (*on, *whole), workloads=WHOLE_WORKLOADS),
        ]
    return found


def chosen_settings(arguments: argparse.Namespace, repeat: int) -> list[Setting]:
    """Those of this repeat; the whole benchmark is run once."""
    found = settings(arguments.device, arguments.cache, arguments.rounds)
    return [
        setting
        for setting in found
        if setting.simulator in arguments.peers
        and (not arguments.quick or (setting.simulator, setting.label) in QUICK)
        and (repeat == 1 or setting.label != WHOLE)
    ]


def precision_of(setting: Setting) -> str:
    """The precision of a setting's products: FedJAX has JAX's default on GPUs, TensorFloat-32."""
    options = setting.options
    if "--precision" in options:
        return options[options.index("--precision") + 1]
    return "highest" if setting.simulator == OURS else "tensorfloat32"


def start(raw: Path, arrays: dict[str, Path], arguments: argparse.Namespace) -> Session:
    described = {
        "gpu": graphics_card() if arguments.device == "cuda" else "none",
        "cpu": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    workloads = {name: facts(name, path) | traffic(name, path) for name, path in arrays.items()}
    found = {d.name: d.version for d in distributions()}
    installed = [f"{name} {found[name]}" for name in ("jax", "flax", "torch", "pfl", "fedjax") if name in found]
    card = measure_card(arguments)
    return Session.start(raw, described, workloads=workloads, packages=installed, card=card)


def traffic(name: str, path: Path) -> dict[str, float]:
    """The least bytes of a round, with activations of 32 and of 16 bits, where the workload says what layers write."""
    workload, arrays = WORKLOADS[name], Arrays(path)
    if not workload.outputs:
        return {}
    return {"bytes": bytes_per_round(workload, arrays), "bytes_bfloat16": bytes_per_round(workload, arrays, 2)}


def measure_card(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Rates of the device: matrix products by precision, and copies; see :mod:`benchmarks.card`."""
    device = {"JAX_PLATFORMS": "cpu"} if arguments.device == "cpu" else {}
    setting = Setting("card", "", "", None, variables=device)
    command = [sys.executable, "-m", "benchmarks.card"]
    found = run_quietly(command, setting.process_environment(), arguments.max_wait, arguments.timeout)
    if "failed" in found:
        sys.exit(f"error: the device could not be measured in {REPOSITORY}:\n{found['failed']}")
    return {name: found[name] for name in (*PRECISIONS, "copy")}


def graphics_card() -> str:
    """Name, memory and driver of the GPU as reported by nvidia-smi; exits if there is none."""
    if shutil.which("nvidia-smi") is None:
        sys.exit("error: nvidia-smi is not installed: --device cpu tries the command without an NVIDIA GPU")
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]


def measure(session: Session, setting: Setting, names: dict, arrays: Path, arguments: argparse.Namespace) -> None:
    command = setting.command(names["workload"], arrays, Path(sys.executable).parent)
    result = run_quietly(command, setting.process_environment(), arguments.max_wait, arguments.timeout)
    session.add(names | result)
    print(one_line(session.runs[-1]), flush=True)


def conclude(session: Session, out: Path) -> int:
    print(table(by_round(session)))
    print("wrote", write_page(out / "gpu.md", sections(session)))
    problems = disagreements(session, tolerance)
    for problem in problems:
        print("error:", problem, file=sys.stderr)
    return 1 if problems else 0


def tolerance(run: dict) -> float:
    """Of a run's test loss, relative to the median; of a whole benchmark any, since its cohorts are drawn."""
    if run["setting"] == WHOLE:
        return float("inf")
    own = WORKLOADS[run["workload"]].tolerance
    return max(own or 0.0, TOLERANCES[run.get("precision", "tensorfloat32")])


def by_round(session: Session) -> Session:
    """The runs that are timed round by round, without those of the whole benchmark."""
    return Session(session.path, session.header, [run for run in session.runs if run["setting"] != WHOLE])


def whole(session: Session) -> Iterable[str]:
    """A sentence on the time of each simulator's whole benchmark."""
    for run in session.runs:
        if run["setting"] == WHOLE and "failed" not in run:
            rounds = round(run["first_round_with_import"] / run["round_median"])
            reached = run.get("seconds_to_target")
            source = session.header["workloads"][run["workload"]]["source"]
            text = (
                f"All {rounds:,} rounds of {run['workload']} ({source} samples), with an evaluation every "
                f"{EVALUATE_EVERY} rounds, take {run['simulator']} {run['first_round_with_import']:.1f} s from process "
                f"start to end, including imports and compilation; test accuracy {run['test_accuracy']:.3f}"
            )
            if source == "cifar10":
                when = f"after {reached:.1f} s" if reached is not None else "never"
                text += f", {TARGET_ACCURACY:.0%} {when}"
            yield text + "."


def sections(session: Session) -> Iterable[str]:
    found, header = rows(by_round(session)), session.header
    m = header["machine"]
    yield "# Comparison with other simulators on a GPU"
    models = [f"{name}: {WORKLOADS[name].model}" for name in header["workloads"] if WORKLOADS[name].network]
    if "W11" in header["workloads"]:
        models.append(f"W11, pfl-research's CIFAR-10 benchmark without dropout: {WORKLOADS['W11'].model}")
    yield (
        f"Written by `python -m benchmarks.gpu` on {m['date']} from session `{header['id']}` of `gpu.jsonl`. Machine: "
        f"{m['gpu']}; {m['cpu']}, {m['cores']} cores; Python {m['python']}, {', '.join(header['packages'])}. "
        "All simulators train the same models from the same initial weights on the same arrays, cohorts and batches. "
        f"`peers.md` describes W1 to W10. {'; '.join(models)}."
    )
    yield "## Milliseconds a round"
    yield (
        "Each simulator in its fastest setting; in parentheses, the speedup over the fastest other simulator. Empty "
        "cells were not run."
    )
    yield table(by_round(session))
    yield from whole(session)
    if "card" in header:
        yield "## Share of the bound"
        yield bound_text(session)
        yield bounds(session, found)
    yield "## Seconds from process start to the end of the first round"
    yield "With imports and compilation; that of PyTorch's compiled form is part of it."
    yield pivot(found, lambda row: f"{row.first_round_with_import:.1f}")
    yield "## Peak GPU memory, MB"
    yield "Peak allocation of arrays and programs as reported by PyTorch and JAX."
    yield memory(by_round(session))
    yield "## Every setting"
    yield every_setting(session, found)
    problems = disagreements(session, tolerance)
    yield "## Agreement"
    own = [f"{name} {WORKLOADS[name].tolerance:g}" for name in header["workloads"] if WORKLOADS[name].tolerance]
    drawn = f"; {', '.join(own)}, since every simulator draws other dropout masks" if own else ""
    yield (
        f"Test losses within {TOLERANCES['tensorfloat32']:g} of their median (bfloat16 {TOLERANCES['bfloat16']:g}"
        f"{drawn}): {'all.' if not problems else 'not all.'}"
    )
    yield from (f"- {problem}" for problem in problems)


def bound_text(session: Session) -> str:
    card = session.header["card"]
    rates = ", ".join(f"{name} {card[name]['gflops'] / 1e3:.3g}" for name in PRECISIONS)
    return (
        "The bound of a round is the larger of two times: its matrix products at the rate of large square ones, and "
        "the bytes that every step must read and write (`bytes_per_round` in `workloads.py`) at the rate of a copy. "
        f"Both rates were measured in the same command: TFLOP/s of products {rates}; copy (read and write) "
        f"{card['copy']['gigabytes']:,.0f} GB/s. A share of 100 % would be a round without a wasted operation."
    )


def bound_seconds(session: Session, workload: str, precision: str) -> tuple[float, float] | None:
    """(seconds of the products, seconds of the traffic) of a round at best; None for unknown traffic."""
    facts, card = session.header["workloads"][workload], session.header.get("card")
    if card is None or "bytes" not in facts:
        return None
    moved = facts["bytes_bfloat16" if precision == "bfloat16" else "bytes"]
    return facts["flop"] / card[precision]["gflops"] / 1e9, moved / card["copy"]["gigabytes"] / 1e9


def bounds(session: Session, found: list[Row]) -> str:
    """The bound of each setting of each workload, its parts, and the share of it that was reached."""
    precisions = {identity(run)[:3]: run["precision"] for run in session.runs}
    lines, best = [], best_peers(found)
    for row in found:
        precision = precisions[row.workload, row.simulator, row.setting]
        bound = bound_seconds(session, row.workload, precision)
        if bound is not None:
            products, moved = bound
            share = max(bound) / row.round
            fastest = f"{best[row.workload] / row.round:.2f}" if row.workload in best else ""
            names = (row.workload, row.simulator, row.setting, precision, number(row.round * 1e3))
            lines.append((*names, number(products * 1e3), number(moved * 1e3), f"{share:.0%}", fastest))
    head = (
        "",
        "simulator",
        "setting",
        "precision",
        "ms a round",
        "products, ms",
        "traffic, ms",
        "share",
        "× best peer",
    )
    return markdown_table(head, lines)


def memory(session: Session) -> str:
    peaks = {identity(run)[:3]: run.get("device_peak_mb") for run in session.runs}

    def cell(row: Row) -> str:
        peak = peaks[row.workload, row.simulator, row.setting]
        return number(peak) if peak else ""

    return pivot(rows(session), cell)


def every_setting(session: Session, found: list[Row]) -> str:
    lines = []
    for row in found:
        flop = session.header["workloads"][row.workload]["flop"]
        lines.append(
            (
                row.workload,
                row.simulator,
                row.setting,
                number(row.round * 1e3),
                number(flop / row.round / 1e12),
                f"{row.first_round_with_import:.1f}",
                f"{row.loss:.4f}",
                f"{row.finished}",
            )
        )
    head = ("", "simulator", "setting", "ms a round", "TFLOP/s", "first round s", "test loss", "runs")
    return markdown_table(head, lines)


if __name__ == "__main__":
    sys.exit(main())
