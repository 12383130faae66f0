from datetime import UTC, datetime
from uuid import UUID

import pytest

from schemas.evidence import Entry, Kind
from schemas.stories import STORIES, TONES, job_state, served_in, tell


def entry(kind: Kind, **body: object) -> Entry:
    return Entry(
        sequence=1,
        id=UUID(int=1),
        stream="release/1",
        position=1,
        act="act",
        kind=kind,
        project=UUID(int=2),
        actor="maria",
        recorded_at=datetime(2026, 11, 29, tzinfo=UTC),
        body=body,
        previous="sha256:" + "0" * 64,
        entry_digest="sha256:" + "1" * 64,
        key_id="k",
        envelope=None,
    )


def test_a_replica_that_is_not_wanted_any_more_has_ended_and_a_measurement_was_cancelled():
    assert [job_state("serve", "cancelled"), job_state("serve", "done")] == ["ended", "done"]
    assert job_state("evaluate", "cancelled") == "cancelled"


def test_every_kind_has_a_story():
    assert set(STORIES) | {Kind.GATE_RECORDED} == set(Kind)
    assert {tone for tone, _ in STORIES.values()} <= {*TONES.values(), "plain"}


@pytest.mark.parametrize(
    ("verdict", "tone"), [("passed", "good"), ("failed", "bad"), ("errored", "warn"), ("inconclusive", "warn")]
)
def test_a_gate_tells_its_verdict_and_why(verdict, tone):
    told = tell(entry(Kind.GATE_RECORDED, gate="load", verdict=verdict, summary="because"))
    assert told == (tone, f"load {verdict}: because")


def test_traffic_tells_who_serves_and_when_nobody_does():
    arms = [{"bundle": "sha256:" + "a" * 64, "weight_bp": 250}, {"bundle": "sha256:" + "b" * 64, "weight_bp": 9750}]
    shifted = tell(entry(Kind.TRAFFIC_SHIFTED, desired=arms, applied_ms=12.34))
    assert shifted == ("plain", "2.5 % aaaaaaaaaaaa + 97.5 % bbbbbbbbbbbb, acknowledged in 12.3 ms")
    again = tell(entry(Kind.TRAFFIC_SHIFTED, desired=arms, applied_ms=12.34, reasons=["its soak is over"]))
    assert again[1] == f"{shifted[1]}: its soak is over"
    named = tell(entry(Kind.TRAFFIC_SHIFTED, desired=arms, applied_ms=1), {arms[0]["bundle"]: "gemma-first"})
    assert named[1].startswith("2.5 % gemma-first (aaaaaaaa) + 97.5 % bbbbbbbbbbbb, ")
    assert served_in([entry(Kind.PROMOTED), entry(Kind.TRAFFIC_SHIFTED, desired=arms)]) == {
        str(arm["bundle"]) for arm in arms
    }
    restored = tell(entry(Kind.TRAFFIC_RESTORED, desired=[], cause="requested", reasons=["maria: wrong language"]))
    assert restored == ("bad", "nothing is served (503) (requested): maria: wrong language")
