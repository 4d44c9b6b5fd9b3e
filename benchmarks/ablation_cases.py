"""Cases of `benchmarks.ablation` for passes that no plain network under FedAvg contains: methods, plans and dtypes.

``python -m benchmarks.ablation_cases --point '{"name": "moon"}'`` runs one of them in this process and prints its time.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.points import point_parser
from benchmarks.timing import RESULT_PREFIX

CLIENTS = 5
SAMPLES = 64
"""Samples of a client: two batches of 32."""
ROUNDS = 9


def moon() -> dict[str, Any]:
    """MOON, whose loss computes the outputs and the features of one network."""
    from fedrax.algorithms import MOON
    from fedrax.models import CNN

    return images(CNN(), MOON(local=local_steps()))


def sine_network() -> dict[str, Any]:
    """A coordinate network with sine activations: two coordinates, three colors, a layer of 256 after another."""
    import jax.numpy as jnp
    from flax import linen as nn

    from fedrax import FedAvg, regression
    from fedrax.models import from_linen

    class Coordinates(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(3):
                x = jnp.sin(30 * nn.Dense(256)(x))
            return nn.Dense(3)(x)

    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (CLIENTS * 512, 2)).astype(np.float32)
    y = rng.uniform(size=(len(x), 3)).astype(np.float32)
    task = regression(from_linen(Coordinates(), x[:1]))
    return {"algorithm": FedAvg(local=local_steps(batch_size=256)), "task": task, "x": x, "y": y}


def client_dp() -> dict[str, Any]:
    """Client-level differential privacy: the norms of differences of a million parameters."""
    from fedrax import FedAvg
    from fedrax.models import MLP
    from fedrax.privacy import ClientDP

    return images(MLP(hidden=(1000, 1000)), ClientDP(FedAvg(local=local_steps())))


def token_layers() -> dict[str, Any]:
    """Dense layers written for one token, under vmap over tokens and over samples, as in Equinox."""
    import equinox as eqx
    import jax

    from fedrax import FedAvg, classification
    from fedrax.models import from_equinox

    class Tokens(eqx.Module):
        first: eqx.nn.Linear
        second: eqx.nn.Linear
        last: eqx.nn.Linear

        def __call__(self, x: Any) -> Any:
            hidden = jax.vmap(lambda token: jax.nn.relu(self.second(jax.nn.relu(self.first(token)))))(x)
            return self.last(hidden.mean(0))

    layers = zip(jax.random.split(jax.random.key(0), 3), ((128, 512), (512, 128), (128, 10)), strict=True)
    model = Tokens(*(eqx.nn.Linear(*sizes, key=key) for key, sizes in layers))
    x, y = arrays((64, 128))
    return {
        "algorithm": FedAvg(local=local_steps()),
        "task": classification(from_equinox(model)),
        "x": x,
        "y": y,
    }


def half_precision_norms() -> dict[str, Any]:
    """Convolutions with group norm and layers in bfloat16, parameters in float32."""
    import jax.numpy as jnp
    from flax import linen as nn

    from fedrax import FedAvg, classification
    from fedrax.models import from_linen

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for width in (32, 64):
                x = nn.Conv(width, (3, 3), strides=2, dtype=jnp.bfloat16)(x)
                x = nn.relu(nn.GroupNorm(8, dtype=jnp.bfloat16)(x))
            return nn.Dense(10, dtype=jnp.bfloat16)(x.mean((1, 2)))

    x, y = arrays((32, 32, 3))
    task = classification(from_linen(Network(), x[:1]))
    return {"algorithm": FedAvg(local=local_steps()), "task": task, "x": x, "y": y}


def sample_dp() -> dict[str, Any]:
    """DP-SGD: norms of the gradients of single samples of a small convolutional network."""
    from fedrax import FedAvg
    from fedrax.models import CNN
    from fedrax.privacy import SampleDP

    return images(CNN(), SampleDP(FedAvg(local=local_steps(steps=2, epochs=None))))


def vectorized_clients() -> dict[str, Any]:
    """Convolutions of all clients at once: the plan vmap."""
    from fedrax import FedAvg
    from fedrax.models import CNN

    return images(CNN(), FedAvg(local=local_steps())) | {"plan": "vmap"}


CASES: Mapping[str, Callable[[], dict[str, Any]]] = {
    make.__name__: make
    for make in (moon, sine_network, client_dp, token_layers, half_precision_norms, sample_dp, vectorized_clients)
}


def local_steps(**options: Any) -> Any:
    """Local SGD over all samples once."""
    from fedrax import LocalSGD

    return LocalSGD(**{"lr": 0.01, "epochs": 1, "batch_size": 32} | options)


def arrays(sample: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Random samples and labels of all clients."""
    rng, rows = np.random.default_rng(0), CLIENTS * SAMPLES
    return rng.normal(size=(rows, *sample)).astype(np.float32), rng.integers(0, 10, rows).astype(np.int32)


def images(architecture: Any, algorithm: Any) -> dict[str, Any]:
    """A method that trains a model of the zoo on images."""
    from fedrax import classification

    x, y = arrays((32, 32, 3))
    return {"algorithm": algorithm, "task": classification(architecture.build(x.shape[1:], 10)), "x": x, "y": y}


def measure_here(name: str) -> dict[str, Any]:
    """Seconds of a round, the passes that changed a program, and the final loss."""
    from fedrax import Federation, simulate
    from fedrax.xla import applied_passes

    case = CASES[name]()
    x, y = case["x"], case["y"]
    federation = Federation.from_arrays(
        x, y, offsets=np.arange(CLIENTS + 1) * (len(x) // CLIENTS), test=(x[:8], y[:8]), shuffle=False
    )
    started = time.monotonic()
    result = simulate(
        case["algorithm"],
        case["task"],
        federation,
        rounds=ROUNDS,
        cohort_size=CLIENTS,
        eval_every=ROUNDS,
        progress=False,
        plan=case.get("plan", "auto"),
    )
    seconds = [event["seconds"] for event in result.events][:-1]  # the last one is evaluated
    return {
        "round": statistics.median(after - before for before, after in itertools.pairwise(seconds)),
        "whole": time.monotonic() - started,
        "applied": sorted(applied_passes()),
    }


def main() -> None:
    arguments = point_parser(__doc__).parse_args()
    print(RESULT_PREFIX + json.dumps(measure_here(**json.loads(arguments.point))))


if __name__ == "__main__":
    main()
