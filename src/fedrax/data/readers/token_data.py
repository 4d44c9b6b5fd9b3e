"""Texts as the tokens of a tokenizer, with a mask of those that are not padding, for transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.text_data import build_vocabulary, encode_words, tokenize
from fedrax.errors import FedraxError
from fedrax.inputs import Inputs

TOKENS, MASK = "input_ids", "attention_mask"
"""Names of the tokens and of their mask, as of ``transformers``."""
DEFAULT_WORDS, DEFAULT_LARGEST = 40, 100_000
"""Words of a text, and of a vocabulary, where a reader is given no other numbers."""
_UNLIMITED = 1 << 20
"""A tokenizer without a maximal length states a number above this."""


@checked_arguments
def encode_texts(
    texts: Sequence[str], tokenizer: Any, *, pairs: Sequence[str] | None = None, length: int | None = None
) -> dict[str, np.ndarray]:
    """Encode texts by a tokenizer, truncated or padded to one length.

    Args:
        texts: n texts.
        tokenizer: A tokenizer of ``transformers``, or a function that maps a text (with ``pairs`` two texts) to its
            token numbers.
        pairs: n second texts, where a sample is a pair of texts.
        length: Tokens per sample; by default those of the longest, at most as many as the tokenizer allows.

    Returns:
        ``input_ids`` and ``attention_mask``, 1 for tokens and 0 for padding, int32 [n, length], and the other arrays
        that a tokenizer of ``transformers`` gives, such as ``token_type_ids``. Padding follows the tokens.

    Raises:
        FedraxError: ``length`` is below 1, a text is not a string, or the tokenizer returns anything but token numbers.

    Example:
        >>> encoded = fedrax.data.encode_texts(["ab", "b"], lambda text: [ord(letter) - 96 for letter in text])
        >>> encoded["input_ids"].tolist(), encoded["attention_mask"].tolist()
        ([[1, 2], [2, 0]], [[1, 1], [1, 0]])
    """
    if length is not None and length < 1:
        raise FedraxError(f"a text has room for 1 token or more, not {length}.")
    if pairs is not None and len(pairs) != len(texts):
        raise FedraxError(f"there must be a second text for each text, and there are {len(pairs)} for {len(texts)}.")
    columns = [list(column) for column in (texts, pairs) if column is not None]
    for text in (text for column in columns for text in column):
        if not isinstance(text, str):
            raise FedraxError(f"a text is wanted, not {text!r:.60}: leave rows without one out, or give an empty one.")
    if hasattr(tokenizer, "pad_token_id"):
        return _by_transformers(columns, tokenizer, length)
    if not callable(tokenizer):
        raise FedraxError(f"tokenizer must be one of transformers, or a function, not {type(tokenizer).__name__}.")
    rows = [_numbers(tokenizer(*row))[:length] for row in zip(*columns, strict=True)]
    return _padded({TOKENS: rows, MASK: [np.ones_like(row) for row in rows]}, length, {})


def _by_transformers(columns: list[list[str]], tokenizer: Any, length: int | None) -> dict[str, np.ndarray]:
    """The arrays that a tokenizer of ``transformers`` gives."""
    most = getattr(tokenizer, "model_max_length", None)
    limit = length or (most if most is not None and most <= _UNLIMITED else None)
    cut = {"truncation": True, "max_length": limit} if limit is not None else {}
    found = tokenizer(*columns, padding=False, return_attention_mask=True, **cut)
    rows = {name: [_numbers(row) for row in found[name]] for name in found if len(found[name]) == len(columns[0])}
    fill = next((n for n in (tokenizer.pad_token_id, getattr(tokenizer, "eos_token_id", None)) if n is not None), 0)
    return _padded(rows, length, {TOKENS: fill})


def _numbers(row: Any) -> np.ndarray:
    """Token numbers of a text, int32 [tokens]."""
    try:
        numbers = np.asarray(row)
    except (TypeError, ValueError):
        numbers = np.zeros(0, object)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise FedraxError(f"a tokenizer returns a list of token numbers for each text, not {row!r:.60}.")
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < 1 << 31:
        raise FedraxError(
            f"token numbers lie in 0 to {(1 << 31) - 1}, and these in {numbers.min()} to {numbers.max()}."
        )
    return numbers.astype(np.int32)


def _padded(rows: Mapping[str, list[np.ndarray]], length: int | None, fill: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The rows of each name as an array [n, length], filled up with 0 or the number in ``fill``."""
    made, longest = {}, length or max((len(row) for row in rows[TOKENS]), default=1) or 1
    if 4 * len(rows) * len(rows[TOKENS]) * longest > MAX_BYTES:
        raise FedraxError(f"{len(rows[TOKENS]):,} texts of {longest} tokens are more than {MAX_BYTES >> 30} GiB.")
    for name in sorted(rows):
        made[name] = np.full((len(rows[name]), longest), fill.get(name, 0), np.int32)
        for at, row in enumerate(rows[name]):
            made[name][at, : len(row)] = row
    return made


