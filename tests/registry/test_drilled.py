"""A drill counts for the bundle that it went back to, and for no other."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from gates.policy import Outcome
from registry import db, releases
from registry.auth import Actor
from registry.service import Service
from schemas.api import ReleaseCreate
from schemas.evidence import Kind, Replaced, SplitEntry, Traffic
from schemas.policy import Policy
from schemas.problems import NotEligible
from tests.support import factories, phases

GATES = [{"gate": "integrity"}, {"gate": "compatibility", "boot_seconds": "60", "answer_seconds": "10"}]


def standing(service: Service, release: UUID, policy: Policy) -> releases.Standing:
    with service.database.transaction() as session:
        row = session.get_one(releases.ReleaseRow, release)
        return releases.standing(session, row, policy, now=db.now(session))


def test_a_drill_counts_no_more_when_traffic_would_go_back_to_another_bundle(service: Service, actor: Actor) -> None:
    factories.created_target(service, actor)
    quick = factories.registered_policy(service, actor).digest
    suite = factories.registered_load(service, actor, gap_us=20_000)
    drilled = factories.registered_policy(
        service, actor, "drilled", gates=[*GATES, {"gate": "rollback", "suite": suite.digest}]
    )
    first, second, third = (factories.registered_bundle(service, actor, n, n.encode()).digest for n in "abc")
    one = phases.promoted(service, actor, first, quick)
    body = ReleaseCreate(target="chat@prod", bundle=second, policy=quick, reason="a test")
    with service.database.transaction() as session:
        two = releases.create(session, service, actor, body).id
    phases.let_in(service, phases.pass_gates(service, two))
    factories.record_act(service, one, Kind.REPLACED, Replaced(release=two))
    factories.record_act(service, two, Kind.PROMOTED, phases.Note(reason="a test"))
    body = ReleaseCreate(target="chat@prod", bundle=third, policy=drilled.digest, reason="a test")
    with service.database.transaction() as session:
        three = releases.create(session, service, actor, body).id
    phases.pass_gates(service, three, against=second)
    assert standing(service, three, drilled).decision.outcome is Outcome.PASSED

    at = datetime.now(UTC)
    back = [SplitEntry(bundle=first, weight_bp=10_000)]
    restored = Traffic(desired=back, revision="3", applied_ms=1.0, step=0, requested_at=at, applied_at=at)
    factories.record_act(service, two, Kind.TRAFFIC_RESTORED, restored)
    factories.record_act(service, one, Kind.REINSTATED, Replaced(release=two))
    found = standing(service, three, drilled)
    assert found.decision.outcome is Outcome.UNDECIDED
    assert found.decision.reasons == (f"rollback went back to {second}, and now traffic would go back to {first}",)
    with service.database.transaction() as session:
        row = session.get_one(releases.ReleaseRow, three)
        with pytest.raises(NotEligible, match="now traffic would go back"):
            releases.require_eligible(session, row, drilled, now=db.now(session))
