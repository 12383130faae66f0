"""Who holds a token, on what it may act, and how it ends."""

from datetime import timedelta

import pytest

from registry import (
    approvals,
    auth,
    db,
    deletion,
    documents,
    erasure,
    evidence,
    projects,
    releases,
    runs,
    targets,
    tokens,
)
from registry.auth import Actor
from schemas.api import Act, Erase, LimitsSet, RecordCreate, ReleaseCreate, RunCreate, TargetCreate
from schemas.common import format_instant
from schemas.policy import Policy
from schemas.problems import Conflict, InvalidDocument, NotFound, NotPermitted, TransitionRefused, Unauthenticated
from schemas.release import Phase
from tests.support.factories import (
    canary_body,
    created_target,
    policy_body,
    registered_bundle,
    registered_golden,
    registered_policy,
    started_release,
)
from tests.support.phases import gated

WHY = Act(reason="a test")


@pytest.fixture
def service(scratch):
    return scratch


def made(service, name="maria", role="manager", project="default", **options):
    with service.database.transaction() as session:
        row, _ = projects.ensure(session, service, project, by="test")
        return auth.create_token(session, service, row, name, role, by="root", now=db.now(session), **options)


def holder(service, secret):
    with service.database.transaction() as session:
        return auth.authenticate(session, secret, db.now(session))


def revoked(service, by, token, why=WHY):
    with service.database.transaction() as session:
        return tokens.revoke(session, service, by, token, why)


@pytest.fixture
def admin(service):
    return holder(service, made(service, "root", "admin").secret)


def test_a_name_is_one_person_s_as_long_as_the_token_counts(service, admin):
    first = made(service)
    with pytest.raises(Conflict) as refused:
        made(service, role="engineer")
    assert refused.value.members["holder"] == str(first.id)
    made(service, project="team-b")
    revoked(service, admin, first.id)
    second = made(service, role="engineer")
    assert holder(service, second.secret).name == "maria"


@pytest.mark.parametrize("name", ["bootstrap", "controller", "policy", "runner", "service"])
def test_nobody_acts_under_a_name_of_the_service_itself(service, name):
    for role in ("manager", "admin", "engineer", "ci"):
        with pytest.raises(InvalidDocument) as refused:
            made(service, name, role)
        assert refused.value.members["errors"][0]["pointer"] == "/name"
    # What the bootstrap makes for the installation's runners is called after their role.
    assert made(service, "runner", "runner").name == "runner"


def test_the_name_of_a_token_that_has_ended_is_free_again(service):
    with service.database.transaction() as session:
        row, _ = projects.ensure(session, service, "default", by="test")
        now = db.now(session)
        options = {"by": "root", "expires_at": now - timedelta(hours=1)}
        auth.create_token(session, service, row, "maria", "manager", now=now - timedelta(hours=2), **options)
    assert made(service).name == "maria"


def test_a_revoked_token_opens_nothing_and_its_end_is_evidence(service, admin):
    token = made(service)
    row = revoked(service, admin, token.id, Act(reason="was in a log"))
    with pytest.raises(Unauthenticated):
        holder(service, token.secret)
    assert revoked(service, admin, token.id).revoked_at == row.revoked_at
    with service.database.transaction() as session:
        entries = evidence.read(session, f"project/{row.project_id}")
    since = format_instant(row.revoked_at)
    ended = [evidence.wire(entry) for entry in entries if entry.kind == "token_revoked"]
    assert [(entry.actor, entry.body) for entry in ended] == [
        ("root", {"token": str(token.id), "name": "maria", "reason": "was in a log", "revoked_at": since})
    ]


def test_no_act_is_done_after_the_end_of_its_token_although_it_was_let_in_before(service, admin, actor):
    """Each looks again in its own transaction: so it is before the token's end in the log, or is not."""
    bundle = registered_bundle(service, actor).digest
    second = holder(service, made(service, "kim", "admin").secret)
    manager = holder(service, made(service).secret)
    for one in (second, manager):
        revoked(service, admin, one.token)
    target = TargetCreate(name="chat@prod", runner_class="cpu", gateway="local")
    policy = Policy.model_validate(policy_body()).canonical()
    late = [
        lambda session: deletion.delete_bundle(session, service, manager, bundle, WHY),
        lambda session: erasure.erase(session, service, manager, Erase(entry=bundle, reason="x")),
        lambda session: targets.create(session, service, manager, target),
        lambda session: documents.register(session, service, manager, "policy", policy),
        lambda session: projects.set_limits(session, service, second, "default", LimitsSet(bytes=1)),
    ]
    for act in late:
        with pytest.raises(Unauthenticated), service.database.transaction() as session:
            act(session)


def test_the_last_administrator_of_a_project_stays(service, admin):
    with pytest.raises(Conflict, match="last administrator"):
        revoked(service, admin, admin.token)
    second = made(service, "kim", "admin")
    assert revoked(service, admin, admin.token).revoked_at is not None
    with pytest.raises(Unauthenticated):
        revoked(service, admin, second.id)


