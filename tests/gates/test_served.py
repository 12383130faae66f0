from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from gates.served import served_at
from schemas.evidence import GENESIS, Entry, Kind

START = datetime(2026, 11, 29, 14, 0, tzinfo=UTC)
OLD, NEW = ("sha256:" + digit * 64 for digit in "12")


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def change(seconds: float, split: dict[str, int], *, kind: Kind = Kind.TRAFFIC_SHIFTED, revision: int = 1) -> Entry:
    """A change that was begun half a second before it was acknowledged."""
    body = {
        "desired": [{"bundle": bundle, "weight_bp": weight} for bundle, weight in split.items()],
        "revision": str(revision),
        "applied_ms": 3.5,
        "step": 0,
        "requested_at": at(seconds - 0.5).isoformat(),
        "applied_at": at(seconds).isoformat(),
    }
    return entry(kind, body, sequence=revision)


def entry(kind: Kind, body: dict[str, object], *, sequence: int = 1) -> Entry:
    return Entry(
        sequence=sequence, id=UUID(int=sequence), project=UUID(int=0), stream="release/1", position=sequence, act="a",
        kind=kind, actor="controller", recorded_at=START, body=body, previous=GENESIS,
        entry_digest=f"sha256:{sequence:064d}", key_id="k", envelope=None,
    )  # fmt: skip


LOG = [
    entry(Kind.CREATED, {"target": "chat@demo"}, sequence=90),
    change(10, {OLD: 10_000}, revision=1),
    change(20, {OLD: 7_000, NEW: 3_000}, revision=2),
    change(30, {OLD: 10_000, NEW: 0}, revision=3, kind=Kind.TRAFFIC_RESTORED),
    change(40, {}, revision=4, kind=Kind.TRAFFIC_RESTORED),
]


def shares(seconds: float) -> dict[str, int]:
    return {arm.bundle: arm.weight_bp for arm in served_at(LOG, at(seconds)).split}


def test_nothing_served_before_the_first_change():
    before = served_at(LOG, at(9))
    assert before.split == ()
    assert (before.revision, before.since, before.entry, before.becoming) == (None, None, None, None)


def test_nothing_served_by_an_empty_log():
    assert served_at([], at(0)).split == ()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (10, {OLD: 10_000}),
        (19.999, {OLD: 10_000}),
        (20, {OLD: 7_000, NEW: 3_000}),
        (29.9, {OLD: 7_000, NEW: 3_000}),
        (30, {OLD: 10_000}),
        (3600, {}),
    ],
)
def test_the_last_acknowledged_change_is_in_force(seconds, expected):
    assert shares(seconds) == expected


def test_the_answer_names_the_entry_that_it_stands_on():
    found = served_at(LOG, at(25))
    assert (found.entry, found.revision, found.since) == (LOG[2].entry_digest, "2", at(20))
    assert [found.weight_bp(bundle) for bundle in (OLD, NEW, GENESIS)] == [7_000, 3_000, 0]


def test_the_order_of_the_entries_does_not_matter():
    assert served_at(reversed(LOG), at(25)) == served_at(LOG, at(25))


def test_a_change_that_had_begun_is_told_beside_the_split_in_force():
    during = served_at(LOG, at(19.6))
    assert {arm.bundle: arm.weight_bp for arm in during.split} == {OLD: 10_000}
    assert {arm.bundle: arm.weight_bp for arm in during.becoming or ()} == {OLD: 7_000, NEW: 3_000}
    assert served_at(LOG, at(19.4)).becoming is None


def test_of_two_changes_acknowledged_at_once_the_later_entry_counts():
    log = [change(10, {NEW: 10_000}, revision=2), change(10, {OLD: 10_000}, revision=1)]
    assert served_at(log, at(11)).weight_bp(NEW) == 10_000


def test_a_change_that_does_not_say_how_is_refused():
    with pytest.raises(ValueError, match="desired"):
        served_at([entry(Kind.TRAFFIC_SHIFTED, {"revision": "1"})], at(0))
