"""Functions edited between two runs, as in notebook cells: the second run uses the new ones."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax.xla.fingerprint import CodeFingerprint
from tests.simulation.problems import FEDERATION, TASK, run

METHOD = """
import jax, jax.numpy as jnp, fedrax
from fedrax.contract.algorithm import Algorithm, ClientOutput

STRENGTH = 1.0

def changed(update):
    return STRENGTH * update

def near(predicted, y):
    return predicted == y

@fedrax.hyperparameters
class Mine(fedrax.FedAvg):
    def client(self, message, state, data):
        output = super().client(message, state, data)
        return output._replace(upload=jax.tree.map(changed, output.upload))

def hits(params, batch):
    return near(TASK.outputs(params, batch.x).argmax(-1), batch.y).astype(jnp.float32)
"""
"""A cell: a method, a metric, and what they call."""


def notebook() -> dict[str, Any]:
    cells: dict[str, Any] = {"__name__": "__main__", "TASK": TASK}
    exec(compile(METHOD, "cell-1.py", "exec"), cells)
    return cells


def moved(algorithm: fedrax.Algorithm, **options: Any) -> np.ndarray:
    """What one round adds to the starting parameters."""
    result = run(algorithm, rounds=1, trajectory=True, **options)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.params)]) - start()


def start() -> np.ndarray:
    params = TASK.init(jax.random.fold_in(jax.random.key(0), 0))
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("plan", ["scan", "vmap", "loop", "debug"])
@pytest.mark.parametrize("edit", ["STRENGTH = 3.0", "def changed(update):\n    return 3.0 * update"])
def test_an_edited_helper_or_number(plan: str, edit: str):
    cells = notebook()
    method = cells["Mine"](local=fedrax.LocalSGD(lr=0.05, steps=2, batch_size=2))
    before = moved(method, plan=plan)
    exec(compile(edit, "cell-2.py", "exec"), cells)
    np.testing.assert_allclose(moved(method, plan=plan), 3 * before, rtol=1e-4, atol=1e-6)


LOSS = """
import jax, jax.numpy as jnp
from fedrax.contract.task import Batch

def penalty(params):
    return 0.0

@jax.custom_vjp
def through(x):
    return x

def backward(_, g):
    return (g,)

through.defvjp(lambda x: (x, None), lambda kept, g: backward(kept, g))

def loss(params, batch, key):
    return through(TASK.loss(params, batch, key)) + penalty(params)
"""


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "loop"])
@pytest.mark.parametrize(
    "edit",
    [
        "def penalty(params):\n    return sum((leaf**2).sum() for leaf in jax.tree.leaves(params))",
        "def backward(_, g):\n    return (5 * g,)",
    ],
    ids=["penalty", "backward"],
)
def test_what_a_loss_calls(plan: str, edit: str):
    cells: dict[str, Any] = {"__name__": "__main__", "TASK": TASK}
    exec(compile(LOSS, "cell-1.py", "exec"), cells)
    task = fedrax.Task(TASK.init, cells["loss"], TASK.metrics)
    before = moved(fedrax.FedAvg(), task=task, plan=plan)
    exec(compile(edit, "cell-2.py", "exec"), cells)
    after = moved(fedrax.FedAvg(), task=task, plan=plan)
    assert not np.allclose(after, before, rtol=1e-3)
    fresh = fedrax.Task(TASK.init, lambda params, batch, key: cells["loss"](params, batch, key), TASK.metrics)
    np.testing.assert_allclose(after, moved(fedrax.FedAvg(), task=fresh, plan=plan), rtol=1e-5, atol=1e-7)


NAMED = """
import jax, jax.numpy as jnp, numpy as np
VALUE = {value}
class Own:
    mu = 1.0
    def call(self, x):
        return VALUE, self.mu, x.shape
