from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from gates.answers import Outcome as StreamOutcome
from gates.served import served_at
from schemas.evidence import GENESIS, Entry, Kind
from schemas.release import GateStatus, Phase, ReleaseDetail
from schemas.result import GateResult, Measurement, Verdict
from workers.demo.report import Outcome, Rollback, differences, instants, rollback_of
from workers.demo.story import BUSY_RATIO, RATES_PER_SECOND, rate_for
from workers.demo.traffic import Account, StreamEnd

START = datetime(2026, 11, 29, 14, 0, tzinfo=UTC)
OLD, NEW = ("sha256:" + digit * 64 for digit in "12")


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def entry(kind: Kind, body: dict[str, Any], *, sequence: int = 1) -> Entry:
    return Entry(
        sequence=sequence, id=UUID(int=sequence), project=UUID(int=0), stream="release/1", position=sequence, act="a",
        kind=kind, actor="controller", recorded_at=START, body=body, previous=GENESIS,
        entry_digest=f"sha256:{sequence:064d}", key_id="k", envelope=None,
    )  # fmt: skip


def change(seconds: float, split: dict[str, int], *, kind: Kind = Kind.TRAFFIC_SHIFTED, **more: Any) -> Entry:
    desired = [{"bundle": bundle, "weight_bp": weight} for bundle, weight in split.items()]
    instants = {"requested_at": at(seconds - 0.1).isoformat(), "applied_at": at(seconds).isoformat()}
    body = {"desired": desired, "revision": "1", "applied_ms": 3.5, "step": 0, **instants, **more}
    return entry(kind, body, sequence=round(seconds * 10) + 1)


RESTORE = [
    change(200, {OLD: 7_000, NEW: 3_000}),
    entry(Kind.STOP_CONDITION_FIRED, {"step": 0, "reasons": ["slow"], "measurements": []}),
    change(220, {OLD: 10_000}, kind=Kind.TRAFFIC_RESTORED, breach_at=at(219.5).isoformat()),
    entry(Kind.RESTORE_OBSERVED, {"observed": 3, "seconds": 0.75}),
]


def release(name: str, phase: Phase, log: list[Entry] = (), *, golden: str = "passed") -> ReleaseDetail:
    gate = GateStatus(gate="golden", verdict=golden, summary="s", entry=None, duration_ms=1)
    return ReleaseDetail(
        id=UUID(int=1), target="chat@demo", bundle=OLD, bundle_name=name, policy=NEW, phase=phase, phase_since=START,
        is_paused=False, held=[], waits=None, reason="why", created_at=START, created_by="engineer", predecessor=None,
        step=0, weight_bp=0, version=f"{phase}:1", gates=[gate], quarantined=[], doing=None, log=list(log),
    )  # fmt: skip


def end(seconds: float = 0, *, status: int = 200) -> StreamEnd:
    outcome = StreamOutcome.OK if status == 200 else StreamOutcome.HTTP_5XX
    return StreamEnd(at(seconds), "single", status, outcome, "", 100.0, 200.0, 1, "stable")


def good() -> Outcome:
    return Outcome(
        releases=[
            release("first", Phase.SUPERSEDED, [change(10, {OLD: 10_000})]),
            release("longer", Phase.PROMOTED, [change(100, {OLD: 7_000, NEW: 3_000}), change(120, {NEW: 10_000})]),
            release("broken", Phase.REJECTED, golden="failed"),
            release("slow", Phase.ROLLED_BACK, RESTORE),
        ],
        rollback=Rollback(0.5, 0.75),
        streams=Account(sent=4, ends=[end(50), end(111), end(211), end(230)]),
        entries=100,
        verified=True,
        engine="llamacpp 1",
        model_sha256="a" * 64,
    )


def test_nothing_differs_when_everything_came_out_as_it_should():
    assert differences(good()) == []


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("phase", [Phase.CANARY, Phase.PROMOTED, Phase.REJECTED, Phase.ROLLED_BACK])
def test_each_phase_must_be_the_one_expected(place, phase):
    outcome = good()
    expected = outcome.releases[place].phase
    outcome.releases[place] = outcome.releases[place].model_copy(update={"phase": phase})
    assert (differences(outcome) == []) == (phase is expected)


