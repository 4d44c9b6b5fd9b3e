"""How a trace's time is parted, on timelines written by hand for a program that XLA has compiled."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from fedrax.compiled.scopes import GRADIENT, phase_scope, scope
from fedrax.profiling.attribution import attribute
from fedrax.profiling.hlo import ProgramText
from fedrax.profiling.measurement import Traced
from fedrax.profiling.trace import Timeline, _timeline, waits


def product() -> tuple[ProgramText, str]:
    """A program, and the name of its only matrix product, which is of the first phase's gradients."""

    def function(a: jax.Array) -> jax.Array:
        with phase_scope(0), scope(GRADIENT):
            return a @ a

    text = ProgramText(jax.jit(function).lower(jnp.ones((64, 64))).compile().as_text() or "")
    return text, next(name for name in text.operations if text.cost(name).flops)


TEXT, PRODUCT = product()


def timeline(microseconds: float, times: int = 10) -> Timeline:
    """A device that did nothing but the product."""
    events = [(int(1e3 * microseconds * (i + 1)), int(1e3 * microseconds * i), PRODUCT) for i in range(times)]
    return _timeline(events, TEXT)


def test_time_is_charged_from_the_end_of_the_operation_before():
    made = _timeline([(10, 0, "a"), (30, 15, "b"), (40, 35, "a")], TEXT)
    assert dict(made.charged) == {"a": 20, "b": 20}
    assert dict(made.runs) == {"a": 2, "b": 1} and made.span == 40


def test_a_product_is_charged_with_the_delay_of_what_reads_it():
    text = ProgramText("""HloModule m

ENTRY %e (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %dot = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %bitcast = f32[4,4]{1,0} bitcast(%dot)
  %reads = f32[4,4]{1,0} add(%a, %bitcast)
  ROOT %other = f32[4,4]{1,0} add(%a, %reads)
}
""")
    made = _timeline([(10, 0, "dot"), (70, 60, "reads"), (90, 80, "other")], text)
    assert dict(made.charged) == {"dot": 60, "reads": 10, "other": 20}
    busy = _timeline([(10, 0, "dot"), (50, 12, "other"), (70, 60, "reads")], text)
    assert dict(busy.charged) == {"dot": 20, "other": 40, "reads": 10}
    assert made.span == 90 and made.runs["dot"] == 1
    without = _timeline([(10, 0, "other"), (70, 60, "reads")], text)
    assert dict(without.charged) == {"other": 10, "reads": 60}, "a product that the trace does not show"


def test_the_product_handed_over_last_is_the_one_waited_for():
    text = ProgramText("""HloModule m

ENTRY %e (a: f32[4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %first = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %second = f32[4,4]{1,0} dot(%a, %first), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %early = f32[4,4]{1,0} add(%first, %first)
  ROOT %both = f32[4,4]{1,0} add(%first, %second)
}
""")
    events = [(5, 0, "first"), (60, 46, "early"), (65, 60, "second"), (120, 110, "both")]
    assert dict(_timeline(events, text).charged) == {"first": 46, "early": 14, "second": 50, "both": 10}
    again = [(end + 120, start + 120, name) for end, start, name in events]
    assert _timeline(events + again, text).charged["second"] == 100


def test_an_interrupted_execution_is_charged_with_the_median():
    ends = [1000 * (i + 1) for i in range(9)] + [5_000_000]
    made = _timeline([(end, end - 1000, "a") for end in ends], TEXT)
    assert made.charged["a"] == 10 * 1000 and made.runs["a"] == 10


@pytest.mark.parametrize(
    ("seconds", "untraced"),
    [(150e-6, 140e-6), (150e-6, 60e-6), (9e-3, 120e-6), (9e-3, 1e-6)],
    ids=["quiet", "slow trace", "held up", "held up, tiny"],
)
def test_parts_make_up_the_time_however_disturbed(seconds: float, untraced: float):
    traced = Traced(2, 1.0, seconds, untraced, [timeline(10.0), timeline(10.0)])
    assert 0 <= traced.outside < untraced
    made = attribute(traced, TEXT, small=0.5, ms=3.0)
    assert math.isclose(sum(made.parts.values()), 3.0) and math.isclose(made.kinds["products"], 3.0)
    assert made.cost.flops == 2 * 10 / 2 * 2 * 64**3
    assert made.operations[0, "gradients"] == 5


def test_what_clients_do_is_scaled_to_all_of_them():
    half = attribute(Traced(1, 0.5, 150e-6, 140e-6, [timeline(10.0)]), TEXT, small=0.5, ms=3.0)
    assert half.cost.flops == 2 * 10 * 2 * 64**3 and half.operations[0, "gradients"] == 20


def test_waiting_is_what_exceeds_the_last_to_arrive():
    first, second = Timeline(), Timeline()
    first.meetings["all-reduce"], second.meetings["all-reduce"] = [50, 10], [10, 30]
    assert waits([first, second]) == [{"all-reduce": 40}, {"all-reduce": 20}]
    assert waits([first]) == [{}]
