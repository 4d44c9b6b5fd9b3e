"""Violations of the contract raise one clear message with the method's name and the remedy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import ClientOutput, FedAvg, FedraxError, LocalSGD, check_algorithm, cli, hyperparameters, tree
from fedrax.contract import Phase
from fedrax.contract.checks import checked_server
from fedrax.data import load
from fedrax.models import Logistic, Model
from tests.simulation.problems import TASK, make_federation, run
from tests.slow import slow_cases

FEDERATION = make_federation(test_rows=0)


class State(NamedTuple):
    """Client state."""

    a: Any


class CountingServer(NamedTuple):
    """Server state."""

    params: Any
    count: Any


def method(**functions: Any) -> FedAvg:
    """FedAvg with some of its methods replaced."""
    return hyperparameters(type("Mine", (FedAvg,), {"__module__": __name__, "__annotations__": {}, **functions}))()


def client(output: Callable) -> FedAvg:
    """FedAvg whose clients return ``output(message, state, data)``."""
    return method(client=lambda self, message, state, data: output(message, state, data))


def client_with_state(first: Any, output: Callable) -> FedAvg:
    """FedAvg with a client state."""
    run = lambda self, m, s, d: ClientOutput(upload=m, state=output(s))  # noqa: E731
    return method(client=run, init_client=lambda self, params: first)


def client_with_direction(direction: Callable, memory: Any = None) -> FedAvg:
    """FedAvg whose local steps follow this direction."""
    return client(lambda m, s, d: ClientOutput(upload=LocalSGD(steps=2).run(d, m, direction, memory).params))


def server_with_info(number: Any) -> FedAvg:
    """FedAvg whose server returns this info."""
    return method(server=lambda self, server, cohort: (server, number))


def check(self: Any) -> None:
    """A check that raises a Python error."""
    raise ValueError("too small")


@dataclasses.dataclass(frozen=True)
class Halved:
    """A schedule without the decorator."""

    def __call__(self, round: Any) -> float:
        return 0.5


CASES = {
    "Mine.client returns a dict instead of a ClientOutput": client(lambda m, s, d: m),
    "Mine.client uploads nothing": client(lambda m, s, d: ClientOutput(upload=None)),
    "Mine.client returns in its upload something other than arrays": client(lambda m, s, d: ClientOutput(upload="x")),
    "Mine.client returns in its total something other": client(lambda m, s, d: ClientOutput(upload=m, total="x")),
    "Mine.client gives the info nothing": client(lambda m, s, d: ClientOutput(upload=m, info=None)),  # type: ignore[arg-type]
    r"info 'loss' of shape \(2,\): one": client(lambda m, s, d: ClientOutput(upload=m, info={"loss": jnp.ones(2)})),
    "Mine.client gives the info 'test_accuracy', a name that is reserved": client(
        lambda m, s, d: ClientOutput(upload=m, info={"test_accuracy": 1.0})
    ),
    "Mine.server gives the info 'bytes_up', a name that is reserved": server_with_info({"bytes_up": 1.0}),
    "passes a traced value to NumPy": client(lambda m, s, d: ClientOutput(upload=jax.tree.map(np.asarray, m))),
    "asks for the truth of a traced": client(lambda m, s, d: ClientOutput(upload=m if d.size > 3 else s)),
    "as a Python index or size": client(lambda m, s, d: ClientOutput(upload=[m for _ in range(d.size)])),
    "but no client has one: define init_client": client(lambda m, s, d: ClientOutput(upload=m, state=m)),
    r"a is of shape \(\), but init_client": client_with_state(State(jnp.zeros(3)), lambda s: State(1.0)),
    "returns no state, but init_client makes one: pass state=": client_with_state(State(jnp.zeros(3)), lambda s: ()),
    "of type float32, but init_client makes it int32": client_with_state(
        State(jnp.int32(3)), lambda s: State(s.a + 0.5)
    ),
    "Mine.init_client returns in its state something": client_with_state("x", lambda s: s),
    "Mine.init_client returns nothing: return the state": client_with_state(None, lambda s: ()),
    "of type complex64, but before the round": method(
        client=lambda self, m, s, d: ClientOutput(upload=jax.tree.map(lambda a: a + 1j, m)),
        server=lambda self, s, c: (s._replace(params=c.mean), {}),
    ),
    "a direction with a memory returns a dict, not the pair": client_with_direction(lambda g, x, step, memory: g, ()),
    "a direction must have the tree structure": client_with_direction(lambda g, x, step: (g, ())),
    "must return a memory with the tree structure": client_with_direction(lambda g, x, step, memory: (g, g), ()),
    "Mine.receive returns nothing": method(receive=lambda self, upload: None),
    "Mine.receive returns in its value something": method(receive=lambda self, upload: "x"),
    "Mine.broadcast returns in its message something": method(broadcast=lambda self, server: "x"),
    "Mine.init returns nothing without params": method(init=lambda self, params, num_clients: None),
    "Mine.server returns a Server instead of a state and its info": method(server=lambda self, s, c: s),
    "Mine.server gives the info nothing|a state and its info": server_with_info(None),
    "Mine.server returns in its info something": server_with_info({"x": "much"}),
    r"Mine.server gives the info 'x' of shape \(3,\)": server_with_info({"x": jnp.ones(3)}),
    "before the round it was of shape": method(server=lambda self, server, cohort: (None, {})),
    "Mine.phases must be a tuple of one Phase": method(phases=property(lambda self: ())),
    "Mine.phases must be a tuple": method(phases=property(lambda s: Phase(s.broadcast, s.client, s.server))),
    "Mine.traits is nothing": method(traits=property(lambda self: None)),
    "Mine.local_steps is a float": method(local_steps=property(lambda self: 3.0)),
    "what Mine.personal returns: output/bias is not": method(personal=lambda self, params, state: {"a": jnp.ones(1)}),
    "Mine.personal returns in its model something": method(personal=lambda self, params, state: "x"),
    "fails with ValueError: pytree structure error.*: both trees need the same keys, and what": client(
        lambda m, s, d: ClientOutput(upload={"delta": m})
    ),
    "return the same keys, shapes and types from all branches": client(
        lambda m, s, d: ClientOutput(upload=jax.lax.cond(d.size > 3, lambda: m, lambda: {"delta": m}))
    ),
    "return from the loop's body what it begins with": client(
        lambda m, s, d: ClientOutput(upload=m, info={"x": jax.lax.while_loop(lambda x: x < 3, lambda x: (x, x), 0.0)})
    ),
    r"\(x begins as int32\[\] and ends as float32\[\]\): return from the loop's body": client(
        lambda m, s, d: ClientOutput(upload=jax.lax.while_loop(lambda x: x < 3, lambda x: x + 0.5, jnp.int32(0)))
    ),
    "give both the same shapes": client(lambda m, s, d: ClientOutput(upload=jax.tree.map(lambda a: a[:2], m))),
    "fails with AttributeError: .* no attribute 'meen': did you mean 'mean'": method(server=lambda self, s, c: c.meen),
    "fails with KeyError: 'delta': cohort.mean has the keys of": method(server=lambda self, s, c: c.mean["delta"]),
    "a model's numbers are a tree: use tree.add": client(lambda m, s, d: ClientOutput(upload=0.5 * m)),
    "indexes by a traced Boolean array": client(
        lambda m, s, d: ClientOutput(upload=jax.tree.map(lambda a: a[a > 0], m))
    ),
    r"write ClientOutput\(upload=": client(lambda m, s, d: ClientOutput(update=m)),  # type: ignore[call-arg]
    "fails with ZeroDivisionError: division by zero": client(lambda m, s, d: 1 / 0),
    r"client takes \(message, data\), and is called with \(message, state, data\): write def client\(self,": method(
        client=lambda self, message, data: ClientOutput(upload=message)
    ),
    r"init_client takes \(\), and is called with \(params\)": method(init_client=lambda self: ()),
    "Mine.params is a int: write def params": method(params=property(lambda self: 3)),
    "count of type float32, but before the round it was int32": method(
        init=lambda self, params, num_clients: CountingServer(params, 0),
        server=lambda self, server, cohort: (server._replace(count=server.count + 0.5), {}),
    ),
    "Mine.lam has no annotation, so it is not a field: write lam: float = 0.5": method(lam=0.5),
    "Mine.local has no annotation, so it is not a field": method(local=LocalSGD(steps=2)),
    "local.run is given a dict as data: write local.run": client(lambda m, s, d: LocalSGD().run(m, d)),  # type: ignore[arg-type]
    r"fails with TypeError: tuple indices .* is an empty tuple": method(server=lambda self, s, c: c.total["n"]),
    "unknown field of Traits: 'feature'; did you mean 'features'": method(
        traits=property(lambda self: fedrax.contract.Traits(feature=True))  # type: ignore[call-arg]
    ),
    r"Mine \(.* fails with AttributeError: 'Mine' object has no attribute 'lam'": method(
        traits=property(lambda self: self.lam)
    ),
    "Mine.releases gives nothing: a tuple of Release is needed": method(releases=lambda self: None),
    r"Mine \(test_misuse.py, line \d+, in check\) fails with ValueError: too small": method(check=check),
    "what Mine.with_params returns: params/output/bias is not": method(with_params=lambda self, server, params: None),
    "in Mine's server state: output/bias is not": method(
        init=lambda self, p, n: CountingServer((p.pop("output"), p)[1], 0)
    ),
    "nothing calls Mine.recieve: did you mean 'receive'": method(recieve=lambda self, upload: upload),
    "Mine.trait has no annotation, so it is not a field": method(trait=fedrax.contract.Traits()),
    "FedAvg.local must be of class LocalSGD": FedAvg(local=FedAvg()),  # type: ignore[arg-type]
    "local.schedule must be a pytree: decorate Halved with @hyperparameters": FedAvg(
        local=LocalSGD(schedule=Halved())  # type: ignore[arg-type]
    ),
}


# -- several phases ----------------------------------------------------------------------------------------------------


def helper() -> float:
    """A helper of a user-defined method."""
    return 1 / 0


@hyperparameters
class TwoPhases(FedAvg):
    """FedAvg after a phase without an upload."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        before = Phase(lambda server: server.params, self.measure, self.center)
        return before, Phase(self.broadcast, self.client, self.server)

    def init_client(self, params: Any) -> State:
        """State for the second phase."""
        return State(params)

    def measure(self, message: Any, state: Any, data: Any) -> Any:
        """First phase of a client."""
        return ClientOutput(upload=message, state=state)

    def center(self, server: Any, cohort: Any) -> Any:
        """First phase of the server."""
        return server, {}

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        """Second phase of a client."""
        return super().client(message, state, data)._replace(state=State(tree.scale(0.5, state.a)))


