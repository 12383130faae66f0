"""Taking an approval back: by whom, until when, and what the release shows then."""

import pytest

from registry import approvals, verification
from registry.auth import Actor
from schemas.api import Act, Withdraw
from schemas.evidence import Kind
from schemas.problems import Conflict, NotPermitted, TransitionRefused
from schemas.release import Phase
from tests.support.phases import first_traffic, gated

WHY = "one answer is wrong after all"


@pytest.fixture
def service(scratch):
    return scratch


@pytest.fixture
def release(service, actor):
    return gated(service, actor, approval={"required": 2})


def person(actor, name, role="manager"):
    return Actor(actor.project_id, "default", name, role)


@pytest.fixture
def approve(service, actor, release):
    def approve(name):
        with service.database.transaction() as session:
            return approvals.approve(session, service, person(actor, name), release, Act(reason="read"))

    return approve


@pytest.fixture
def withdraw(service, actor, release):
    def withdraw(name, approver=None, role="manager"):
        body = Withdraw(reason=WHY, approver=approver)
        with service.database.transaction() as session:
            return approvals.withdraw(session, service, person(actor, name, role), release, body)

    return withdraw


@pytest.fixture
def entries(service, release):
    def entries():
        with service.database.transaction() as session:
            return approvals.log(session, release)

    return entries


def test_an_approved_release_waits_again_when_one_approval_is_withdrawn(
    service, actor, approve, withdraw, entries, release
):
    approve("kim")
    assert approve("jo").phase == Phase.APPROVED
    row = withdraw("kim")
    assert (row.phase, row.reason) == (Phase.GATED, WHY)
    assert row.due_at is not None  # whoever reconciles looks at it again
    with pytest.raises(TransitionRefused):
        first_traffic(service, release)
    assert approve("jo").phase == Phase.GATED  # stands already, and counts once
    assert approve("lee").phase == Phase.APPROVED
    told = [entry for entry in entries() if entry.kind == Kind.APPROVED]
    assert [entry.act for entry in told] == ["approved", "approved:2"]
    given = {entry.actor: entry.entry_digest for entry in entries() if entry.kind == Kind.APPROVAL_GRANTED}
    counted = approvals.evidence.claim_of(told[1].envelope)["body"]["approvals"]
    assert counted == sorted([given["jo"], given["lee"]])
    with service.database.transaction() as session:
        assert verification.verify(session, actor.project_id).verified


def test_whoever_withdrew_may_approve_again_and_withdraw_again(approve, withdraw, entries):
    for _ in range(2):
        approve("kim")
        withdraw("kim")
    assert [entry.act for entry in entries() if entry.kind in {Kind.APPROVAL_GRANTED, Kind.APPROVAL_WITHDRAWN}] == [
        "approval:kim",
        "withdrawal:kim",
        "approval:kim:2",
        "withdrawal:kim:2",
    ]


def test_withdrawing_twice_changes_nothing(approve, withdraw, entries):
    approve("kim")
    withdraw("kim")
    count = len(entries())
    assert withdraw("kim").phase == Phase.GATED
    assert len(entries()) == count


def test_only_an_administrator_withdraws_the_approval_of_another(approve, withdraw, entries):
    approve("kim")
    with pytest.raises(NotPermitted, match="withdrawn by kim, or by an administrator"):
        withdraw("jo", "kim")
    withdraw("root", "kim", role="admin")
    (entry,) = [entry for entry in entries() if entry.kind == Kind.APPROVAL_WITHDRAWN]
    assert entry.actor == "root"
    body = approvals.evidence.claim_of(entry.envelope)["body"]
    assert (body["approver"], body["reason"]) == ("kim", WHY)


def test_who_has_not_approved_has_nothing_to_withdraw(approve, withdraw):
    approve("kim")
    with pytest.raises(Conflict, match="jo has not approved"):
        withdraw("jo")


def test_what_has_traffic_is_rolled_back_instead(service, approve, withdraw, release):
    approve("kim")
    approve("jo")
    first_traffic(service, release)
    with pytest.raises(TransitionRefused, match="sluicegate release rollback") as refused:
        withdraw("kim")
    assert refused.value.members["change"] == Kind.TRAFFIC_SHIFTED
