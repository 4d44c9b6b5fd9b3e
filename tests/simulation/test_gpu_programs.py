"""Runs compiled for two H100 without having one: the precision of every product, and what devices exchange.

Needs JAX's CUDA packages and no GPU (``make test-gpu-programs``); nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.gpu_programs import topology_devices
from fedrax import Algorithm, Federation, LocalSGD, Scaffold, Settings, classification
from fedrax.algorithms import GradMAS
from fedrax.models import from_linen
from fedrax.profiling.hlo import ProgramText
from fedrax.simulation.evaluation import compiled_evaluation
from fedrax.simulation.executors.compiled import compiled_block
from fedrax.simulation.persistence.resume import initial_state
from fedrax.simulation.process import numeric_context
from fedrax.simulation.run import make_block_loader
from fedrax.simulation.setup import prepare
from fedrax.xla import CLIENT_AXIS, CodeFingerprint
from fedrax.xla.precision import OperandFormat
from tests.compiler import ON_GPU
from tests.simulation.networks import EveryLayer

if not (find_spec("jax_plugins") and any(find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))):
    pytest.skip("JAX's CUDA packages are not installed: make test-gpu-programs", allow_module_level=True)
if ON_GPU:
    pytest.skip("two CPU devices are compared with two GPUs: make test-gpu-programs", allow_module_level=True)


class Softmax(nn.Module):
    """One layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3)(x.mean(1))


EVERY_LAYER = EveryLayer(width=8)
MULTIPLIES_AT_THE_SERVER = GradMAS(LocalSGD(steps=2, batch_size=10))


class Programs(NamedTuple):
    """A block of rounds and the evaluation of test samples."""

    rounds: ProgramText
    evaluation: ProgramText


def compile_for(
    backend: str,
    devices: list[Any],
    precision: OperandFormat = "highest",
    method: Algorithm = MULTIPLIES_AT_THE_SERVER,
    network: nn.Module = EVERY_LAYER,
) -> Programs:
    """The programs of a run on two devices, which are those of the topology or this machine's CPU devices."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 8, 8)).astype(np.float32), rng.integers(0, 3, 80)
    federation = Federation.from_arrays(x, y, np.repeat(np.arange(4), 20), test=(x[:6], y[:6]))
    task, mesh = classification(from_linen(network, x[:1])), Mesh(np.array(devices), (CLIENT_AXIS,))

    def shape(a: Any) -> Any:
        if isinstance(a, float):
            return a
        spec = a.sharding.spec if isinstance(getattr(a, "sharding", None), NamedSharding) else P()
        return jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=NamedSharding(mesh, spec))

    settings = Settings(rounds=2, cohort_size=4, plan="vmap", devices=2, precision=precision)
    with numeric_context("float32"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: backend)  # what fedrax asks when it chooses forms
        setup = prepare(method, task, federation, settings)
        loader = make_block_loader(setup)
        state, block = initial_state(setup, loader), loader.next_block(0, 1)
        loader.close(failed=True)
        given = setup.algorithm, state, setup.engine.samples, setup.key, block.inputs, np.int32(1)
        rounds = compiled_block(setup.engine.program, mesh, jax.tree.structure(setup.algorithm))
        test = setup.evaluators["test"]
        evaluation, starts = compiled_evaluation(task, mesh, test.rows, 4, CodeFingerprint(task))
        placed = jax.ShapeDtypeStruct(starts.shape, starts.dtype, sharding=NamedSharding(mesh, P(CLIENT_AXIS)))
        measured = jax.tree.map(shape, (setup.algorithm.params(state.server), test.samples))
        lowered = rounds.lower(*jax.tree.map(shape, given)), evaluation.lower(*measured, placed)
        return Programs(*(ProgramText(one.compile().as_text()) for one in lowered))


@pytest.fixture(scope="module")
def gpus() -> Iterator[list[Any]]:
    cached = jax.config.values["jax_enable_compilation_cache"]
    yield topology_devices(2)
    jax.config.update("jax_enable_compilation_cache", cached)


@pytest.fixture(scope="module")
def for_gpus(gpus: list[Any]) -> Programs:
    return compile_for("gpu", gpus)


def precisions(program: ProgramText) -> list[str]:
    """The precisions that the operands of each product and convolution of floats have; the bias of one has none."""
    products = [
        op for op in program.operations.values() if re.search(r"dot|conv|gemm|matmul", op.opcode + _target(op.text))
    ]
    floats = [op for op in products if op.opcode != "convert" and op.shapes[0][0] in ("f32", "bf16")]
    found = [re.search(r"operand_precision(?:=|\":)[{\[]([\w\",]*)", op.text) for op in floats]
    return [one[1].replace('"', "").lower() if one else "default" for one in found]


def _target(text: str) -> str:
    return (re.search(r'custom_call_target="([^"]*)"', text) or ["", ""])[1]


def test_every_product_has_full_precision(for_gpus: Programs):
    """Of local steps, server and evaluation, as XLA keeps it in the compiled program: none is in TensorFloat-32."""
    for program in for_gpus:
        found = precisions(program)
        assert len(found) > 5 and all(one.startswith("highest,highest") for one in found), found


def test_only_local_steps_have_reduced_precision(gpus: list[Any]):
    rounds, evaluation = map(precisions, compile_for("gpu", gpus, "tensorfloat32"))
    assert {one[:9] for one in rounds} == {"high,high", "highest,h"}  # the server's are those of full precision
    assert all(one.startswith("highest,highest") for one in evaluation)


def exchanged(program: ProgramText) -> list[tuple[str, float]]:
    """(collective operation, bytes) of a program."""
    found = (op for op in program.operations.values() if program.is_collective(op.name))
    return sorted((op.opcode.removesuffix("-start"), op.bytes) for op in found if not op.opcode.endswith("-done"))


def test_two_gpus_exchange_what_two_cpu_devices_exchange(gpus: list[Any]):
    """In a round one sum of all uploads and losses, and the first client whose values are not finite."""
    found = [
        exchanged(compile_for(backend, devices, method=Scaffold(), network=Softmax()).rounds)
        for backend, devices in (("gpu", gpus), ("cpu", jax.devices("cpu")[:2]))
    ]
    assert found[0] == found[1]
    (name, least), (_, sums) = found[0]
    assert (name, least) == ("all-reduce", 4) and sums > 2 * 4 * (8 * 3 + 3)  # changes of x and of c
