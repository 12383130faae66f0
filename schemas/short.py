"""Ids, counts and spans of time in few words. Pure."""

from collections.abc import Iterable
from decimal import Decimal

ID_LENGTHS = (13, 18, 23, 36)
"""Characters of an id that may be shown alone: whole groups, so that none ends in a dash."""


def apart(ids: Iterable[object]) -> int:
    """Return how many characters of ids are to be shown so that no two different ones look alike.

    Ids begin with the time at which they were made: 8 characters are the same for 65 s, 13 for a millisecond.

    Source: RFC 9562, section 5.7 (UUID version 7).
    """
    whole = {str(one) for one in ids}
    return next(length for length in ID_LENGTHS if len({one[:length] for one in whole}) == len(whole))


def many(count: int, noun: str, one: str = "", several: str = "") -> str:
    """Return a count of things in words, such as `1 file`, `2 files`, `2 entries`, and the verb that follows.

    Args:
        count: of the things.
        noun: one of them.
        one: form of the verb after a single thing, such as `is`.
        several: form of the verb after none or several, such as `are`.
    """
    things = f"1 {noun}" if count == 1 else f"{count} {plural(noun)}"
    verb = agreeing(count, one, several)
    return f"{things} {verb}" if verb else things


def agreeing(count: int, one: str, several: str) -> str:
    """Return the form of a verb that goes with a count, such as `is` with 1 and `are` with any other."""
    return one if count == 1 else several


def plural(noun: str) -> str:
    """Return the plural of a noun of ours, such as policies or releases."""
    is_after_consonant = noun.endswith("y") and noun[-2] not in "aeiou"
    return f"{noun[:-1]}ies" if is_after_consonant else f"{noun}s"


def took(milliseconds: float) -> str:
    """Return how long something took, as precisely as people read it: `10 ms`, `15.5 s`, `2 min 5 s`."""
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds / 1000:.1f} s" if milliseconds < 60_000 else span(round(milliseconds / 1000))


def span(seconds: Decimal | float) -> str:
    """Return a span of time as people say it, exactly: `30 s`, `4 min`, `1 h 30 min`, `1 day`."""
    whole = Decimal(str(seconds))
    rest = whole % 60
    minutes = int(whole // 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [many(days, "day")] if days else []
    parts += [f"{count} {unit}" for count, unit in ((hours, "h"), (minutes, "min")) if count]
    return " ".join([*parts, *([f"{rest.normalize():f} s"] if rest or not parts else [])])
