"""The access log is read once, line by line, whatever happens to its file."""

import json
import os
from datetime import UTC, datetime, timedelta

import pytest

from workers.traffic.access_log import AccessLog, parse_line

LINE = {
    "ts": "1795976141.892915",
    "rid": "7d4b",
    "method": "POST",
    "path": "/v1/chat/completions",
    "target": "chat@prod",
    "rev": "7",
    "route": "split",
    "code": 200,
    "details": "via_upstream",
    "flags": "-",
    "assigned": "chat@prod/bbbbbbbbbbbb/r2",
    "served": "127.0.0.1:8002",
    "attempts": 1,
    "type": "text/event-stream; charset=utf-8",
    "in": 10,
    "out": 90,
    "headers_us": 900,
    "ttft_us": 120_500,
    "duration_ms": 900,
}


def line(**changes) -> bytes:
    return json.dumps(LINE | changes).encode() + b"\n"


@pytest.fixture
def log(tmp_path):
    return AccessLog(tmp_path / "access.jsonl")


def append(log, data: bytes) -> None:
    with log.path.open("ab") as file:
        file.write(data)


def codes(batch) -> list[int]:
    return [record.code for record in batch.records]


def rotate(log, number: int, *, reopen: bool = True) -> None:
    log.path.rename(log.path.with_name(f"{log.path.name}.{number}"))
    if reopen:
        log.path.touch()


def drain(log, since):
    """Read to the end and return codes, garbled lines, whether anything was lost, and the last position."""
    found, garbled, lost = [], 0, False
    while True:
        batch = log.read(since)
        found += codes(batch)
        garbled += batch.garbled
        lost = lost or batch.is_lost
        since = batch.until
        if not batch.is_more:
            return found, garbled, lost, since


def test_a_line_is_a_record():
    record = parse_line(line())
    assert record.at == datetime(2026, 11, 29, 18, 15, 41, 892_915, tzinfo=UTC)
    assert (record.target, record.revision, record.route) == ("chat@prod", 7, "split")
    assert (record.ttft_ms, record.duration_ms, record.is_event_stream) == (120.5, 900.0, True)
    assert record.flags == frozenset()


def test_what_envoy_leaves_out_is_none():
    fields = {"target": None, "rev": None, "assigned": None, "served": None, "ttft_us": None, "code": 0, "type": None}
    record = parse_line(line(**fields, flags="UPE,DC"))
    assert (record.target, record.revision, record.assigned, record.ttft_ms) == (None, None, None, None)
    assert record.flags == {"UPE", "DC"}
    assert not record.is_event_stream


@pytest.mark.parametrize(
    "garbled",
    [
        b"",
        b"[]\n",
        b"{\n",
        b"\xff\xfe\n",
        line(ts="yesterday"),
        line(code="200"),
        line(code=True),
        line(ttft_us=-1),
        line(rev="seven"),
        line(target=3),
        line(duration_ms=1e300),
        json.dumps({key: value for key, value in LINE.items() if key != "served"}).encode(),
    ],
)
def test_what_is_no_record_is_refused(garbled):
    with pytest.raises(ValueError, match=r".+"):
        parse_line(garbled)


def test_each_line_is_read_once(log):
    assert drain(log, "") == ([], 0, False, "")
    append(log, line(code=200) + line(code=201))
    found, _, _, since = drain(log, "")
    assert found == [200, 201]
    assert drain(log, since)[0] == []
    append(log, line(code=202))
    assert drain(log, since)[0] == [202]


def test_a_line_that_is_still_being_written_waits_for_its_end(log):
    whole = line(code=201)
    append(log, line(code=200) + whole[:30])
    found, garbled, _, since = drain(log, "")
    assert (found, garbled) == ([200], 0)
    assert drain(log, since)[:2] == ([], 0)
    append(log, whole[30:])
    assert drain(log, since)[:2] == ([201], 0)


def test_the_end_is_after_the_last_whole_line(log):
    assert log.end() == ""
    append(log, line(code=200) + line(code=201)[:20])
    since = log.end()
    append(log, line(code=201)[20:] + line(code=202))
    assert drain(log, since)[:2] == ([201, 202], 0)


def test_garbled_lines_are_counted_and_the_rest_is_read(log):
    append(log, line(code=200) + b"no json\n" + line(code=201) + b"\n")
    assert drain(log, "")[:3] == ([200, 201], 2, False)


def test_a_rotated_file_is_read_to_its_end_before_the_new_one(log):
    append(log, line(code=200))
    since = drain(log, "")[3]
    append(log, line(code=201))
    rotate(log, 1)
    append(log, line(code=202))
    assert drain(log, since)[:3] == ([201, 202], 0, False)


