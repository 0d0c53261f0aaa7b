"""JSON Lines and CSV: physical lines, byte order marks, and every way a line can be broken."""

import json
import sys
from pathlib import Path

import pytest

from engine.data.rows import LineProblem, Reading
from engine.data.textfiles import read_csv, read_jsonl
from engine.errors import DataError

BOM = b"\xef\xbb\xbf"
JSONL = b'{"prompt":"2+2?","answer":"4"}\n{"prompt":"3+3?","answer":"6"}\n'
CSV = b"prompt,answer\n2+2?,4\n3+3?,6\n"


def jsonl(tmp_path: Path, content: bytes) -> Reading:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return read_jsonl(path)


def csv(tmp_path: Path, content: bytes) -> Reading:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    return read_csv(path)


@pytest.mark.parametrize(("read", "content"), [(jsonl, JSONL), (csv, CSV)])
def test_a_byte_order_mark_changes_nothing(tmp_path, read, content):
    plain, marked = read(tmp_path, content), read(tmp_path, BOM + content)
    assert plain.rows == marked.rows
    assert [row.values for row in marked.rows] == [{"prompt": "2+2?", "answer": "4"}, {"prompt": "3+3?", "answer": "6"}]
    assert not marked.problems


@pytest.mark.parametrize(("read", "content"), [(jsonl, JSONL), (csv, CSV)])
def test_windows_line_endings_change_nothing(tmp_path, read, content):
    assert read(tmp_path, content.replace(b"\n", b"\r\n")).rows == read(tmp_path, content).rows


@pytest.mark.parametrize(("read", "content"), [(jsonl, JSONL), (csv, CSV)])
def test_a_missing_last_newline_changes_nothing(tmp_path, read, content):
    assert read(tmp_path, content.rstrip()).rows == read(tmp_path, content).rows


def test_jsonl_and_csv_of_the_same_rows_have_the_same_digests(tmp_path):
    assert [row.digest for row in jsonl(tmp_path, JSONL).rows] == [row.digest for row in csv(tmp_path, CSV).rows]


def test_blank_lines_are_ignored_and_broken_lines_have_their_physical_number(tmp_path):
    reading = jsonl(tmp_path, b'{"prompt":"a"}\n\n{"prompt":"b"}\n   \n{"prompt": \n[]\n{"prompt":"secret"}\n')
    assert [row.line for row in reading.rows] == [1, 3, 7]
    assert [problem.line for problem in reading.problems] == [5, 6]
    assert "not valid JSON" in reading.problems[0].reason
    assert reading.problems[1].reason == "must be a JSON object, found an array"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'"text"', "found a string"),
        (b"4", "found a number"),
        (b"null", "found null"),
        (b"true", "found a boolean"),
        (b'{"a": "\xff"}', "is not UTF-8 (byte 8 of the line)"),
        (b'{"a": 1}\0', "holds a NUL byte"),
        (b"\0\0\0", "holds a NUL byte"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b'{"a": 1e999}', "not finite"),
        (b'{"a": ' + b"9" * 5000 + b"}", "more digits than can be read"),
        (b'{"a": ' + b"[" * 200_000 + b"}", "nested too deeply"),
        (b'{"a": 1, "a": 2}', "names a key twice"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": 1} {"a": 2}', "Extra data at column 10"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": "tab\there"}', "Invalid control character"),
    ],
)
def test_every_broken_line_is_told_apart_and_the_next_line_is_read(tmp_path, line, reason):
    reading = jsonl(tmp_path, b'{"a": 0}\n' + line + b'\n{"a": 3}\n')
    assert [row.line for row in reading.rows] == [1, 3]
    assert [problem.line for problem in reading.problems] == [2]
    assert reason in reading.problems[0].reason


