"""Two small texts compared: bounded, printable, and nothing where one is no text."""

import pytest

from gates.text_difference import MOST_BYTES, MOST_LINES, is_compared, lines
from schemas.comparison import FileChange


def test_one_change_in_a_long_line_is_told_without_what_follows_it():
    rest = "{% for one in messages %}{{ one.content }} and more of it {% endfor %}" * 40
    found = lines(f"{{{{ a }}}}{rest}".encode(), f"{{{{ bos }}}}{rest}".encode())
    assert [line[0] for line in found] == ["@", "-", "+", " ", " "]


def test_what_is_long_is_counted_and_what_is_no_text_is_not_told():
    found = lines(b"a\n" * 900, b"b\n" * 900)
    assert (len(found), found[-1]) == (MOST_LINES + 1, "@ and 1722 more lines")
    assert lines(b"\xff\xfe", b"a") == []
    assert lines(b"", b"a\n" * 3000) == []


@pytest.mark.parametrize(
    ("role", "size", "digit", "expected"),
    [
        ("template", 10, "b", True),
        ("config", MOST_BYTES, "b", True),
        ("config", MOST_BYTES + 1, "b", False),
        ("weights", 10, "b", False),
        ("template", 10, "a", False),
    ],
)
def test_small_texts_that_are_in_both_are_compared(role, size, digit, expected):
    was = {"size": 10, "sha256": "sha256:" + "a" * 64, "role": role}
    now = was | {"size": size, "sha256": "sha256:" + digit * 64}
    assert (
        is_compared(FileChange.model_validate({"path": "x", "change": "changed", "was": was, "now": now})) is expected
    )
    assert not is_compared(FileChange.model_validate({"path": "x", "change": "added", "was": None, "now": now}))
