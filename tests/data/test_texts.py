"""Tokens, vocabularies, word vectors, and the readers of sentence pairs and tweets."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest

from fedrax import FedAvg, FedraxError, classification, simulate
from fedrax.data import Federation, Natural, encode_texts, load, next_tokens
from fedrax.data.readers.text_data import MAX_LINE, build_vocabulary, encode_words, read_word_vectors, tokenize
from fedrax.models import Model


def test_tokens_are_lower_case_words_and_single_punctuation_marks() -> None:
    assert tokenize("A man's dog, 2 cats -- isn't it?") == (
        ["a", "man's", "dog", ",", "2", "cats", "-", "-", "isn't", "it", "?"]
    )
    assert tokenize(" \n\t") == []
    assert tokenize("naïve 日本") == ["naïve", "日", "本"]


def test_vocabulary_contains_frequent_words_and_padding_is_zero() -> None:
    texts = [["b", "a", "b"], ["c", "a", "b"]]
    assert build_vocabulary(texts, min_count=2) == ("b", "a")
    assert build_vocabulary(texts, largest=1) == ("b",)
    encoded = encode_words([["a", "z", "b", "b"], []], ("b", "a"), 3)
    np.testing.assert_array_equal(encoded, [[3, 1, 2], [0, 0, 0]])
    assert encoded.dtype == np.int32
    with pytest.raises(FedraxError):
        build_vocabulary(texts, min_count=0)
    with pytest.raises(FedraxError, match="no word occurs 4 times, the most frequent one 3"):
        build_vocabulary(texts, min_count=4)
    assert build_vocabulary([]) == build_vocabulary([[]]) == ()
    with pytest.raises(FedraxError):
        encode_words(texts, (), 0)


def test_word_vectors_in_the_format_of_glove(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("3 2\nthe 1.0 2.0\ncat -1 0.5\nthe 9 9\nother 7 7\n")
    table = read_word_vectors(path, ("cat", "dog", "the"))
    np.testing.assert_array_equal(table, [[0, 0], [0, 0], [-1, 0.5], [0, 0], [1, 2]])
    assert table.dtype == np.float32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cat one two\n", "not followed by numbers"),
        (b"cat 1 2\ndog 1\n", "line 2: not 2 finite numbers"),
        (b"cat nan 1\n", "finite"),
        (b"cat 1e39 1\n", "finite"),
        (b"cat\n", "not followed by numbers"),
        (b"\xff\xfe 1\n", "line 1 is not UTF-8"),
        (b"\x1f\x8b\x08\x00\n", "unpack a compressed file first"),
        (b"cat 1 2\ndog 1 2 3\n", "line 2: not 2 finite numbers"),
        (b"cat\t1\t2\n", "with single blanks"),
        (b"bird 1 2\n", "none of the 2 words"),
        (b"cat " + b"1 " * 5000 + b"\n", "1 to 4096 numbers"),
        (b"x" * (MAX_LINE + 10), "longer than"),
        (b"", "none of the 2 words"),
    ],
)
def test_invalid_vector_files_are_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    with pytest.raises(FedraxError, match=message):
        read_word_vectors(path, ("cat", "dog"))
    with pytest.raises(FedraxError, match="cannot be read"):
        read_word_vectors(tmp_path, ("cat",))


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfcat -1 0.5\r\n. . . 5 6\r\nthe 1.0 2.0\r\n",  # with a byte order mark
        b"\xef\xbb\xbf3 2\ncat -1 0.5 \nat the 7 7 \nthe 1 2 \n",  # with the header of fastText
        b". . . 5 6\nthe cat 8 8\ncat -1 0.5\nthe 1 2\nthe 9 9\ncat at cat 8 8\n",  # words with blanks, as in GloVe
    ],
)
def test_vector_files_of_other_programs(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    np.testing.assert_array_equal(read_word_vectors(path, ("cat", "the")), [[0, 0], [0, 0], [-1, 0.5], [1, 2]])


def test_invalid_texts_and_vocabularies_raise_a_clear_error() -> None:
    for missing in (None, float("nan"), b"bytes"):
        with pytest.raises(FedraxError, match=r"a text is wanted, not .*: leave rows without one out"):
            tokenize(missing)  # type: ignore[arg-type]
    for made in (build_vocabulary, lambda texts: encode_words(texts, ("a",), 3)):
        with pytest.raises(FedraxError, match="a list of words is wanted, not the text 'a cat': tokenize"):
            made(["a cat"])


def write(path: Path, **columns: list) -> None:
    path.parent.mkdir(exist_ok=True)
    pl.DataFrame(columns).write_parquet(path)


def pairs(path: Path, label: str = "neutral") -> None:
    write(path, sentence1=["A dog .", "Two men"], sentence2=["A cat", "No one ."], label=["entailment", label])


def test_snli_reads_pairs_with_the_vocabulary_of_the_training_rows(tmp_path: Path) -> None:
    pairs(tmp_path / "snli" / "dev.parquet")
    write(tmp_path / "snli" / "test.parquet", sentence1=["A bird ."], sentence2=["Men"], label=["contradiction"])
    data = load("snli", tmp_path, length=3)
    assert data.vocabulary[:2] == (".", "a")
    assert (data.train.x.shape, data.train.x.dtype) == ((2, 2, 3), np.int32)
    number = {word: i for i, word in enumerate(data.vocabulary, start=2)}
    np.testing.assert_array_equal(data.train.x[0], [[number["a"], number["dog"], number["."]], [3, number["cat"], 0]])
    np.testing.assert_array_equal(data.test.x[0], [[3, 1, 2], [number["men"], 0, 0]])
    assert data.test.y.tolist() == [2]
    pairs(tmp_path / "snli" / "test.parquet", label="-")
    with pytest.raises(FedraxError, match="not '-'"):
        load("snli", tmp_path)
    with pytest.raises(FedraxError, match=r"train\.parquet"):
        load("snli", tmp_path, train="train")
    (tmp_path / "snli" / "dev.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(FedraxError, match="cannot be read"):
        load("snli", tmp_path)
    write(tmp_path / "snli" / "dev.parquet", sentence1=["a"], sentence2=[3], label=["neutral"])
    with pytest.raises(FedraxError, match="'sentence2' holds"):
        load("snli", tmp_path)


def test_tweets_are_grouped_by_user(tmp_path: Path) -> None:
    texts = [f"so happy {i} :)" for i in range(10)] + [f"so sad {i}" for i in range(50, 55)]
    users, labels = ["u1"] * 10 + ["u0"] * 5, [1] * 10 + [0] * 5
    write(tmp_path / "sent140" / "leaf_k30_by_user.parquet", user=users, text=texts, label=labels)
    data = load("sent140", tmp_path, length=4)
    assert data.train.x.shape == (12, 4)
    assert data.test_clients is not None
    assert np.bincount(data.test_clients).tolist() == [1, 2]
    assert set(data.vocabulary) == {"so", "happy", "sad", ":", ")"}
    federation = Federation.from_dataset(data, Natural(), 0)
    assert federation.vocabulary == data.vocabulary
    assert (federation.num_clients, federation.train.y[:4].tolist()) == (2, [0] * 4)
    write(tmp_path / "sent140" / "leaf_k30_by_user.parquet", user=["a"], text=["b"], label=[4])
    with pytest.raises(FedraxError, match="labels are 0 and 1"):
        load("sent140", tmp_path)


def test_unused_tables_may_be_missing(tmp_path: Path) -> None:
    pairs(tmp_path / "snli" / "train.parquet")
    pairs(tmp_path / "snli" / "test.parquet")
    write(tmp_path / "sent140" / "sample.parquet", user=["u", "u"], text=["a", "b"], label=[0, 1])
    assert len(load("snli", tmp_path, train="train").train.y) == 2
    assert len(load("sent140", tmp_path, table="sample", test_fraction=0.0, min_count=1).train.y) == 2
    with pytest.raises(FedraxError, match=r"sent140/leaf_k30_by_user\.parquet is missing"):
        load("sent140", tmp_path)


def test_folder_name_is_not_a_glob_pattern(tmp_path: Path) -> None:
    for folder in ("[ab]", "a"):  # as a glob pattern, the second name would match the first one
        (tmp_path / folder).mkdir()
        tweets = {"user": ["u", "u"], "text": [folder, folder], "label": [0, 1]}
        write(tmp_path / folder / "sent140" / "leaf_k30_by_user.parquet", **tweets)
    data = load("sent140", tmp_path / "[ab]", min_count=1)
    assert data.vocabulary == ("[", "]", "ab")


def test_words_in_other_scripts():
    assert tokenize("Grüße, l'été à 5 Äpfeln") == ["grüße", ",", "l'été", "à", "5", "äpfeln"]
    assert tokenize("cafe\u0301 мир_мир") == ["café", "мир", "_", "мир"]
    assert tokenize("東京へ行く") == list("東京へ行く")
    assert (
        tokenize("हिन्दी में") == ["हिन्दी", "में"] and len(tokenize("İstanbul")) == 1
    )  # combining marks are no letters in Python


def letters(*texts: str) -> list[int]:
    return [ord(letter) - 96 for text in texts for letter in text]


def test_tokens_of_a_function_have_a_mask() -> None:
    encoded = encode_texts(["abc", "", "b"], letters)
    assert {name: a.tolist() for name, a in encoded.items()} == {
        "attention_mask": [[1, 1, 1], [0, 0, 0], [1, 0, 0]],
        "input_ids": [[1, 2, 3], [0, 0, 0], [2, 0, 0]],
    }
    assert all(a.dtype == np.int32 for a in encoded.values())
    cut = encode_texts(["abc"], letters, pairs=["ba"], length=4)
    assert cut["input_ids"].tolist() == [[1, 2, 3, 2]] and cut["attention_mask"].all()
    assert encode_texts(["a"], letters, length=3)["input_ids"].tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"texts": ["a", None]}, "a text is wanted, not None"),
        ({"pairs": ["a"]}, "a second text for each text, and there are 1 for 2"),
        ({"length": 0}, "room for 1 token or more, not 0"),
        ({"tokenizer": str}, "a list of token numbers for each text, not 'a'"),
        ({"tokenizer": lambda text: [0.5]}, "a list of token numbers"),
        ({"tokenizer": lambda text: [-1]}, "these in -1 to -1"),
        ({"tokenizer": "bert"}, "tokenizer must be one of transformers, or a function, not str"),
    ],
)
def test_what_is_no_tokenizer_raises_a_clear_error(given: dict[str, Any], says: str) -> None:
    options: dict[str, Any] = {"texts": ["a", "b"], "tokenizer": letters} | given
    with pytest.raises(FedraxError, match=says):
        encode_texts(**options)


def test_columns_of_a_table_are_texts(tmp_path: Path) -> None:
    path, names = tmp_path / "reviews.csv", ["shop", "title", "review", "stars", "good"]
    rows = [["a", "007", "good, very good", 5, 1], ["a", "no", "bad", 1, 0], ["b", "007", "good", 4, 1]]
    pl.DataFrame(dict(zip(names, zip(*rows, strict=True), strict=True))).write_csv(path)
    options: dict[str, Any] = {"path": path, "label": "good", "client": "shop", "test_fraction": 0.0, "length": 3}
    one = load("csv", texts=["review"], drop=("title", "stars"), **options)
    assert one.vocabulary == ("good", ",", "bad", "very") and one.client_names == ("a", "b")
    assert one.train.x.tolist() == [[2, 3, 5], [4, 0, 0], [2, 0, 0]] and one.train.y.tolist() == [1, 0, 1]
    two = load("csv", texts=["title", "review"], columns=("title", "review"), **options)
    assert two.train.x.shape == (3, 2, 3) and "007" in two.vocabulary
    both = load("csv", texts=["review"], drop=("title",), standardize="none", **options)
    assert both.train.x["features"].tolist() == [[5], [1], [4]] and both.feature_names == ("stars",)
    np.testing.assert_array_equal(both.train.x["tokens"], one.train.x)
    for changes, says in (
        ({"texts": ["good"]}, "texts names one column of texts, or two for pairs of texts, not 'good', which has"),
        ({"texts": ["a", "b", "c"]}, "or two for pairs of texts, not a, b, c"),
        ({"texts": ["text"]}, "column of .*reviews.csv"),
        ({}, "length has no effect without texts"),
        ({"texts": ["review"], "drop": ("title",), "tokenizer": str(tmp_path / "none")}, "transformers"),
    ):
        with pytest.raises(FedraxError, match=says):
            load("csv", **(options | changes))


def test_the_next_token_is_predicted_where_there_is_one() -> None:
    """The loss is the mean of samples, perplexity that of all tokens, as NumPy computes them."""
    texts = ["abcabc", "ab", "cabab", "bca"]
    x = encode_texts(texts, letters)
    y = next_tokens(x)
    assert y[1].tolist() == [2, -1, -1, -1, -1, -1] and (y >= 0).sum() == sum(len(text) - 1 for text in texts)
    assert next_tokens([[4, 5]]).tolist() == [[5, -1]]
    data = Federation.from_arrays(x, y, [0, 0, 1, 1], test=(x, y), num_classes=4, padding=-1)
    table = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    model = Model(
        lambda key: {"table": jnp.asarray(table)}, lambda params, x, key=None: params["table"][x["input_ids"]]
    )
    task = classification(model, padding=-1, metrics=["perplexity"])
    found = simulate(FedAvg(), task, data, rounds=0, cohort_size=2, eval_first=True, progress=False).events[-1]
    log_p = table - np.log(np.exp(table).sum(1, keepdims=True))
    lost = [[-log_p[a, b] for a, b in zip(letters(t), letters(t)[1:], strict=False)] for t in texts]
    assert found["test_loss"] == pytest.approx(np.mean([np.mean(one) for one in lost]), rel=1e-5)
    assert found["test_perplexity"] == pytest.approx(np.exp(np.mean(np.concatenate(lost))), rel=1e-5)
    before = jax.tree.map(np.asarray, model.init(None))
    after = simulate(FedAvg(), task, data, rounds=1, cohort_size=2, progress=False).params
    moved = (np.asarray(after["table"]) != before["table"]).any(1)
    assert moved.tolist() == [False, True, True, True]  # padding is never a token
    with pytest.raises(FedraxError, match="takes 'input_ids' and 'attention_mask'"):
        next_tokens({"tokens": x["input_ids"]})
