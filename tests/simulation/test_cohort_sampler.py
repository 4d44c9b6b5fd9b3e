"""Participation: sampling, traces, scripts, weights, stragglers, and invalid settings.

The assignment of clients to devices is tested in test_planner.py.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax import FedraxError
from fedrax.participation import Availability, FixedList, Poisson, WeightedBySamples
from fedrax.robust import Robust
from fedrax.simulation import Script, Settings
from fedrax.simulation.settings import cohort_sampler
from tests.simulation.problems import FEDERATION, LOCAL, SCAFFOLD, SIZES, assert_close, assert_identical, run

N = len(SIZES)
MANY_SIZES = np.random.default_rng(1).integers(1, 50, 40)
"""Sizes of 40 clients, for frequencies of draws."""
BLOCKS = fedrax.LocalSGD(lr=0.02, steps=2, blocks=2)


def write_trace(path: Path, rows: list[tuple[int, int]]) -> Availability:
    """A trace file of (round, client) rows, with the columns in the other order."""
    path.write_text("client,round\n" + "".join(f"{client},{round}\n" for round, client in rows))
    return Availability(path)


def cohorts(rounds: int, **settings: Any) -> list[list[int]]:
    """Cohorts of the first rounds."""
    sampler = cohort_sampler(Settings(**settings), np.array(SIZES))
    return [sampler.cohort(r).tolist() for r in range(rounds)]


def test_cohorts_are_uniform_without_replacement():
    sampler = cohort_sampler(Settings(rounds=4000, cohort_size=9), MANY_SIZES)
    drawn = np.array([sampler.cohort(r) for r in range(4000)])
    assert all(len(np.unique(cohort)) == 9 for cohort in drawn[:200])
    rates = np.bincount(drawn.ravel(), minlength=40) / 4000
    np.testing.assert_allclose(rates, 9 / 40, atol=5 * np.sqrt(9 / 40 * 31 / 40 / 4000))
    assert len(np.unique(drawn[:500], axis=0)) == 500


def test_cohorts_depend_on_the_seed_only():
    draw = lambda seed: [cohort_sampler(Settings(seed=seed), MANY_SIZES).cohort(r).tolist() for r in range(5)]  # noqa: E731
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_poisson_samples_clients_independently():
    drawn = cohorts(6000, cohort_size=3, participation=Poisson())
    there = np.array([[client in cohort for client in range(N)] for cohort in drawn])
    chance = 3 / N
    np.testing.assert_allclose(there.mean(0), chance, atol=0.025)
    assert np.abs(np.corrcoef(there.T) - np.eye(N)).max() < 0.06
    sizes = np.array([len(cohort) for cohort in drawn])
    np.testing.assert_allclose([sizes.mean(), sizes.var()], [3, N * chance * (1 - chance)], rtol=0.06)
    assert sizes.min() == 0 and drawn[0] == cohorts(1, cohort_size=3, participation=Poisson())[0]
    assert cohorts(3, cohort_size=N, participation=Poisson()) == [list(range(N))] * 3


def test_poisson_cohorts_are_never_truncated():
    """The capacity is the same for every seed, so that a new seed does not recompile."""
    capacities = set()
    for seed in range(5):
        sampler = cohort_sampler(
            Settings(rounds=2000, cohort_size=20, participation=Poisson(), seed=seed), np.full(1000, 5, np.int64)
        )
        capacities.add(sampler.largest)
        assert 20 < max(len(sampler.cohort(r)) for r in range(2000)) <= sampler.largest
    assert len(capacities) == 1 and capacities.pop() < 80
    assert (sampler.varying, sampler.expected) == (True, 20.0)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", ["vmap", "loop", "debug"])
def test_empty_rounds_change_nothing(plan: str):
    options: dict[str, Any] = {"cohort_size": 1, "participation": Poisson(), "rounds": 8, "trajectory": True}
    base = run(SCAFFOLD, **options)
    counts = [event["clients"] for event in base.events]
    assert 0 in counts and max(counts) > 1
    for count, event, before, after in zip(
        counts, base.events, [None, *base.trajectory], base.trajectory, strict=False
    ):
        assert ("train_loss" in event) == (count > 0)
        if count == 0 and before is not None:
            pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
            assert all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)
    assert_close(run(SCAFFOLD, **options, plan=plan), base)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "loop", "debug"])
def test_empty_rounds_of_traces_and_scripts_change_nothing(plan: str, tmp_path: Path):
    trace = write_trace(tmp_path / "t.csv", [(1, 1), (1, 3), (4, 5)])
    script = fedrax.simulation.Script(cohorts=[[], [1, 3], [], [], [5]])
    method = fedrax.FedAvg(local=LOCAL, server_optimizer=fedrax.optim.SGD(lr=0.5, momentum=0.9))
    for options in ({"participation": trace, "cohort_size": 2}, {"script": script}):
        with pytest.warns(fedrax.FedraxWarning, match="3 of 5 rounds have no client and change nothing"):
            result = run(method, rounds=5, trajectory=True, plan=plan, **options)
        assert [event["clients"] for event in result.events] == [0, 2, 0, 0, 1]
        assert ["train_loss" in event for event in result.events] == [False, True, False, False, True]
        assert all(event["bytes_up"] == result.events[1]["bytes_up"] for event in result.events[2:4])
        after = [np.asarray(params["output"]["bias"]) for params in result.trajectory]
        assert (after[2] == after[1]).all() and (after[3] == after[1]).all() and (after[4] != after[1]).any()
    with pytest.raises(FedraxError, match="none of the given cohorts holds a client"):
        run(method, rounds=2, script=fedrax.simulation.Script(cohorts=[[], []]))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", [fedrax.algorithms.QFedAvg(local=LOCAL), Robust(fedrax.FedAvg(local=LOCAL))])
def test_servers_that_divide_by_uploads_skip_empty_rounds(method: fedrax.Algorithm):
    result = run(method, cohort_size=1, participation=Poisson(), rounds=8)
    assert 0 in [event["clients"] for event in result.events]
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(result.params))


def test_server_that_diverges_in_an_empty_round_is_named():
    class Fails(fedrax.FedAvg):
        """Divides by the cohort size."""

        def server(self, server, cohort):
            """0 / 0 for an empty cohort."""
            moved, info = super().server(server, cohort)
            return moved._replace(params=jax.tree.map(lambda a: a * (cohort.size / cohort.size), moved.params)), info

    with pytest.raises(fedrax.simulation.NonFiniteError, match="the server state is not finite"):
        run(fedrax.hyperparameters(Fails)(local=LOCAL), cohort_size=1, participation=Poisson(), rounds=8)


def test_method_with_fixed_cohort_rejects_poisson_sampling():
    with pytest.raises(FedraxError, match="cohort's size varies"):
        run(fedrax.LoSAC(local=BLOCKS), participation=Poisson())


def test_sampling_in_proportion_to_size():
    sampler = cohort_sampler(Settings(cohort_size=1, participation=WeightedBySamples()), MANY_SIZES)
    rates = np.bincount([sampler.cohort(r)[0] for r in range(4000)], minlength=40) / 4000
    chance = MANY_SIZES / MANY_SIZES.sum()
    assert (np.abs(rates - chance) < 5 * np.sqrt(chance / 4000) + 1e-3).all()


def test_fixed_participation_samples_from_its_list():
    chosen = FixedList((5, 1, 3))
    assert cohorts(3, cohort_size=3, participation=chosen) == [[1, 3, 5]] * 3
    assert cohorts(2, cohort_size=7, participation=chosen) == [[1, 3, 5]] * 2
    drawn = cohorts(40, cohort_size=2, participation=chosen)
    assert {tuple(cohort) for cohort in drawn} == {(1, 3), (1, 5), (3, 5)}
    sampler = cohort_sampler(Settings(cohort_size=7, participation=chosen), np.array(SIZES))
    assert (sampler.largest, sampler.varying) == (3, False)
    for wrong in ((), (1, 1), (-1,), (N,)):
        with pytest.raises(FedraxError, match="must hold different clients"):
            cohort_sampler(Settings(cohort_size=1, participation=FixedList(wrong)), np.array(SIZES))


def test_trace_determines_the_available_clients(tmp_path: Path):
    trace = write_trace(tmp_path / "t.csv", [(0, 1), (0, 3), (0, 5), (1, 2), (2, 0), (2, 7), (2, 6), (2, 0)])
    available = [{1, 3, 5}, {2}, {0, 6, 7}]
    drawn = cohorts(12, cohort_size=2, participation=trace)
    assert all(set(cohort) <= available[r % 3] for r, cohort in enumerate(drawn))
    assert [len(cohort) for cohort in drawn] == [2, 1, 2] * 4
    assert {client for cohort in drawn for client in cohort} == {0, 1, 2, 3, 5, 6, 7}
    (tmp_path / "same.csv").write_text("round,client\n0,1\n0,3\n0,5\n1,2\n2,0\n2,7\n2,6\n")
    same = Availability(tmp_path / "same.csv")
    assert cohorts(12, cohort_size=2, participation=same) == drawn
    assert cohort_sampler(Settings(cohort_size=2, participation=same), np.array(SIZES)).varying
    result = run(fedrax.Scaffold(local=LOCAL), participation=trace, cohort_size=2, rounds=3)
    assert [event["clients"] for event in result.events] == [2, 1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round,client\n0,1\n999999999999,1\n", "rounds 0 to 999999"),
        ("round,client\n0,8\n", "clients 0 to 7"),
        ("round,client\n0,-1\n", "clients 0 to 7"),
        ("round,client\n-1,1\n", "rounds 0 to"),
        ("round,client\n0,1.5\n", "whole numbers"),
        ("round,client\n0,\n", "whole numbers"),
        ("round,client\n0,x\n", "whole numbers"),
        ("round,client\n", "whole numbers"),
        ("round,who\n0,1\n", "columns round, client"),
        ("", "columns round, client"),
        ("round,client\n0,1,2,3\n", "columns round, client"),
        (b"\xff\xfe\x00round", "columns round, client"),
        (None, "columns round, client"),
    ],
)
def test_malformed_traces_are_rejected(text: str | bytes | None, message: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FedraxError, match=message) as caught:
        run(participation=Availability(tmp_path / "t.csv"))
    assert "availability trace" in str(caught.value) and "t.csv" in str(caught.value)


def test_long_trace_is_read_in_chunks(tmp_path: Path):
    rows = [(round, client) for round in range(20_000) for client in range(N)]
    sampler = cohort_sampler(
        Settings(participation=write_trace(tmp_path / "t.csv", rows), cohort_size=8), np.array(SIZES)
    )
    assert len(sampler.state) == 20_000
    assert sampler.cohort(19_999).tolist() == list(range(N))


@pytest.mark.parametrize(
    "cohort", [[0, 8], [-1, 2], [1, 1], [0.5, 1.0], [True, False], [[0, 1], [2, 3]], ["a"], [None]]
)
def test_invalid_scripted_cohorts_are_rejected(cohort: list):
    with pytest.raises(FedraxError, match="the given cohort of round 1 must hold different clients from 0 to 7"):
        run(script=Script(cohorts=[[0, 1], cohort]), rounds=2)


@pytest.mark.parametrize(("steps", "fits"), [([[1, 2, 3]], True), ([[1, 0, 3]], False), ([[1, 2]], False)])
def test_scripted_numbers_of_steps_must_be_positive(steps: list, fits: bool):
    script = Script(cohorts=[[0, 1, 2]], steps=np.asarray(steps))
    if fits:
        assert run(rounds=1, script=script).events[-1]["gradients"] == 2 * 6
        return
    with pytest.raises(FedraxError, match=r"given steps must be .* 1 or more|of shape"):
        run(rounds=1, script=script)


def test_too_few_scripted_cohorts_and_too_many_clients_are_rejected():
    with pytest.raises(FedraxError, match="2 cohorts are given for 3 rounds"):
        run(script=Script(cohorts=[[0], [1]]), rounds=3)
    with pytest.raises(FedraxError, match="cannot sample 9 clients"):
        run(cohort_size=9)


def test_default_cohort_size_fits_few_clients():
    assert cohort_sampler(Settings(), np.array(SIZES)).largest == len(SIZES) < 10
    assert cohort_sampler(Settings(), np.ones(30, int)).largest == 10
    chosen = run(rounds=2, cohort_size=len(SIZES), participation=Poisson()).events[-1]
    assert run(rounds=2, cohort_size=10, participation=Poisson()).events[-1]["gradients"] == chosen["gradients"]


def test_scripted_cohorts_replace_sampling():
    drawn = cohorts(4, cohort_size=3)
    assert_identical(run(script=Script(cohorts=np.array(drawn))), run())


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (np.zeros((1, 3, 2), int), r"shape \(2, 3, 2\)"),
        (np.zeros((2, 2, 2), int), r"shape \(2, 3, 2\)"),
        (np.zeros((2, 3, 1), int), r"shape \(2, 3, 2\)"),
        (np.zeros((2, 3), int), r"shape \(2, 3, 2\)"),
        (np.zeros((2, 3, 2)), "whole numbers"),
        (np.full((2, 3, 2), 2), "from 0 to 1"),
        (np.full((2, 3, 2), -1), "from 0 to 1"),
    ],
)
def test_invalid_scripted_blocks_are_rejected(blocks: np.ndarray, message: str):
    with pytest.raises(FedraxError, match=message):
        run(fedrax.FedAvg(local=BLOCKS), script=Script(blocks=blocks), rounds=2)
    with pytest.raises(FedraxError, match=r"no local\.blocks"):
        run(script=Script(blocks=blocks), rounds=2)


def test_scripted_blocks_are_used():
    """Always the first block: equal to full batches of a federation that has only these samples."""
    halves = np.diff(FEDERATION.offsets) // 2
    rows = np.concatenate([np.arange(a, a + h) for a, h in zip(FEDERATION.offsets, halves, strict=False)])
    x, y = (a[rows] for a in FEDERATION.train)
    half = fedrax.Federation.from_arrays(
        x, y, offsets=np.concatenate([[0], np.cumsum(halves)]), shuffle=False, num_classes=3
    )
    weighted = [2 * h / n for h, n in zip(halves, SIZES, strict=True)]  # M / n_i times a sum over n_i / M rows
    even = [i for i, w in enumerate(weighted) if w == 1]
    script = Script(cohorts=[even[:3]] * 2, blocks=np.zeros((2, 3, 2), int).tolist())  # type: ignore[arg-type]
    given = run(fedrax.FedAvg(local=BLOCKS), script=script, rounds=2)
    full = fedrax.LocalSGD(lr=0.02, steps=2, batch_size="full")
    plain = run(fedrax.FedAvg(local=full), federation=half, script=Script(cohorts=[even[:3]] * 2), rounds=2)
    np.testing.assert_allclose(given.params["output"]["weight"], plain.params["output"]["weight"], rtol=1e-5)


def test_stragglers_have_the_requested_number_and_uniform_shares():
    sampler = cohort_sampler(Settings(stragglers=0.4), MANY_SIZES)
    works = np.array([sampler.work(r, 10) for r in range(1000)])
    assert ((works < 1).sum(1) == 4).all()
    assert (works > 0).all() and (works <= 1).all()
    slow = works[works < 1]
    assert abs(slow.mean() - 0.5) < 0.03
    assert abs((slow < 0.25).mean() - 0.25) < 0.04


@pytest.mark.parametrize("local", [fedrax.LocalSGD(), fedrax.LocalSGD(steps=1)], ids=["epoch", "step"])
def test_stragglers_without_effect_are_warned_of(local: fedrax.LocalSGD):
    with pytest.warns(UserWarning, match="stragglers are ignored"):
        slow = run(fedrax.FedAvg(local=local), stragglers=1.0, rounds=1)
    assert slow.events[-1]["gradients"] == run(fedrax.FedAvg(local=local), rounds=1).events[-1]["gradients"]


@pytest.mark.parametrize(
    "algorithm", [fedrax.algorithms.FedSGD(), fedrax.algorithms.SignSGD()], ids=["FedSGD", "SignSGD"]
)
def test_methods_without_stragglers_are_warned_of(algorithm: fedrax.Algorithm):
    with pytest.warns(fedrax.FedraxWarning, match="the same work at slow clients: stragglers is ignored"):
        run(algorithm, stragglers=1.0, rounds=1)


def test_stragglers_are_the_same_for_every_algorithm():
    """Shares depend on (seed, round) only."""
    sampler = cohort_sampler(Settings(stragglers=0.5, cohort_size=4), np.array(SIZES))
    local = fedrax.LocalSGD(lr=0.02, steps=10, batch_size=2)
    runs = [run(kind(local=local), stragglers=0.5, cohort_size=4) for kind in (fedrax.FedAvg, fedrax.Scaffold)]
    counts = [[event["gradients"] for event in result.events] for result in runs]
    assert counts[0] == counts[1]
    by_hand = np.cumsum([2 * np.ceil(np.float32(sampler.work(r, 4)) * 10).sum() for r in range(4)])
    # clients of 7 and 9 samples have a last batch of one sample, so take at most two steps
    assert all(0.6 * most <= count <= most for count, most in zip(counts[0], by_hand, strict=True))
    assert counts[0][-1] < run(fedrax.FedAvg(local=local), cohort_size=4).events[-1]["gradients"]


def test_aggregation_weights_by_samples():
    """With full batches and one step, the cohort is equivalent to one client with all its samples."""
    local = fedrax.LocalSGD(lr=0.1, steps=1, batch_size="full")
    script = Script(cohorts=[[1, 4, 6]])
    result = run(fedrax.FedAvg(local=local), script=script, rounds=1, weights="samples")
    rows = np.concatenate([np.arange(FEDERATION.offsets[c], FEDERATION.offsets[c + 1]) for c in (1, 4, 6)])
    x, y = (a[rows] for a in FEDERATION.train)
    one = fedrax.Federation.from_arrays(x, y, offsets=np.array([0, len(rows)]), num_classes=3)
    whole = run(fedrax.FedAvg(local=local), federation=one, rounds=1, cohort_size=1)
    np.testing.assert_allclose(
        result.params["output"]["weight"], whole.params["output"]["weight"], rtol=1e-5, atol=1e-7
    )


def test_settings_that_a_method_does_not_support_are_rejected(tmp_path: Path):
    for method in (fedrax.Scaffold(local=LOCAL), fedrax.algorithms.MIFA(local=LOCAL)):
        with pytest.raises(FedraxError, match="uniform aggregation weights only"):
            run(method, weights="samples")
    printed = fedrax.LoSAC(local=BLOCKS)
    with pytest.raises(FedraxError, match="wrong point when the cohort's size varies"):
        run(printed, script=Script(cohorts=[[0], [1, 2]]), rounds=2)
    trace = write_trace(tmp_path / "t.csv", [(0, 1), (1, 2), (1, 3)])
    with pytest.raises(FedraxError, match="wrong point when the cohort's size varies"):
        run(printed, participation=trace, cohort_size=2)
    run(printed, participation=trace, cohort_size=1, rounds=2)


@pytest.mark.slow
def test_one_client_per_round_on_two_devices():
    for plan in ("scan", "vmap", "loop"):
        options = {"plan": plan, "cohort_size": 1, "rounds": 3}
        algorithm = fedrax.Scaffold(local=LOCAL)
        assert_close(run(algorithm, **options), run(algorithm, **(options | {"plan": "scan", "devices": 1})))


def test_stragglers_are_independent_of_the_poisson_cohort():
    """With Poisson sampling the number of stragglers varies; in cohorts of fixed size it is exact."""
    settings = Settings(rounds=400, cohort_size=4, participation=Poisson(), stragglers=0.5)
    sampler = cohort_sampler(settings, np.full(8, 3))
    slow = np.array([int((sampler.work(r, 4) < 1).sum()) for r in range(400)])
    assert set(slow) == {0, 1, 2, 3, 4}
    assert slow.mean() == pytest.approx(2, abs=0.2)
    fixed = cohort_sampler(Settings(rounds=9, cohort_size=4, stragglers=0.5), np.full(8, 3))
    assert [int((fixed.work(r, 4) < 1).sum()) for r in range(9)] == [2] * 9
