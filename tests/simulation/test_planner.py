"""Assignment of clients to devices: the same work on any number of devices, in every plan."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from fedrax.participation import Poisson
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.simulation.placement.planner import Planner
from fedrax.simulation.settings import Script, Settings, cohort_sampler

SIZES = np.random.default_rng(1).integers(1, 50, 40)
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])


def planner(devices: int = 2, stateful: bool = False, by_samples: bool = False, chunk: int = 1, **settings) -> Planner:
    """A planner of 20 rounds of 9 clients."""
    defaults: dict[str, Any] = {"rounds": 20, "cohort_size": 9}
    changed = Settings(**(defaults | settings))
    made = Planner(
        cohort_sampler(changed, SIZES),
        OFFSETS,
        devices=devices,
        stateful=stateful,
        by_samples=by_samples,
        dtype=changed.dtype,
    )
    made.set_chunk(chunk)
    return made


def client_inputs(block, r: int) -> dict[int, dict[str, float]]:
    """Inputs of each client in round r, on any device."""
    found = {}
    for d in range(block.count.shape[1]):
        for k in range(block.count[r, d]):
            fields = {f: getattr(block.assignments, f)[r, d, k] for f in ("offset", "size", "weight")}
            fields["work"] = 1.0 if block.assignments.work is None else block.assignments.work[r, d, k]
            assert int(block.assignments.client[r, d, k]) not in found
            found[int(block.assignments.client[r, d, k])] = {name: float(value) for name, value in fields.items()}
    return found


VARIANTS = [
    {"devices": devices, "stateful": stateful, "by_samples": by_samples, "chunk": chunk}
    for devices in (1, 2, 3)
    for stateful in (False, True)
    for by_samples in (False, True)
    for chunk in (1, 4)
]


@pytest.mark.parametrize(
    "settings", [{}, {"weights": "samples"}, {"stragglers": 0.4}], ids=["plain", "samples", "slow"]
)
def test_rounds_do_not_depend_on_devices_state_or_plan(settings: dict):
    base = planner(1, **settings).block(0, 20, 20)
    for variant in VARIANTS:
        block = planner(**variant, **settings).block(0, 20, 20)
        for r in range(20):
            assert client_inputs(block, r) == client_inputs(base, r)


def test_every_client_gets_its_own_rows_and_weights_sum_to_one():
    for weights in ("uniform", "samples"):
        block = planner(weights=weights, dtype="float64").block(0, 20, 20)
        np.testing.assert_allclose(block.assignments.weight.sum((1, 2)), 1, rtol=1e-14)
        assert (block.cohort_size == 9).all()
        for r in range(20):
            clients = client_inputs(block, r)
            assert len(clients) == 9
            total = sum(SIZES[c] for c in clients)
            for c, fields in clients.items():
                assert (fields["offset"], fields["size"]) == (OFFSETS[c], SIZES[c])
                share = SIZES[c] / total if weights == "samples" else 1 / 9
                np.testing.assert_allclose(fields["weight"], share, rtol=1e-14)


def test_padding_positions_have_zero_weight():
    block = planner(3, stateful=True, chunk=4).block(0, 20, 20)
    idle = block.assignments.client == len(SIZES)
    assert idle.any()
    assert not block.assignments.weight[idle].any()
    assert (idle.sum(2) + block.count == block.assignments.client.shape[2]).all()


def test_block_may_start_at_any_round():
    whole, part = planner(stateful=True).block(0, 20, 20), planner(stateful=True).block(12, 5, 8)
    for r in range(5):
        assert client_inputs(part, r) == client_inputs(whole, 12 + r)
        np.testing.assert_array_equal(part.assignments.slot[r], whole.assignments.slot[12 + r])
    np.testing.assert_array_equal(part.round, np.arange(12, 20))


def test_client_with_state_has_a_fixed_device_and_row():
    """Device and row never change, are different for all clients, and within the capacity."""
    p = planner(3, stateful=True, by_samples=True)
    block, homes = p.block(0, 20, 20), {}
    for r in range(20):
        for d in range(3):
            for k in range(block.count[r, d]):
                where = (d, int(block.assignments.slot[r, d, k]))
                assert homes.setdefault(int(block.assignments.client[r, d, k]), where) == where
                assert where[1] < p.capacity
    assert len(set(homes.values())) == len(homes)
    assert homes == p.home


def test_memory_of_a_plan_does_not_grow_with_the_rounds():
    """As soon as all clients are assigned, no further rounds are inspected."""
    most, drawn = [], []
    for rounds in (20, 2000):
        tracemalloc.start()
        planner(stateful=True, rounds=rounds)
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert most[1] < 1.5 * most[0], most
    with pytest.MonkeyPatch.context() as patch:
        whole = CohortSampler.cohort
        patch.setattr(CohortSampler, "cohort", lambda self, round: drawn.append(round) or whole(self, round))
        made = planner(stateful=True, rounds=2000)
    assert len(made.home) == len(SIZES) and max(drawn) < 100


@pytest.mark.parametrize("by_samples", [False, True])
@pytest.mark.parametrize("participation", [None, Poisson()], ids=["uniform", "Poisson"])
def test_number_of_state_rows_does_not_depend_on_the_seed(by_samples: bool, participation: Any):
    sizes = np.random.default_rng(2).lognormal(3, 1, 1000).astype(int) + 1
    chosen: dict[str, Any] = {"rounds": 22, "cohort_size": 50} | (
        {} if participation is None else {"participation": participation}
    )
    room, needed = [], []
    for seed in range(5):
        sampler = cohort_sampler(Settings(seed=seed, **chosen), sizes)
        made = Planner(
            sampler, sizes.cumsum() - sizes, devices=2, stateful=True, by_samples=by_samples, row_bytes=10**6
        )
        room.append(2 * made.capacity)
        needed.append(len(np.unique(np.concatenate([sampler.cohort(r) for r in range(22)]))))
        assert sorted(made.home) == sorted({c for r in range(22) for c in sampler.cohort(r).tolist()})
    assert len(set(room)) == 1 and len(set(needed)) > 1
    assert max(needed) < room[0] < 1.35 * min(needed)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_clients_per_device_do_not_depend_on_the_seed(devices: int):
    sizes = np.random.default_rng(2).lognormal(3, 1, 1000).astype(int) + 1
    offsets, room, needed = sizes.cumsum() - sizes, set(), set()
    for seed, rounds in enumerate((4, 10, 20, 40)):
        sampler = cohort_sampler(Settings(seed=seed, rounds=rounds, cohort_size=120), sizes)
        made = Planner(sampler, offsets, devices=devices, stateful=True, by_samples=True, row_bytes=10**6)
        room.add(made.max_stateful_clients)
        needed.add(made.block(0, rounds, rounds).count.max())
    assert len(room) == 1 and max(needed) <= min(room) <= 1.5 * 120 / devices + 10
    assert devices == 1 or len(needed) > 1


def test_extreme_sizes_need_a_device_with_room_for_all():
    """One client has almost all rows, so that all others of a round are on the other device."""
    sizes = np.array([10**6, *[1] * 40])
    sampler = cohort_sampler(
        Settings(rounds=2, cohort_size=20), sizes, Script(cohorts=[np.arange(20), np.arange(20, 40)])
    )
    made = Planner(sampler, sizes.cumsum() - sizes, devices=2, stateful=True, by_samples=True)
    assert made.block(0, 2, 2).count.max() == 19 and made.max_stateful_clients == 20


def test_state_rows_of_scripted_cohorts_are_exact():
    cohorts = [np.arange(40), np.arange(20, 60), np.arange(40)]
    sampler = cohort_sampler(Settings(rounds=3, cohort_size=40), np.full(1000, 10), Script(cohorts=cohorts))
    made = Planner(sampler, np.arange(1000) * 10, devices=1, stateful=True, by_samples=False, row_bytes=10**6)
    assert made.capacity == 60 == len(made.home)


def test_seed_that_exceeds_the_estimate_has_enough_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CohortSampler, "most_clients", 10)
    sampler = cohort_sampler(Settings(rounds=20, cohort_size=9), SIZES)
    made = Planner(sampler, OFFSETS, devices=2, stateful=True, by_samples=False, row_bytes=10**8)
    rows = list(made.rows().values())
    assert len(set(rows)) == len(rows) == len(made.home) > 2 * 6
    assert max(row for _, row in made.home.values()) < made.capacity


def test_work_is_balanced():
    """Without states, no device has more than the equal share plus the largest client."""
    p = planner(2, by_samples=True)
    block = p.block(0, 20, 20)
    loads = np.where(
        np.arange(block.assignments.size.shape[2]) < block.count[..., None], block.assignments.size, 0
    ).sum(2)
    assert (loads.max(1) <= loads.mean(1) + SIZES.max()).all()


def test_idle_time_of_devices_with_and_without_sharing():
    assert planner().idle_share(0) == pytest.approx(1 / 9)  # five clients versus four
    assert planner(cohort_size=8).idle_share(0) == planner(devices=1).idle_share(0) == 0
    uneven, sizes = planner(cohort_size=1, by_samples=True), SIZES
    assert uneven.idle_share(0) == pytest.approx(1)  # one device is always idle
    block = planner(by_samples=True).block(0, 1, 1)
    load = np.sort([sum(sizes[c] for c in block.assignments.client[0, d, : block.count[0, d]]) for d in (0, 1)])
    assert planner(by_samples=True).idle_share(0) == pytest.approx((load[1] - load[0]) / load.sum())
    together = planner()
    assert together.join(2.0) == 2
    assert together.idle_share(0) == 0


def test_vectorized_clients_have_similar_sizes():
    """A chunk takes as long as its largest client: chunks of neighbors by size have the fewest steps."""
    for devices in (1, 2):
        block = planner(devices, by_samples=True, chunk=4).block(0, 20, 20)
        for r in range(20):
            for d in range(devices):
                sizes = block.assignments.size[r, d, : block.count[r, d]]
                assert (np.diff(sizes) <= 0).all()
    one_by_one = planner(1, by_samples=True).block(0, 20, 20)
    assert any((np.diff(one_by_one.assignments.size[r, 0, : one_by_one.count[r, 0]]) > 0).any() for r in range(20))


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_client_has_one_position_in_a_round(devices: int, stateful: bool):
    sampler = cohort_sampler(Settings(rounds=30, cohort_size=5, stragglers=0.4), SIZES)
    made = Planner(sampler, OFFSETS, devices=devices, stateful=stateful, by_samples=True)
    made.set_chunk(2)
    block, homes = made.block(0, 30, 32), {}
    for r in range(30):
        placed = []
        for d in range(devices):
            n = block.count[r, d]
            clients = block.assignments.client[r, d, :n]
            placed += clients.tolist()
            assert (block.assignments.client[r, d, n:] == len(SIZES)).all() and (
                block.assignments.weight[r, d, n:] == 0
            ).all()
            assert (block.assignments.size[r, d, :n] == SIZES[clients]).all()
            for client, slot in zip(clients.tolist(), block.assignments.slot[r, d, :n].tolist(), strict=True):
                assert not stateful or homes.setdefault(client, (d, slot)) == (d, slot)
        assert sorted(placed) == sampler.cohort(r).tolist()
        assert block.assignments.weight[r].sum() == pytest.approx(1)
    assert len(set(homes.values())) == len(homes)
    owners = made.owners()
    assert sorted(owners[owners >= 0].tolist()) == sorted(homes)
    assert (block.count[30:] == 0).all()


@pytest.mark.parametrize("stateful", [False, True])
def test_sharing_of_clients_does_not_depend_on_the_seed(stateful: bool):
    """Otherwise a new seed would recompile: sharing helps only in cohorts with the one large client of 200."""
    sizes = np.where(np.arange(200) == 7, 1000, 10)
    drawn, found = set(), set()
    for seed in range(20):
        sampler = cohort_sampler(Settings(rounds=20, cohort_size=2, seed=seed), sizes)
        drawn.add(any(7 in sampler.cohort(r) for r in range(20)))
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        joins = Planner(sampler, offsets, devices=2, stateful=stateful, by_samples=True).join(2.0)
        found.add(joins)
    assert len(found) == 1
    assert drawn == {False, True}
