"""Methods that others would write: other names, states, optimizers and places than those of the package."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrax
from fedrax import FedAvg, FedraxError, LocalSGD, tree
from fedrax.config.annotations import Leaf
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import ClientOutput, Cohort
from fedrax.experiments import serialization
from fedrax.models import Model
from fedrax.optim import Optax
from fedrax.optim.server import SGD
from fedrax.testing import check_algorithm
from tests.simulation.problems import FEDERATION, LOCAL, run, travels

PLANS = ["scan", "vmap", "loop", "debug"]


class State(NamedTuple):
    params: Any
    extra: Any = ()


@hyperparameters
class Own(FedAvg):
    """FedAvg with a server state of its own."""

    def init(self, params: Any, n: int) -> State:
        return State(params, self.extra(n))

    def extra(self, n: int) -> Any:
        return ()

    def server(self, server: State, cohort: Cohort) -> Any:
        return server._replace(params=tree.add(server.params, cohort.mean)), {}


def test_arguments_may_have_other_names():
    jax.tree.map(np.testing.assert_array_equal, run(Own(LOCAL)).params, run(FedAvg(LOCAL)).params)


def test_numbers_of_numpy_in_a_state():
    """JAX computes in float32 with them; their own type is none that the server could keep."""

    @hyperparameters
    class Counting(Own):
        def extra(self, n: int) -> Any:
            return np.zeros(n), np.log(n), np.arange(n)

    kept = run(Counting(LOCAL)).server.extra
    assert [leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)] == [4, 4, 4]


def test_marks_that_are_not_finite():
    @hyperparameters
    class Best(Own):
        def extra(self, n: int) -> Any:
            return {"best": jnp.inf}

    for plan in ("scan", "debug"):
        with pytest.raises(FedraxError, match=r"Best.init returns .*best is not finite.*finfo"):
            run(Best(LOCAL), plan=plan)


@pytest.mark.parametrize("where", ["server", "client"])
def test_random_keys_are_kept_as_numbers(where: str):
    @hyperparameters
    class Drawing(Own):
        def extra(self, n: int) -> Any:
            return jax.random.key(0) if where == "server" else ()

        def init_client(self, params: Any) -> Any:
            return jax.random.key(0) if where == "client" else ()

    with pytest.raises(FedraxError, match=r"random key in its state: keep its numbers, jax\.random\.key_data"):
        run(Drawing(LOCAL))


def test_states_that_begin_as_none():
    @hyperparameters
    class Later(FedAvg):
        def init_client(self, params: Any) -> Any:
            return {"before": None}

        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            output = super().client(message, state, data)
            return output._replace(state={"before": output.upload})

    with pytest.raises(FedraxError, match="init_client's holds no numbers: give it arrays in place of None"):
        run(Later(LOCAL))


@hyperparameters
class Halving:
    """A server rule of one's own."""

    lr: float = 0.5

    def init(self, params: Any) -> Any:
        return ()

    def step(self, params: Any, state: Any, delta: Any, round: Any) -> Any:
        return tree.add_scaled(params, self.lr, delta), state


def test_a_server_optimizer_of_ones_own():
    one, other = run(FedAvg(LOCAL, Halving())), run(FedAvg(LOCAL, SGD(lr=0.5)))  # type: ignore[arg-type]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one.params, other.params)


class Half:
    """None: it lacks ``step``."""

    def init(self, params: Any) -> Any:
        return ()


def test_a_server_optimizer_that_is_none():
    with pytest.raises(FedraxError, match="server_optimizer must be of class"):
        run(FedAvg(LOCAL, hyperparameters(Half)()))


