"""A signature that takes its time: nobody waits for it, and no act is lost or done twice."""

import threading
import time
from dataclasses import replace

import pytest
from sqlalchemy import text

from registry import acts, approvals, blobs, holding, releases, targets, verification
from registry.auth import Actor
from registry.keys import Signer
from schemas.api import Act, Revoke, Withdraw
from schemas.common import sha256_digest
from schemas.evidence import Kind
from schemas.problems import TransitionRefused, Unavailable
from schemas.release import Phase
from tests.support.api import Api
from tests.support.phases import gated, in_canary
from tests.support.together import together

SLOW_SECONDS = 0.5
WHY = Act(reason="looked at")


class Remote(Signer):
    """A key that somebody else holds: it answers after a while, and may have something done meanwhile."""

    is_quick = False

    def __init__(self, signer, seconds=SLOW_SECONDS):
        super().__init__(signer._current.key)
        self.seconds, self.signed, self.asked = seconds, 0, threading.Event()
        self.meanwhile = None

    def sign(self, payload):
        self.asked.set()
        if self.meanwhile is not None:
            self.meanwhile()
        time.sleep(self.seconds)
        self.signed += 1
        return super().sign(payload)


@pytest.fixture
def remote(service):
    return replace(service, signer=Remote(service.signer))


def person(actor, name):
    return Actor(actor.project_id, "default", name, "manager")


def kinds(service, release):
    with service.database.transaction() as session:
        return [entry.kind for entry in releases.log(session, release)]


def act(service, actor, release, what, **options):
    return acts.perform(service, lambda session: what(session, service, actor, release, WHY, **options))


@pytest.fixture
def sound(service, actor):
    yield
    with service.database.transaction() as session:
        told = verification.verify(session, actor.project_id)
    assert told.verified, told.faults


def test_nobody_waits_for_a_signature_that_somebody_else_makes(service, remote, actor, sound):
    release = in_canary(service, actor)
    slow = threading.Thread(target=act, args=(remote, actor, release, releases.pause))
    slow.start()
    assert remote.signer.asked.wait(10)
    began = time.monotonic()
    with service.database.transaction() as session:
        targets.lock(session, releases.get(session, actor.project_id, release).target_id)
    act(service, person(actor, "kim"), release, releases.rollback)
    took = time.monotonic() - began
    assert slow.is_alive()
    assert took < SLOW_SECONDS
    slow.join()
    assert kinds(service, release)[-2:] == [Kind.ROLLBACK_REQUESTED, Kind.PAUSED]
    assert remote.signer.signed == 1  # what was said did not change, and was signed once


def test_what_others_made_impossible_meanwhile_is_refused_and_leaves_nothing(service, remote, actor, sound):
    release = gated(service, actor, approval={"required": 1})
    remote.signer.meanwhile = lambda: act(service, actor, release, releases.reject)
    with pytest.raises(TransitionRefused):
        act(remote, person(actor, "kim"), release, approvals.approve)
    assert Kind.APPROVAL_GRANTED not in kinds(service, release)


def test_many_acts_at_once_are_each_done_once(service, remote, actor, sound):
    release = gated(service, actor, approval={"required": 4})
    remote.signer.seconds = 0.05
    people = [person(actor, name) for name in ("kim", "jo", "lee", "sam")]
    outcomes = together(*(lambda who=who: act(remote, who, release, approvals.approve) for who in people))
    assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
    row = acts.perform(remote, lambda session: approvals.look(session, remote, release))
    assert row.phase == Phase.APPROVED
    written = kinds(service, release)
    assert written.count(Kind.APPROVAL_GRANTED) == 4
    assert written.count(Kind.APPROVED) == 1


def test_what_was_granted_before_a_result_was_revoked_is_not_approved_after_it(service, remote, actor, sound):
    release = gated(service, actor, approval={"required": 1})
    remote.signer.seconds = 0.0
    act(remote, person(actor, "kim"), release, approvals.approve)
    with service.database.transaction() as session:
        result = next(entry for entry in releases.log(session, release) if entry.kind == Kind.GATE_RECORDED)
        releases.revoke(session, service, actor, Revoke(entry=result.entry_digest, reason="it was throttled"))
    row = acts.perform(remote, lambda session: approvals.look(session, remote, release))
    assert row.phase == Phase.GATED
    assert Kind.APPROVED not in kinds(service, release)


