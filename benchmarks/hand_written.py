"""Hand-written forms of the library beside the plain ones that they replace.

``python -m benchmarks.hand_written`` times the output layer and the LSTM of the model zoo (100 local SGD steps, with
the compiler passes), top-k selection and the sort of columns, each in its hand-written and in its plain form: in turn,
in one process, compiled beforehand; the median of the runs counts. It checks that both give the same values and writes
``results/hand_written.md``. ``--repeats`` sets the number of runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.pages import markdown_table, number, write_page
from benchmarks.sessions import RESULTS, Session
from fedrax import xla
from fedrax.compression.topk import largest
from fedrax.models.layers import dense, init_output, output
from fedrax.models.lstm import init_lstm, lstm
from fedrax.robust.sorting_network import sort_columns

RAW = RESULTS / "hand_written.jsonl"
STEPS = 100


class Pair(NamedTuple):
    """Two forms of one computation."""

    name: str
    plain_name: str
    hand_written: Callable[[], Any]
    plain: Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="runs of each form, in turn (default 15)")
    session = Session.start(RAW)
    repeats = parser.parse_args().repeats
    for pair in pairs():
        session.add(measure(pair, repeats))
    print(write_page(RESULTS / "hand_written.md", sections(session)).read_text())


def pairs() -> list[Pair]:
    """The pairs, with random arguments."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    labels = jnp.asarray(rng.integers(0, 10, 10))

    def layer(inputs: int) -> Pair:
        params, x = init_output(jax.random.key(0), inputs, 10), normal(10, inputs)
        stored_as_hidden = params | {"weight": params["weight"].T + 0}
        return Pair(
            f"output layer, {inputs} x 10, batch of 10",
            "a dense layer",
            sgd(lambda p: cross_entropy(output(p, x), labels), params),
            sgd(lambda p: cross_entropy(dense(p, x), labels), stored_as_hidden),
        )

    recurrent = {"cells": init_lstm(jax.random.key(1), 64, 128), "output": init_output(jax.random.key(2), 128, 10)}
    x, vector, columns = normal(10, 40, 64), normal(1_000_000), normal(50, 200_000)
    return [
        layer(60),
        layer(784),
        Pair(
            "LSTM of 128 over 40 steps, batch of 10",
            "a scan of the cell, differentiated by JAX",
            sgd(lambda p: cross_entropy(output(p["output"], lstm(p["cells"], x)), labels), recurrent),
            sgd(lambda p: cross_entropy(output(p["output"], plain_lstm(p["cells"], x)), labels), recurrent),
        ),
        Pair(
            "100,000 largest of 1,000,000 entries",
            "lax.top_k",
            partial(jax.jit(partial(largest, k=100_000)), vector),
            partial(jax.jit(lambda v: jnp.sort(lax.top_k(jnp.abs(v), 100_000)[1])), vector),
        ),
        Pair(
            "columns of 50 x 200,000 sorted",
            "jnp.sort",
            partial(jax.jit(sort_columns), columns),
            partial(jax.jit(partial(jnp.sort, axis=0)), columns),
        ),
    ]


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean cross entropy."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def sgd(loss: Callable[[Any], Array], params: Any) -> Callable[[], Array]:
    """The loss after local steps on one batch."""
    gradient = xla.optimize(jax.grad(xla.optimize_forward(loss)))

    def step(_: int, params: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient(params))

    return partial(jax.jit(lambda params: loss(lax.fori_loop(0, STEPS, step, params))), params)


def plain_lstm(layer: dict[str, Array], x: Array) -> Array:
    """The last hidden state [B, hidden] of the LSTM of the model zoo, as one would write it in JAX."""

    def cell(state: tuple[Array, Array], x_t: Array) -> tuple[tuple[Array, Array], None]:
        h, c = state
        gates = x_t @ layer["input_weight"] + layer["input_bias"] + h @ layer["hidden_weight"] + layer["hidden_bias"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zeros = jnp.zeros((len(x), len(layer["hidden_weight"])))
    return lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))[0][0]


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """Seconds of both forms; raises AssertionError if their values differ."""
    forms = {"hand_written": pair.hand_written, "plain": pair.plain}
    first, second = (form() for form in forms.values())  # compiles
    np.testing.assert_allclose(first, second, rtol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, form in forms.items():
            start = time.perf_counter()
            jax.block_until_ready(form())
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    return {"case": pair.name, "instead_of": pair.plain_name, "times": times} | medians


def sections(session: Session) -> list[str]:
    """Sections of the page."""
    rows = [
        (
            run["case"],
            run["instead_of"],
            number(run["hand_written"] * 1000),
            number(run["plain"] * 1000),
            f"{run['plain'] / run['hand_written']:.2f}",
        )
        for run in session.runs
    ]
    text = (
        f"Written by `python -m benchmarks.hand_written` on {session.header['date']}. Milliseconds of {STEPS} steps of "
        f"SGD for the layers, of one call for the others; medians of runs in turn.\n\n{session.machine_text()} No "
        "accelerator is used."
    )
    head = ("hand-written", "instead of", "hand-written, ms", "plain, ms", "plain / hand-written")
    return ["# Hand-written forms beside plain ones", text, markdown_table(head, rows)]


if __name__ == "__main__":
    main()
