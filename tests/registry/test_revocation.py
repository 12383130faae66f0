"""A gate result that was revoked counts no more: what stands on it and has no traffic yet holds."""

from dataclasses import replace

import pytest

from registry import approvals, releases, verification
from registry.web.notices import notices
from schemas.api import Act, ReleaseCreate, Revoke
from schemas.evidence import EvidenceRevoked, Kind, Staged
from schemas.problems import NotEligible
from schemas.release import Phase
from schemas.result import GateResult, Verdict
from tests.support.factories import created_target, record_act, registered_bundle, registered_policy
from tests.support.streams import stream_engine
from tests.support.world import world

STAGED = Staged(files=1, size=1, duration_ms=1)


@pytest.fixture
def stage(service, actor, tmp_path):
    with world(service, actor, tmp_path) as made:
        yield made


def result_of(release, gate):
    (found,) = [entry for entry in release.log if entry.kind is Kind.GATE_RECORDED and entry.body["gate"] == gate]
    return found.entry_digest


def revoke(stage, digest, reason="the runner was throttled"):
    with stage.service.database.transaction() as session:
        row, is_new = releases.revoke(session, stage.service, stage.actor, Revoke(entry=digest, reason=reason))
        return row.entry_digest, is_new


def kinds(release):
    return [entry.kind for entry in release.log]


def gated(stage, required=1):
    """A release whose gates have passed and that waits for people."""
    policy = stage.policy(approval={"required": required})
    release = stage.release(stage.bundle("chat", b"one"), policy)
    stage.evaluate()
    return stage.until_phase(release, Phase.GATED)


def test_a_gated_release_whose_result_was_revoked_is_not_approved_and_holds(stage):
    shown = gated(stage)
    revoke(stage, result_of(shown, "compatibility"))
    with (
        pytest.raises(NotEligible, match=r"compatibility was revoked: the runner was throttled$"),
        stage.service.database.transaction() as session,
    ):
        approvals.approve(session, stage.service, replace(stage.actor, name="nora"), shown.id, Act(reason="looks good"))
    stage.until(lambda: bool(stage.show(shown.id).held))
    shown = stage.show(shown.id)
    assert shown.phase is Phase.GATED
    assert Kind.APPROVED not in kinds(shown)
    gate = next(gate for gate in shown.gates if gate.gate == "compatibility")
    assert (gate.verdict, gate.summary) == (None, "revoked: the runner was throttled")
    (held,) = shown.held
    assert held.endswith("may not move: compatibility was revoked: the runner was throttled")
    # Nobody is asked to agree to what nobody can let through.
    told = [one for notice in notices(shown, required=1) for one in (notice.title, *notice.lines)]
    assert not any("release approve" in one for one in told)
    assert any("only a new release measures again" in one for one in told)


def test_an_approved_release_whose_evidence_is_revoked_before_traffic_holds(stage):
    shown = gated(stage)
    with stage.service.database.transaction() as session:
        approvals.approve(session, stage.service, replace(stage.actor, name="nora"), shown.id, Act(reason="looks good"))
    assert stage.show(shown.id).phase is Phase.APPROVED
    revoke(stage, result_of(shown, "integrity"))
    stage.until(lambda: bool(stage.show(shown.id).held))
    for _ in range(3):
        stage.turn()
    shown = stage.show(shown.id)
    assert shown.phase is Phase.APPROVED
    assert Kind.TRAFFIC_SHIFTED not in kinds(shown)
    assert "integrity" in shown.held[0]
    assert stage.serving_jobs() == []
    # Who lets it go on cannot let it through.
    with stage.service.database.transaction() as session:
        releases.resume(session, stage.service, stage.actor, shown.id, Act(reason="go"))
    stage.until(lambda: bool(stage.show(shown.id).held))
    assert stage.show(shown.id).phase is Phase.APPROVED


def test_a_canary_whose_evidence_is_revoked_goes_no_further(stage):
    with stream_engine("one") as before, stream_engine("two") as engine:
        policy = stage.policy()
        stage.live(stage.bundle("chat", b"one"), policy, before)
        release = stage.release(stage.bundle("chat", b"two"), policy)
        stage.evaluate()
        stage.serve(engine, pid=2000)
        shown = stage.until_phase(release, Phase.CANARY)
        revoke(stage, result_of(shown, "integrity"))
        with stage.traffic():
            stage.until(lambda: bool(stage.show(release).held))
        shown = stage.show(release)
        assert (shown.phase, shown.weight_bp) == (Phase.CANARY, 5000)
        assert kinds(shown).count(Kind.TRAFFIC_SHIFTED) == 1
        with pytest.raises(NotEligible), stage.service.database.transaction() as session:
            releases.promote(session, stage.service, stage.actor, release, Act(reason="go"))


def test_a_result_that_is_revoked_while_gates_run_is_measured_again(stage):
    policy = stage.policy()
    release = stage.release(stage.bundle("chat", b"one"), policy)
    claim = stage.claim()
    stage.report(claim, "staged:1", "staged", {"files": 1, "size": 10, "duration_ms": 1})
    stage.verdict(claim, "integrity", "passed")
    revoke(stage, result_of(stage.show(release), "integrity"))
    stage.complete(claim)
    again = stage.claim()
    assert again.kind == "evaluate"
    assert "integrity" in again.gates
    assert stage.show(release).phase in {Phase.STAGED, Phase.BOOTED}


# --------------------------------------------------------------------------------- without a gateway