"""


@pytest.mark.parametrize(
    ("one", "other"),
    [("jax.nn.relu", "jax.nn.gelu"), ("jnp.float32", "jnp.bfloat16"), ("np.float32(1)", "np.float32(3)"),
     ("(0.5, 0.5)", "(0.9, 0.1)"), ("{'a': 1}", "{'a': 2}"), ("'sum'", "'mean'")],
)  # fmt: skip
def test_what_a_name_may_mean(one: str, other: str):
    cells: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(NAMED.replace("{value}", one), "cell-1.py", "exec"), cells)
    before = CodeFingerprint(cells["Own"])
    assert CodeFingerprint(cells["Own"]) == before
    exec(compile(f"VALUE = {other}", "cell-2.py", "exec"), cells)
    assert CodeFingerprint(cells["Own"]) != before


def test_attributes_are_no_names():
    """A loop over ``mu``, or data called ``x``, are not what ``self.mu`` and ``batch.x`` mean."""
    cells: dict[str, Any] = {"__name__": "__main__", "mu": 0.1, "shape": 3}
    exec(compile(NAMED.replace("{value}", "0"), "cell-1.py", "exec"), cells)
    before = CodeFingerprint(cells["Own"])
    cells |= {"mu": 0.2, "shape": np.zeros(3)}
    assert CodeFingerprint(cells["Own"]) == before


def test_an_edited_metric():
    cells = notebook()
    task = fedrax.Task(TASK.init, TASK.loss, {"hits": cells["hits"]}, outputs=TASK.outputs)
    share = fedrax.simulate(fedrax.FedAvg(), task, FEDERATION, rounds=1, cohort_size=3).events[-1]["test_hits"]
    assert 0 < share < 1
    exec(compile("def near(predicted, y):\n    return predicted != y", "cell-2.py", "exec"), cells)
    again = fedrax.simulate(fedrax.FedAvg(), task, FEDERATION, rounds=1, cohort_size=3).events[-1]["test_hits"]
    assert again == pytest.approx(1 - share)


def test_what_was_not_edited_is_the_same():
    """Counts, histories and fields are no edits, nor is a cell that is run again as it was."""
    cells, other = notebook(), notebook()
    assert CodeFingerprint(cells["Mine"]()) == CodeFingerprint(cells["Mine"](local=fedrax.LocalSGD(lr=0.3)))
    assert hash(CodeFingerprint(cells["Mine"]())) == hash(CodeFingerprint(other["Mine"]())) and CodeFingerprint(
        cells["Mine"]()
    ) == CodeFingerprint(other["Mine"]())
    cells["STRENGTH"] = 2.0
    assert CodeFingerprint(cells["Mine"]()) != CodeFingerprint(other["Mine"]())
    assert CodeFingerprint(fedrax.FedAvg()) == CodeFingerprint(fedrax.Scaffold())  # the package's own are not looked at


def test_a_metric_that_was_edited_is_another_run(tmp_path: Any):
    """A finished run's numbers are of the old one: they are not gone on with."""
    cells = notebook()
    task = fedrax.Task(TASK.init, TASK.loss, {"hits": cells["hits"]}, outputs=TASK.outputs)
    fedrax.simulate(fedrax.FedAvg(), task, FEDERATION, rounds=1, cohort_size=3, directory=tmp_path)
    exec(compile("def near(predicted, y):\n    return predicted != y", "cell-2.py", "exec"), cells)
    with pytest.raises(fedrax.FedraxError, match="its evaluation differs"):
        fedrax.simulate(fedrax.FedAvg(), task, FEDERATION, rounds=2, cohort_size=3, directory=tmp_path, resume=True)


def test_a_field_that_is_a_function_is_known_again(tmp_path: Any):
    """By its name: where it lies in memory differs from process to process."""

    @fedrax.hyperparameters
    class Bent(fedrax.FedAvg):
        bend: Any = abs

    def made() -> Any:
        def bend(x: Any) -> Any:
            return x

        return bend

    run(Bent(bend=made()), rounds=1, directory=tmp_path)
    assert len(run(Bent(bend=made()), rounds=2, directory=tmp_path, resume=True).events) == 2
