"""A rollback is asked for one time that a release is live, whoever asks, and whatever else is done at that moment."""

from datetime import UTC, datetime
from uuid import uuid4

import pytest

from registry import history, releases, rollbacks, targets
from registry.client import Client
from registry.tables import ReleaseRow
from registry.web.notices import notices
from schemas.api import Act
from schemas.evidence import Kind, Replaced, Traffic
from schemas.problems import Problem
from tests.support.factories import canary_body, record_act
from tests.support.phases import in_canary
from tests.support.together import together

ROUNDS = 4


@pytest.fixture
def author(api):
    return api.actor("engineer")


def went_and_came_back(api, release, act=""):
    """Another release takes its place, and is taken back."""
    for kind in (Kind.REPLACED, Kind.REINSTATED):
        record_act(api.service, release, kind, Replaced(release=uuid4()), f"{kind}{act}")


def live(api, author, target="chat@prod"):
    """A release whose soak lasts as long as the test: it may be taken back to nothing."""
    release = in_canary(api.service, author, target, canary=canary_body(soak_seconds="3600"))
    record_act(api.service, release, Kind.PROMOTED, releases.Note(reason="a test"))
    return release


def asked(api, release):
    with api.service.database.transaction() as session:
        row = session.get_one(ReleaseRow, release)
        counting = rollbacks.asked(session, row)
        log = releases.log(session, release)
        assert [entry.id for entry in rollbacks.requests(log)][:1] == ([] if counting is None else [counting.id])
        return len(rollbacks.requests(log)), len([one for one in log if one.kind == Kind.ROLLBACK_REQUESTED])


def test_what_was_asked_is_over_when_a_release_comes_back_and_may_be_asked_anew(api, author, sound):
    release = live(api, author)
    with Client(api.url, api.tokens["engineer"]) as kim:
        kim.releases.roll_back(release, "wrong language")
        kim.releases.roll_back(release, "again")
        assert asked(api, release) == (1, 1)
        for number in range(1, 3):
            went_and_came_back(api, release, f"{number}")
            assert asked(api, release) == (0, number)
            kim.releases.roll_back(release, "wrong language still", to_nothing=True)  # nothing was before it
            kim.releases.roll_back(release, "again")
            assert asked(api, release) == (1, number + 1)


def test_a_request_is_before_a_replacement_or_is_refused_and_never_counts_after_a_return(api, author, sound):
    for round_ in range(ROUNDS):
        release = live(api, author, f"chat{round_}@prod")

        def ask(r=release):
            with Client(api.url, api.tokens["engineer"]) as kim:
                return kim.releases.roll_back(r, "wrong language")

        acts = [ask, lambda r=release: record_act(api.service, r, Kind.REPLACED, Replaced(release=uuid4()))]
        said, _ = together(*acts) if round_ % 2 else reversed(together(*reversed(acts)))
        record_act(api.service, release, Kind.REINSTATED, Replaced(release=uuid4()))
        if isinstance(said, Problem):
            assert said.kind == "transition-refused"
        assert asked(api, release)[0] == 0


def test_neither_page_nor_history_tells_a_request_that_is_over(api, author):
    release = live(api, author)
    with api.service.database.transaction() as session:
        releases.rollback(session, api.service, author, release, Act(reason="wrong language"))

    def told():
        with api.service.database.transaction() as session:
            shown = releases.detail(session, session.get_one(ReleaseRow, release))
        return [one.title for one in notices(shown, required=0)]

    assert "engineer asked to take it back." in told()
    went_and_came_back(api, release)
    assert "engineer asked to take it back." not in told()
    at = datetime.now(UTC)
    moved = {"desired": [], "revision": "9", "applied_ms": 1.0, "requested_at": at, "applied_at": at}
    taken = Traffic(**moved, cause="stop_condition", reasons=["too slow"])
    record_act(api.service, release, Kind.TRAFFIC_RESTORED, taken)
    with api.service.database.transaction() as session:
        row = targets.get(session, api.project_id, "chat@prod")
        last = history.wire(session, history.browse(session, row, after=None, limit=1)[0])
    assert (last.kind, last.by == last.actor, last.by == "engineer") == ("traffic_restored", True, False)
