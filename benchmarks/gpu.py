"""Comparison with other simulators on one GPU.

``python -m benchmarks.gpu`` runs fedrax, a PyTorch loop, pfl-research and FedJAX on the workloads of
``benchmarks.peers`` and on W11, pfl-research's own CIFAR-10 benchmark. Each run is a fresh process in the environment
of the command, which needs builds of JAX and PyTorch for the GPU (``pip install '.[cuda]' '.[flax]' torch pfl==0.6.0
fedjax==0.0.17``). It checks that all end at the same test loss, appends every run to ``results/gpu.jsonl`` and writes
``results/gpu.md``. fedrax also runs all 1,500 rounds of W11.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.environments import cache_directory
from benchmarks.machine import cores, processor
from benchmarks.make_arrays import ensure_arrays
from benchmarks.pages import markdown_table, number, write_page
from benchmarks.peers import facts, one_line
from benchmarks.peers_report import Row, disagreements, identity, pivot, rows, table
from benchmarks.quiet import run_quietly
from benchmarks.sessions import RESULTS, Session
from benchmarks.simulators import OURS, Setting
from benchmarks.workloads import ON_A_GPU, WORKLOADS

TOLERANCE = 5e-3
"""Relative tolerance of test losses; TensorFloat-32 has 10 bits of mantissa."""
SHORT = ("--precision", "tensorfloat32")
WHOLE = "1,500 rounds"
"""pfl-research's complete CIFAR-10 benchmark, from the start of the process to its end."""


def main() -> int:
    arguments = parse_arguments()
    raw = arguments.out / "gpu.jsonl"
    if arguments.report:
        return conclude(Session.latest(raw), arguments.out)
    arrays = {name: ensure_arrays(name, arguments.cache / "arrays") for name in arguments.workloads}
    session = Session.latest(raw) if arguments.resume else start(raw, arrays, arguments.device)
    done = {identity(run) for run in session.runs if "failed" not in run}
    chosen = [s for s in settings(arguments.device, arguments.cache) if s.simulator in arguments.peers]
    for repeat in range(1, arguments.repeats + 1):
        for workload in arguments.workloads:
            for setting in chosen:
                names = {"workload": workload, "simulator": setting.simulator, "setting": setting.label}
                names["repeat"] = repeat
                if workload in setting.workloads and identity(names) not in done:
                    measure(session, setting, names, arrays[workload], arguments)
    return conclude(session, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    peers = list(dict.fromkeys(setting.simulator for setting in settings("cuda", cache_directory())))
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: W1 to W11")
    add("--peers", nargs="+", choices=peers, default=peers, help="default: all")
    add("--repeats", type=int, default=3, help="runs of everything, in turn (default 3)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the command without a GPU")
    add("--cache", type=Path, default=cache_directory(), help="where arrays and compiled programs are kept")
    add("--out", type=Path, default=RESULTS, help="where runs are kept and the page is written")
    add("--max-wait", type=float, default=60, help="seconds to wait for a quiet machine (default 60)")
    add("--timeout", type=float, default=300, help="seconds a run may take (default 300)")
    add("--resume", action="store_true", help="continue the last session")
    add("--report", action="store_true", help="only write the last session's page again")
    return parser.parse_args()


def settings(device: str, cache: Path) -> list[Setting]:
    """Every simulator in TensorFloat-32, the default of PyTorch's convolutions, and W11 also in float32."""
    on = ("--device", device)
    ours = {"FEDRAX_CACHE": str(cache / "fedrax-gpu")}
    # No preallocation: otherwise the peak memory would be all of the GPU's memory
    jax = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({"JAX_PLATFORMS": "cpu"} if device == "cpu" else {})
    return [
        Setting(OURS, "nothing compiled before", "run_fedrax", None, (*SHORT, "--forget", "1"), variables=ours | jax),
        Setting(OURS, "compiled before", "run_fedrax", None, SHORT, variables=ours | jax),
        Setting(OURS, "float32", "run_fedrax", None, workloads=ON_A_GPU, variables=ours | jax),
        Setting("PyTorch loop", "TensorFloat-32", "run_torch", None, (*on, *SHORT)),
        Setting("PyTorch loop", "float32", "run_torch", None, on, workloads=ON_A_GPU),
        Setting("pfl-research", "TensorFloat-32", "run_pfl", None, (*on, *SHORT)),
        Setting("FedJAX", "jit", "run_fedjax", None, variables=jax),
        Setting(OURS, WHOLE, "run_whole", None, SHORT, workloads=ON_A_GPU, variables=ours | jax),
    ]


def start(raw: Path, arrays: dict[str, Path], device: str) -> Session:
    described = {
        "gpu": graphics_card() if device == "cuda" else "none",
        "cpu": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    workloads = {name: facts(name, path) for name, path in arrays.items()}
    found = {d.name: d.version for d in distributions()}
    installed = [f"{name} {found[name]}" for name in ("jax", "flax", "torch", "pfl", "fedjax") if name in found]
    return Session.start(raw, described, workloads=workloads, packages=installed)


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
    problems = disagreements(by_round(session), TOLERANCE)
    for problem in problems:
        print("error:", problem, file=sys.stderr)
    return 1 if problems else 0


def by_round(session: Session) -> Session:
    """The runs that are timed round by round, without those of the whole benchmark."""
    return Session(session.path, session.header, [run for run in session.runs if run["setting"] != WHOLE])


def whole(session: Session) -> Iterable[str]:
    """A sentence on the time of the whole benchmark."""
    found = [run for run in session.runs if run["setting"] == WHOLE and "failed" not in run]
    if found:
        seconds = statistics.median(run["first_round_with_import"] for run in found)
        yield (
            f"All 1,500 rounds of W11, with an evaluation on 2,000 samples every ten rounds, take fedrax "
            f"{seconds:.1f} s from process start to end, including imports and compilation "
            f"(test accuracy {found[-1]['test_accuracy']:.3f})."
        )


def sections(session: Session) -> Iterable[str]:
    found, header = rows(by_round(session)), session.header
    m = header["machine"]
    yield "# Comparison with other simulators on a GPU"
    yield (
        f"Written by `python -m benchmarks.gpu` on {m['date']} from session `{header['id']}` of `gpu.jsonl`. Machine: "
        f"{m['gpu']}; {m['cpu']}, {m['cores']} cores; Python {m['python']}, {', '.join(header['packages'])}. "
        "All simulators train the same models from the same initial weights on the same arrays, cohorts and batches. "
        "`peers.md` describes W1 to W10. W11 is pfl-research's CIFAR-10 benchmark without dropout: "
        f"{WORKLOADS['W11'].model}."
    )
    yield "## Milliseconds a round"
    yield (
        "Each simulator in its fastest setting; in parentheses, the speedup over the fastest other simulator. Empty "
        "cells were not run."
    )
    yield table(by_round(session))
    yield from whole(session)
    yield "## Seconds from process start to the end of the first round"
    yield pivot(found, lambda row: f"{row.first_round_with_import:.1f}")
    yield "## Peak GPU memory, MB"
    yield "Peak allocation of arrays and programs as reported by PyTorch and JAX."
    yield memory(by_round(session))
    yield "## Every setting"
    yield every_setting(session, found)
    problems = disagreements(by_round(session), TOLERANCE)
    yield "## Agreement"
    yield f"Test losses within {TOLERANCE:g} of their median: {'all.' if not problems else 'not all.'}"
    yield from (f"- {problem}" for problem in problems)


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
