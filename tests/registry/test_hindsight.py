"""A database's clock that was set back leaves leases and turns far ahead; nothing stands still until they have come."""

from datetime import timedelta
from pathlib import Path

import pytest

from gates.router import CANDIDATE
from registry import db, hindsight, releases
from registry.service import Service
from registry.tables import JobRow
from schemas.release import Phase
from schemas.runner import JobState
from tests.support.streams import Script, stream_engine
from tests.support.world import QUICK_CANARY, World, world

HOUR = timedelta(hours=1)


@pytest.fixture
def here(service: Service, actor, tmp_path: Path):
    with world(service, actor, tmp_path) as made:
        yield made


def ahead(here: World, release, **fields):
    """What stands beside a release's log, as it is left when the clock is set back by an hour."""
    with here.service.database.transaction() as session:
        row = releases.get(session, here.actor.project_id, release)
        for name in fields:
            setattr(row, name, db.now(session) + HOUR)


def job_ahead(here: World, job, name):
    with here.service.database.transaction() as session:
        setattr(session.get_one(JobRow, job), name, db.now(session) + HOUR)


def test_a_release_whose_turn_lies_an_hour_ahead_is_looked_at_now(here: World) -> None:
    release = here.release(here.bundle("one", b"1"), here.policy())
    ahead(here, release, due_at=True)
    assert here.control.due() == []
    here.control.revive()
    assert here.control.due() == [release]


def test_a_lease_that_ends_in_an_hour_ends_within_one_lease(here: World) -> None:
    release = here.release(here.bundle("one", b"1"), here.policy())
    held = here.control.claim(release)
    assert held is not None
    ahead(here, release, lease_until=True)
    here.control.revive()
    with here.service.database.transaction() as session:
        left = releases.get(session, here.actor.project_id, release).lease_until - db.now(session)
    # Whoever holds it may believe in the whole of it, and no more.
    assert 0 < left.total_seconds() <= here.service.settings.release_lease_seconds
    here.control.renew(held)


def test_jobs_wait_no_longer_than_their_lease_and_a_turn_that_is_near_stays(here: World) -> None:
    here.release(here.bundle("one", b"1"), here.policy())
    here.turn()
    with here.service.database.transaction() as session:
        job = session.query(JobRow).one().id
    job_ahead(here, job, "due_at")
    here.turn()
    claim = here.claim()
    assert claim.job == job
    job_ahead(here, job, "lease_until")
    here.turn()
    with here.service.database.transaction() as session:
        row = session.get_one(JobRow, job)
        assert row.state == JobState.CLAIMED
        left = row.lease_until - db.now(session)
        assert 0 < left.total_seconds() <= here.service.settings.lease_seconds
        row.lease_until = before = db.now(session) + timedelta(seconds=here.service.settings.lease_seconds + 30)
        session.flush()
        hindsight.bring_near(session, here.service.settings, db.now(session))
        session.refresh(row)
        assert row.lease_until == before


def test_a_step_that_began_in_the_future_is_stopped_all_the_same_and_does_not_pass(here: World) -> None:
    policy = here.policy(canary=QUICK_CANARY | {"soak_seconds": "60"})
    with stream_engine("one") as one, stream_engine("two") as two:
        here.live(here.bundle("one", b"1" * 10), here.policy("first"), one)
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        ahead(here, second, step_since=True, phase_since=True)
        with here.traffic() as answers:
            here.until(lambda: sum(each.statuses.total() for each in answers) > 200)
            for _ in range(3):
                here.turn()
            shown = here.show(second)
            assert (shown.phase, shown.step) == (Phase.CANARY, 0)
            two.script = Script(fault="503")
            shown = here.until_phase(second, Phase.ROLLED_BACK, seconds=15)
        assert "error_ratio" in str(shown.reason)
        split = here.envoy.gateway.desired(here.name)
        assert split is not None
        assert split.weight_bp(CANDIDATE) == 0
