"""FedBuff with asynchronous clients against an event-driven server in plain Python."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrax import FedAvg, FedraxError, LocalSGD, Settings, simulate, sweep
from fedrax.algorithms import FedBuff
from fedrax.optim.schedules import InverseTimeDecay
from fedrax.optim.server import SGD
from fedrax.participation import Asynchronous, Availability
from fedrax.participation.asynchronous import arrivals, read_durations
from fedrax.participation.policy import ARRIVALS, generator
from fedrax.personalization import Ditto
from fedrax.robust import Robust
from tests import reference
from tests.algorithms.problems import make_problem

PROBLEM = make_problem("quadratic")
SECONDS = {0: [1.0], 1: [2.5, 0.5], 2: [0.7], 3: [1.0], 4: [7.0], 5: [3.0, 0.2, 9.0], 6: [0.4]}
LOCAL = LocalSGD(lr=0.05, steps=3, batch_size=3, order="stored", schedule=InverseTimeDecay(0.1))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [f"{client},{seconds}" for client, each in SECONDS.items() for seconds in each]
    path = tmp_path / "seconds.csv"
    path.write_text("\n".join(["client,seconds", *lines]) + "\n")
    return path


def event_driven_run(
    rounds: int, concurrency: int, buffer: int, power: float
) -> tuple[list[np.ndarray], list[float], list[int]]:
    """(x after each server step, times, staleness of each upload); clients train the model with which they started."""
    clients = PROBLEM.clients(
        reference.Local(lr=0.05, steps=3, batch_size=3, schedule=("InverseTimeDecay", {"rate": 0.1}))
    )
    rng, x, version, begun = generator(0, ARRIVALS, 0), PROBLEM.x0, 0, 0
    working, buffered, times = [], [], dict.fromkeys(SECONDS, 0)
    found, ticks, delays = [], [], []

    def start_client(now: float) -> None:
        nonlocal begun
        while True:
            i = int(rng.integers(7))
            if i not in [w[2] for w in working] + [h[0] for h in buffered]:
                break
        takes = SECONDS[i][times[i] % len(SECONDS[i])]
        times[i] += 1
        heapq.heappush(working, (now + takes, begun, i, x, version))
        begun += 1

    for _ in range(concurrency):
        start_client(0.0)
    while version < rounds:
        now, _, i, model, since = heapq.heappop(working)
        delta = clients[i].descend(model, reference.Part(i, 1.0, since)).params - model
        delays.append(version - since)
        buffered.append((i, (1 + version - since) ** -power * delta))
        if len(buffered) == buffer:
            x = x + 0.8 * sum(d for _, d in buffered) / buffer
            buffered, version = [], version + 1
            found.append(x)
            ticks.append(now)
        start_client(now)
    return found, ticks, delays


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("concurrency", "buffer", "power"), [(3, 2, 0.5), (1, 1, 0.5), (5, 3, 0.0), (4, 1, 2.0)])
def test_fedbuff_agrees_with_the_event_driven_server(trace: Path, concurrency: int, buffer: int, power: float):
    xs, ticks, delays = event_driven_run(8, concurrency, buffer, power)
    assert concurrency == 1 or max(delays) > 0
    result = simulate(
        FedBuff(LOCAL, server_optimizer=SGD(lr=0.8), power=power, max_delay=24),
        PROBLEM.task,
        PROBLEM.federation,
        rounds=8,
        cohort_size=buffer,
        participation=Asynchronous(trace, concurrency=concurrency),
        params=PROBLEM.params,
        trajectory=True,
        dtype="float64",
        devices=1,
    )
    assert result.trajectory is not None
    for actual, desired in zip(result.trajectory, xs, strict=True):
        np.testing.assert_allclose(reference.join(PROBLEM.problem, actual), desired, atol=1e-12)
    np.testing.assert_allclose([event["clock"] for event in result.events], ticks)
    assert [event["clients"] for event in result.events] == [concurrency + buffer - 1] + [buffer] * 7


def schedule(trace: Path, rounds: int, buffer: int = 2, concurrency: int = 3, seed: int = 0) -> Any:
    participation = Asynchronous(trace, concurrency)
    durations = read_durations(participation.trace, 7)
    return arrivals(participation, durations, rounds, buffer, generator(seed, ARRIVALS, 0))


def test_additional_rounds_do_not_change_earlier_ones(trace: Path):
    short, long = schedule(trace, 5), schedule(trace, 40)
    for one, other in ((short.cohorts, long.cohorts), (short.delays, long.delays), (short.clock, long.clock)):
        for actual, desired in zip(one, other, strict=False):
            np.testing.assert_array_equal(actual, desired)
    assert all(np.array_equal(cohort, np.unique(cohort)) for cohort in long.cohorts)
    assert (np.diff(long.clock) >= 0).all()
    assert not np.array_equal(schedule(trace, 5, seed=1).cohorts[0], short.cohorts[0])


def test_resumed_run_includes_pending_uploads(trace: Path, tmp_path: Path):
    settings: dict[str, Any] = {"cohort_size": 2, "participation": Asynchronous(trace, 3), "devices": 1}
    settings |= {"params": PROBLEM.params, "eval_every": 1}
    method = FedBuff(LOCAL, max_delay=24)
    run = lambda rounds, **more: simulate(  # noqa: E731
        method, PROBLEM.task, PROBLEM.federation, rounds=rounds, **settings, **more
    )
    run(3, directory=tmp_path)
    resumed, uninterrupted = run(6, directory=tmp_path, resume=True), run(6)
    np.testing.assert_array_equal(resumed.params["w"], uninterrupted.params["w"])
    assert [e["clock"] for e in resumed.events] == [e["clock"] for e in uninterrupted.events]


@pytest.mark.parametrize("kind", [Availability, Asynchronous])
def test_traces_are_identified_by_their_content(kind: type, trace: Path, tmp_path: Path):
    """A run resumes with its trace at another path, but not with a different trace."""
    if kind is Availability:
        trace.write_text("round,client\n" + "".join(f"{r},{client}\n" for r in range(3) for client in range(7)))
        method, make = FedAvg(LOCAL), Availability
    else:
        method, make = FedBuff(LOCAL, max_delay=24), lambda path: Asynchronous(path, 3)
    settings: dict[str, Any] = {"cohort_size": 2, "params": PROBLEM.params, "directory": tmp_path / "run"}
    run = lambda rounds, path, **more: simulate(  # noqa: E731
        method, PROBLEM.task, PROBLEM.federation, rounds=rounds, participation=make(path), **settings, **more
    )
    run(2, trace)
    moved = trace.rename(tmp_path / "moved.csv")
    assert run(3, moved, resume=True).events[-1]["round"] == 3
    lines = moved.read_text().splitlines()
    moved.write_text("\n".join([*lines, lines[-1]] if kind is Asynchronous else lines[:-1]) + "\n")
    with pytest.raises(FedraxError, match="its participation trace differs;"):
        run(4, moved, resume=True)


def test_sweeps_have_the_same_clock(trace: Path):
    methods = [FedBuff(LOCAL, power=power, max_delay=24) for power in (0.0, 1.0)]
    settings = Settings(rounds=3, cohort_size=2, participation=Asynchronous(trace, 3), eval_every=3)
    together, in_turn = (
        sweep(methods, PROBLEM.task, PROBLEM.federation, settings=settings, mode=mode)
        for mode in ("vectorized", "sequential")
    )
    for (one,), (other,) in zip(together, in_turn, strict=True):
        np.testing.assert_allclose(one.params["w"], other.params["w"], rtol=1e-5)
        assert [e["clock"] for e in one.events] == [e["clock"] for e in other.events]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FedAvg(LOCAL), "FedAvg waits for all uploads of a round.* take FedBuff, or"),
        (Robust(FedBuff(LOCAL)), "Robust waits for all uploads of a round.* take FedBuff without it, or"),
        (FedBuff(LOCAL, max_delay=1), r"FedBuff supports delays up to 1: set max_delay to \d+"),
        (Ditto(FedBuff(LOCAL, max_delay=1)), "Ditto supports delays up to 1"),
    ],
    ids=["FedAvg", "Robust", "no room", "no room inside"],
)
def test_methods_without_staleness_are_rejected(trace: Path, method: Any, message: str):
    settings: dict[str, Any] = {"rounds": 8, "cohort_size": 2, "participation": Asynchronous(trace, 3)}
    with pytest.raises(FedraxError, match=message):
        simulate(method, PROBLEM.task, PROBLEM.federation, **settings)


def test_clients_that_never_finish_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in the event-driven server; no room is reserved for their uploads."""
    monkeypatch.setitem(SECONDS, 3, [1e12])
    path = tmp_path / "t.csv"
    path.write_text("client,seconds\n" + "".join(f"{i},{s}\n" for i, each in SECONDS.items() for s in each))
    xs, ticks, delays = event_driven_run(8, 5, 2, 0.5)
    known, longest = schedule(path, 8, concurrency=5), max(delays)
    assert 3 in np.concatenate(known.cohorts)
    assert known.longest_delay_in_run == longest
    settings: dict[str, Any] = {"rounds": 8, "cohort_size": 2, "params": PROBLEM.params, "dtype": "float64"}
    settings |= {"participation": Asynchronous(path, 5), "devices": 1}
    run = lambda room: simulate(  # noqa: E731
        FedBuff(LOCAL, server_optimizer=SGD(lr=0.8), max_delay=room), PROBLEM.task, PROBLEM.federation, **settings
    )
    for room in (longest, longest + 3):
        result = run(room)
        np.testing.assert_allclose(reference.join(PROBLEM.problem, result.params), xs[-1], atol=1e-12)
        np.testing.assert_allclose([event["clock"] for event in result.events], ticks)
        printed = [np.minimum(own, room + 1).mean() for own in known.delays]
        np.testing.assert_allclose([event["delay"] for event in result.events], printed, rtol=1e-6)
    with pytest.raises(FedraxError, match=f"set max_delay to {longest}$"):
        run(longest - 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,hours\n0,1\n", "not a CSV with columns client, seconds"),
        ("client,seconds\n0,1\n1,-2\n", "seconds above 0"),
        ("client,seconds\n0,1\n1,1e308\n", "seconds above 0, up to 1e"),
        (f"client,seconds\n0,1\n1,{10**30}\n", "'seconds' holds integers beyond 64 bits"),
        ("client,seconds\n0,1\n9,2\n", "must name clients 0 to 6"),
        ("client,seconds\n0,1\n1,x\n", "numbers of seconds"),
        ("client,seconds\n0,\n1,2\n", "numbers of seconds"),
        ("client,seconds\n0,1\n1,2\n", "has no line for client 2"),
    ],
)
def test_malformed_traces_raise_a_clear_error(tmp_path: Path, text: str, message: str):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(FedraxError, match=message):
        schedule(path, 30, concurrency=6)


def test_too_large_concurrency_is_rejected(trace: Path):
    with pytest.raises(FedraxError, match="needs 8 clients or more: there are 7"):
        schedule(trace, 2, buffer=3, concurrency=6)


def test_too_many_asynchronous_rounds_are_rejected(trace: Path):
    with pytest.raises(FedraxError, match="at most 1,000,000 rounds, not 2,147,483,647"):
        schedule(trace, 2**31 - 1)
