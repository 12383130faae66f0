import time

import pytest
import rfc8785
from hypothesis import given, strategies
from pydantic import TypeAdapter, ValidationError

from schemas.common import DecimalString, Instant, canonical_json, check_path, strict_json


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b'{"a": {"b": 1, "\\u0062": 2}}', "has the key 'b' twice"),
        (b'{"a": NaN}', "has the value NaN"),
        (b'{"a": -Infinity}', "has the value -Infinity"),
        (b'{"a": "\xff"}', "is not UTF-8 at byte 7"),
        (b"[" * 65 + b"]" * 65, "is nested deeper than 64 levels"),
        (b'{"a": 1} {', "is not JSON"),
        (b'"' + b"a" * 100, "is larger than 100 bytes"),
    ],
)
def test_json_that_parsers_disagree_on_is_refused(raw, said):
    with pytest.raises(ValueError, match=said):
        strict_json(raw, limit=100 if said.endswith("bytes") else 1 << 20)


def test_brackets_inside_a_string_are_no_nesting():
    assert strict_json(b'{"a": "' + b"[" * 100 + b'\\"{"}') == {"a": "[" * 100 + '"{'}


def test_a_string_without_end_is_refused_in_time_linear_in_its_size():
    raw = b'"' + b'\\"' * 500_000
    started = time.perf_counter()
    with pytest.raises(ValueError, match="is not JSON"):
        strict_json(raw)
    assert time.perf_counter() - started < 5  # quadratic scanning took an hour


@pytest.mark.parametrize(
    "path", ["model.gguf\n", "a/b\n", "/a", "a//b", "../a", "a/./b", "-a", ".a", "a.", "a b", "é", "nul.txt"]
)
def test_a_path_that_some_file_system_reads_otherwise_is_refused(path):
    with pytest.raises(ValueError, match="path"):
        check_path(path)


def test_a_decimal_has_one_spelling():
    with pytest.raises(ValidationError):
        TypeAdapter(DecimalString).validate_python("1\n")


ANYTHING = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(2**60), 2**60)
    | strategies.floats(allow_nan=True)
    | strategies.text(),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
)


@given(ANYTHING)
def test_the_quick_writer_writes_what_the_thorough_one_does_and_refuses_what_it_refuses(value):
    try:
        expected = rfc8785.dumps(value)
    except rfc8785.CanonicalizationError:
        with pytest.raises(ValueError, match="cannot be written"):
            canonical_json(value)
    else:
        assert canonical_json(value) == expected


@pytest.mark.parametrize("value", [{1: "a"}, {"a": float("inf")}, {"a": 2**53}, "\ud800", {"\ud800": 1}, {"a": b"x"}])
def test_what_json_cannot_hold_has_no_canonical_form(value):
    with pytest.raises((ValueError, TypeError)):
        canonical_json(value)


def test_names_beyond_ascii_are_ordered_as_rfc_8785_asks():
    # By UTF-16: U+1F600 is a pair that begins below U+FB33.
    assert canonical_json({"\ufb33": 1, "\U0001f600": 2}) == '{"\U0001f600":2,"\ufb33":1}'.encode()


@pytest.mark.parametrize(
    ("said", "is_sound"),
    [
        ("0001-01-01T00:00:00Z", False),
        ("1969-12-31T23:59:59Z", False),
        ("1970-01-01T00:00:00Z", True),
        ("2200-12-31T23:59:59Z", True),
        ("2201-01-01T00:00:00Z", False),
        ("9999-12-31T23:59:59-12:00", False),
        ("0001-01-01T00:00:00+12:00", False),
    ],
)
def test_an_instant_is_of_a_year_that_every_reader_writes_with_four_digits(said, is_sound):
    if is_sound:
        assert TypeAdapter(Instant).validate_python(said).year in {1970, 2200}
        return
    with pytest.raises(ValidationError, match="from 1970 to 2200"):
        TypeAdapter(Instant).validate_python(said)
