"""Tasks with a label per position: next tokens with padding, segmentation, several targets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, Federation, LocalSGD, classification, regression, simulate
from fedrax.data import Natural, as_samples
from fedrax.data.dataset import Dataset
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.models import Linear, Model

FEDAVG = FedAvg(local=LocalSGD(lr=0.5, epochs=2, batch_size=4))
RNG = np.random.default_rng(0)
OWNER = np.arange(48) % 6
TOKENS, LENGTH, PADDING = 7, 9, -100


def table_of_next_tokens() -> Model:
    """A model whose logits of the next token are a row of a table."""
    return Model(
        lambda key: {"table": jnp.zeros((TOKENS, TOKENS))},
        lambda params, x, key=None: params["table"][x],
        name="bigrams",
    )


def sentences(dtype: str = "int64") -> tuple[np.ndarray, np.ndarray]:
    """Padded sequences in which token t is followed by 3 t + 1 mod 7: tokens and next tokens."""
    start, lengths = RNG.integers(0, TOKENS, 48), RNG.integers(2, LENGTH + 1, 48)
    tokens = [start]
    for _ in range(LENGTH):
        tokens.append((3 * tokens[-1] + 1) % TOKENS)
    tokens = np.stack(tokens, 1)
    after = np.where(np.arange(LENGTH) < lengths[:, None], tokens[:, 1:], PADDING)
    return tokens[:, :-1].astype(dtype), after


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dtype", ["int64", "uint8", ">u2"])
def test_next_tokens_of_padded_sequences(dtype):
    x, y = sentences(dtype)
    federation = Federation.from_arrays(x, y, OWNER, test=(x, y), padding=PADDING)
    assert federation.num_classes == TOKENS and federation.preprocess() is None
    task = classification(table_of_next_tokens(), padding=federation.padding)
    result = simulate(FEDAVG, task, federation, rounds=15, cohort_size=3, eval_every=15)
    losses = [event["train_loss"] for event in result.events]
    assert losses[0] > 1.5 and losses[-1] < 0.5 * losses[0]
    assert result.events[-1]["test_loss"] < 1 and result.events[-1]["test_accuracy"] == 1


def test_padding_does_not_change_other_positions():
    x, y = sentences()
    shown = np.where(y == PADDING, 0, x)  # tokens at padded positions are never learned from
    results = []
    for tokens in (x, shown):
        federation = Federation.from_arrays(tokens, y, OWNER, padding=PADDING)
        task = classification(table_of_next_tokens(), padding=PADDING)
        results.append(simulate(FEDAVG, task, federation, rounds=2, cohort_size=3).params["table"])
    np.testing.assert_array_equal(*results)


def pixelwise() -> Model:
    """A model with logits of each pixel's class from its color."""

    def init(key):
        return {"weight": 0.01 * jax.random.normal(key, (3, 2)), "bias": jnp.zeros(2)}

    return Model(init, lambda params, x, key=None: x @ params["weight"] + params["bias"], name="pixelwise")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", ["scan", "vmap", "loop"])
def test_segmentation(plan):
    x = RNG.integers(0, 256, (48, 5, 4, 3), np.uint8)
    y = (x[..., 0] > x[..., 1]).astype(np.uint8)
    y[:, 0, 0] = 255
    federation = Federation.from_arrays(x, y, OWNER, test=(x, y), pixels=True, padding=255)
    task = classification(pixelwise(), federation.preprocess(), federation.padding)
    result = simulate(FEDAVG, task, federation, rounds=12, cohort_size=3, eval_every=12, plan=plan)
    losses = [event["train_loss"] for event in result.events]
    assert losses[-1] < 0.7 * losses[0] and result.events[-1]["test_accuracy"] > 0.9


def test_several_targets():
    x = RNG.normal(size=(48, 4)).astype(">f4")
    y = x @ RNG.normal(size=(4, 3))
    federation = Federation.from_arrays(x, y, OWNER, test=(x, y))
    gentle = FedAvg(local=LocalSGD(lr=0.2, epochs=2, batch_size=4))
    result = simulate(gentle, regression(Linear().build((4,), 3)), federation, rounds=12, cohort_size=3, eval_every=12)
    losses = [event["train_loss"] for event in result.events]
    assert losses[-1] < 0.1 * losses[0] and result.events[-1]["test_mse"] < 0.1


# Experiments


def dataset(x: np.ndarray, y: np.ndarray, classes: int | None, **options) -> Dataset:
    samples = as_samples(x, y, options.get("padding"))
    return Dataset("own", samples, samples, classes, train_clients=OWNER, test_clients=OWNER, **options)


class GivenModel:
    """An experiment's model that is an existing object."""

    def __init__(self, model: Model):
        self.model = model

    def build(self, input_shape, num_outputs):
        self.asked = (input_shape, num_outputs)
        return self.model


def task_of(data: Dataset, model: Model, normalize: bool = True):
    federation = Federation.from_dataset(data, Natural(), 0)
    own = GivenModel(model)
    return experiment.make_task(experiment.Experiment(model=own, normalize=normalize), federation), own, federation


def test_experiments_scale_pixels_only_and_use_the_padding():
    x, y = sentences("uint8")
    task, own, federation = task_of(dataset(x, y, TOKENS, padding=PADDING), table_of_next_tokens())
    assert own.asked == ((LENGTH,), TOKENS)
    params = task.init(jax.random.key(0))
    np.testing.assert_allclose(
        task.loss(params, federation.train, jax.random.key(0)), np.log(TOKENS) * (federation.train.y != -100).any(1),
        rtol=1e-5,
    )  # fmt: skip
    seen = []

    def apply(params, x, key=None):
        seen.append(np.asarray(x))
        return params["w"] + jnp.zeros((len(x), 2))

    model = Model(lambda key: {"w": jnp.zeros(2)}, apply)
    images = RNG.integers(0, 256, (48, 2, 2, 1), np.uint8)
    labels = np.arange(48) % 2
    for options, normalize, expected in (
        ({}, True, images),
        ({"pixels": True}, True, images / 255),
        ({"pixels": True, "mean": (0.5,), "std": (0.25,)}, True, (images / 255 - 0.5) / 0.25),
        ({"pixels": True, "mean": (0.5,), "std": (0.25,)}, False, images / 255),
    ):
        task, _, _ = task_of(dataset(images, labels, 2, **options), model, normalize)
        assert task.outputs is not None
        task.outputs({"w": jnp.zeros(2)}, images)
        np.testing.assert_allclose(seen[-1], expected, rtol=1e-4, atol=1e-5)
    _, own, _ = task_of(dataset(images / 255, RNG.normal(size=(48, 3)), None), model)
    assert own.asked == ((2, 2, 1), 3)


def test_model_with_one_output_per_sample_is_rejected_for_several_labels():
    x, y = sentences("uint8")
    federation = Federation.from_arrays(x, y, OWNER, padding=PADDING)
    task = classification(Linear().build((LENGTH,), TOKENS), padding=PADDING)
    with pytest.raises(FedraxError, match=r"outputs \[B, ..., classes\] for integer labels"):
        simulate(FEDAVG, task, federation, rounds=1, cohort_size=3)
