"""How each line of the access log counts."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gates.tally import Fate, Tally, fate
from tests.support.canary import CANDIDATE, CUT, GOOD, PROBE, SPLIT, T0, records, tally


def test_a_client_that_leaves_counts_apart():
    left = replace(GOOD, flags=frozenset({"DC"}))
    early = replace(left, code=0, ttft_ms=None, duration_ms=50.0)
    seen = tally((GOOD, 10), (left, 5), (early, 5)).arms["candidate"]
    assert (seen.n, seen.errors, seen.fates[Fate.CLIENT_LEFT]) == (10, 0, 10)
    assert seen.over(400) == (0, 15)  # those who left after the first byte have a TTFT


def test_requests_that_generate_nothing_dilute_nothing():
    listing = replace(GOOD, method="GET", is_event_stream=False, ttft_ms=1.0)
    whole = replace(GOOD, is_event_stream=False, ttft_ms=2_000.0)
    seen = tally((listing, 100), (whole, 3)).arms["candidate"]
    assert seen.n == 3
    assert seen.over(400) == (0, 0)


def test_what_ended_before_the_step_began_is_not_the_steps():
    older = replace(CUT, revision=6, at=T0 - timedelta(seconds=5))
    assert tally((older, 4)).arms["candidate"].errors == 0


def test_other_targets_and_probes_only_show_that_the_log_is_alive():
    found = tally((replace(CUT, target="other@prod"), 9), (PROBE, 9), (replace(GOOD, route="unknown", target=None), 9))
    assert found.arms["candidate"].n == 0
    assert found.assigned.total() == 0
    assert found.newest_at == GOOD.ended_at


def test_a_pinned_request_counts_for_its_arm_but_not_for_the_split():
    found = tally((replace(CUT, route="pin", assigned=CANDIDATE.cluster), 3))
    assert found.arms["candidate"].errors == 3
    assert found.assigned.total() == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Fate.GOOD),
        ({"attempts": 0}, Fate.GOOD),
        ({"served": None}, Fate.GOOD),
        ({"code": 500}, Fate.SERVER_ERROR),
        ({"code": 503}, Fate.SERVER_ERROR),
        ({"code": 499}, Fate.REFUSED),
        ({"code": 400}, Fate.REFUSED),
        ({"code": 399}, Fate.GOOD),
        ({"code": 0}, Fate.CLIENT_LEFT),
        ({"flags": frozenset({"DC"})}, Fate.CLIENT_LEFT),
        ({"flags": frozenset({"DPE"})}, Fate.CLIENT_LEFT),
        ({"flags": frozenset({"RL"})}, Fate.GOOD),
        ({"flags": frozenset({"UF"})}, Fate.CUT),
        ({"attempts": 2}, Fate.RETRIED),
        ({"served": "127.0.0.1:8001"}, Fate.OTHER_ARM),
        ({"served": "127.0.0.1:8003"}, Fate.OTHER_ARM),
    ],
)
def test_each_request_has_one_fate(changes, expected):
    assert fate(replace(GOOD, **changes), CANDIDATE.address) is expected


@pytest.mark.parametrize("flag", ["NR", "IH", "RL", "UAEX"])
def test_what_the_gateway_itself_refused_is_not_cut(flag):
    assert fate(replace(GOOD, code=403, flags=frozenset({flag})), CANDIDATE.address) is Fate.REFUSED


def test_what_took_as_long_as_it_may_is_not_over():
    just = replace(GOOD, ttft_ms=400.0)
    left = replace(GOOD, flags=frozenset({"DC"}), code=0, ttft_ms=None, duration_ms=400.0)
    assert tally((just, 3), (left, 3)).arms["candidate"].over(400) == (0, 3)


@pytest.mark.parametrize(
    ("changes", "counted"),
    [({}, (1, 1)), ({"revision": 8}, (0, 1)), ({"revision": 6}, (0, 1)), ({"method": "PUT"}, (1, 0))],
)
def test_a_request_counts_for_the_split_of_its_revision_and_for_its_arm_if_it_generates(changes, counted):
    found = tally((replace(GOOD, **changes), 1))
    assert (found.assigned["candidate"], found.arms["candidate"].n) == counted


def test_a_request_that_ended_as_the_step_began_is_the_steps():
    just = replace(GOOD, at=T0 - timedelta(milliseconds=900))
    assert just.ended_at == T0
    assert tally((just, 1)).arms["candidate"].n == 1


def test_lines_come_in_any_order_and_only_one_as_young_as_the_probe_answers_it():
    found = Tally(SPLIT, T0)
    found.expect(T0 + timedelta(seconds=50))
    for seconds in (49, 40):
        found.add([replace(PROBE, at=T0 + timedelta(seconds=seconds))])
    assert found.newest_at == T0 + timedelta(seconds=49)
    assert found.unanswered_at == T0 + timedelta(seconds=50)
    found.add([replace(PROBE, at=T0 + timedelta(seconds=50))])
    assert found.unanswered_at is None


def test_what_may_be_unwritten_is_the_most_that_was_open_within_the_last_two_seconds():
    found = Tally(SPLIT, T0)
    assert (found.open("candidate"), found.unwritten("candidate")) == (None, 0)
    for seconds, count in ((0, 9), (1, 7), (2.5, 3)):
        found.see(T0 + timedelta(seconds=seconds), {"candidate": count})
    assert (found.open("candidate"), found.unwritten("candidate")) == (3, 7)
    assert (found.open("stable"), found.unwritten("stable")) == (0, 0)
    found.miss(T0 + timedelta(seconds=3), "gone")
    assert (found.open("candidate"), found.unwritten("candidate")) == (None, 0)


def test_the_order_of_reasons_for_one_request_is_engine_before_client():
    assert fate(replace(GOOD, flags=frozenset({"UPE", "DC"})), CANDIDATE.address) is Fate.CUT
    assert fate(replace(GOOD, code=404, flags=frozenset({"NR"})), CANDIDATE.address) is Fate.REFUSED


@given(st.lists(records, max_size=40), st.integers(0, 40))
def test_batches_add_up_in_any_cut(found, cut):
    whole, halves = Tally(SPLIT, T0), Tally(SPLIT, T0)
    whole.add(found)
    halves.add(found[:cut])
    halves.add(found[cut:])
    assert whole == halves


@given(st.lists(records, max_size=40), st.integers(0, 40), st.integers(0, 3), st.booleans())
def test_a_tally_can_be_taken_back_to_a_mark(found, cut, garbled, lost):
    first, whole = Tally(SPLIT, T0), Tally(SPLIT, T0)
    for each in (first, whole):
        each.expect(T0)
        each.add(found[:cut])
    mark = whole.mark()
    whole.add(found[cut:], garbled=garbled, lost=lost)
    whole.expect(T0 + timedelta(seconds=9))
    back = whole.at(mark)
    assert back == first
    first.add(found[cut:], garbled=garbled, lost=lost)
    back.add(found[cut:], garbled=garbled, lost=lost)
    first.expect(T0 + timedelta(seconds=9))
    back.expect(T0 + timedelta(seconds=9))
    assert whole == first == back
