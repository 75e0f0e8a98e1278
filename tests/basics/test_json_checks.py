"""JSON from elsewhere: what is too much, and what is not of the form."""

import json

import pytest

from jaxdp.basics.json_checks import (
    by_name,
    each,
    fields,
    maybe,
    number,
    number_text,
    parse_json,
    read_json,
    row,
    text,
    truth,
    whole,
)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[" * 60_000, "nested more than 100 deep"),
        (b"[" * 101 + b"]" * 101, "nested more than 100 deep"),
        (b'[{"a":' * 60 + b"1" + b"}]" * 60, "nested more than 100 deep"),
        (b"[],[]," * 2**21 + b"[]", "more than 4,194,304 lists and objects"),
        (b"1," * 2**24 + b"[]", "more than 16,777,216 values"),
        (b" " * (2**28 + 1), "268,435,457 bytes, and 268,435,456 are the most"),
        (b'"' + b'\\"' * 1000, "Unterminated string"),
        (b"[1] [2]", "Extra data"),
        (b'"\xff"', "can't decode"),
        (b"9" * 5000, "digits"),
        (b"", "Expecting value"),
    ],
)
def test_what_is_too_much_or_no_json_is_a_value_error(content, told):
    with pytest.raises(ValueError, match=told):
        parse_json(content)


def test_brackets_in_strings_and_side_by_side_are_not_deep(tmp_path):
    value = {'["{' * 200 + '\\"[': [[[]] * 500, "[" * 500, '"']}
    assert parse_json(json.dumps(value).encode()) == value
    (tmp_path / "some.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "some.json") == value
    with pytest.raises(ValueError, match="and 100 are the most"):
        read_json(tmp_path / "some.json", 100)


FORM = fields(
    {"step": whole(1, 9), "row": row(text("[a-z]+", "letters"), truth())},
    {
        "values": by_name(each(maybe(number_text()))),
        "time": number(0.0, finite=True),
        "not empty": by_name(number(), least=1),
    },
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"step": 9, "values": {"x": [None, 1, 1.5, "nan", "-0.5"]}, "time": 0},
        {"not empty": {"": float("nan")}, "unknown": object},
    ],
)
def test_what_has_the_form_is_let_pass(change):
    FORM({"step": 1, "row": ["abc", False]} | change, "saved")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"step": True},
            "`saved.step` is True, and must be a whole number from 1 to 9",
        ),
        ({"step": 0}, "`saved.step` is 0"),
        ({"step": 1.0}, "`saved.step` is 1.0"),
        ({"row": ["abc", 1]}, r"`saved.row\[1\]` is 1, and must be true or false"),
        ({"row": ["a1", True]}, r"`saved.row\[0\]` is 'a1', and must be letters"),
        ({"row": ["a\n", True]}, "must be letters"),
        ({"row": ["abc"]}, "must be a list of 2"),
        ({"row": "ab"}, "must be a list of 2"),
        ({"values": {"x": [0, "one"]}}, r"`saved.values.x\[1\]` is 'one'"),
        ({"values": {"x": [10**40]}}, "must be a number or the text of one"),
        ({"values": []}, "must be an object"),
        ({"time": float("inf")}, "`saved.time` is inf, and must be a finite number"),
        ({"not empty": {}}, "`saved.not empty` is empty"),
    ],
)
def test_what_has_not_is_named(change, told):
    with pytest.raises(ValueError, match=told):
        FORM({"step": 1, "row": ["abc", False]} | change, "saved")
    with pytest.raises(ValueError, match="`saved` has no step, row"):
        FORM({}, "saved")
