"""Spans of time as people say them."""

from decimal import Decimal

import pytest

from schemas.short import span, took


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (Decimal(0), "0 s"),
        (Decimal("0.5"), "0.5 s"),
        (Decimal("30.0"), "30 s"),
        (60, "1 min"),
        (Decimal("90.5"), "1 min 30.5 s"),
        (240, "4 min"),
        (5400, "1 h 30 min"),
        (86_400, "1 day"),
        (Decimal(86_460), "1 day 1 min"),
        (604_800.0, "7 days"),
    ],
)
def test_a_span_is_said_exactly_and_in_units_that_people_use(seconds, said):
    assert span(seconds) == said


@pytest.mark.parametrize(
    ("milliseconds", "said"),
    [(0, "0 ms"), (10.4, "10 ms"), (999, "999 ms"), (15_514, "15.5 s"), (60_000, "1 min"), (125_400, "2 min 5 s")],
)
def test_how_long_something_took_is_said_as_precisely_as_people_read_it(milliseconds, said):
    assert took(milliseconds) == said
