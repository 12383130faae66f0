"""What the log, the gateway and the target say of a release that serves alone."""

from uuid import UUID

from registry import evidence, history, releases
from schemas.evidence import Kind, Traffic
from tests.support.gateway import ask_many
from tests.support.world import World


def assert_recorded_as_served(here: World, live: UUID) -> None:
    """What clients see as the revision, who serves, and what the target says are those of the last entry about it."""
    change = [entry for entry in here.show(live).log if entry.kind is Kind.TRAFFIC_SHIFTED][-1]
    traffic = Traffic.model_validate(change.body)
    bundle = here.show(live).bundle
    assert set(ask_many(here.envoy.url(here.name), 10).revisions) == {traffic.revision}
    assert [(arm.bundle, arm.weight_bp) for arm in traffic.desired] == [(bundle, 10_000)]
    assert here.target().applied == traffic.desired
    with here.service.database.transaction() as session:
        row = releases.get(session, here.actor.project_id, live)
        assert [e.id for e in evidence.traffic(session, row.target_id, upto=None, limit=1)] == [change.id]


def why_settled(here: World, live: UUID) -> list[str] | None:
    """Return why the last change of a live release's traffic was made, as the target's history tells it, too."""
    change = [entry for entry in here.show(live).log if entry.kind is Kind.TRAFFIC_SHIFTED][-1]
    reasons = Traffic.model_validate(change.body).reasons
    with here.service.database.transaction() as session:
        target = releases.get(session, here.actor.project_id, live).target_id
        row = evidence.traffic(session, target, upto=None, limit=1)[0]
        assert history.wire(session, row).reason == "; ".join(reasons or ())
    return reasons
