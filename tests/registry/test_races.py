"""Two at once, on connections of their own: one effect, the other is told by whom, and nothing is half done."""

import pytest
from sqlalchemy import select

from registry import approvals, releases
from registry.client import Client
from registry.tables import EntryRow
from schemas.api import ReleaseCreate, TokenCreate
from schemas.evidence import Kind
from schemas.problems import Conflict, Problem, StaleEdit, TransitionRefused, Unauthenticated
from schemas.release import Release
from tests.support.factories import created_target, policy_body, registered_bundle, registered_policy
from tests.support.phases import first_traffic, gated, in_canary
from tests.support.together import together

ROUNDS = 4
"""Each race is run so often, with the other one first when it happens so."""


@pytest.fixture
def author(api):
    """Who makes the releases: an engineer, and so nobody who lets them through."""
    return api.actor("engineer")


def token(api, name, role="manager"):
    with Client(api.url, api.tokens["admin"]) as client:
        return client.tokens.create(TokenCreate(name=name, role=role))


def acting(api, secret, act):
    """A call of `act` with a client of its own."""

    def call():
        with Client(api.url, secret) as client:
            return act(client)

    return call


def log(api, release):
    with api.service.database.transaction() as session:
        return [(entry.kind, entry.actor) for entry in releases.log(session, release)]


def entries(api, kind):
    with api.service.database.transaction() as session:
        return session.scalars(select(EntryRow).where(EntryRow.kind == kind).order_by(EntryRow.sequence)).all()


def test_of_two_managers_who_promote_one_does_and_the_other_hears_who(api, author, sound):
    kim, jo = token(api, "kim"), token(api, "jo")
    for round_ in range(ROUNDS):
        release = in_canary(api.service, author, f"chat{round_}@prod")
        outcomes = together(
            *(acting(api, who.secret, lambda c, r=release: c.releases.promote(r, "hotfix")) for who in (kim, jo))
        )
        assert sorted(type(one).__name__ for one in outcomes) == ["Conflict", "Release"]
        refused = next(one for one in outcomes if isinstance(one, Conflict))
        winner = ("kim", "jo")[[isinstance(one, Release) for one in outcomes].index(True)]
        assert (refused.members["holder"], refused.members["change"]) == (winner, "promotion_requested")
        assert log(api, release).count((Kind.PROMOTION_REQUESTED, winner)) == 1
        assert len([kind for kind, _ in log(api, release) if kind == Kind.PROMOTION_REQUESTED]) == 1


def test_asking_for_a_promotion_again_changes_nothing(api, author, sound):
    kim = token(api, "kim")
    release = in_canary(api.service, author)
    with Client(api.url, kim.secret) as client:
        first = client.releases.promote(release, "hotfix")
        assert client.releases.promote(release, "hotfix").version == first.version


def test_a_rollback_wins_over_a_promotion_whoever_comes_first(api, author, sound):
    kim, jo = token(api, "kim"), token(api, "jo")
    for round_ in range(ROUNDS):
        release = in_canary(api.service, author, f"chat{round_}@prod")
        acts = [
            acting(api, kim.secret, lambda c, r=release: c.releases.promote(r, "hotfix")),
            acting(api, jo.secret, lambda c, r=release: c.releases.roll_back(r, "wrong language")),
        ]
        promoted, rolled_back = together(*acts) if round_ % 2 else reversed(together(*reversed(acts)))
        assert isinstance(rolled_back, Release)
        kinds = [kind for kind, _ in log(api, release)]
        assert kinds.count(Kind.ROLLBACK_REQUESTED) == 1
        if isinstance(promoted, Release):
            assert kinds.index(Kind.PROMOTION_REQUESTED) < kinds.index(Kind.ROLLBACK_REQUESTED)
        else:
            assert isinstance(promoted, Conflict)
            assert promoted.members["holder"] == "jo"
            assert Kind.PROMOTION_REQUESTED not in kinds