def test_fewer_releases_than_four_differ():
    outcome = good()
    outcome.releases = outcome.releases[:2]
    assert "superseded, promoted, not superseded, promoted, rejected, rolled_back" in differences(outcome)[0]
    outcome.releases = []
    assert "none" in differences(outcome)[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verified": False}, "evidence does not verify"),
        ({"streams": Account()}, "no stream was sent"),
        ({"streams": Account(sent=2, ends=[end(), end(status=503)])}, "1 streams broke: 1 × http_5xx"),
        ({"streams": Account(sent=2, ends=[end()])}, "1 streams have not ended"),
        ({"rollback": Rollback(0.5, None)}, "no request was seen on the restored bundle"),
    ],
)
def test_what_differs_is_said(change, said):
    outcome = good()
    for name, value in change.items():
        setattr(outcome, name, value)
    assert len(differences(outcome)) == 1
    assert said in differences(outcome)[0]


def test_a_rejection_must_be_the_golden_gates_and_a_rollback_a_stop_conditions():
    outcome = good()
    outcome.releases[2] = release("broken", Phase.REJECTED, golden="passed")
    assert "not by its golden gate" in differences(outcome)[0]
    outcome = good()
    outcome.releases[3] = release("slow", Phase.ROLLED_BACK, [RESTORE[0], *RESTORE[2:]])
    assert "by no stop condition" in differences(outcome)[0]


def test_times_count_from_the_breach():
    assert rollback_of(RESTORE) == Rollback(0.5, 0.75)
    assert rollback_of(RESTORE[:1]) == Rollback(None, None)
    assert rollback_of([change(10, {OLD: 10_000}, kind=Kind.TRAFFIC_RESTORED)]) == Rollback(None, None)


def test_the_instants_are_those_of_requests_amid_three_spans():
    outcome = good()
    found = instants(outcome.releases, outcome.streams)
    assert found == [at(50), at(111), at(211)]
    log = [entry for one in outcome.releases for entry in one.log]
    shares = [[(arm.bundle, arm.weight_bp) for arm in served_at(log, instant).split] for instant in found]
    assert shares == [[(OLD, 10_000)], [(OLD, 7_000), (NEW, 3_000)], [(OLD, 7_000), (NEW, 3_000)]]


def test_there_are_no_instants_without_four_releases():
    assert instants(good().releases[:3], good().streams) == []


def test_the_document_has_exactly_the_promised_members():
    outcome = good()
    outcome.served = [served_at(outcome.releases[0].log, at(50))]
    document = outcome.document()
    assert (document["is_as_it_should_be"], document["differences"], document["busy"]) == (
        not differences(outcome),
        differences(outcome),
        None,
    )
    assert {name: set(value) if isinstance(value, dict) else None for name, value in document.items()} == {
        **dict.fromkeys(("is_as_it_should_be", "differences", "busy", "releases")),
        "rollback": {"breach_to_first_change_seconds", "breach_to_restored_seconds"},
        "streams": {"total", "broken"},
        "evidence": {"entries", "verified"},
        "served_at": None,
        "engine": None,
        "model_sha256": None,
    }
    assert document["releases"][2] == {"name": "broken", "bundle": OLD, "phase": "rejected", "reason": "why"}
    assert document["streams"] == {"total": 4, "broken": 0}
    split = [{"bundle": OLD, "weight_bp": 10_000}]
    digest = outcome.releases[0].log[0].entry_digest
    assert document["served_at"] == [{"at": "2026-11-29T14:00:50.000000Z", "split": split, "evidence": digest}]


def load_result(p50_ms: float | None) -> GateResult:
    measured = Measurement(name="e2e", unit="ms", statistic="p50", value=p50_ms, n=64, infinite=0)
    return GateResult(
        gate="load", definition=OLD, verdict=Verdict.PASSED, summary="s", measurements=[measured], findings=[],
        duration_ms=1, source="run",
    )  # fmt: skip


def test_the_rate_of_live_traffic_follows_from_the_load_gate():
    low, high = RATES_PER_SECOND
    assert rate_for(load_result(200)) == pytest.approx(BUSY_RATIO / 0.2)
    assert (rate_for(load_result(1)), rate_for(load_result(60_000))) == (high, low)
    assert rate_for(load_result(None)) is None
    assert rate_for(load_result(200).model_copy(update={"measurements": []})) is None
