"""Networks for texts as token numbers: EPISODE's sentence-pair classifier and stacked LSTMs for tweets.

Token 0 is padding. A recurrent state does not change at padding, and outputs there are ignored, so that padding has no
effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.config.hyperparameters import PositiveInt
from fedrax.contract.model import Model, Params
from fedrax.data.readers.text_data import PADDING, UNKNOWN, read_word_vectors
from fedrax.errors import FedraxError
from fedrax.models.architecture import Shape, TextArchitecture
from fedrax.models.layers import dense, dropout, init_dense, init_output, output
from fedrax.models.lstm import init_lstm


@dataclass(frozen=True)
class SentencePairs(TextArchitecture):
    """EPISODE's network for SNLI (Crawshaw et al. 2023, section 5.1, after Conneau et al. 2017).

    A bidirectional LSTM reads each sentence; u and v are the maxima of its hidden states over the words. A classifier
    of three dense layers reads the features ``[u, v, |u - v|, u * v]``. Inputs have the shape
    (2, words).

    Example:
        >>> network = fedrax.models.SentencePairs(hidden=8, classifier=4, embedding=5)
        >>> model = network.build(input_shape=(2, 40), num_outputs=3, vocabulary=("a", "b"))
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        1275
    """

    hidden: PositiveInt = 2048
    """Units of the LSTM in each direction."""
    classifier: PositiveInt = 512
    """Units of the classifier's first two layers."""
    activation: Literal["none", "relu"] = "none"
    """Activation between the classifier's layers; "none" as in Conneau et al."""
    embedding: PositiveInt = 300
    """Dimension of learned word vectors."""
    vectors: Path | None = None
    """File of word vectors in GloVe's format, which are not trained; None learns word vectors."""
    loss: Literal["hinge", "cross_entropy"] = "hinge"
    """Training loss: the multiclass hinge loss or cross entropy."""

    def _build_for(self, input_shape: Shape, num_outputs: int, vocabulary: tuple[str, ...]) -> Model:
        if len(input_shape) != 2 or input_shape[0] != 2:
            raise FedraxError(
                f"sentence_pairs takes pairs of texts (2, words), not inputs of shape {tuple(input_shape)}"
            )
        embed, init_embedding, width = _embedding(self.vectors, vocabulary, self.embedding)
        activate = jax.nn.relu if self.activation == "relu" else lambda x: x

        def init(key: Array) -> Params:
            keys = jax.random.split(key, 6)
            return init_embedding(keys[0]) | {
                "forward": init_lstm(keys[1], width, self.hidden),
                "backward": init_lstm(keys[2], width, self.hidden),
                "dense1": init_dense(keys[3], 8 * self.hidden, self.classifier),
                "dense2": init_dense(keys[4], self.classifier, self.classifier),
                "output": init_output(keys[5], self.classifier, num_outputs),
            }

        def encode(params: Params, x: Array, key: Array | None = None) -> Array:
            words = x.reshape(-1, x.shape[-1])  # both sentences at once: [2 B, words]
            vectors, is_word = embed(params, words), words != PADDING
            directions = [lstm_states(params[d], vectors, is_word, d == "backward") for d in ("forward", "backward")]
            states = jnp.concatenate(directions, axis=-1)
            maxima = jnp.where(is_word[..., None], states, -jnp.inf).max(1)
            sentences = jnp.where(is_word.any(1)[:, None], maxima, 0).reshape(x.shape[0], 2, -1)
            u, v = sentences[:, 0], sentences[:, 1]
            return jnp.concatenate([u, v, jnp.abs(u - v), u * v], axis=-1)

        def hidden(params: Params, x: Array, key: Array | None = None) -> Array:
            return activate(dense(params["dense2"], activate(dense(params["dense1"], x))))

        model = _build_model("sentence_pairs", init, [encode, hidden], vocabulary)
        return replace(model, loss="hinge") if self.loss == "hinge" else model


