"""Run a command on a quiet machine and measure its resources and those of other processes. Linux only: reads /proc."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.timing import RESULT_PREFIX, STARTED

QUIET_CPUS = 0.10  # CPUs used by other processes below which the machine counts as quiet
SAMPLE_SECONDS = 0.25
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def run_quietly(command: list[str], environment: dict[str, str], max_wait: float, timeout: float) -> dict[str, Any]:
    """Run ``command`` and return the result that it printed, or ``{"failed": last lines of output}``.

    The result also has ``peak_pss_mb``: memory of the whole process tree, shared pages counted once; ``wall_seconds``;
    ``cpu_seconds`` of the tree; ``foreign_cpu``: mean number of CPUs that other processes used meanwhile (short-lived
    processes that were not sampled count as foreign, so about 0.1 means quiet); ``waited_seconds``: the time until the
    machine was quiet.
    """
    waited = wait_for_quiet(max_wait)
    tag = uuid.uuid4().hex
    tree = ProcessTree(f"BENCHMARK_TAG={tag}".encode())
    busy_before, start = busy_cpu_seconds(), time.monotonic()
    environment = environment | {"BENCHMARK_TAG": tag, STARTED: repr(start)}
    children_before = children_cpu_seconds()
    output, finished = run(command, environment, timeout, tree)
    wall, busy = time.monotonic() - start, busy_cpu_seconds() - busy_before
    tree.stop()
    # Sampling misses the end of a process; the system's count misses re-parented processes.
    own = max(tree.cpu_seconds(), children_cpu_seconds() - children_before)
    result = printed_result(output) if finished else None
    return (result or {"failed": output[-2000:], "timed_out": not finished}) | {
        "peak_pss_mb": round(tree.peak_pss / 2**20, 1),
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(own, 2),
        "foreign_cpu": round(max(0.0, busy - own) / wall, 3),
        "waited_seconds": round(waited, 1),
    }


def run(command: list[str], environment: dict[str, str], timeout: float, tree: ProcessTree) -> tuple[str, bool]:
    """The command's output, and whether it ended before the timeout."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    tree.start()
    try:
        return process.communicate(timeout=timeout)[0], True
    except subprocess.TimeoutExpired:
        tree.terminate()
        return process.communicate()[0], False


def printed_result(output: str) -> dict[str, Any] | None:
    lines = [line for line in output.splitlines() if line.startswith(RESULT_PREFIX)]
    return json.loads(lines[-1].removeprefix(RESULT_PREFIX)) if lines else None


def wait_for_quiet(max_wait: float) -> float:
    """Wait until the machine is quiet for two seconds, at most ``max_wait`` seconds; return the seconds waited."""
    start = time.monotonic()
    while True:
        before, since = busy_cpu_seconds(), time.monotonic()
        time.sleep(2)
        busy = (busy_cpu_seconds() - before) / (time.monotonic() - since)
        waited = time.monotonic() - start
        if busy <= QUIET_CPUS or waited > max_wait:
            return waited


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def busy_cpu_seconds() -> float:
    """CPU seconds of the whole machine since boot: user, nice, system, interrupts, stolen."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft_irq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft_irq + steal) / TICKS_PER_SECOND


class ProcessTree(threading.Thread):
    """Samples the memory and CPU time of all processes with a tag in their environment, and of their children.

    The tag finds processes that were re-parented; children are included because Ray's workers overwrite their
    environment with their title.
    """

    def __init__(self, tag: bytes) -> None:
        super().__init__(daemon=True)
        self.tag = tag
        self.peak_pss = 0  # bytes
        self._cpu: dict[str, float] = {}
        self._members: set[str] = set()
        self._strangers: set[str] = set()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self.sample()

    def stop(self) -> None:
        """Stop sampling, and kill remaining processes of the command."""
        self._stopped.set()
        self.join()
        deadline = time.monotonic() + 5
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.terminate()

    def cpu_seconds(self) -> float:
        return sum(self._cpu.values())

    def sample(self) -> None:
        pss = 0
        for pid in self.members():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                self._cpu[pid] = (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
                pss += proportional_memory(pid)
            except (OSError, IndexError):
                continue  # it has ended
        self.peak_pss = max(self.peak_pss, pss)

    def members(self) -> list[str]:
        """Ids of the running processes with the tag."""
        alive = {name for name in os.listdir("/proc") if name.isdigit()}
        self._members &= alive
        self._strangers &= alive
        for pid in sorted(alive - self._members - self._strangers, key=int):  # parents before children
            try:
                ours = self.tag in Path(f"/proc/{pid}/environ").read_bytes() or parent(pid) in self._members
            except OSError:
                continue
            (self._members if ours else self._strangers).add(pid)
        return list(self._members)

    def terminate(self) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def parent(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]


def proportional_memory(pid: str) -> int:
    """Bytes of memory of a process, with shared pages divided among the processes that share them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
