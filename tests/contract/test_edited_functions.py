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
"""A notebook cell with a method, a metric and helper functions."""


def run_cell() -> dict[str, Any]:
    cells: dict[str, Any] = {"__name__": "__main__", "TASK": TASK}
    exec(compile(METHOD, "cell-1.py", "exec"), cells)
    return cells


def update_of_a_round(algorithm: fedrax.Algorithm, **options: Any) -> np.ndarray:
    """Change of the parameters by one round."""
    result = run(algorithm, rounds=1, trajectory=True, **options)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.params)]) - initial_parameters()


def initial_parameters() -> np.ndarray:
    params = TASK.init(jax.random.fold_in(jax.random.key(0), 0))
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("plan", ["scan", "vmap", "loop", "debug"])
@pytest.mark.parametrize("edit", ["STRENGTH = 3.0", "def changed(update):\n    return 3.0 * update"])
def test_edited_helpers_and_numbers_take_effect(plan: str, edit: str):
    cells = run_cell()
    method = cells["Mine"](local=fedrax.LocalSGD(lr=0.05, steps=2, batch_size=2))
    before = update_of_a_round(method, plan=plan)
    exec(compile(edit, "cell-2.py", "exec"), cells)
    np.testing.assert_allclose(update_of_a_round(method, plan=plan), 3 * before, rtol=1e-4, atol=1e-6)


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
def test_edited_functions_called_by_a_loss_take_effect(plan: str, edit: str):
    cells: dict[str, Any] = {"__name__": "__main__", "TASK": TASK}
    exec(compile(LOSS, "cell-1.py", "exec"), cells)
    task = fedrax.Task(TASK.init, cells["loss"], TASK.metrics)
    before = update_of_a_round(fedrax.FedAvg(), task=task, plan=plan)
    exec(compile(edit, "cell-2.py", "exec"), cells)
    after = update_of_a_round(fedrax.FedAvg(), task=task, plan=plan)
    assert not np.allclose(after, before, rtol=1e-3)
    fresh = fedrax.Task(TASK.init, lambda params, batch, key: cells["loss"](params, batch, key), TASK.metrics)
    np.testing.assert_allclose(after, update_of_a_round(fedrax.FedAvg(), task=fresh, plan=plan), rtol=1e-5, atol=1e-7)


NAMED_VALUE = """
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
def test_fingerprint_depends_on_the_values_of_global_names(one: str, other: str):
    cells: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(NAMED_VALUE.replace("{value}", one), "cell-1.py", "exec"), cells)
    before = CodeFingerprint(cells["Own"])
    assert CodeFingerprint(cells["Own"]) == before
    exec(compile(f"VALUE = {other}", "cell-2.py", "exec"), cells)
    assert CodeFingerprint(cells["Own"]) != before


def test_fingerprint_does_not_depend_on_globals_named_like_attributes():
    """Global variables ``mu`` and ``shape`` are not those of ``self.mu`` and ``x.shape``."""
    cells: dict[str, Any] = {"__name__": "__main__", "mu": 0.1, "shape": 3}
    exec(compile(NAMED_VALUE.replace("{value}", "0"), "cell-1.py", "exec"), cells)
    before = CodeFingerprint(cells["Own"])
    cells |= {"mu": 0.2, "shape": np.zeros(3)}
    assert CodeFingerprint(cells["Own"]) == before


def test_edited_metric_takes_effect():
    cells = run_cell()
    task = fedrax.Task(TASK.init, TASK.loss, {"hits": cells["hits"]}, outputs=TASK.outputs)
    share = fedrax.simulate(fedrax.FedAvg(), task, FEDERATION, rounds=1, cohort_size=3).events[-1]["test_hits"]
    assert 0 < share < 1
    exec(compile("def near(predicted, y):\n    return predicted != y", "cell-2.py", "exec"), cells)
    again = fedrax.simulate(fedrax.FedAvg(), task, FEDERATION, rounds=1, cohort_size=3).events[-1]["test_hits"]
    assert again == pytest.approx(1 - share)


def test_fingerprint_ignores_counters_and_repeated_cells():
    """Neither changed counters, histories and fields nor the same cell run again are edits."""
    cells, other = run_cell(), run_cell()
    assert CodeFingerprint(cells["Mine"]()) == CodeFingerprint(cells["Mine"](local=fedrax.LocalSGD(lr=0.3)))
    assert hash(CodeFingerprint(cells["Mine"]())) == hash(CodeFingerprint(other["Mine"]())) and CodeFingerprint(
        cells["Mine"]()
    ) == CodeFingerprint(other["Mine"]())
    cells["STRENGTH"] = 2.0
    assert CodeFingerprint(cells["Mine"]()) != CodeFingerprint(other["Mine"]())
    assert CodeFingerprint(fedrax.FedAvg()) == CodeFingerprint(
        fedrax.Scaffold()
    )  # code of fedrax itself is not fingerprinted


def test_finished_run_is_not_reused_after_an_edited_metric(tmp_path: Any):
    cells = run_cell()
    task = fedrax.Task(TASK.init, TASK.loss, {"hits": cells["hits"]}, outputs=TASK.outputs)
    fedrax.simulate(fedrax.FedAvg(), task, FEDERATION, rounds=1, cohort_size=3, directory=tmp_path)
    exec(compile("def near(predicted, y):\n    return predicted != y", "cell-2.py", "exec"), cells)
    with pytest.raises(fedrax.FedraxError, match="its evaluation differs"):
        fedrax.simulate(fedrax.FedAvg(), task, FEDERATION, rounds=2, cohort_size=3, directory=tmp_path, resume=True)


def test_function_fields_are_identified_by_name_across_processes(tmp_path: Any):
    """Their addresses differ between processes."""

    @fedrax.hyperparameters
    class Bent(fedrax.FedAvg):
        bend: Any = abs

    def made() -> Any:
        def bend(x: Any) -> Any:
            return x

        return bend

    run(Bent(bend=made()), rounds=1, directory=tmp_path)
    assert len(run(Bent(bend=made()), rounds=2, directory=tmp_path, resume=True).events) == 2