def test_an_act_of_several_entries_is_whole_or_not_at_all(service, remote, actor, sound):
    release = gated(service, actor)
    remote.signer.seconds = 0.0
    before = len(kinds(service, release))
    seen = []
    remote.signer.meanwhile = lambda: seen.append(len(kinds(service, release)))
    row = acts.perform(remote, lambda session: approvals.look(session, remote, release))
    assert row.phase == Phase.APPROVED
    assert seen == [before, before]  # neither entry was there while the other was signed
    assert kinds(service, release)[-2:] == [Kind.APPROVAL_NOT_REQUIRED, Kind.APPROVED]


def test_an_act_that_others_keep_changing_gives_up(service, remote, actor):
    remote.signer.seconds = 0.0
    release = gated(service, actor)

    def restless(session):
        row = releases.get(session, actor.project_id, release)
        told = releases.Note(reason=f"try {remote.signer.signed}")
        return releases.act(session, remote, row, "pause", "kim", Kind.PAUSED, told)

    with pytest.raises(Unavailable, match="others kept changing"):
        acts.perform(remote, restless)
    assert remote.signer.signed == acts.TRIES
    assert Kind.PAUSED not in kinds(service, release)


def test_over_http_a_slow_signature_ends_in_an_approved_release(service, remote, sound):
    remote.signer.seconds = 0.01
    with Api(remote) as api:
        release = gated(service, api.actor("engineer"), approval={"required": 1})
        before = remote.signer.signed
        answer = api.clients["manager"].post(f"/v1/releases/{release}/approvals", json={"reason": "read"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["phase"] == "approved"
    assert remote.signer.signed == before + 2


def test_nobody_waits_for_a_blob_of_which_a_signature_is_still_to_come(service, remote, actor, sound):
    raw = b"weights"
    digest = sha256_digest(raw)
    held = []

    def look() -> None:
        with service.database.transaction() as session:
            lock = text("SELECT pg_try_advisory_xact_lock(hashtextextended(:blob, 0))")
            held.append(session.scalar(lock, {"blob": f"blob/{digest}"}))

    remote.signer.meanwhile = look
    blobs.store(remote, actor.project_id, digest, [raw], limit=100)
    assert held == [True]


def test_what_may_be_done_over_and_over_ends_before_a_log_is_too_long_to_be_read(service, actor, sound, monkeypatch):
    monkeypatch.setattr(holding, "MOST_TO_REPEAT", 12)
    monkeypatch.setattr(holding, "MOST_TO_RESUME", 14)
    waiting, moving = gated(service, actor, approval={"required": 1}), in_canary(service, actor, "other@prod")
    kim = person(actor, "kim")

    def approve_over_and_over():
        no = Withdraw(reason="no")
        for _ in range(12):
            act(service, kim, waiting, approvals.approve)
            acts.perform(service, lambda session: approvals.withdraw(session, service, kim, waiting, no))

    def pause_over_and_over():
        for _ in range(12):
            act(service, kim, moving, releases.pause)
            act(service, kim, moving, releases.resume)

    ends = (waiting, approve_over_and_over, releases.reject), (moving, pause_over_and_over, releases.rollback)
    for release, repeat, end in ends:
        with pytest.raises(TransitionRefused, match=str(release)) as refused:
            repeat()
        assert refused.value.members["limit"] == 12
        # It was refused before it began: nothing is left half done, and what ends the release has room.
        assert 12 <= len(kinds(service, release)) <= 13
        act(service, kim, release, end)
    assert kinds(service, waiting)[-1] == Kind.REFUSED
    assert kinds(service, moving)[-1] == Kind.ROLLBACK_REQUESTED


def test_a_release_that_holds_again_and_again_is_resumed_until_its_log_is_long(service, actor, sound, monkeypatch):
    monkeypatch.setattr(holding, "MOST_TO_RESUME", 3)
    release = in_canary(service, actor)
    act(service, actor, release, releases.pause)
    with pytest.raises(TransitionRefused, match="take its traffic back"):
        act(service, actor, release, releases.resume)
    act(service, actor, release, releases.rollback)
