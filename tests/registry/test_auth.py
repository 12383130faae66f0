import base64
import json
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import text

from registry import auth, evidence, projects
from registry.api.app import ROUTERS
from registry.auth import PERMISSIONS, Actor
from registry.tables import TokenRow
from schemas.common import format_instant
from schemas.problems import Conflict, InvalidDocument, NotPermitted, Unauthenticated
from tests.support.api import ROLES

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.fixture
def project(session, shared_service):
    return projects.create(session, shared_service, "default", by="test")


def actor(role, project="default"):
    return Actor(project_id=UUID(int=0), project=project, name="maria", role=role)


@pytest.mark.parametrize("role", ROLES)
def test_a_token_tells_who_holds_it(session, shared_service, project, role):
    made = auth.create_token(session, shared_service, project, "maria", role, by="test", now=NOW)
    assert auth.authenticate(session, made.secret, NOW) == Actor(project.id, "default", "maria", role, token=made.id)


def test_a_secret_is_long_random_and_nowhere_in_the_database(session, shared_service, project):
    made = auth.create_token(session, shared_service, project, "maria", "admin", by="test", now=NOW)
    assert auth.is_secret(made.secret)
    assert made.secret.startswith("slg_")
    assert len({auth.new_secret() for _ in range(100)}) == 100
    for table in ("tokens", "entries"):
        rows = session.execute(text(f"SELECT * FROM {table}")).all()
        assert rows
        assert made.secret not in repr(rows)
        assert made.secret.encode() not in b"".join(value for row in rows for value in row if isinstance(value, bytes))


def test_making_a_token_is_evidence(session, shared_service, project):
    made = auth.create_token(session, shared_service, project, "maria", "admin", by="root", now=NOW)
    about, entry = evidence.read(session, f"project/{project.id}")
    assert (entry.kind, entry.actor) == ("token_created", "root")
    bound = auth.bound(session.get_one(TokenRow, made.id))
    assert evidence.wire(entry).body == {
        "token": str(made.id),
        "role": "admin",
        "name": "maria",
        "created_at": format_instant(NOW),
        "bound": bound,
    }
    # Neither the secret, nor what is stored of it, is told.
    said = entry.envelope + about.envelope + base64.b64decode(json.loads(entry.envelope)["payload"])
    assert all(told.encode() not in said for told in (made.secret, auth.fingerprint(made.secret)[7:]))


@pytest.mark.parametrize("secret", ["", "slg_", "slg_" + "A" * 43, "Bearer x", "\0", "ä" * 100])
def test_an_unknown_secret_is_refused(session, shared_service, project, secret):
    auth.create_token(session, shared_service, project, "maria", "admin", by="test", now=NOW)
    with pytest.raises(Unauthenticated):
        auth.authenticate(session, secret, NOW)


def test_a_token_counts_until_it_ends(session, shared_service, project):
    ends = NOW + timedelta(hours=1)
    made = auth.create_token(session, shared_service, project, "maria", "admin", by="test", now=NOW, expires_at=ends)
    assert auth.authenticate(session, made.secret, ends - timedelta(microseconds=1))
    with pytest.raises(Unauthenticated):
        auth.authenticate(session, made.secret, ends)


def test_a_token_cannot_end_before_it_begins(session, shared_service, project):
    with pytest.raises(InvalidDocument) as refused:
        auth.create_token(session, shared_service, project, "maria", "admin", by="test", now=NOW, expires_at=NOW)
    assert refused.value.members["errors"][0]["pointer"] == "/expires_at"


def test_a_revoked_token_is_refused_in_the_same_words_as_an_unknown_one(session, shared_service, project):
    made = auth.create_token(session, shared_service, project, "maria", "admin", by="test", now=NOW)
    token = auth.find_token(session, made.secret)
    token.revoked_at = NOW
    session.flush()
    with pytest.raises(Unauthenticated) as revoked:
        auth.authenticate(session, made.secret, NOW)
    with pytest.raises(Unauthenticated) as unknown:
        auth.authenticate(session, auth.new_secret(), NOW)
    assert revoked.value.detail == unknown.value.detail


def test_two_tokens_cannot_share_a_secret(session, shared_service, project):
    made = auth.create_token(session, shared_service, project, "maria", "admin", by="test", now=NOW)
    with pytest.raises(Conflict):
        auth.create_token(session, shared_service, project, "other", "runner", by="test", now=NOW, secret=made.secret)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("action", PERMISSIONS)
def test_an_action_is_for_the_roles_of_the_table_and_the_refusal_names_them(action, role):
    if role in PERMISSIONS[action]:
        auth.require(actor(role), action)
        return
    with pytest.raises(NotPermitted) as refused:
        auth.require(actor(role), action)
    assert refused.value.members["allowed"] == sorted(PERMISSIONS[action])
    assert all(allowed in refused.value.detail for allowed in PERMISSIONS[action])


def test_an_action_that_is_not_in_the_table_is_for_nobody():
    with pytest.raises(NotPermitted, match="is for nobody"):
        auth.require(actor("admin"), "launch_rockets")


def test_what_lets_a_candidate_through_is_not_for_whoever_proposes_it():
    lets_through = {action for action, roles in PERMISSIONS.items() if not roles & {"engineer", "ci"}}
    assert {
        "approve",
        "promote",
        "resume",
        "register_policy",
        "set_reference",
        "create_target",
        "lift_quarantine",
        "protect_alias",
    } <= lets_through
    assert all("engineer" in PERMISSIONS[action] for action in ("reject", "pause", "rollback", "quarantine"))


def allowed(role):
    return {action for action, roles in PERMISSIONS.items() if role in roles}


def test_a_runner_only_fetches_and_runs_jobs():
    assert allowed("runner") == {"fetch", "run_jobs"}


def test_who_only_looks_changes_nothing_and_a_pipeline_touches_no_live_traffic():
    assert allowed("viewer") == {"read", "fetch", "checkpoint"}
    assert allowed("auditor") - allowed("viewer") == {"list_tokens", "revoke_evidence"}
    assert allowed("engineer") - allowed("ci") == {"pause", "quarantine", "rollback"}
    assert allowed("ci") < allowed("engineer") < allowed("manager") < allowed("admin")


def routes(router):
    """The routes of a router, also those of routers inside it."""
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        yield from [route] if inner is None else routes(inner)


def test_every_permission_is_asked_for_by_a_route():
    asked = {one.action for router in ROUTERS for route in routes(router) for one in route.given}
    assert asked - {None} == set(PERMISSIONS)