@hyperparameters
class FailsFirst(TwoPhases):
    def measure(self, message: Any, state: Any, data: Any) -> Any:
        raise ValueError("gone")


@hyperparameters
class FailsInPhaseServer(TwoPhases):
    def center(self, server: Any, cohort: Any) -> Any:
        return cohort.meen


@hyperparameters
class FailsInHelper(TwoPhases):
    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        return ClientOutput(upload=helper())


@hyperparameters
class ReturnsNone(TwoPhases):
    def measure(self, message: Any, state: Any, data: Any) -> Any:
        return None


@hyperparameters
class Stateless(TwoPhases):
    def measure(self, message: Any, state: Any, data: Any) -> Any:
        return ClientOutput(upload=message)


@hyperparameters
class StatelessPair(Stateless):
    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        (own,) = state
        return ClientOutput(upload=own)


@hyperparameters
class FailsInALambda(TwoPhases):
    @property
    def phases(self) -> tuple[Phase, ...]:
        before = Phase(lambda server: server.parameters, self.measure, self.center)
        return before, Phase(self.broadcast, self.client, self.server)


@hyperparameters
class FailsInTheLibrary(fedrax.algorithms.MimeSVRG):
    def broadcast(self, server: Any) -> Any:
        return server.params


NO_STATE = r": measure of phase 1 returned no state: write ClientOutput\(upload=..., state=...\) there$"
PHASES = {
    FailsFirst: r"^FailsFirst \(test_misuse.py, line \d+, in measure of phase 1\) fails with ValueError: gone$",
    FailsInPhaseServer: r"line \d+, in center of phase 1\) fails with AttributeError: .* did you mean 'mean'",
    FailsInHelper: r"^FailsInHelper \(.*, in helper, called by client of phase 2\) fails with ZeroDivisionError",
    ReturnsNone: r"^ReturnsNone.measure of phase 1 returns nothing instead of a ClientOutput",
    Stateless: r"line \d+, in client of phase 2\) fails with AttributeError: .* has no attribute 'a'" + NO_STATE,
    StatelessPair: r"in client of phase 2\) fails with ValueError: not enough values to unpack .*" + NO_STATE,
    FailsInALambda: r"in broadcast of phase 1\) fails with AttributeError: .*'parameters'",
    FailsInTheLibrary: r"^FailsInTheLibrary.client of phase 2 fails with AttributeError: 'dict' object has no",
}


