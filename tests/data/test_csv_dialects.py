"""CSV files with other separators, encodings, empty rows, and identifiers that look like numbers."""

from pathlib import Path

import numpy as np
import pytest

from fedrax.data import load
from fedrax.data.readers.table_files import CsvFormat, read_csv
from fedrax.errors import FedraxError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.csv"


def test_semicolons_and_decimal_commas(path: Path) -> None:
    path.write_text("x;y;label\n1,5;2;a\n-0,25;3;b\n", encoding="utf-8")
    dataset = load("csv", path=path, separator=";", decimal=",", standardize="none", test_fraction=0.0)
    assert dataset.train.x.tolist() == [[1.5, 2], [-0.25, 3]] and dataset.class_names == ("a", "b")
    for option, message in (
        ({}, r"has one column 'x;y;label': if ';' separates its columns, set separator to it"),
        ({"separator": ";;"}, "a separator is one character"),
        ({"decimal": ","}, "a decimal comma needs another separator"),
    ):
        with pytest.raises(FedraxError, match=message):
            load("csv", path=path, **option)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("größe,label\n1,2\n".encode("latin-1"), "it is not valid UTF-8: save it in this encoding"),
        ("a,label\nü,2\n".encode("latin-1"), "it is not valid UTF-8: save it in this encoding"),
        (b"a,label\n1,2\n1,2,3\n", "line 3 has more cells than the header has names"),
        (b'a,label\n"1\n2",2\n1,2,3\n', "line 4 has more cells than the header has names"),
        (b'a,label\n1,2\n"1,2\n3,4\n', "the quotation mark in line 3 is never closed"),
    ],
)
def test_unreadable_files_raise_one_clear_message(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(FedraxError, match=message) as caught:
        load("csv", path=path)
    assert len(str(caught.value).splitlines()) == 1 and "schema" not in str(caught.value).lower()


@pytest.mark.parametrize("rest", ["\n", "\n\n", ",,\n", ",,\n\n1,2,a\n,,\n"])
def test_empty_rows_are_ignored(path: Path, rest: str) -> None:
    path.write_text("x,y,label\n1,2,a\n3,4,b\n" + rest)
    rows = 2 + rest.count("a")
    assert len(load("csv", path=path, test_fraction=0.0).train.y) == rows


def test_leading_zeros_are_part_of_a_name(path: Path, tmp_path: Path) -> None:
    """The three clients differ in leading zeros only; names without leading zeros are sorted as numbers."""
    path.write_text(
        "who,plz,x,label\n" + "".join(f"{who},{who},{i},0{i % 2}\n" for i, who in enumerate(["001", "01", "1"] * 4))
    )
    options = {"client": "who", "categorical": ("plz",), "test_fraction": 0.0}
    dataset = load("csv", path=path, **options)
    assert dataset.client_names == ("001", "01", "1") and dataset.class_names == ("00", "01")
    assert dataset.feature_names == ("plz=001", "plz=01", "plz=1", "x")
    assert load("csv", path=path, labels="numbers", **options).train.y.max() == 1
    test = tmp_path / "test.csv"
    test.write_text("who,plz,x,label\n1,1,5,00\n")
    assert load("csv", path=path, test_path=test, client="who", categorical=("plz",)).test_clients.tolist() == [2]
    path.write_text("who,x,label\n10,1,0\n9,2,1\n-0,3,1\n")
    assert load("csv", path=path, client="who", test_fraction=0.0).client_names == ("0", "9", "10")


def test_row_without_client_is_rejected(path: Path) -> None:
    path.write_text("who,x,label\n1.5,1,0\nNaN,2,1\n2.5,3,1\n")
    with pytest.raises(FedraxError, match="'who' has missing values, which are not allowed there"):
        load("csv", path=path, client="who")


def test_text_columns_with_distinct_values_are_noted(path: Path) -> None:
    path.write_text("day,ward,label\n" + "".join(f"2024-01-{i % 28 + 1},w{i % 3},{i % 2}\n" for i in range(50)))
    notes = load("csv", path=path).notes
    assert any("'day' has a different text in most rows: drop it" in note for note in notes)
    assert not any("'ward' has a different text" in note for note in notes)
    path.write_text("car,x,label\n" + "".join(f"model {i},{i},{i % 2}\n" for i in range(20)))
    assert any("'car' has a different text in every row: drop it" in note for note in load("csv", path=path).notes)


def test_csv_format_applies_to_all_columns(path: Path) -> None:
    path.write_text("a|b\n1|NA\n|2\n")
    table = read_csv(path, CsvFormat("|", missing_as=("NA",)), texts=("a",))
    assert table["a"].to_list() == ["1", None] and np.isnan(table["b"].to_numpy()[0])


def test_blanks_around_cells_are_removed(tmp_path: Path):
    """For example "39, State-gov, ?"."""
    rows = "".join(
        f"{i}, {i % 5}, {'?' if i == 3 else 'State-gov'}, {i / 2}, {'>50K' if i % 2 else '<=50K'}\n" for i in range(20)
    )
    path = tmp_path / "adult.csv"
    path.write_text("age, hours, work, gain, label\n" + rows)
    dataset = load("csv", path=path, missing="mean", missing_as=("?",))
    assert dataset.feature_names == ("age", "hours", "work=State-gov", "work missing", "gain")
    assert dataset.class_names == ("<=50K", ">50K")
    path.write_text("size; label\n1,5; 1\n 2,5; 2\n 4; 1\n")
    dataset = load("csv", path=path, separator=";", decimal=",", standardize="none", test_fraction=0.0)
    assert dataset.train.x[:, 0].tolist() == [1.5, 2.5, 4] and dataset.class_names == ("1", "2")


@pytest.mark.parametrize("number_format", ["{},5", "1.00{},5", '"{},000"', "{}%", "${}", "-{},25 €"])
def test_numbers_with_units_or_separators_are_rejected(tmp_path: Path, number_format: str):
    """Otherwise each number would become a category."""
    path = tmp_path / "n.csv"
    path.write_text("price;a;label\n" + "".join(f"{number_format.format(i)};{i};{i % 2}\n" for i in range(1, 9)))
    with pytest.raises(FedraxError, match=r"'price' holds texts such as .*1.*, numbers in another form: write them as"):
        load("csv", path=path, separator=";")
    assert len(load("csv", path=path, separator=";", categorical=("price",), test_fraction=0.0).feature_names) == 9
    with pytest.raises(FedraxError, match='labels = "classes" reads them'):
        load("csv", path=path, separator=";", label="price")


def test_integer_labels_written_as_floats_are_noted(tmp_path: Path):
    """pandas writes integer columns with missing values as floats."""
    path = tmp_path / "f.csv"
    path.write_text("a,label\n" + "".join(f"{i},{i % 3}.0\n" for i in range(30)))
    message = "3 distinct integers written as floats, which are read as targets"
    assert any(message in note for note in load("csv", path=path).notes)
    assert not any(message in note for note in load("csv", path=path, labels="numbers").notes)


@pytest.mark.parametrize(
    ("header", "message"), [(b"PK\x03\x04", "a spreadsheet: unpack it, or save"), (b"PAR1", "huggingface reads it")]
)
def test_binary_formats_are_recognized(tmp_path: Path, header: bytes, message: str):
    path = tmp_path / "other.csv"
    path.write_bytes(header + bytes(100) + header)
    with pytest.raises(FedraxError, match=message):
        load("csv", path=path)


def test_column_names_may_look_like_the_header_of_a_binary_format(path: Path) -> None:
    path.write_text("PAR1,PAR2,label\n1,2,a\n3,4,b\n")
    assert load("csv", path=path, test_fraction=0.0).feature_names == ("PAR1", "PAR2")
    path.write_text("x^2,x,label\n1,1,a\n4,2,b\n")  # polars would decompress the file
    with pytest.raises(FedraxError, match="begins with x\\^: unpack it first, or give its first column another name"):
        load("csv", path=path)


@pytest.mark.parametrize("cells", [("1.234", "12.500", "999"), ("1,5", " 12.500", "999"), ("1.234,5", "12", "999")])
def test_thousands_separators_are_not_decimal_points(path: Path, cells: tuple[str, ...]) -> None:
    """1.234 would be read as about one instead of a thousand."""
    path.write_text("x;label\n" + "".join(f"{cell};a\n" for cell in cells))
    with pytest.raises(FedraxError, match="numbers in another form: write them as plain numbers; categorical"):
        load("csv", path=path, separator=";", decimal=",")


def test_few_texts_among_decimal_commas_are_rejected(path: Path) -> None:
    path.write_text("x;label\n1,5;a\n2,5;b\nNA;a\n")
    with pytest.raises(FedraxError, match=r"'x' holds numbers, and in 1 of 3 rows texts: 'NA'\. missing_as"):
        load("csv", path=path, separator=";", decimal=",")


def test_few_numbers_with_another_decimal_separator_are_rejected(path: Path) -> None:
    path.write_text('x,label\n950,a\n870,b\n"1,200",a\n')
    with pytest.raises(FedraxError, match="'x' holds texts such as '1,200', numbers in another form"):
        load("csv", path=path)


def test_comma_separated_lists_are_texts(path: Path) -> None:
    path.write_text("q;label\n" + "1,3;a\n1,2,5;b\n" * 3)
    dataset = load("csv", path=path, separator=";", test_fraction=0.0)
    assert dataset.feature_names == ("q=1,2,5", "q=1,3")


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize("digits", ["12345678901234567890", "1" * 21, "1" * 45])
def test_long_integers_stay_distinct(path: Path, digits: str, blank: str) -> None:
    path.write_text(f"who,x,label\n{blank}{digits},1,a\n{blank}{digits[:-1]}9,2,b\n")
    with pytest.raises(FedraxError, match="beyond 64 bits: write floats, or put a letter in front"):
        load("csv", path=path, client="who")


def test_carriage_returns_as_line_ends(tmp_path: Path):
    path = tmp_path / "mac.csv"
    path.write_bytes(b"a,label\r1,x\r2,y\r")
    with pytest.raises(FedraxError, match="its lines end in carriage returns alone: save it with line feeds"):
        load("csv", path=path)


def test_title_above_the_header_and_escaped_tab_separator(path: Path) -> None:
    path.write_text("# ages of 2024\na,b,label\n1,2,0\n2,3,1\n")
    with pytest.raises(FedraxError, match="begins with '# ages of 2024' and not with the names of its columns: remove"):
        load("csv", path=path)
    path.write_text("Series: ages of 2024\nSeasonally adjusted\na,label\n1,0\n")
    with pytest.raises(FedraxError, match="line 3 has more cells than the header has names"):
        load("csv", path=path)
    path.write_text("a\tlabel\n1\t0\n2\t1\n")
    with pytest.raises(FedraxError, match=r"if '\\t' separates its columns, set separator to it"):
        load("csv", path=path)
    assert load("csv", path=path, separator=r"\t").feature_names == ("a",)


@pytest.mark.parametrize("missing_as", ["-99", "-99.0", " -99 "])
def test_numeric_codes_of_missing_values_match_in_any_notation(path: Path, missing_as: str) -> None:
    path.write_text("a,b,c,label\n1.5,7,-99,0\n-99.0,-99,x,1\n2.5,9,y,1\n3.5,8,x,0\n")
    dataset = load("csv", path=path, missing_as=(missing_as,), missing="mean", standardize="none", test_fraction=0.0)
    assert dataset.train.x[1, :2].tolist() == [2.5, 8]