def test_an_approval_is_before_its_token_s_end_or_is_not(api, author, sound):
    for round_ in range(ROUNDS):
        kim = token(api, f"kim{round_}")
        release = gated(api.service, author, f"chat{round_}@prod", approval={"required": 1})
        approved, revoked = together(
            acting(api, kim.secret, lambda c, r=release: c.releases.approve(r, "read")),
            acting(api, api.tokens["admin"], lambda c, t=kim: c.tokens.revoke(t.id, "has left")),
        )
        assert revoked.is_valid is False
        granted = [entry for entry in entries(api, Kind.APPROVAL_GRANTED) if entry.actor == kim.name]
        (ended,) = [entry for entry in entries(api, Kind.TOKEN_REVOKED) if str(kim.id) in entry.act]
        if isinstance(approved, Release):
            assert approved.phase == "approved"
            assert granted[0].sequence < ended.sequence
        else:
            assert isinstance(approved, Unauthenticated)
            assert granted == []
            assert log(api, release)[-1][0] == Kind.GATES_PASSED


def test_an_act_that_was_let_in_before_its_token_s_end_is_not_done_after_it(api, author, sound):
    """The token counts when the request is let in, and is revoked while the act waits for the release."""
    kim = token(api, "kim")
    release = gated(api.service, author, approval={"required": 1})
    with api.service.database.transaction() as session:
        actor = api.actor("manager")
        mine = type(actor)(api.project_id, "default", "kim", "manager", token=kim.id)
    with Client(api.url, api.tokens["admin"]) as client:
        client.tokens.revoke(kim.id, "has left")
    with api.service.database.transaction() as session, pytest.raises(Unauthenticated):
        approvals.approve(session, api.service, mine, release, releases.Act(reason="late"))
    assert entries(api, Kind.APPROVAL_GRANTED) == []


def test_of_two_releases_on_one_target_one_begins_and_the_other_hears_which(api, author, sound):
    bundle, policy = registered_bundle(api.service, author).digest, registered_policy(api.service, author).digest
    for round_ in range(ROUNDS):
        created_target(api.service, author, f"chat{round_}@prod")
        body = ReleaseCreate(target=f"chat{round_}@prod", bundle=bundle, policy=policy)
        outcomes = together(
            *(acting(api, api.tokens[role], lambda c, b=body: c.releases.create(b)) for role in ("engineer", "ci"))
        )
        made = next(one for one in outcomes if isinstance(one, Release))
        refused = next(one for one in outcomes if isinstance(one, Conflict))
        assert refused.members["holder"] == str(made.id)
        assert made.created_by in refused.detail
        with Client(api.url, api.tokens["viewer"]) as client:
            assert [one.id for one in client.releases.list(target=body.target)] == [made.id]


def test_of_two_who_register_one_document_one_stores_it_and_both_get_the_same_answer(api, sound):
    for round_ in range(ROUNDS):
        body = policy_body(f"policy{round_}")

        def post(role, body=body):
            with api.client(api.tokens[role]) as client:
                return client.post("/v1/policies", json=body)

        answers = together(*[lambda p=post, r=role: p(r) for role in ("manager", "admin", "manager")])
        assert sorted(one.status_code for one in answers) == [200, 200, 201]
        assert len({one.content for one in answers}) == 1
    assert len(entries(api, Kind.POLICY_REGISTERED)) == ROUNDS


def test_of_two_tokens_of_one_name_one_is_made(api, sound):
    body = TokenCreate(name="maria", role="manager")
    outcomes = together(*[acting(api, api.tokens["admin"], lambda c: c.tokens.create(body))] * 3)
    assert sorted(type(one).__name__ for one in outcomes) == ["Conflict", "Conflict", "TokenCreated"]
    made = next(one for one in outcomes if not isinstance(one, Problem))
    assert {one.members["holder"] for one in outcomes if isinstance(one, Conflict)} == {str(made.id)}