@pytest.mark.parametrize("kind", PHASES)
def test_error_in_a_phase_names_its_function(kind: type[FedAvg]):
    with pytest.raises(FedraxError, match=PHASES[kind]):
        run(kind(), FEDERATION, rounds=1, devices=1)


def test_phases_without_errors_run():
    assert len(run(TwoPhases(), FEDERATION, rounds=1, devices=1).events) == 1


@pytest.mark.parametrize("message", CASES)
@pytest.mark.parametrize(
    "use", [lambda m: run(m, FEDERATION, rounds=1, devices=1), check_algorithm], ids=["simulate", "check"]
)
def test_misuse_raises_a_clear_error(message: str, use: Callable):
    with pytest.raises(FedraxError, match=message) as caught:
        use(CASES[message])
    assert "Traceback" not in str(caught.value)


def test_info_may_be_a_python_number():
    events = run(server_with_info({"x": 1.5}), FEDERATION, rounds=2, devices=1).events
    assert [event["x"] for event in events] == [1.5, 1.5]


def test_names_of_event_fields_are_reserved():
    event = run(FedAvg(local=LocalSGD(steps=1)), rounds=1, devices=1).events[0]
    assert event.keys() >= {"train_loss", "test_accuracy", "clients", "seconds"}
    reserved = ("clock", "epsilon", "epsilon_paper", "diverged", "sound", "bad", "recorded", "seconds_a_client")
    for name in (*event, *reserved):
        if name != "gradients":  # a method may count its gradients itself
            with pytest.raises(FedraxError, match=f"gives the info '{name}'"):
                checked_server(FedAvg(), 0, (jnp.ones(2), {name: 1.0}))


