"""Runs of unusual kinds against those that they must equal: streamed, side by side, in short types, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, Scaffold, classification, sweep
from fedrax.algorithms import PFedMe
from fedrax.config.annotations import Leaf
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract import Variables
from fedrax.contract.algorithm import Algorithm, ClientOutput
from fedrax.contract.averaging import Averaging
from fedrax.models import Model
from fedrax.optim import Optax
from fedrax.personalization import Ditto
from fedrax.simulation import Script
from fedrax.simulation.persistence import checkpoint
from tests.simulation.problems import FEDERATION, LOCAL, TASK, assert_identical, run


@pytest.mark.parametrize("method", [PFedMe(LOCAL), Ditto(FedAvg(local=LOCAL))], ids=["pFedMe", "Ditto"])
def test_metrics_of_own_models_do_not_depend_on_where_samples_lie(method: Algorithm):
    """Streamed, the devices have the samples of a block alone, under other numbers."""
    ends = [run(method, samples=samples, devices=1, eval_every=2).events[-1] for samples in ("resident", "streamed")]
    names = [name for name in ends[0] if "personal" in name]
    assert len(names) >= 2
    for name in names:
        assert ends[1][name] == pytest.approx(ends[0][name], rel=1e-5), name


def adagrad(start: float) -> FedAvg:
    rule = Optax.of(optax.adagrad, initial_accumulator_value=start)
    return FedAvg(local=LocalSGD(lr=0.1, steps=3, batch_size=2, carry=True, optimizer=rule))


@hyperparameters
class Beginning(Averaging):
    """Clients remember a number, which begins at a hyper-parameter."""

    begin: float = 0.0

    def init_client(self, params: Any) -> Any:
        return jnp.asarray(self.begin)

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        result = self.local.run(data, message)
        update = jax.tree.map(lambda a, b: state * (a - b), result.params, message)
        return ClientOutput(upload=update, state=state + 1, info=result.info)

    def personal(self, params: Any, state: Any) -> Any:
        return jax.tree.map(lambda a: state * a, params)


@pytest.mark.parametrize(
    "methods", [[adagrad(0.01), adagrad(100.0)], [Beginning(LOCAL, begin=b) for b in (0.5, 2.0)]], ids=["optax", "own"]
)
def test_runs_side_by_side_begin_each_with_its_own_clients(methods: list[Algorithm]):
    options: dict[str, Any] = {"rounds": 3, "cohort_size": 3, "eval_every": 3, "devices": 1}
    together, in_turn = (sweep(methods, TASK, FEDERATION, **options, mode=m) for m in ("vectorized", "sequential"))
    for (one,), (other,) in zip(together, in_turn, strict=True):
        for name in other.events[-1].keys() - {"seconds"}:
            assert one.events[-1][name] == pytest.approx(other.events[-1][name], rel=1e-4), name
        for i in range(FEDERATION.num_clients):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), one.client_state(i), other.client_state(i)
            )


@hyperparameters
class Weighted(FedAvg):
    """Each client's update times a number of its own."""

    factors: Leaf[Any] = None
    first: Leaf[Any] = None

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        out = FedAvg.client(self, message, state, data)
        factor = self.factors[jnp.minimum(data.place.client, self.first[0])]
        return out._replace(upload=jax.tree.map(lambda u: factor * u, out.upload))


def test_whole_numbers_among_the_inputs_of_runs_side_by_side_stay_whole():
    lists = [np.linspace(0, 1, 8), np.linspace(1, 0, 8)]
    methods = [Weighted(LOCAL, factors=list_, first=np.array([k + 5])) for k, list_ in enumerate(lists)]
    together, in_turn = (
        sweep(methods, TASK, FEDERATION, rounds=2, cohort_size=3, mode=m) for m in ("vectorized", "sequential")
    )
    for (one,), (other,) in zip(together, in_turn, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), one.params, other.params)
    uneven = [methods[0], Weighted(LOCAL, factors=np.ones(9), first=np.array([5]))]
    assert len(sweep(uneven, TASK, FEDERATION, rounds=1, cohort_size=3)) == 2


