"""The worked examples of the serving notes, with their exact values, and what the formulas refuse."""

from decimal import Decimal
from fractions import Fraction

import pytest

from gates.placement import cost
from gates.placement.cache import kv_bytes, uniform
from gates.placement.ledger import GB, Ledger, Reserve, cached_tokens, judge

SEVENTY = uniform(80, 8, 128, 2)
"""80 layers, 8 key-value heads of 128, in 16 bits."""
CARD = Reserve(80 * GB, Decimal("0.90"), activation_bytes=4 * GB)


def test_sixteen_sequences_of_8000_tokens_take_what_the_notes_say():
    took = kv_bytes(sequences=16, layers=32, tokens=8000, width=1024, element_bytes=2)
    assert took == 16_777_216_000
    assert round(took / 2**30, 1) == 15.6
    assert uniform(32, 8, 128, 2).sequence_bytes(8000) * 16 == took


def test_one_80_gb_card_holds_397_000_tokens_or_49_sequences_of_an_8b_model():
    cache = uniform(32, 8, 128, 2)
    assert cache.token_bytes() == 131_072
    ledger = Ledger(0, CARD, weights=16 * GB, sequence_bytes=cache.sequence_bytes(8000))
    assert ledger.reserve.usable_bytes == 72 * GB
    assert ledger.room == 52 * GB
    assert cached_tokens(ledger.room, cache.token_bytes()) == 396_728
    found = judge([ledger], 8000, 49)
    assert (found.fits, found.sequences, found.cached_tokens) == (True, 49, 396_728)
    assert not judge([ledger], 8000, 50).fits


@pytest.mark.parametrize(
    ("devices", "weights", "fits", "tokens", "sequences"),
    [(2, 140, False, 0, 0), (4, 140, True, 402_832, 50), (2, 70, True, 201_416, 25)],
)
def test_a_70b_model_on_80_gb_cards(devices, weights, fits, tokens, sequences):
    assert SEVENTY.token_bytes() == 327_680
    size = SEVENTY.sequence_bytes(8000, tensor=devices)
    ledger = Ledger(0, CARD, weights=weights * GB // devices, sequence_bytes=size)
    found = judge([ledger], 8000, 1)
    assert (found.fits, found.cached_tokens, found.sequences) == (fits, tokens, sequences)


def test_two_cards_fail_for_a_70b_model_and_the_number_that_decides_is_said():
    ledger = Ledger(0, CARD, weights=70 * GB, sequence_bytes=SEVENTY.sequence_bytes(8000, tensor=2))
    found = judge([ledger], 8000, 1)
    assert (found.what, found.found, found.expected, found.unit) == ("memory", 72 * GB, 74 * GB, "bytes")
    assert ledger.room == -2 * GB


def test_a_ledger_takes_everything_that_is_stated_from_the_room():
    reserve = Reserve(1000, Decimal("0.5"), activation_bytes=10, graph_bytes=20, headroom_bytes=30)
    ledger = Ledger(3, reserve, weights=100, sequence_bytes=50, adapters=40, draft=60)
    assert ledger.room == 500 - 10 - 20 - 30 - 100 - 40 - 60
    assert ledger.lines()["cache_room_bytes"] == 240
    assert ledger.sequences == 4
    assert judge([ledger], 8, 1, groups=2).sequences == 8


def test_the_fullest_stage_decides():
    wide = Ledger(0, Reserve(1000, Decimal(1)), weights=100, sequence_bytes=90)
    tight = Ledger(1, Reserve(1000, Decimal(1)), weights=500, sequence_bytes=90)
    found = judge([wide, tight], 8, 6)
    assert (found.fits, found.stage, found.sequences) == (False, 1, 5)


def test_a_stage_whose_weights_are_too_much_decides_alone():
    wide = Ledger(0, Reserve(1000, Decimal(1)), weights=100, sequence_bytes=90)
    over = Ledger(1, Reserve(1000, Decimal(1)), weights=1001, sequence_bytes=90)
    found = judge([wide, over], 8, 1)
    assert (found.fits, found.what, found.stage, found.expected) == (False, "memory", 1, 1001)


def test_a_room_of_nothing_holds_nothing():
    full = Ledger(0, Reserve(100, Decimal(1)), weights=100, sequence_bytes=1)
    assert (full.room, full.sequences, judge([full], 1, 1).fits) == (0, 0, False)
    assert judge([full], 1, 1).what == "memory"
    assert cached_tokens(-5, 2) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_bytes": 0},
        {"utilization": Decimal(0)},
        {"utilization": Decimal("1.01")},
        {"activation_bytes": -1},
        {"graph_bytes": -1},
        {"headroom_bytes": -1},
    ],
)
def test_a_reserve_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"at most 1|at least 0"):
        Reserve(**{"device_bytes": 1} | wrong)