def test_two_administrators_who_revoke_each_other_leave_one(api, sound):
    other = token(api, "root", "admin")
    with Client(api.url, other.secret) as client:
        ours = next(one for one in client.tokens.list() if one.name == "admin")
    outcomes = together(
        acting(api, api.tokens["admin"], lambda c: c.tokens.revoke(other.id, "coup")),
        acting(api, other.secret, lambda c: c.tokens.revoke(ours.id, "coup")),
    )
    assert len([one for one in outcomes if not isinstance(one, Problem)]) == 1
    assert {type(one) for one in outcomes if isinstance(one, Problem)} <= {Conflict, Unauthenticated}
    assert len(entries(api, Kind.TOKEN_REVOKED)) == 1


# ------------------------------------------------------------------------------------ as the caller saw it


def test_an_act_is_done_only_on_what_the_caller_saw_and_the_refusal_says_who_changed_it(api, author, sound):
    kim = token(api, "kim")
    release = gated(api.service, author, approval={"required": 2})
    with Client(api.url, kim.secret) as client, Client(api.url, api.tokens["manager"]) as other:
        seen = client.releases.get(release)
        assert seen.version == f"gated:{len(seen.log)}"
        other.releases.approve(release, "read", if_match=seen.version)
        before = log(api, release)
        for act in ("approve", "reject", "pause", "resume", "promote", "roll_back"):
            with pytest.raises(StaleEdit) as refused:
                getattr(client.releases, act)(release, "as I saw it", if_match=seen.version)
            assert refused.value.members["changed_by"] == "manager"
            assert refused.value.members["change"] == "approval_granted"
            assert refused.value.members["version"] == f"gated:{len(before)}"
            assert "by manager at" in refused.value.detail
        assert log(api, release) == before
        assert client.releases.approve(release, "read", if_match=f"gated:{len(before)}").phase == "approved"


def test_of_two_acts_on_the_same_version_one_is_done(api, author, sound):
    kim, jo = token(api, "kim"), token(api, "jo")
    release = gated(api.service, author, approval={"required": 2})
    with Client(api.url, kim.secret) as client:
        version = client.releases.get(release).version
    outcomes = together(
        *(acting(api, who.secret, lambda c: c.releases.approve(release, "read", if_match=version)) for who in (kim, jo))
    )
    assert sorted(type(one).__name__ for one in outcomes) == ["Release", "StaleEdit"]
    assert len(entries(api, Kind.APPROVAL_GRANTED)) == 1


def test_answers_carry_the_version_as_etag_and_every_spelling_of_it_is_taken(api, author):
    release = gated(api.service, author, approval={"required": 9})
    manager, url = api.clients["manager"], f"/v1/releases/{release}"
    shown = manager.get(url)
    assert shown.headers["etag"] == f'"{shown.json()["version"]}"'
    for spelling in ("*", '"{}"', '"gated:1", "{}"', "{}"):
        spelled = spelling.format(manager.get(url).json()["version"])
        answer = manager.post(f"{url}/pauses", json={"reason": "look"}, headers={"if-match": spelled})
        assert answer.status_code == 200, spelled
        manager.post(f"{url}/resumptions", json={"reason": "seen"})
    assert answer.headers["etag"] == f'"{answer.json()["version"]}"'
    stale = manager.post(f"{url}/pauses", json={"reason": "look"}, headers={"if-match": '"gated:1"'})
    assert (stale.status_code, stale.json()["type"].rsplit("/", 1)[1]) == (412, "stale-edit")


def test_a_release_may_ask_for_the_target_to_be_as_it_was_seen(api, author, sound):
    created_target(api.service, author)
    bundle, policy = registered_bundle(api.service, author).digest, registered_policy(api.service, author).digest
    body = {"target": "chat@prod", "bundle": bundle, "policy": policy}
    engineer = api.clients["engineer"]
    seen = engineer.get("/v1/targets/chat@prod")
    tag = seen.headers["etag"]
    assert tag == f'"{seen.json()["generation"]}"'
    first = engineer.post("/v1/releases", json=body, headers={"if-match": tag}).json()
    engineer.post(f"/v1/releases/{first['id']}/rejections", json={"reason": "wrong weights"})
    stale = engineer.post("/v1/releases", json=body, headers={"if-match": tag})
    assert stale.status_code == 412
    assert (stale.json()["changed_by"], stale.json()["change"]) == ("engineer", "refused")
    tag = engineer.get("/v1/targets/chat@prod").headers["etag"]
    assert engineer.post("/v1/releases", json=body, headers={"if-match": tag}).status_code == 201


