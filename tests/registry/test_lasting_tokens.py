"""Who is let in for a while lets nobody in for longer, and does nothing once that is over."""

from datetime import timedelta

import pytest

from registry import auth, db, projects, tokens
from registry.tables import ProjectRow
from schemas.api import Act, LimitsSet
from schemas.common import format_instant
from schemas.problems import Unauthenticated
from tests.support.together import together


@pytest.fixture
def guest(api):
    """Let an administrator in for a day, and return when that ends and their client."""
    with api.service.database.transaction() as session:
        project = session.get_one(ProjectRow, api.actor("admin").project_id)
        ends = db.now(session) + timedelta(days=1)
        made = auth.create_token(
            session, api.service, project, "guest", "admin", by="root", now=db.now(session), expires_at=ends
        )
    with api.client(made.secret) as client:
        yield ends, client


@pytest.mark.parametrize("later", [None, timedelta(microseconds=1), timedelta(days=365)])
def test_a_token_that_ends_makes_none_that_lasts_longer(guest, later):
    ends, client = guest
    asked = {} if later is None else {"expires_at": format_instant(ends + later)}
    for role in ("admin", "viewer"):
        answer = client.post("/v1/tokens", json={"name": f"late-{role}", "role": role, **asked})
        assert (answer.status_code, answer.json()["expires_at"]) == (403, format_instant(ends))
        assert "ends at" in answer.json()["detail"]
    names = [one["name"] for one in client.get("/v1/tokens").json()["items"]]
    assert not [name for name in names if name.startswith("late-")]


def test_a_token_that_ends_makes_others_that_end_with_it_or_before(guest):
    ends, client = guest
    for name, before in (("with-it", timedelta()), ("before", timedelta(hours=1))):
        asked = {"name": name, "role": "viewer", "expires_at": format_instant(ends - before)}
        assert client.post("/v1/tokens", json=asked).status_code == 201


def test_a_token_without_an_end_makes_any(api):
    assert api.clients["admin"].post("/v1/tokens", json={"name": "for-ever", "role": "viewer"}).status_code == 201


def test_limits_set_by_a_token_that_is_being_revoked_are_set_or_refused(api):
    """Both acts hold the project first, so that neither waits for the other."""
    admin = api.actor("admin")
    for round_ in range(8):
        with api.service.database.transaction() as session:
            project = session.get_one(ProjectRow, admin.project_id)
            now = db.now(session)
            made = auth.create_token(session, api.service, project, f"kim-{round_}", "admin", by="root", now=now)
            second = auth.authenticate(session, made.secret)

        def limit(by=second, most=round_ + 1):
            with api.service.database.transaction() as session:
                projects.set_limits(session, api.service, by, "default", LimitsSet(jobs=most))

        def revoke(token=made.id):
            with api.service.database.transaction() as session:
                tokens.revoke(session, api.service, admin, token, Act(reason="left"))

        faults = [one for one in together(limit, revoke) if isinstance(one, BaseException)]
        assert [type(one) for one in faults] in ([], [Unauthenticated]), faults