def test_two_rotations_between_two_looks_lose_nothing(log):
    append(log, line(code=200))
    since = drain(log, "")[3]
    for number in (9, 10):
        append(log, line(code=200 + number))
        rotate(log, number)
    append(log, line(code=299))
    assert drain(log, since)[:3] == ([209, 210, 299], 0, False)


def test_envoy_may_still_write_to_the_renamed_file(log):
    append(log, line(code=200))
    rotate(log, 1, reopen=False)
    found, _, lost, since = drain(log, "")
    assert (found, lost) == ([], False)  # the start of the present file, and there is none
    old = AccessLog(log.path.with_name("access.jsonl.1"))
    since = old.end()
    append(old, line(code=201))
    found, _, lost, since = drain(log, since)
    assert (found, lost) == ([201], False)
    append(old, line(code=202))
    log.path.touch()
    append(log, line(code=203))
    assert drain(log, since)[:3] == ([202, 203], 0, False)


def test_a_rotated_file_that_ends_inside_a_line_counts_it_as_garbled(log):
    append(log, line(code=200))
    since = log.end()
    append(log, line(code=201)[:20])
    rotate(log, 1)
    append(log, line(code=202))
    assert drain(log, since)[:3] == ([202], 1, False)


def test_a_cut_file_is_reported_as_lost_lines(log):
    append(log, line(code=200) + line(code=201))
    since = log.end()
    os.truncate(log.path, 0)
    append(log, line(code=202))
    assert drain(log, since)[:3] == ([202], 0, True)


def test_a_file_that_is_gone_is_reported_as_lost_lines(log):
    append(log, line(code=200))
    since = log.end()
    log.path.rename(log.path.with_name("elsewhere"))
    assert drain(log, since)[:3] == ([], 0, True)
    append(log, line(code=201))
    assert drain(log, since)[:3] == ([201], 0, True)


def test_a_large_batch_comes_in_pieces(log):
    append(log, b"".join(line(code=200 + each) for each in range(50)))
    batch = log.read("", max_bytes=2_000)
    assert 0 < len(batch.records) < 50
    assert batch.is_more
    rest = drain(log, batch.until)
    assert codes(batch) + rest[0] == [200 + each for each in range(50)]


def test_a_line_without_end_is_skipped_as_garbled(log):
    append(log, b"x" * 200_000 + b"\n" + line(code=200))
    found, garbled, lost = [], 0, False
    since = ""
    for _ in range(10):
        batch = log.read(since, max_bytes=70_000)
        found, garbled, since = found + codes(batch), garbled + batch.garbled, batch.until
    assert (found, lost) == ([200], False)
    assert garbled >= 1


def test_a_read_costs_the_new_bytes_only(log, monkeypatch):
    append(log, line() * 20_000)
    since = log.end()
    append(log, line(code=201))
    batch = log.read(since)
    assert codes(batch) == [201]
    inode, _, offset = batch.until.partition(":")
    assert int(offset) == log.path.stat().st_size
    assert int(inode) == log.path.stat().st_ino


@pytest.mark.parametrize("second", [-100, 0, 1, 2_999, 3_000, 5_000, 8_999, 20_000])
def test_a_lost_position_is_found_again_by_time(log, second):
    began = datetime(2026, 11, 3, 14, tzinfo=UTC)
    for number in range(3):
        seconds = range(number * 3_000, (number + 1) * 3_000)
        stamps = [f"{(began + timedelta(seconds=each)).timestamp():.6f}" for each in seconds]
        append(log, b"".join(line(ts=ts, code=200 + each % 100) for each, ts in zip(seconds, stamps, strict=True)))
        if number < 2:
            rotate(log, number)
    since = log.position_at(began + timedelta(seconds=second, milliseconds=900))
    found, garbled, lost, _ = drain(log, since)
    expected = range(max(0, min(second, 9_000)), 9_000)
    assert (garbled, lost) == (0, False)
    assert found[len(found) - len(expected) :] == [200 + each % 100 for each in expected]
    assert len(found) - len(expected) < 400  # a few more than asked for, not the whole log


def test_an_empty_log_has_no_lost_position(log):
    assert log.position_at(datetime(2026, 11, 3, tzinfo=UTC)) == ""
    log.path.touch()
    assert drain(log, log.position_at(datetime(2026, 11, 3, tzinfo=UTC)))[:3] == ([], 0, False)


@pytest.mark.parametrize("position", ["x", "1", "1:", ":1", "1:-1", "1:2:3"])
def test_what_is_no_position_is_refused(log, position):
    with pytest.raises(ValueError, match="position"):
        log.read(position)
