"""Tokens, vocabularies, word vectors, and the readers of sentence pairs and tweets."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedrax import FedraxError
from fedrax.data import Federation, Natural, load
from fedrax.data.readers.text_data import MAX_LINE, build_vocabulary, encode_words, read_word_vectors, tokenize


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