# ------------------------------------------------------------------------------------------------- time and price


def test_a_request_of_80_tokens_takes_2138_ms():
    assert cost.request_ms(400, 22, 80) == 2138
    assert cost.request_ms(400, 22, 1) == 400


def test_a_million_tokens_cost_46_cents_at_4_an_hour_and_2400_a_second():
    found = cost.per_million(4, 2400)
    assert found == Fraction(4 * 10**6, 3600 * 2400)
    assert round(found, 2) == Fraction(46, 100)
    assert cost.per_million(Decimal("4.00"), Decimal(2400)) == found


def test_twelve_replicas_become_22_when_answers_double():
    assert cost.requests_per_second(2400, 300) == 8
    assert cost.requests_per_second(2400, 600) == 4
    assert cost.replicas(60, 8, utilization=Decimal("0.75"), spare=2) == 12
    assert cost.replicas(60, 4, utilization=Decimal("0.75"), spare=2) == 22


def test_demand_of_25_at_6_each_asks_for_three_more_than_three():
    assert cost.replicas(25, 6) == 5
    assert cost.replicas(25, 6, spare=1) - 3 == 3


def test_a_new_replica_serves_after_210_seconds():
    assert cost.warm_up_seconds([70, 95, 25, 20]) == 210


def test_speculation_yields_2_8_tokens_a_pass():
    found = cost.tokens_per_pass(Decimal("0.7"), 4)
    assert found == Fraction(27_731, 10_000)
    assert round(float(found), 1) == 2.8
    assert cost.tokens_per_pass(1, 4) == 5
    assert cost.tokens_per_pass(0, 4) == 1


def test_separate_pools_that_save_90_ms_and_transfer_for_120_lose():
    assert cost.disaggregation_gain_ms(90, 120) == -30
    assert cost.disaggregation_gain_ms(120, 90) == 30


def test_a_cache_s_transfer_is_its_bytes_by_the_bandwidth_and_what_is_fixed():
    took = cost.transfer_seconds(1_048_576_000, 10**10, setup=Decimal("0.002"), metadata=0, conversion=Decimal("0.001"))
    assert took == Fraction(1_078_576, 10_000_000)


def test_the_shorter_queue_wins_against_the_cached_prefix():
    cached = cost.wait_ms(450, 1800, Decimal("0.18"))
    assert (cached, cost.wait_ms(80, 0, Decimal("0.18"))) == (126, 80)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: cost.request_ms(1, 1, 0),
        lambda: cost.request_ms(-1, 1, 1),
        lambda: cost.per_million(4, 0),
        lambda: cost.per_million(-1, 1),
        lambda: cost.requests_per_second(1, 0),
        lambda: cost.replicas(1, 0),
        lambda: cost.replicas(1, 1, utilization=Decimal("1.1")),
        lambda: cost.replicas(1, 1, utilization=0),
        lambda: cost.replicas(1, 1, spare=-1),
        lambda: cost.warm_up_seconds([1, -1]),
        lambda: cost.tokens_per_pass(Decimal("1.1"), 1),
        lambda: cost.tokens_per_pass(0, -1),
        lambda: cost.transfer_seconds(1, 0),
        lambda: cost.disaggregation_gain_ms(-1, 0),
        lambda: cost.wait_ms(0, -1, 0),
    ],
)
def test_what_is_out_of_its_range_is_refused(ask):
    with pytest.raises(ValueError, match=r"at least|above|at most"):
        ask()