def test_nonfinite_infos_are_omitted_from_events(tmp_path: Path):
    user_method = server_with_info({"x": float("nan"), "y": float("inf"), "z": 2.0})
    events = run(user_method, FEDERATION, rounds=2, devices=1, directory=tmp_path / "run").events
    assert [{name: event[name] for name in "xyz" if name in event} for event in events] == [{"z": 2.0}] * 2
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == events


def test_upload_may_be_a_python_number():
    moved = lambda self, s, c: (s._replace(params=tree.scale(1 + c.mean, s.params)), {})  # noqa: E731
    ones = method(client=lambda self, m, s, d: ClientOutput(upload=1.0), server=moved)
    start = run(FedAvg(), FEDERATION, rounds=1, devices=1, trajectory=True).params
    params = run(ones, FEDERATION, params=start, rounds=2, devices=1).params
    np.testing.assert_allclose(params["output"]["weight"], 4 * start["output"]["weight"], rtol=1e-6)


def test_all_violations_are_reported_in_one_message():
    """A part that is needed by the next one is replaced if it is invalid."""
    broken: dict[str, Any] = {
        "init_client": lambda self, params: "x",
        "broadcast": lambda self, server: "x",
        "client": lambda self, message, state, data: {"update": message},
        "server": lambda self, server, cohort: server,
    }
    for parts in (broken.keys(), ("client", "server"), ("init_client", "server"), ("client",), ("init_client",)):
        user_method = method(**{name: broken[name] for name in parts})
        for use in (lambda m: run(m, FEDERATION, rounds=1), check_algorithm):
            with pytest.raises(FedraxError) as caught:
                use(user_method)
            lines = str(caught.value).splitlines()
            assert [line.partition(" ")[0] for line in lines] == [f"Mine.{name}" for name in broken if name in parts]
    both = method(client=lambda self, message: message, server=lambda self, cohort: cohort)
    with pytest.raises(FedraxError, match=r"^Mine.client takes .*\n.*server takes \(cohort\)"):
        check_algorithm(both)


def test_consequential_errors_are_not_reported():
    """The server fails because of the client's malformed upload."""
    user_method = method(client=lambda self, m, s, d: m, server=lambda self, server, cohort: cohort.mean["delta"])
    with pytest.raises(FedraxError) as caught:
        check_algorithm(user_method)
    assert str(caught.value).startswith("Mine.client returns a dict") and "\n" not in str(caught.value)


