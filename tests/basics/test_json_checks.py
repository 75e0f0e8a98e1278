"""JSON from elsewhere: what is too much, and what has fields of other types."""

import pytest

from jaxdp.basics.files import check_fields, parse_json, read_json


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[" * 600_000, "nested too deep"),
        (b'"' + b'\\"' * 1000, "Unterminated string"),
        (b"[1] [2]", "Extra data"),
        (b'"\xff"', "can't decode"),
        (b"9" * 5000, "digits"),
        (b"", "Expecting value"),
    ],
)
def test_what_is_no_json_is_a_value_error(content, told):
    with pytest.raises(ValueError, match=told):
        parse_json(content)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "some.json").open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(ValueError, match="268,435,457 bytes, and 268,435,456 are"):
        read_json(tmp_path / "some.json")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], r"`saved` is \[\], and must be an object"),
        ({"b": {}}, "`saved.a` is missing, and must be int"),
        ({"a": True}, "`saved.a` is True, and must be int"),
        ({"a": "1"}, "`saved.a` is '1', and must be int"),
        ({"a": 1, "b": []}, r"`saved.b` is \[\], and must be dict | None"),
        ({"a": 1}, None),
        ({"a": 1, "b": {}, "c": object}, None),
    ],
)
def test_fields_of_another_type_are_named(value, told):
    types = {"a": int, "b": dict | None}
    if told is None:
        return check_fields(value, types, "saved")
    with pytest.raises(ValueError, match=told):
        check_fields(value, types, "saved")