def test_what_a_client_writes_into_its_message_nobody_else_is_sent():
    @hyperparameters
    class Moved(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            message["output"] = tree.scale(1.5, message["output"])
            return super().client(message, state, data)

    one, *others = [run(Moved(LOCAL), plan=plan).params["output"] for plan in PLANS]
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


class Side(Enum):
    """An option."""

    LEFT = "left"
    RIGHT = "right"


@hyperparameters
class Sided(FedAvg):
    """Another way on the right."""

    side: Side = Side.LEFT

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        output = super().client(message, state, data)
        return output._replace(upload=tree.scale(1 if self.side is Side.LEFT else -1, output.upload))


def test_enumerations_as_fields(tmp_path: Path):
    with pytest.raises(FedraxError, match=r"Sided.side must be a Side: LEFT, RIGHT, got 'left'"):
        run(Sided(LOCAL, side="left"))  # type: ignore[arg-type]
    reader = serialization.Reader("a file", tmp_path)
    assert serialization.table_of(Sided(side=Side.RIGHT))["side"] == "RIGHT"
    assert reader.fields(Sided, {"side": "RIGHT"}, "").side is Side.RIGHT
    with pytest.raises(FedraxError, match=r"side: must be a Side: LEFT, RIGHT, not 'right'"):
        reader.fields(Sided, {"side": "right"}, "")


@pytest.mark.parametrize("plan", PLANS)
def test_the_number_of_a_step_is_an_array(plan: str):
    """Whatever the plan, and another random number in each step."""

    @hyperparameters
    class Slowing(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            def direction(gradient: Any, x: Any, memory: Any, step: Any) -> Any:
                drawn = jax.random.normal(step.key("noise"))
                return tree.scale(1 / (1 + step.index.astype(jnp.float32)), gradient), memory.at[step.index].set(drawn)

            result = self.local.run(data, message, direction, memory=jnp.zeros(3))
            drawn = jnp.sort(result.memory)
            info = {"apart": jnp.min(drawn[1:] - drawn[:-1]), "sum": result.memory.sum()}
            return ClientOutput(upload=tree.sub(result.params, message), info={**result.info, **info})

    made = run(Slowing(LOCAL), plan=plan, rounds=2)
    assert all(event["apart"] > 0 for event in made.events)
    assert made.events[0]["sum"] != pytest.approx(made.events[1]["sum"])
    assert made.events[0]["sum"] == pytest.approx(run(Slowing(LOCAL), rounds=2).events[0]["sum"], rel=1e-5)


def test_no_local_step_at_all():
    @hyperparameters
    class Chance(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            steps = jnp.where(data.place.client % 2 == 0, 0, 2)
            result = self.local.run(data.with_steps(steps), message, mean_gradient=True)
            return ClientOutput(upload=tree.sub(result.params, message), info=result.info)

    made = run(Chance(LocalSGD(lr=0.05, batch_size=2)), rounds=4)
    assert all(np.isfinite(event["train_loss"]) for event in made.events) and made.stopped != "diverged"


@pytest.mark.parametrize("options", [{"plan": "debug"}, {"plan": "loop"}, {"devices": 1}], ids=str)
def test_a_field_that_holds_the_parameters_of_an_earlier_run(options: dict[str, Any]):
    @hyperparameters
    class Towards(FedAvg):
        teacher: Leaf[Any] = ()

        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            output = super().client(message, state, data)
            near = tree.sub(self.teacher, message)
            return output._replace(upload=tree.add_scaled(output.upload, 0.1, near))

    first = run(FedAvg(LOCAL))
    assert len(run(Towards(LOCAL, teacher=first.params), **options).events) == 4


def test_learning_rates_in_the_state_of_an_optimizer():
    rule = Optax.of(optax.inject_hyperparams(optax.adamw))
    with pytest.raises(FedraxError, match="keeps its learning rate in its state"):
        run(FedAvg(LocalSGD(lr=0.001, steps=1, optimizer=rule)))


def test_optimizers_that_need_more_than_gradients():
    with pytest.raises(FedraxError, match="needs more than a direction"):
        run(FedAvg(LocalSGD(steps=1, optimizer=Optax(optax.lbfgs()))))


def test_a_number_of_numpy_as_a_field():
    @hyperparameters
    class Weighed(FedAvg):
        mu: float = 0.1

        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            output = super().client(message, state, data)
            return output._replace(upload=tree.scale(1 - self.mu, output.upload))

    check_algorithm(Weighed(mu=np.float32(0.1)))  # type: ignore[arg-type]


def test_what_was_sent_in_a_round_is_not_sent_again():
    """EPISODE's second phase sends G, MimeSVRG's the mean gradient, Mime's that and s: not x once more."""
    model, _ = travels(FedAvg(LOCAL))
    assert travels(fedrax.Episode(LOCAL)) == (2 * model, 2 * model)
    assert travels(fedrax.algorithms.MimeSVRG(LOCAL)) == (2 * model, 2 * model)
    assert travels(fedrax.algorithms.Mime(LOCAL))[0] == 3 * model


def test_what_compiled_functions_of_a_method_hand_on_is_not_sent_again():
    @hyperparameters
    class Compiled(fedrax.Episode):
        def center(self, server: Any, cohort: Any) -> tuple[Any, dict]:
            return jax.jit(jax.jit(super().center))(server, cohort)

        def broadcast(self, server: Any) -> Any:
            return jax.jit(super().broadcast)(server)

    assert travels(Compiled(LOCAL)) == travels(fedrax.Episode(LOCAL))


@hyperparameters
class WithoutTheLast(FedAvg):
    """FedAvg on all of a client's rows but the last one."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        result = self.local.run(data.with_samples(data.samples, data.size - 1), message)
        return ClientOutput(upload=tree.sub(result.params, message), info=result.info)


@pytest.mark.parametrize("local", [LocalSGD(batch_size=2, order="stored"), LocalSGD(blocks=2, steps=6)])
def test_rows_that_are_left_out_are_never_looked_at(local: LocalSGD):
    """Clients of one size, which batches and blocks divide: each row has a weight of its own."""
    rows = np.eye(8, dtype=np.float32)
    federation = fedrax.Federation.from_arrays(rows, np.ones(8, np.float32), np.arange(8) // 4)
    task = fedrax.regression(Model(lambda key: jnp.zeros(8), lambda params, x, key=None: x @ params))
    moved = run(WithoutTheLast(local), federation, task=task, rounds=1, cohort_size=2).params != 0
    stored = federation.train.x.argmax(1)
    assert moved[stored].reshape(2, 4).tolist() == 2 * [[True, True, True, False]]


@pytest.mark.parametrize("plan", ["scan", "vmap", "debug"])
def test_all_of_a_clients_samples(plan: str):
    """Clients of unlike sizes: sums of their own rows alone."""

    class Sums(NamedTuple):
        params: Any
        sums: Any

    @hyperparameters
    class Counting(FedAvg):
        def init(self, params: Any, n: int) -> Any:
            return Sums(params, jnp.zeros(()))

        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            batch, real = data.all_samples()
            rows = batch.x.reshape(len(real), -1).sum(1)
            return ClientOutput(upload=tree.zeros_like(message), total={"x": jnp.sum(jnp.where(real, rows, 0))})

        def server(self, server: Any, cohort: Cohort) -> Any:
            return server._replace(sums=cohort.total["x"]), {}

    cohort = [4, 1, 3]
    found = run(Counting(LOCAL), rounds=1, plan=plan, devices=1, script=fedrax.simulation.Script(cohorts=[cohort]))
    rows = [row for c in cohort for row in range(FEDERATION.offsets[c], FEDERATION.offsets[c + 1])]
    np.testing.assert_allclose(found.server.sums, np.asarray(FEDERATION.train[0])[rows].sum(), rtol=1e-5)