def test_tokens_of_another_project_are_only_the_installation_s_business(service, admin):
    theirs, ours = made(service, "bo", "admin", "team-b"), made(service)
    with pytest.raises(NotFound):
        revoked(service, holder(service, theirs.secret), ours.id)
    made(service, "ann", "admin", "team-b")
    assert revoked(service, admin, theirs.id).revoked_at is not None


@pytest.mark.parametrize("role", sorted(set(auth.PERMISSIONS["fetch"]) - set(auth.LIMITABLE)))
def test_only_who_acts_on_targets_can_be_limited_to_some(service, role):
    with pytest.raises(InvalidDocument) as refused:
        made(service, role=role, targets=["chat@prod"])
    assert refused.value.members["errors"][0]["pointer"] == "/targets"


# -------------------------------------------------------------------------------- limited to targets


@pytest.fixture
def limited(service):
    """A manager for chat@staging only."""
    return holder(service, made(service, "stage", "manager", targets=["chat@staging", "chat@staging"]).secret)


def test_a_limited_token_says_what_it_is_for(service, limited):
    assert limited.targets == {"chat@staging"}
    with service.database.transaction() as session:
        (entry, *_) = reversed(evidence.read(session, f"project/{limited.project_id}"))
    assert evidence.wire(entry).body["targets"] == ["chat@staging"]


ACTS = ("approve", "reject", "pause", "resume", "promote", "rollback")


@pytest.mark.parametrize("act", ACTS)
def test_a_limited_token_acts_on_no_other_target_s_release(service, actor, limited, act):
    release = started_release(service, actor, "chat@prod")
    with service.database.transaction() as session, pytest.raises(NotPermitted) as refused:
        getattr(approvals if act == "approve" else releases, act)(session, service, limited, release, WHY)
    assert refused.value.members == {"target": "chat@prod", "targets": ["chat@staging"]}


def test_a_limited_token_makes_nothing_for_another_target(service, actor, limited):
    created_target(service, actor, "chat@prod")
    bundle, policy, suite = (
        registered_bundle(service, actor).digest,
        registered_policy(service, actor).digest,
        registered_golden(service, actor).digest,
    )
    release = ReleaseCreate(target="chat@prod", bundle=bundle, policy=policy)
    run = RunCreate(bundle=bundle, policy=policy, runner_class="cpu", target="chat@prod")
    record = RecordCreate(suite=suite, bundle=bundle, target="chat@prod", reason="read")
    target = TargetCreate(name="chat@canary", runner_class="cpu", gateway="local")
    for refused in (
        lambda session: releases.create(session, service, limited, release),
        lambda session: runs.create(session, service, limited, run),
        lambda session: runs.record(session, service, limited, record),
        lambda session: targets.create(session, service, limited, target),
    ):
        with service.database.transaction() as session, pytest.raises(NotPermitted, match="is for chat@staging"):
            refused(session)


def test_a_limited_token_makes_no_rules_for_all_targets_but_works_on_its_own(service, limited):
    raw = Policy.model_validate(policy_body()).canonical()
    with service.database.transaction() as session, pytest.raises(NotPermitted, match="concerns every target"):
        documents.register(session, service, limited, "policy", raw)
    created_target(service, limited, "chat@staging")
    maria = Actor(limited.project_id, "default", "maria", "manager")
    body = ReleaseCreate(
        target="chat@staging",
        bundle=registered_bundle(service, limited).digest,
        policy=registered_policy(service, maria).digest,
    )
    with service.database.transaction() as session:
        release = releases.create(session, service, limited, body)
        assert releases.reject(session, service, limited, release.id, WHY).phase == Phase.REJECTED


# -------------------------------------------------------------------------------- separation of duties


@pytest.mark.parametrize("role", ["manager", "admin"])
def test_the_author_of_a_release_does_not_approve_it(service, actor, role):
    release = gated(service, actor, approval={"required": 1})
    author = Actor(actor.project_id, "default", actor.name, role)
    with service.database.transaction() as session, pytest.raises(NotPermitted) as refused:
        approvals.approve(session, service, author, release, WHY)
    assert refused.value.members["author"] == actor.name
    kim = Actor(actor.project_id, "default", "kim", "manager")
    with service.database.transaction() as session:
        assert approvals.approve(session, service, kim, release, WHY).phase == Phase.APPROVED


@pytest.mark.parametrize(("required", "problem"), [(0, TransitionRefused), (1, NotPermitted)])
def test_the_author_promotes_only_where_the_policy_asks_for_no_approval(service, actor, required, problem):
    """Without traffic there is nothing to promote yet, which is another refusal than that of the person."""
    release = gated(service, actor, approval={"required": required}, canary=canary_body())
    with service.database.transaction() as session, pytest.raises(problem):
        releases.promote(session, service, actor, release, WHY)
    kim = Actor(actor.project_id, "default", "kim", "manager")
    with service.database.transaction() as session, pytest.raises(TransitionRefused):
        releases.promote(session, service, kim, release, WHY)