@checked_arguments
def next_tokens(x: Any, padding: int = -1) -> np.ndarray:
    """Labels of next-token prediction: the token that follows at each position.

    Args:
        x: Tokens with their mask, as `encode_texts` returns them; or tokens [n, length] without padding.
        padding: Label of positions without a next token, for ``Federation.from_arrays`` and ``classification``.

    Returns:
        Labels, int32 [n, length].

    Raises:
        FedraxError: ``x`` has no tokens [n, length].

    Example:
        >>> encoded = fedrax.data.encode_texts(["abc", "b"], lambda text: [ord(letter) - 96 for letter in text])
        >>> fedrax.data.next_tokens(encoded).tolist()
        [[2, 3, -1], [-1, -1, -1]]
    """
    named = isinstance(x, Mapping)
    if named and TOKENS not in x:
        raise FedraxError(
            f"next_tokens takes {TOKENS!r} and {MASK!r}, as encode_texts returns them, not {', '.join(x)}."
        )
    tokens = np.asarray(x[TOKENS] if named else x)
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise FedraxError(f"tokens must be integers [n, length], not {tokens.dtype} {list(tokens.shape)}.")
    mask = np.asarray(x[MASK]).astype(bool) if named and MASK in x else np.ones(tokens.shape, bool)
    labels = np.full(tokens.shape, padding, np.int32)
    labels[:, :-1] = np.where(mask[:, 1:] & mask[:, :-1], tokens[:, 1:], padding)
    return labels


@dataclass(frozen=True)
class TextReader:
    """How a reader encodes the columns of texts of a table; the fields are options of `load_csv`."""

    tokenizer: Any = None
    length: int | None = None
    min_count: int = 1
    largest: int = DEFAULT_LARGEST

    def encode(self, columns: list[list[str]], train: np.ndarray, where: str) -> tuple[Inputs, tuple[str, ...]]:
        """(inputs of one or two columns of texts, vocabulary of words or ())."""
        if self.tokenizer is not None:
            if self.min_count != 1 or self.largest != DEFAULT_LARGEST:
                raise FedraxError("min_count and largest have no effect on the tokens of a tokenizer: leave them out.")
            pairs = columns[1] if len(columns) == 2 else None
            return encode_texts(columns[0], load_tokenizer(self.tokenizer), pairs=pairs, length=self.length), ()
        length = DEFAULT_WORDS if self.length is None else self.length
        if length < 1 or 4 * len(columns) * len(columns[0]) * length > MAX_BYTES:
            raise FedraxError(f"{where}: {len(columns[0]):,} texts of length {length} are none, or too much.")
        lists = [[tokenize(text) for text in column] for column in columns]
        words = build_vocabulary((column[row] for column in lists for row in train), self.min_count, self.largest)
        sides = [encode_words(column, words, length) for column in lists]
        return sides[0] if len(sides) == 1 else np.stack(sides, axis=1), words


def load_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer of ``transformers`` from its directory; any other tokenizer as it is."""
    if not isinstance(tokenizer, str):
        return tokenizer
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise FedraxError("a tokenizer in a directory needs transformers: pip install transformers.") from None
    try:
        return transformers.AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files may break the reader in any way
        if not Path(tokenizer).is_dir():
            raise FedraxError(
                f"tokenizer: {tokenizer!r} is neither a directory nor in the local cache of transformers; nothing is"
                " downloaded."
            ) from error
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise FedraxError(f"{tokenizer} has no tokenizer of transformers: {cause}") from error
