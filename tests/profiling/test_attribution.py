"""Attribution of a trace's time to operations, on hand-written timelines."""

from __future__ import annotations

import math

import pytest

from fedrax.profiling.attribution import WAIT, OperationTime, attribute
from fedrax.profiling.hlo import ProgramText
from fedrax.profiling.measurement import TracedRounds
from fedrax.profiling.trace import Timeline, timeline, waits

TEXT = ProgramText("""HloModule m

ENTRY %e (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %first = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={0}, metadata={op_name="fedrax.phase0/fedrax.gradient/dot"}
  %second = f32[4,4]{1,0} dot(%a, %first), lhs_contracting_dims={0}
  %image = f32[1,2,2,4]{3,2,1,0} bitcast(%a)
  %kernel = f32[1,1,4,1]{3,2,1,0} parameter(1)
  %conv = f32[1,2,2,1]{3,2,1,0} convolution(%image, %kernel), window={size=1x1}, dim_labels=b01f_01io->b01f
  %pool = f32[1,2,2,1]{3,2,1,0} negate(%conv)
  %bitcast = f32[4,4]{1,0} bitcast(%second)
  %early = f32[4,4]{1,0} add(%first, %first)
  %wide = f32[64,64]{1,0} parameter(2)
  %over = f32[64,64]{1,0} negate(%wide)
  %meet = f32[4,4]{1,0} all-reduce(%early)
  ROOT %both = f32[4,4]{1,0} add(%first, %bitcast)
}
""")
FLOPS = 2 * 4**3


def timeline_of(*events: tuple[int, int, str]) -> Timeline:
    """A timeline of events (start, end, name)."""
    return timeline([(end, start, name) for start, end, name in events], TEXT)


def total(made: Timeline) -> dict[str, int]:
    """Time of each operation."""
    names = {*made.charged, *made.awaited}
    return {name: sum(made.charged[name]) + sum(made.awaited[name]) for name in names}


def test_time_is_charged_from_the_end_of_the_previous_operation():
    made = timeline_of((0, 10, "early"), (15, 30, "both"), (35, 40, "early"))
    assert made.charged == {"early": [10, 10], "both": [20]} and made.span == 40


@pytest.mark.parametrize(
    ("events", "charged"),
    [
        ([(0, 10, "first"), (60, 70, "early")], {"first": 60, "early": 10}),
        ([(0, 10, "first"), (12, 50, "other"), (60, 70, "early")], {"first": 20, "other": 40, "early": 10}),
        ([(0, 5, "first"), (46, 60, "early"), (60, 65, "second"), (110, 120, "both")],
         {"first": 46, "early": 14, "second": 50, "both": 10}),
        ([(0, 10, "conv"), (60, 70, "pool")], {"conv": 60, "pool": 10}),
        ([(0, 10, "other"), (60, 70, "early")], {"other": 10, "early": 60}),
    ],
    ids=["read at once", "read later", "two", "a convolution", "not in the trace"],
)  # fmt: skip
def test_products_are_charged_with_the_delay_of_their_consumers(events: list, charged: dict):
    assert total(timeline_of(*events)) == charged


def busy(microseconds: int, name: str = "first", times: int = 10) -> Timeline:
    """A device with one repeated operation."""
    return timeline_of(*((1000 * microseconds * i, 1000 * microseconds * (i + 1), name) for i in range(times)))


@pytest.mark.parametrize(
    ("seconds", "untraced"), [(150e-6, 140e-6), (9e-3, 120e-6), (9e-3, 1e-6)], ids=["quiet", "held up", "tiny"]
)
def test_times_of_operations_sum_to_the_total(seconds: float, untraced: float):
    traced = TracedRounds(2, 1.0, seconds, untraced, [busy(10), busy(10)])
    assert 0 < traced.busy <= untraced
    (made,) = attribute(traced, TEXT, small=0.5, ms=3.0)
    assert math.isclose(made.ms, 3.0) and (made.kind, made.part) == ("products", "gradients")
    assert made.flops == 2 * 10 / 2 * FLOPS and made.executions == 5


def test_scalar_operations_are_charged_to_the_thread():
    """The 20 µs of a scalar that another thread copies."""
    kinds = [
        attribute(TracedRounds(1, 1.0, 2e-4, 2e-4, [busy(20, name)]), TEXT, 0.5, 1.0) for name in ("early", "over")
    ]
    assert [made.kind for (made,) in kinds] == ["small", "memory"]


def test_time_of_traced_clients_is_scaled_to_all_clients():
    (made,) = attribute(TracedRounds(1, 0.5, 150e-6, 140e-6, [busy(10)]), TEXT, small=0.5, ms=3.0)
    assert made.flops == 2 * 10 * FLOPS and made.executions == 20


def test_waiting_of_traced_clients_is_not_scaled():
    """Of two devices one was idle while a part was traced; over the whole round both are idle for a fifth."""
    first = timeline_of((0, 100, "first"), (100, 101, "both"))
    second = timeline_of((0, 1, "both"), (1, 2, "both"))
    part = TracedRounds(1, 0.5, 110e-9, 110e-9, [first, second], idle=0.25)
    spent = {made.part: made.ms for made in attribute(part, TEXT, small=1e-9, ms=1.0)}
    assert spent[WAIT] == pytest.approx(0.2, rel=0.02)


def test_interrupted_execution_is_charged_about_the_median():
    events = [(1000 * i, 1000 * (i + 1), "first") for i in range(9)] + [(9000, 50_009_000, "first")]
    other = (50_009_000, 50_018_000, "both")
    traced = TracedRounds(1, 1.0, 51e-3, 51e-3, [timeline_of(*events, other)])
    spent = {made.about.what: made.ms for made in attribute(traced, TEXT, small=0.5, ms=1.0)}
    assert spent["product"] < 15 * spent["pass"], "50 ms against 9 µs in the trace"


def test_waiting_is_the_time_before_the_last_device_arrives():
    first = timeline_of((0, 50, "meet"), (50, 60, "meet"))
    second = timeline_of((0, 10, "meet"), (10, 40, "meet"))
    assert waits([first, second]) == {"meet": 60} and waits([first]) == {"meet": 0}
    made = attribute(TracedRounds(1, 1.0, 60e-9, 60e-9, [first, second]), TEXT, small=0.5, ms=1.0)
    waited = next(spent for spent in made if spent.part == WAIT)
    assert isinstance(waited, OperationTime) and math.isclose(waited.ms, 60 / 100)