@pytest.mark.parametrize("states", ["resident", "spilled"])
def test_short_types_of_numbers_survive_a_checkpoint(states: str, tmp_path: Path):
    """NumPy has none of them: their files would not say which they are."""
    if states == "resident":
        method = FedAvg(local=LOCAL, server_optimizer=Optax(optax.adam(0.01, mu_dtype="bfloat16")))
    else:
        rule = Optax.of(optax.adam, mu_dtype="bfloat16")
        method = FedAvg(local=LocalSGD(lr=0.01, steps=3, batch_size=2, carry=True, optimizer=rule))
    options: dict[str, Any] = {"directory": tmp_path / "run", "states": states, "cohort_size": 3, "eval_every": 2}
    run(method, rounds=2, **options)
    resumed, whole = run(method, rounds=4, resume=True, **options), run(method, rounds=4, cohort_size=3, eval_every=2)
    assert_identical(resumed, whole)
    state = {"a": jnp.arange(4, dtype=jnp.int4), "b": jnp.ones((2, 3), jnp.float8_e4m3fn)}
    checkpoint.save(tmp_path / "c", state, {})
    loaded, _ = checkpoint.load(tmp_path / "c", state)
    jax.tree.map(np.testing.assert_array_equal, loaded, jax.tree.map(np.asarray, state))
    with pytest.raises(FedraxError, match="belongs to another algorithm or model"):
        checkpoint.load(tmp_path / "c", state | {"b": jnp.ones((2, 3), jnp.float8_e5m2)})


def test_a_script_that_divides_clients_otherwise_is_another(tmp_path: Path):
    options: dict[str, Any] = {"directory": tmp_path / "run"}
    run(script=Script(cohorts=[[0, 1], [2], [3, 4]]), rounds=1, **options)
    with pytest.raises(FedraxError, match=r"settings \(script\) differ"):
        run(script=Script(cohorts=[[0], [1, 2], [3, 4]]), rounds=3, resume=True, **options)
    assert run(script=Script(cohorts=[[0, 1], [2], [3, 4]]), rounds=3, resume=True, **options).events


def test_test_rows_that_belong_to_nobody():
    with pytest.raises(FedraxError, match="test_offsets give no client a test row: leave them out"):
        Federation.from_arrays(
            *FEDERATION.train, offsets=FEDERATION.offsets, test=tuple(FEDERATION.test),
            test_offsets=np.zeros(len(FEDERATION.offsets), int), num_classes=3,
        )  # fmt: skip


def test_statistics_have_names():
    def train(variables: Any, x: Any, key: Any) -> Any:
        return x @ variables.params["w"], variables.statistics + 1

    apply = lambda variables, x, key=None: x @ variables.params["w"]  # noqa: E731
    task = classification(Model(lambda key: Variables({"w": jnp.zeros((4, 3))}, jnp.zeros(3)), apply, train=train))
    with pytest.raises(FedraxError, match="running statistics are arrays by name"):
        run(task=task, rounds=1)


def test_the_trajectory_after_some_rounds():
    whole, some = (run(Scaffold(local=LOCAL), rounds=9, trajectory=t).trajectory for t in (True, [2, 3, 9]))
    assert len(whole) == 9 and len(some) == 3
    for r, mine in zip((2, 3, 9), some, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, whole[r - 1])
    with pytest.raises(FedraxError, match="rounds 1 to 4, not after 5"):
        run(rounds=4, trajectory=[2, 5])


def test_a_callback_sees_the_evaluation_that_reaches_the_target():
    seen: list[int] = []
    made = run(FedAvg(LOCAL), rounds=4, eval_every=1, target=0.01, callbacks=[lambda s: seen.append(s.event["round"])])
    assert made.stopped == "target" and seen == [event["round"] for event in made.events]


def test_gradients_beyond_32_bits_are_counted():
    """Of many steps over all of a large client's data."""

    @hyperparameters
    class ShapeTracer(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            zero = jax.tree.map(jnp.zeros_like, message)
            return ClientOutput(upload=zero, info={"gradients": self.local.samples(data, 5000)})

    rows = 500_000
    large = Federation.from_arrays(np.zeros((rows, 4), np.float32), np.arange(rows) % 3, offsets=np.array([0, rows]))
    made = run(ShapeTracer(LocalSGD(batch_size="full", steps=5000)), large, rounds=1, cohort_size=1)
    assert made.events[0]["gradients"] == 2_500_000_000
