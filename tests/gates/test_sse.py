import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gates.sse import Event, EventParser, NotUtf8

STREAM = (
    '\ufeff: comment\ndata: {"a": "ü€😀"}\r\n\r\nevent: error\rdata:x\rdata: y\r\rid: 1\nretry: 5\n\n'
    'data\n\nerror: {"code":500}\n\ndata: [DONE]\n\n'
).encode()
EVENTS = [
    Event("", '{"a": "ü€😀"}'),
    Event("error", "x\ny"),
    Event("", "", "1"),
    Event("error", '{"code":500}', "1"),
    Event("", "[DONE]", "1"),
]


def parse(chunks):
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)], parser


def test_a_whole_stream_gives_its_events():
    events, parser = parse([STREAM])
    assert events == EVENTS
    assert parser.comments == 1
    assert parser.is_between_events


@pytest.mark.parametrize("place", range(len(STREAM) + 1))
def test_every_cut_in_two_gives_the_same_events(place):
    assert parse([STREAM[:place], STREAM[place:]])[0] == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_cuts_give_the_same_events(places):
    marks = [0, *sorted(places), len(STREAM)]
    assert parse([STREAM[a:b] for a, b in itertools.pairwise(marks)])[0] == EVENTS


def test_b22_single_bytes_give_the_same_events():
    assert parse([bytes([byte]) for byte in STREAM])[0] == EVENTS


def test_an_event_that_the_end_interrupts_is_not_dispatched():
    events, parser = parse([b"data: a\n\ndata: b\n"])
    assert events == [Event("", "a")]
    assert not parser.is_between_events


def test_an_event_without_data_is_dropped():
    assert parse([b"event: ping\n\ndata: a\n\n"])[0] == [Event("", "a")]


def test_a_line_that_is_not_utf8_is_refused():
    with pytest.raises(NotUtf8):
        parse([b"data: \xc3\n\n"])


def test_the_last_id_counts_once_its_block_is_whole_with_data_or_without():
    parser = EventParser()
    assert parser.feed(b"id: a\ndata: 1\n\n: nothing new\nid: b\n") == [Event("", "1", "a")]
    assert parser.last_id == "a"
    assert parser.feed(b"\nid: c\ndata: 2") == []
    assert parser.last_id == "b"
    assert parser.feed(b"\n\nid: d\0\ndata: 3\n\n") == [Event("", "2", "c"), Event("", "3", "c")]
