"""Errors of user-defined tasks are reported before compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, Task, classification, simulate
from fedrax.contract import Variables, supervised
from fedrax.models import Linear, Model

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype(np.float32), RNG.integers(0, 3, 60)
FEDERATION = Federation.from_arrays(X, Y, np.arange(60) % 6)


def zeros(key: Any) -> jax.Array:
    return jnp.zeros((4, 3))


def errors(params: Any, batch: Any, key: Any = None) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(batch.x @ params, batch.y)


def run(task: Task, **local: Any) -> None:
    local_sgd = LocalSGD(steps=1, **local)
    simulate(FedAvg(local=local_sgd), task, FEDERATION, rounds=1, cohort_size=2, progress=False)


def branching(params: Any, batch: Any, key: Any) -> jax.Array:
    return errors(params, batch) if params.sum() > 0 else -errors(params, batch)


def carrying(params: Any, batch: Any, key: Any) -> jax.Array:
    start = jnp.zeros(len(batch.x), jnp.int32)
    return jax.lax.scan(lambda total, x: (total + x, ()), start, errors(params, batch)[None])[0]


SAYS: dict[str, tuple[Callable[[], Task], str]] = {
    "loss of whole numbers": (
        lambda: Task(init=zeros, loss=lambda p, batch, key: ((batch.x @ p).argmax(-1) != batch.y).astype(int)),
        "loss must be floating-point numbers, not int32, which have no gradient",
    ),
    "no function": (lambda: Task(init=jnp.zeros(3), loss=errors), "init must be a function \\(key\\), not ArrayImpl"),  # type: ignore[arg-type]
    "no key": (lambda: Task(zeros, lambda p, b: errors(p, b)), "called with \\(parameters, batch, key\\)"),  # type: ignore[arg-type]
    "metric": (lambda: Task(zeros, errors, {"far": lambda p: p}), "metric 'far' is a function \\(p\\)"),  # type: ignore[arg-type,dict-item]
    "a mean": (
        lambda: Task(zeros, lambda *a: errors(*a).mean()),
        "must be one number for each sample, .* not their mean",
    ),
    "a mean metric": (
        lambda: Task(zeros, errors, {"m": lambda p, b: b.x.mean()}),
        "metric 'm' must be one number for each",
    ),
    "two a sample": (lambda: Task(zeros, lambda p, b, k: b.x @ p), "each sample, \\[B\\], not \\[B, 3\\]"),
    "no array": (lambda: Task(zeros, lambda p, b, k: (errors(p, b), 1)), "not a tuple"),  # type: ignore[arg-type,return-value]
    "other samples": (
        lambda: classification(Linear().build((5,), 3)),
        "for a batch of 13 samples with x float32 \\[4\\], y int32 \\[\\]: TypeError: dot_general",
    ),
    "own place": (
        lambda: Task(zeros, lambda p, b, k: b.x @ p[:2]),
        "computed \\(in <lambda>, test_task_checks.py, line \\d+\\) for a batch of 13 samples",
    ),
    "traced": (lambda: Task(zeros, branching), "loss \\(in branching, .*\\) asks for the truth of a traced value"),
    "carry": (lambda: Task(zeros, carrying), r"but they differ: .* int32\[13\] .* float32\[13\], so the dtypes"),
    "one output": (lambda: classification(Linear().build((4,), 1)), "needs one output per class, not one: use binary"),
    "whole numbers": (
        lambda: Task(lambda key: {"w": jnp.zeros((4, 3)), "i": jnp.arange(3)}, errors),
        "er i holds int32",
    ),
    "complex numbers": (lambda: Task(lambda key: jnp.zeros((4, 3), complex), errors), "complex64, .* the real and the"),
    "a key": (
        lambda: Task(lambda key: {"key": key}, errors),
        "key holds key<fry>, and only floating-point parameters are",
    ),
    "few outputs": (lambda: classification(Linear().build((4,), 2)), "the model has 2 outputs .* 3 classes"),
}


@pytest.mark.parametrize("name", SAYS)
def test_invalid_tasks_raise_a_clear_error(name: str) -> None:
    make, message = SAYS[name]
    with pytest.raises(FedraxError, match=message):
        run(make())


def test_errors_of_user_code_are_passed_on() -> None:
    def broken(params: Any, batch: Any, key: Any) -> jax.Array:
        return batch.z

    with pytest.raises(AttributeError, match="no attribute 'z'"):
        run(Task(zeros, broken))


def test_unwrapped_optax_optimizer_suggests_the_wrapper() -> None:
    with pytest.raises(FedraxError, match=r"got the function adam: fedrax\.optim\.Optax\.of\(optax\.adam, \.\.\.\)"):
        run(Task(zeros, errors), optimizer=optax.adam)


def test_functions_among_parameters_are_rejected_with_the_remedy() -> None:
    start = lambda key: {"w": jnp.zeros(4), "activation": jax.nn.relu}  # noqa: E731
    with pytest.raises(FedraxError, match=r"for an Equinox module use fedrax\.models\.from_equinox"):
        run(Task(start, errors))


def test_optax_losses_can_be_used_directly() -> None:
    linear = Linear().build((4,), 3)
    of_outputs = optax.softmax_cross_entropy_with_integer_labels
    one, other = (
        simulate(FedAvg(local=LocalSGD(steps=2)), task, FEDERATION, rounds=2, cohort_size=2, progress=False)
        for task in (supervised(linear, of_outputs), classification(linear))
    )
    for actual, desired in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)


def test_dtype_errors_in_a_loss_name_the_dtypes():
    """Samples are not converted for user-defined tasks."""
    convolved = lambda p, b, k: jax.lax.conv(b.x[:, None], p[None, None], (1,), "SAME")[:, 0, 0]  # noqa: E731
    task = Task(lambda key: jnp.ones(2), convolved)
    assert simulate(FedAvg(), task, FEDERATION, rounds=1, cohort_size=2).events
    with pytest.raises(FedraxError, match=r"x float32 \[4\], y int32 \[\], and parameters float64: TypeError"):
        simulate(FedAvg(), task, FEDERATION, rounds=1, cohort_size=2, dtype="float64")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("given", [False, True])
def test_parameters_may_be_python_numbers(given: bool):
    """Returned by ``init``, with or without tracing, and as given parameters."""

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        return (batch.x @ jnp.asarray(params["w"]) + params["b"] - batch.y) ** 2

    def of(key: Any) -> Any:
        return {"w": [0.0] * 4, "b": 0.5}

    def looking(key: Any) -> Any:
        return of(key) if jax.random.key_data(key)[0] >= 0 else None

    settings: dict[str, Any] = {"rounds": 2, "cohort_size": 2, "progress": False, "params": of(0) if given else None}
    one, other = (simulate(FedAvg(), Task(init, loss), FEDERATION, **settings) for init in (of, looking))
    arrays = Task(lambda key: {"w": [jnp.zeros(())] * 4, "b": jnp.float32(0.5)}, loss)
    expected = simulate(FedAvg(), arrays, FEDERATION, **settings | {"params": None})
    for result in (one, other):
        jax.tree.map(np.testing.assert_array_equal, result.params, expected.params)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "vmap", "loop", "debug"])
def test_losses_may_group_the_samples_of_a_batch(plan: Any):
    """For example norms over groups of a batch, and losses of pairs."""

    def grouped(params: Any, batch: Any, key: Any = None) -> jax.Array:
        groups = batch.x.reshape(-1, 4, 4)
        return errors(params, batch._replace(x=(groups - groups.mean(1, keepdims=True)).reshape(batch.x.shape)))

    task = Task(zeros, grouped, {"error": grouped})
    federation = Federation.from_arrays(X[:48], Y[:48], np.arange(48) % 6, test=(X[48:], Y[48:]))
    method = FedAvg(local=LocalSGD(lr=0.1, epochs=1, batch_size=4))
    result = simulate(method, task, federation, rounds=1, cohort_size=2, progress=False, plan=plan)
    assert np.isfinite(result.metric("test_error")).all()


def test_unnamed_statistics_are_rejected():
    def train(variables: Any, x: Any, key: Any) -> Any:
        return x @ variables.params["w"], variables.statistics + 1

    apply = lambda variables, x, key=None: x @ variables.params["w"]  # noqa: E731
    task = classification(Model(lambda key: Variables({"w": jnp.zeros((4, 3))}, jnp.zeros(3)), apply, train=train))
    with pytest.raises(FedraxError, match="running statistics are arrays by name"):
        run(task)


WORDS, POSITIONS = 7, 5


def transformer_like(positions: int = POSITIONS, **embed: Any) -> Model:
    """Looks up tokens and positions, as models of texts do."""

    def apply(params: Any, x: Any, key: Any = None) -> jax.Array:
        tokens = x["tokens"]
        at = params["at"][jnp.arange(tokens.shape[1])]
        return (jnp.take(params["words"], tokens, axis=0, mode=embed.get("mode")) + at).sum(1) @ params["out"]

    def init(key: Any) -> Any:
        return {"words": jnp.ones((WORDS, 3)), "at": jnp.ones((positions, 3)), "out": jnp.ones((3, 2))}

    return Model(init, apply, name="reader")


@pytest.mark.parametrize(
    ("model", "tokens", "says"),
    [
        (
            transformer_like(),
            np.full((4, 5), 7),
            r"x\['tokens'\] of 'arrays' holds integers from 7 to 7, by which the mo",
        ),
        (transformer_like(), np.full((4, 5), -8), "a table of 7: encode texts by the model's own tokenizer"),
        (transformer_like(), np.zeros((4, 6), int), "reader has 5 positions, and looks up 6 for .*: shorten them to 5"),
        (transformer_like(), np.full((4, 5), 6), None),
        (transformer_like(), np.full((4, 5), -7), None),
        (transformer_like(mode="clip"), np.full((4, 5), 99), None),
    ],
)
def test_tokens_and_positions_are_within_the_tables(model: Model, tokens: np.ndarray, says: str | None):
    inputs = {"tokens": tokens.astype(np.int32), "weight": np.ones(4, np.float32)}
    federation = Federation.from_arrays(inputs, [0, 1, 0, 1], [0, 0, 1, 1])
    if says is None:
        simulate(FedAvg(), classification(model), federation, rounds=0, cohort_size=1)
        return
    with pytest.raises(FedraxError, match=says):
        simulate(FedAvg(), classification(model), federation, rounds=0, cohort_size=1)