@dataclass(frozen=True)
class Tweets(TextArchitecture):
    """Stacked LSTM layers over a text, whose last hidden state is the input of a dense layer (EPISODE, appendix H).

    With ``bidirectional``, the dense layer reads the last states of both directions of the last layer. Inputs have the
    shape (words,).

    Example:
        >>> network = fedrax.models.Tweets(hidden=8, embedding=5)
        >>> model = network.build(input_shape=(25,), num_outputs=2, vocabulary=("a", "b"))
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        1094
    """

    hidden: PositiveInt = 256
    """Units of each LSTM layer; 256 in EPISODE."""
    layers: PositiveInt = 2
    """Number of LSTM layers; 2 in EPISODE."""
    embedding: PositiveInt = 300
    """Dimension of learned word vectors."""
    vectors: Path | None = None
    """File of word vectors in GloVe's format, which are not trained; None learns word vectors."""
    dropout: float = 0.0
    """Dropout rate of the last hidden state, used in training only."""
    bidirectional: bool = False
    """Whether every layer reads the text in both directions, each with ``hidden`` units, as in Upcycled-FL."""

    def _build_for(self, input_shape: Shape, num_outputs: int, vocabulary: tuple[str, ...]) -> Model:
        if len(input_shape) != 1:
            raise FedraxError(f"tweets takes texts (words,), not inputs of shape {tuple(input_shape)}")
        if not 0 <= self.dropout < 1:
            raise FedraxError(f"a dropout rate must be in [0, 1), not {self.dropout}")
        embed, init_embedding, width = _embedding(self.vectors, vocabulary, self.embedding)

        def init(key: Array) -> Params:
            keys = jax.random.split(key, self.layers + 2)
            states = self.hidden * (2 if self.bidirectional else 1)
            lstms = {}
            for i, size in enumerate([width] + [states] * (self.layers - 1), start=1):
                lstms[f"lstm{i}"] = init_lstm(keys[i + 1], size, self.hidden)
                if self.bidirectional:
                    lstms[f"lstm{i}_backward"] = init_lstm(jax.random.fold_in(keys[i + 1], 1), size, self.hidden)
            return init_embedding(keys[0]) | lstms | {"output": init_output(keys[1], states, num_outputs)}

        def encode(params: Params, x: Array, key: Array | None = None) -> Array:
            h, is_word = embed(params, x), x != PADDING
            ends = []
            for i in range(1, self.layers + 1):
                directions = [lstm_states(params[f"lstm{i}"], h, is_word)]
                ends = [directions[0][:, -1]]
                if self.bidirectional:
                    directions.append(lstm_states(params[f"lstm{i}_backward"], h, is_word, reverse=True))
                    ends.append(directions[1][:, 0])
                h = jnp.concatenate(directions, axis=-1)
            return dropout(jnp.concatenate(ends, axis=-1), self.dropout, key)

        return _build_model("tweets", init, [encode], vocabulary)


def lstm_states(layer: dict[str, Array], x: Array, is_word: Array, reverse: bool = False) -> Array:
    """Hidden states [B, T, hidden] of an LSTM over x [B, T, F]; where ``is_word`` is False they do not change."""
    inputs = x @ layer["input_weight"] + (layer["input_bias"] + layer["hidden_bias"])
    zeros = jnp.zeros((x.shape[0], layer["hidden_weight"].shape[0]), inputs.dtype)

    def step(state: tuple[Array, Array], at: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (h, c), (input_t, is_word_t) = state, at
        i, f, g, o = jnp.split(input_t + h @ layer["hidden_weight"], 4, axis=-1)
        new_c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        new_h = jax.nn.sigmoid(o) * jnp.tanh(new_c)
        h, c = (jnp.where(is_word_t[:, None], new, old) for new, old in ((new_h, h), (new_c, c)))
        return (h, c), h

    _, states = lax.scan(step, (zeros, zeros), (inputs.swapaxes(0, 1), is_word.T), reverse=reverse)
    return states.swapaxes(0, 1)


def _embedding(vectors: Path | None, vocabulary: tuple[str, ...], width: int) -> tuple[Callable, Callable, int]:
    """(look-up (parameters, tokens) -> vectors, initializer key -> parameters, dimension of a vector)."""
    if not vocabulary:
        raise FedraxError(
            "a text model needs a data set of texts, with a vocabulary: snli, sent140, leaf or huggingface"
        )
    if vectors is not None:
        table = read_word_vectors(vectors, vocabulary)  # a constant: neither trained nor sent

        def look_up(params: Params, words: Array) -> Array:
            return jnp.asarray(table, params["output"]["weight"].dtype)[words]

        return look_up, lambda key: {}, table.shape[1]

    def init(key: Array) -> Params:
        return {"embedding": jax.random.normal(key, (_num_tokens(vocabulary), width))}

    return lambda params, words: params["embedding"][words], init, width


def _num_tokens(vocabulary: tuple[str, ...]) -> int:
    """Number of tokens: padding, unknown words, and the words of the vocabulary."""
    return UNKNOWN + 1 + len(vocabulary)


def _build_model(name: str, init: Callable, body: list[Callable], vocabulary: tuple[str, ...]) -> Model:
    """A model that applies the blocks ``body`` and the dense layer "output" one after the other."""

    def output_block(params: Params, x: Array, key: Array | None = None) -> Array:
        return output(params["output"], x)

    def features(params: Params, x: Array, key: Array | None = None) -> Array:
        for block in body:
            x = block(params, x, key)
        return x

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        return output_block(params, features(params, x, key))

    return Model(init, apply, features, name, (*body, output_block), words=_num_tokens(vocabulary))