def result(gate="integrity", verdict=Verdict.PASSED):
    return GateResult(
        gate=gate, definition="sha256:" + "d" * 64, verdict=verdict, summary="so it is", measurements=[], findings=[],
        duration_ms=1, source="run",
    )  # fmt: skip


@pytest.fixture
def measured(service, actor):
    """A staged release with one passed result."""
    created_target(service, actor)
    bundle, policy = registered_bundle(service, actor), registered_policy(service, actor)
    body = ReleaseCreate(target="chat@prod", bundle=bundle.digest, policy=policy.digest)
    with service.database.transaction() as session:
        release = releases.create(session, service, actor, body).id
    record_act(service, release, Kind.STAGED, STAGED)
    record_act(service, release, Kind.GATE_RECORDED, result(), "gate:1")
    return release, policy


def standing(service, actor, release, policy):
    with service.database.transaction() as session:
        row = releases.get(session, actor.project_id, release)
        found = releases.standing(session, row, policy, now=row.created_at)
        return {gate: entry.entry_digest for gate, (entry, _) in found.results.items()}


def revoke_directly(service, actor, digest):
    with service.database.transaction() as session:
        row, is_new = releases.revoke(session, service, actor, Revoke(entry=digest, reason="wrong"))
        return row.entry_digest, is_new


def test_revoking_leaves_the_entry_where_it_is_and_twice_changes_nothing(service, actor, measured):
    release, policy = measured
    digest = standing(service, actor, release, policy)["integrity"]
    first, is_new = revoke_directly(service, actor, digest)
    again, is_new_again = revoke_directly(service, actor, digest)
    assert (is_new, is_new_again, again) == (True, False, first)
    assert standing(service, actor, release, policy) == {}
    with service.database.transaction() as session:
        assert verification.verify(session, actor.project_id).verified


def test_a_revoked_result_uncovers_no_earlier_one_and_a_later_one_counts(service, actor, measured):
    release, policy = measured
    record_act(service, release, Kind.GATE_RECORDED, result(), "gate:2")
    latest = standing(service, actor, release, policy)["integrity"]
    revoke_directly(service, actor, latest)
    assert standing(service, actor, release, policy) == {}
    record_act(service, release, Kind.GATE_RECORDED, result(), "gate:3")
    assert set(standing(service, actor, release, policy)) == {"integrity"}


def test_revocation_over_http(own_api, measured_api):
    digest = measured_api
    body = {"entry": digest, "reason": "the runner was throttled"}
    path = "/v1/evidence/revocations"
    assert own_api.clients["engineer"].post(path, json=body).status_code == 403
    assert own_api.clients["runner"].post(path, json=body).status_code == 403
    manager = own_api.clients["manager"]
    made = manager.post(path, json=body)
    assert made.status_code == 201
    said = EvidenceRevoked.model_validate(made.json()["body"])
    assert (made.json()["kind"], said.entry, said.gate) == ("evidence_revoked", digest, "integrity")
    assert manager.post(path, json=body).status_code == 200
    assert manager.post(path, json={"entry": "sha256:" + "0" * 64, "reason": "x"}).status_code == 404
    assert manager.post(path, json={"entry": "x", "reason": "x"}).status_code == 422
    assert manager.post(path, json={"entry": digest}).status_code == 422
    other = manager.get("/v1/evidence").json()["items"][0]["entry_digest"]
    refused = manager.post(path, json={"entry": other, "reason": "x"})
    assert refused.status_code == 409
    assert refused.json()["detail"].endswith("only a release's gate results are revoked")


@pytest.fixture
def measured_api(own_api):
    service, actor = own_api.service, own_api.actor("manager")
    created_target(service, actor)
    bundle, policy = registered_bundle(service, actor), registered_policy(service, actor)
    body = ReleaseCreate(target="chat@prod", bundle=bundle.digest, policy=policy.digest)
    with service.database.transaction() as session:
        release = releases.create(session, service, actor, body).id
    record_act(service, release, Kind.STAGED, STAGED)
    record_act(service, release, Kind.GATE_RECORDED, result(), "gate:1")
    return standing(service, actor, release, policy)["integrity"]


def test_revocation_from_the_command_line(own_api, measured_api, command):
    command.be("manager", own_api)
    ran = command.ok("evidence", "revoke", measured_api, "--reason", "wrong model")
    assert "evidence_revoked (manager): integrity result" in ran.out
    assert ran.err == ""
    again = command.ok("evidence", "revoke", measured_api, "--reason", "another reason")
    assert again.out == ran.out
    assert again.err.startswith("nothing has changed: it was so already")
    assert command("evidence", "revoke", "41d0", "--reason", "x").status == 2


def test_a_result_is_revoked_by_its_release_and_gate(own_api, measured_api, command):
    command.be("manager", own_api)
    release = command.ok("release", "list", "--json").json["items"][0]["id"]
    revoke = ("evidence", "revoke", "--reason", "wrong model")
    for wrong, said in (
        ((), "name either the entry, or --release and --gate"),
        (("--release", release), "name either the entry, or --release and --gate"),
        ((measured_api, "--release", release, "--gate", "integrity"), "name either"),
        (("--release", release, "--gate", "compatibility"), "has no result of a gate compatibility"),
        (("--release", release, "--gate", "load"), "its gates are integrity, compatibility"),
    ):
        ran = command(*revoke, *wrong)
        assert (ran.status, ran.out) == (2, "")
        assert said in ran.err
    told = command.ok(*revoke, "--release", release[:13], "--gate", "integrity", "--json").json
    assert (told["kind"], told["body"]["entry"]) == ("evidence_revoked", measured_api)