def test_traits_may_be_a_class_attribute():
    user_method = method(traits=fedrax.contract.Traits(uniform_weights=True))
    run(user_method, FEDERATION, rounds=1)
    with pytest.raises(FedraxError, match="Mine is defined for uniform aggregation weights only"):
        run(user_method, FEDERATION, rounds=1, weights="samples")


def test_helpers_may_have_names_of_contract_functions():
    received = {"received": lambda self, m: m, "client": lambda self, m, s, d: ClientOutput(upload=self.received(m))}
    params = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), TASK.init(jax.random.key(0)))
    doubled = run(method(**received), FEDERATION, rounds=1, params=params).params  # the upload is added to the model
    jax.tree.map(lambda a: np.testing.assert_allclose(a, 2, rtol=1e-6), doubled)
    inner = {"received": lambda self, m: m, "receive": lambda self, upload: upload}
    trained, expected = (run(m, FEDERATION, rounds=1).params for m in (method(**inner), FedAvg()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), trained, expected)


def test_check_algorithm_accepts_a_task_and_its_federation():
    def client(self: Any, message: Any, state: Any, data: Any) -> ClientOutput:
        result = self.local.run(data, message)
        body = {name: tree.scale(name != "output", tree.sub(result.params[name], message[name])) for name in message}
        return ClientOutput(upload=body, info=result.info)

    user_method = method(client=client)
    two_layers = Model(
        lambda key: {"body": jnp.ones((4, 2)), "output": jnp.eye(2, 3)},
        lambda params, x, key=None: x @ params["body"] @ params["output"],
    )
    check_algorithm(user_method, fedrax.classification(two_layers), make_federation((4,) * 4, test_rows=0))
    with pytest.raises(FedraxError, match=r"does not move the parameters, output/bias, .* a task and a federation"):
        check_algorithm(user_method)
    with pytest.raises(FedraxError, match="both a task and its federation, or neither"):
        check_algorithm(user_method, TASK)
    with pytest.raises(FedraxError, match="federation must be a Federation or None, not a tuple: Federation"):
        check_algorithm(user_method, TASK, ())  # type: ignore[arg-type]


def test_leaked_tracer_raises_a_clear_error():
    kept: list[Any] = []

    def leak(message: Any, state: Any, data: Any) -> ClientOutput:
        jax.lax.map(kept.append, jnp.arange(3.0))
        return ClientOutput(upload=tree.scale(kept[0], message))

    def leak_into_the_next_run(message: Any, state: Any, data: Any) -> ClientOutput:
        upload = tree.add(message, kept[0]) if kept else message
        kept.append(message)
        return ClientOutput(upload=upload)

    explained = pytest.raises(FedraxError, match="keeps a traced value outside of the function that made it: return it")
    with explained:
        run(client(leak), FEDERATION, rounds=1)
    kept.clear()
    run(client(leak_into_the_next_run), FEDERATION, rounds=1)
    with explained:
        run(client(leak_into_the_next_run), make_federation((6,) * 4, test_rows=0), rounds=1)


def test_algorithm_without_decorator_is_rejected():
    class Bare(FedAvg):
        """A subclass without the decorator."""

        extra: float = 1.0

    for use in (lambda m: run(m, FEDERATION, rounds=1), check_algorithm):
        with pytest.raises(FedraxError, match="Bare lacks the decorator @hyperparameters"):
            use(Bare(local=LocalSGD()))


def test_averaging_without_client_is_rejected():
    @fedrax.hyperparameters
    class Idle(fedrax.Averaging):
        """A subclass without ``client``."""

    with pytest.raises(FedraxError, match="Idle must define client"):
        check_algorithm(Idle)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "server",
    [
        lambda self, server, cohort: (server._replace(params=cohort.mean), {}),
        lambda self, server, cohort: (server._replace(params=tree.scale(cohort.size / cohort.size, cohort.mean)), {}),
    ],
    ids=["zero", "not finite"],
)
def test_check_algorithm_detects_loss_of_the_model_in_an_empty_round(server: Callable):
    models = lambda self, message, state, data: ClientOutput(upload=self.local.run(data, message).params)  # noqa: E731
    user_method = method(client=models, server=server)
    with pytest.raises(FedraxError, match="Mine loses the model in a round with an empty cohort"):
        check_algorithm(user_method)


