"""Ids and counts in few words. Pure."""

from collections.abc import Iterable

ID_LENGTHS = (13, 18, 23, 36)
"""Characters of an id that may be shown alone: whole groups, so that none ends in a dash."""


def apart(ids: Iterable[object]) -> int:
    """Return how many characters of ids are to be shown so that no two different ones look alike.

    Ids begin with the time at which they were made: 8 characters are the same for 65 s, 13 for a millisecond.

    Source: RFC 9562, section 5.7 (UUID version 7).
    """
    whole = {str(one) for one in ids}
    return next(length for length in ID_LENGTHS if len({one[:length] for one in whole}) == len(whole))


def many(count: int, noun: str) -> str:
    """Return a count of things in words, such as `1 file`, `2 files`, `2 entries`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun of ours, such as policies or releases."""
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