def test_an_act_out_of_place_says_what_happened_last_and_by_whom(api, author):
    release = gated(api.service, author)
    with Client(api.url, api.tokens["manager"]) as client:
        client.releases.reject(release, "wrong weights")
        with pytest.raises(TransitionRefused) as refused:
            client.releases.approve(release, "looks right")
    assert (refused.value.members["changed_by"], refused.value.members["change"]) == ("manager", "refused")


def test_a_name_that_is_taken_is_told_with_its_holder_in_the_own_project_only(api):
    admin = api.clients["admin"]
    body = {"name": "chat@prod", "runner_class": "cpu", "gateway": "local"}
    held = admin.post("/v1/targets", json=body).json()["id"]
    assert admin.post("/v1/targets", json=body).json()["holder"] == held
    admin.post("/v1/projects", json={"name": "team-b"})
    secret = admin.post("/v1/tokens", json={"name": "bo", "role": "manager", "project": "team-b"}).json()["secret"]
    with api.client(secret) as bo:
        refused = bo.post("/v1/targets", json=body)
    assert refused.status_code == 409
    assert held not in refused.text


def test_an_approval_that_is_withdrawn_counts_for_nobody_who_approves_at_the_same_time(api, author, sound):
    kim, jo = token(api, "kim"), token(api, "jo")
    for round_ in range(ROUNDS):
        release = gated(api.service, author, f"chat{round_}@prod", approval={"required": 2})
        with Client(api.url, kim.secret) as client:
            assert client.releases.approve(release, "read").phase == "gated"
        acts = [
            acting(api, jo.secret, lambda c, r=release: c.releases.approve(r, "read")),
            acting(api, kim.secret, lambda c, r=release: c.releases.withdraw(r, "one answer is wrong")),
        ]
        approved, withdrawn = together(*acts) if round_ % 2 else reversed(together(*reversed(acts)))
        assert isinstance(approved, Release)
        assert isinstance(withdrawn, Release)
        kinds = [kind for kind, _ in log(api, release)]
        assert kinds.count(Kind.APPROVAL_WITHDRAWN) == 1
        was_first = kinds.index(Kind.APPROVAL_WITHDRAWN) < max(
            place for place, kind in enumerate(kinds) if kind == Kind.APPROVAL_GRANTED
        )
        # Approved was it only while both stood.
        assert kinds.count(Kind.APPROVED) == (0 if was_first else 1)
        with Client(api.url, kim.secret) as client:
            assert client.releases.get(release).phase == "gated"
            assert client.releases.approve(release, "it was right after all").phase == "approved"


def test_of_a_withdrawal_and_the_first_traffic_one_wins_and_the_other_hears_of_it(api, author, sound):
    kim = token(api, "kim")
    for round_ in range(ROUNDS):
        release = gated(api.service, author, f"chat{round_}@prod", approval={"required": 1})
        with Client(api.url, kim.secret) as client:
            assert client.releases.approve(release, "read").phase == "approved"
        acts = [
            acting(api, kim.secret, lambda c, r=release: c.releases.withdraw(r, "one answer is wrong")),
            lambda r=release: first_traffic(api.service, r),
        ]
        withdrawn, shifted = together(*acts) if round_ % 2 else reversed(together(*reversed(acts)))
        if isinstance(withdrawn, Release):
            assert withdrawn.phase == "gated"
            assert isinstance(shifted, TransitionRefused)
        else:
            assert shifted == "canary"
            assert isinstance(withdrawn, TransitionRefused)
            assert withdrawn.members["change"] == "traffic_shifted"