@pytest.mark.parametrize("kind", slow_cases([FedAvg, fedrax.Episode, fedrax.Upcycled, fedrax.compression.TopK]))
def test_check_algorithm_accepts_valid_methods(kind: type[fedrax.Algorithm]):
    check_algorithm(kind)


INVALID_METHOD = """
from fedrax import FedAvg, hyperparameters

@hyperparameters
class Forgetful(FedAvg):
    def server(self, server, cohort):
        return super().server(server, cohort)[0]
"""


def test_command_line_prints_the_same_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.py").write_text(INVALID_METHOD)
    out = tmp_path / "out"
    assert cli.main(["run", f"{tmp_path}/mine.py:Forgetful", "--out", str(out), "--model", "logistic"]) == 2
    assert "Forgetful.server returns a Server instead of a state and its info" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_check_algorithm_accepts_purely_personal_models():
    def client(self: Any, message: Any, state: Any, data: Any) -> ClientOutput:
        result = self.local.run(data, state)
        return ClientOutput(upload=tree.norm(result.params), state=result.params, info=result.info)

    check_algorithm(
        method(
            client=client,
            init_client=lambda self, params: params,
            server=lambda self, server, cohort: (server, {}),
            personal=lambda self, params, state: state,
        )
    )


def test_check_algorithm_detects_impure_methods():
    """The server counts its calls, which a compiled program does only once."""
    calls = []

    def server(self, server, cohort):
        calls.append(1)
        return FedAvg.server(self, server, cohort._replace(mean=tree.scale(1.0 * len(calls), cohort.mean)))

    with pytest.raises(FedraxError, match="must be pure functions of their arguments"):
        check_algorithm(method(server=server))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("mean", "passes"),
    [
        (lambda cohort, each: each.mean(0), False),
        (lambda cohort, each: each.sum(0) / cohort.size, True),
        (lambda cohort, each: cohort.weights @ each, True),
        (lambda cohort, each: jnp.sum(each[: len(each)], 0, where=cohort.real[:, None]) / cohort.size, True),
        (lambda cohort, each: each[(jnp.arange(len(each)) < cohort.size).sum() - 1], True),
        (lambda cohort, each: each[-1], False),
    ],
    ids=["all rows", "sum", "weights", "real", "last of the cohort", "last row"],
)
def test_check_algorithm_detects_servers_that_include_padding(mean: Callable, passes: bool):
    """The server averages biases of clients from ``cohort.each``."""

    def client(self: Any, message: Any, state: Any, data: Any) -> ClientOutput:
        result = self.local.run(data, message)
        return ClientOutput(upload=(), each=result.params["output"]["bias"], info=result.info)

    def server(self: Any, server: Any, cohort: Any) -> tuple:
        output = server.params["output"] | {"bias": mean(cohort, cohort.each)}
        empty = tree.where(cohort.size > 0, output, server.params["output"])
        return server._replace(params={"output": empty}), {}

    user_method = method(client=client, server=server)
    if passes:
        return check_algorithm(user_method)
    with pytest.raises(FedraxError, match=r"must mask by cohort\.real the rows of cohort\.each"):
        check_algorithm(user_method)


ARGUMENTS = {
    "did you mean 'rounds'": {"round": 5},
    "did you mean 'cohort_size'": {"cohortsize": 5},
    r"must be an Algorithm, not the class FedAvg: give an object, FedAvg\(...\)": {"algorithm": FedAvg},
    "must be an Algorithm, not 'fedavg'": {"algorithm": "fedavg"},
    "task must be a Task, not a Model: fedrax.classification": {"task": Logistic().build((4,), 3)},
    "federation must be a Federation, not a Dataset: Federation.from_dataset": {"federation": load("digits")},
    "federation must be a Federation, not a tuple: Federation.from_arrays": {"federation": (1, 2)},
    "settings must be a Settings or None, not a dict: pass single settings by name": {"settings": {"rounds": 3}},
}


@pytest.mark.parametrize("message", ARGUMENTS)
def test_wrong_arguments_of_simulate_and_sweep(message: str):
    given = {"algorithm": FedAvg(), "task": TASK, "federation": FEDERATION} | ARGUMENTS[message]
    algorithm, task, federation = (given.pop(name) for name in ("algorithm", "task", "federation"))
    with pytest.raises(FedraxError, match=message):
        fedrax.simulate(algorithm, task, federation, **given)
    with pytest.raises(FedraxError, match=message):
        fedrax.sweep([algorithm], task, federation, **given)