def test_unicode_line_separators_inside_a_string_do_not_end_the_line(tmp_path):
    text = "one\u2028two\u2029three\x85four \U0001f600"
    reading = jsonl(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\n{}\n")
    assert [row.values for row in reading.rows] == [{"prompt": text}, {}]
    assert not reading.problems


def test_large_numbers_are_read_exactly(tmp_path):
    assert (
        jsonl(tmp_path, b'{"a": 123456789012345678901234567890}\n').rows[0].values["a"]
        == 123456789012345678901234567890
    )


def test_a_json_array_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(DataError, match=r"one JSON array.*JSON Lines"):
        jsonl(tmp_path, b'[\n  {"prompt": "a"},\n  {"prompt": "b"}\n]\n')


@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_utf16_is_refused_with_the_way_out(tmp_path, mark):
    with pytest.raises(DataError, match=r"UTF-16.*UTF-8"):
        jsonl(tmp_path, mark + b"{\0}\0")


@pytest.mark.parametrize("read", [jsonl, csv])
@pytest.mark.parametrize("content", [b"", BOM, b"\n  \n"])
def test_an_empty_file_has_no_rows(tmp_path, read, content):
    assert read(tmp_path, content) == Reading()


def test_quoted_newlines_keep_the_number_of_the_line_where_the_row_starts(tmp_path):
    reading = csv(tmp_path, b'prompt,answer\n"two\nlines",1\n\n"three\n\nlines",2\nlast,3\n')
    assert [row.line for row in reading.rows] == [2, 5, 8]
    assert reading.rows[1].values == {"prompt": "three\n\nlines", "answer": "2"}


def test_ragged_rows_are_reported_and_the_rest_is_read(tmp_path):
    reading = csv(tmp_path, b"prompt,answer\na,1\nb\nc,3,4\n   \nd,4\n")
    assert [row.line for row in reading.rows] == [2, 6]
    assert reading.problems == [
        LineProblem(3, "has 1 cells, the header has 2"),
        LineProblem(4, "has 3 cells, the header has 2"),
    ]


def test_a_quote_that_is_never_closed_is_reported_where_it_opens(tmp_path):
    reading = csv(tmp_path, b'prompt,answer\na,1\n"b,2\nc,3\n')
    assert [row.line for row in reading.rows] == [2]
    assert [problem.line for problem in reading.problems] == [3]


def test_text_after_a_closing_quote_is_reported(tmp_path):
    reading = csv(tmp_path, b'prompt,answer\n"a"b,1\nc,3\n')
    assert [row.values["prompt"] for row in reading.rows] == ["c"]
    assert [problem.line for problem in reading.problems] == [2]


def test_bytes_that_are_no_text_in_a_csv_cell_reject_their_row_only(tmp_path):
    reading = csv(tmp_path, b'prompt,answer\n"a\n\xff",1\nb,\0\nc,3\n')
    assert [row.values["prompt"] for row in reading.rows] == ["c"]
    assert reading.problems == [
        LineProblem(2, "is not UTF-8 (byte 1 of the line) (line 3)"),
        LineProblem(4, "holds a NUL byte (line 4)"),
    ]


def test_a_cell_above_the_limit_of_the_parser_is_reported(tmp_path):
    reading = csv(tmp_path, b"prompt,answer\n" + b"x" * 200_000 + b",1\nb,2\n")
    assert [row.values["prompt"] for row in reading.rows] == ["b"]
    assert "field limit" in reading.problems[0].reason


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"prompt,answer,prompt", "names a column twice: prompt"),
        (b"prompt,,answer", "column 2 of the CSV header has no name"),
        (b"prompt,\xff", "line 1, the header, is not UTF-8"),
        (b'"a"b,c', "the header, is not valid CSV"),
    ],
)
def test_a_header_that_cannot_be_used_fails_the_file(tmp_path, header, message):
    with pytest.raises(DataError, match=message):
        csv(tmp_path, header + b"\n1,2,3\n")


def test_spaces_around_header_names_do_not_count(tmp_path):
    assert csv(tmp_path, b"prompt, answer\na,1\n").rows[0].values == {"prompt": "a", "answer": "1"}


def test_reading_leaves_the_recursion_limit_alone(tmp_path):
    before = sys.getrecursionlimit()
    jsonl(tmp_path, b'{"a": ' + b"[" * 200_000 + b"}")
    assert sys.getrecursionlimit() == before
