"""A quarantined bundle: nothing goes on with it until a person lifts that, and of two at once one is first."""

import threading
from datetime import UTC, datetime

import pytest
from sqlalchemy import func, select, text

from registry import db, evidence, jobs, quarantine, releases, runners, runs, targets, verification
from registry.client import Client
from registry.tables import EntryRow, JobRow, ReleaseRow, TargetRow
from schemas.api import Progress, RecordCreate, ReleaseCreate, RunCreate, TokenCreate
from schemas.evidence import Kind, Replaced, SplitEntry, Traffic
from schemas.problems import (
    BundleQuarantined,
    Conflict,
    LeaseLost,
    NotEligible,
    NotFound,
    NotPermitted,
    Problem,
    StaleEdit,
)
from schemas.release import Phase
from schemas.result import GateResult
from schemas.runner import JobKind, Report, RunnerRegistration
from tests.support.factories import created_target, record_act, registered_golden, registered_policy
from tests.support.holdings import held, live, register, started
from tests.support.phases import gated, in_canary
from tests.support.runners import until
from tests.support.together import together
from tests.support.world import FINGERPRINT
from workers import quarantines
from workers.control import Control

WHY = "its publisher withdrew it"


@pytest.fixture
def manager(api):
    with Client(api.url, api.tokens["manager"]) as client:
        yield client


@pytest.fixture
def author(api):
    return api.actor("engineer")


def log(api, bundle):
    with api.service.database.transaction() as session:
        rows = evidence.read(session, f"documents/{api.project_id}/{bundle.digest}")
    return [(row.kind, row.actor) for row in rows]


def phase_and_log(api, release):
    with api.service.database.transaction() as session:
        row = session.get_one(ReleaseRow, release)
        return row.phase, [entry.kind for entry in releases.log(session, release)]


def test_a_person_quarantines_and_lifts_and_both_are_evidence_with_reasons(api, manager, author, sound):
    bundle, other = held(api.service, author, "a"), held(api.service, author, "b")
    state = manager.bundles.quarantine(bundle.digest[7:19], WHY)
    assert (state.digest, state.name, state.quarantine.version) == (bundle.digest, "a", "quarantined:2")
    (ground,) = state.quarantine.grounds
    assert (ground.cause, ground.by, ground.reason) == ("person", "manager", WHY)
    assert manager.bundles.quarantine(bundle.digest, "again") == state
    assert manager.bundles.get(bundle.digest).quarantine == state.quarantine
    assert [(one.digest, one.quarantine is not None) for one in manager.bundles.list()] == [
        (other.digest, False),
        (bundle.digest, True),
    ]
    assert [one.digest for one in manager.bundles.list(quarantined=True)] == [bundle.digest]
    assert [one.digest for one in manager.bundles.list(quarantined=False)] == [other.digest]
    assert [one.digest for one in manager.bundles.list("a", quarantined=False)] == []
    lifted = manager.bundles.lift(bundle.digest, "the notice was about another model")
    assert lifted.quarantine is None
    assert manager.bundles.lift(bundle.digest, "again") == lifted
    assert manager.bundles.get(bundle.digest).quarantine is None
    assert log(api, bundle) == [
        (Kind.BUNDLE_REGISTERED, "engineer"),
        (Kind.BUNDLE_QUARANTINED, "manager"),
        (Kind.QUARANTINE_LIFTED, "manager"),
    ]
    with Client(api.url, api.tokens["admin"]) as admin, pytest.raises(Conflict, match="any more: manager lifted it"):
        admin.bundles.lift(bundle.digest, "late")
    with pytest.raises(Conflict, match="is not quarantined"):
        manager.bundles.lift(other.digest, "what for?")
    for act in (manager.bundles.quarantine, manager.bundles.lift):
        with pytest.raises(NotFound):
            act("f" * 64, "x")


def test_each_person_s_reason_is_a_ground_and_a_lift_is_of_the_grounds_that_were_seen(api, manager, author, sound):
    bundle = held(api.service, author, "a")
    seen = manager.bundles.quarantine(bundle.digest, WHY).quarantine.version
    with Client(api.url, api.tokens["engineer"]) as engineer:
        grounds = engineer.bundles.quarantine(bundle.digest, "it answers in another language").quarantine.grounds
    assert [one.by for one in grounds] == ["manager", "engineer"]
    with pytest.raises(StaleEdit) as refused:
        manager.bundles.lift(bundle.digest, "solved", if_match=seen)
    assert (refused.value.members["changed_by"], refused.value.members["version"]) == ("engineer", "quarantined:3")
    manager.bundles.lift(bundle.digest, "both solved", if_match="quarantined:3")
    with api.service.database.transaction() as session:
        last = evidence.latest(session, f"documents/{api.project_id}/{bundle.digest}")
    assert evidence.claim_of(last.envelope)["body"]["grounds"] == [one.entry for one in grounds]


def test_who_only_proposes_quarantines_nothing_and_who_stops_does_not_lift(api, manager, author):
    bundle = held(api.service, author, "a")
    for role in ("ci", "viewer", "auditor", "runner"):
        assert (
            api.clients[role].post(f"/v1/bundles/{bundle.digest}/quarantine", json={"reason": "x"}).status_code == 403
        )
    assert (
        api.clients["engineer"].post(f"/v1/bundles/{bundle.digest}/quarantine", json={"reason": "x"}).status_code == 200
    )
    lift = f"/v1/bundles/{bundle.digest}/quarantine/lift"
    assert api.clients["engineer"].post(lift, json={"reason": "x"}).status_code == 403
    limited = TokenCreate(name="kim", role="manager", targets=["chat@prod"])
    with Client(api.url, api.tokens["admin"]) as admin:
        secret = admin.tokens.create(limited).secret
    with Client(api.url, secret) as kim:
        for act in (kim.bundles.quarantine, kim.bundles.lift):
            with pytest.raises(NotPermitted, match="concerns every target"):
                act(bundle.digest, "x")
    assert api.clients["manager"].post(lift, json={}).status_code == 422


def test_nothing_begins_with_a_quarantined_bundle(api, manager, author, sound):
    service = api.service
    created_target(service, author)
    bundle, policy = held(service, author, "a"), registered_policy(service, author)
    suite = registered_golden(service, author)
    manager.bundles.quarantine(bundle.digest, WHY)
    wanted = [
        lambda: manager.releases.create(ReleaseCreate(target="chat@prod", bundle=bundle.digest, policy=policy.digest)),
        lambda: manager.runs.create(RunCreate(bundle=bundle.digest, policy=policy.digest, runner_class="cpu")),
        lambda: manager.runs.record(
            RecordCreate(suite=suite.digest, bundle=bundle.digest, target="chat@prod", reason="x")
        ),
    ]
    for ask in wanted:
        with pytest.raises(BundleQuarantined, match=f"quarantined: manager: {WHY}") as refused:
            ask()
        assert refused.value.members["quarantined_by"] == "manager"
        assert [one["reason"] for one in refused.value.members["grounds"]] == [WHY]
    with service.database.transaction() as session:
        assert session.scalars(select(JobRow)).all() == []
        assert session.scalars(select(ReleaseRow)).all() == []
    manager.bundles.lift(bundle.digest, "a mistake")
    for ask in wanted:
        ask()


def test_a_bundle_that_is_deleted_and_registered_again_is_quarantined_still(api, manager, author, sound):
    bundle = held(api.service, author, "a")
    manager.bundles.quarantine(bundle.digest, WHY)
    manager.bundles.delete(bundle.digest, "of no use")
    with pytest.raises(NotFound):
        manager.bundles.quarantine(bundle.digest, "x")
    assert register(api.service, author, bundle)
    assert [one.reason for one in manager.bundles.get(bundle.digest).quarantine.grounds] == [WHY]


def result(gate, verdict, **changes):
    body = {"gate": gate, "definition": "sha256:" + "d" * 64, "verdict": verdict, "summary": "a.gguf has other bytes"}
    body |= {"measurements": [], "findings": [], "duration_ms": 5, "source": "run"}
    return GateResult.model_validate(body | changes)


def claimed(service, author):
    """A runner and what it claims: a job or None."""
    registration = RunnerRegistration.model_validate(
        {"name": "r1", "runner_class": "cpu", "fingerprint": FINGERPRINT, "engines": ["llamacpp"], "boot_id": "b"}
    )
    with service.database.transaction() as session:
        return jobs.claim(session, service, runners.register(session, author.project_id, registration))


def test_integrity_that_fails_quarantines_by_that_result_and_nothing_else_does(api, manager, author, sound):
    service = api.service
    bundle, policy = held(service, author, "a"), registered_policy(service, author)
    with service.database.transaction() as session:
        wanted = RunCreate(bundle=bundle.digest, policy=policy.digest, runner_class="cpu")
        runs.create(session, service, author, wanted)
        later = runs.create(session, service, author, wanted).id
    claim = claimed(service, author)

    def report(gate, verdict):
        said = Report(
            fencing_token=claim.fencing_token,
            act=f"gate:{gate}:{verdict}",
            kind="gate_recorded",
            body=result(gate, verdict).model_dump(mode="json", exclude_none=True),
        )
        with service.database.transaction() as session:
            return jobs.report(session, service, author.project_id, claim.job, said)[0]

    for gate, verdict in (("compatibility", "failed"), ("integrity", "errored"), ("integrity", "inconclusive")):
        report(gate, verdict)
        assert manager.bundles.get(bundle.digest).quarantine is None
    entry = report("integrity", "failed")
    report("integrity", "failed")  # told twice, recorded once
    (ground,) = manager.bundles.get(bundle.digest).quarantine.grounds
    assert (ground.cause, ground.by) == ("integrity_gate", "service")
    assert ground.reason == "integrity failed: a.gguf has other bytes"
    with service.database.transaction() as session:
        last = evidence.latest(session, f"documents/{author.project_id}/{bundle.digest}")
        assert evidence.claim_of(last.envelope)["body"]["result"] == entry
    # A run that waits with the same bundle ends, and says why.
    assert claimed(service, author) is None
    with service.database.transaction() as session:
        row = session.get_one(JobRow, later)
        assert (row.state, row.problem) == ("done", "bundle-quarantined")
        ended = evidence.latest(session, f"run/{later}")
        assert evidence.claim_of(ended.envelope)["body"] == {"outcome": "undecided", "problem": "bundle-quarantined"}


@pytest.mark.parametrize("is_lifted", [False, True], ids=["quarantined still", "lifted before it ends"])
def test_a_run_that_is_under_way_is_no_longer_wanted_and_says_why(api, manager, author, is_lifted):
    service = api.service
    bundle, policy = held(service, author, "a"), registered_policy(service, author)
    with service.database.transaction() as session:
        wanted = RunCreate(bundle=bundle.digest, policy=policy.digest, runner_class="cpu")
        run = runs.create(session, service, author, wanted).id
    claim = claimed(service, author)
    said = {"fencing_token": claim.fencing_token}
    runner = api.clients["runner"]
    assert runner.post(f"/v1/jobs/{run}/renewals", json=said).json()["is_wanted"] is True
    manager.bundles.quarantine(bundle.digest, WHY)
    assert runner.post(f"/v1/jobs/{run}/renewals", json=said).json()["is_wanted"] is False
    if is_lifted:
        manager.bundles.lift(bundle.digest, "a mistake")
    assert runner.post(f"/v1/jobs/{run}/completions", json=said).status_code == 204
    assert manager.runs.get(run).problem == "bundle-quarantined"


def test_a_quarantined_replica_that_nobody_wants_any_more_is_booted_by_nobody_and_its_job_ends(api, manager, author):
    service = api.service
    bundle = held(service, author, "a")
    with service.database.transaction() as session:
        job = jobs.create(
            session, author.project_id, JobKind.SERVE, bundle=bundle.digest, runner_class="cpu",
            created_by="controller", now=db.now(session),
        ).id  # fmt: skip
    claim = claimed(service, author)
    ready = {"state": "ready", "cause": "it is", "address": "127.0.0.1:1", "pid": 1, "start_time": "1", "boot_id": "b"}
    said = Report(fencing_token=claim.fencing_token, act="replica:1", kind="replica_changed", body=ready)
    with service.database.transaction() as session:
        jobs.report(session, service, author.project_id, job, said)
        jobs.unwant(session, session.get_one(JobRow, job), now=db.now(session))
        session.execute(text("UPDATE jobs SET lease_until = clock_timestamp() - interval '1 second'"))
    manager.bundles.quarantine(bundle.digest, WHY)
    assert claimed(service, author) is None
    shown = manager.runs.get(job)
    assert (shown.state, shown.problem, shown.replica.state) == ("cancelled", "bundle-quarantined", "stopped")
    # Whoever still has its engine asks for the lease, and ends it when that is refused.
    with pytest.raises(LeaseLost), service.database.transaction() as session:
        jobs.renew(session, service, author.project_id, job, Progress(fencing_token=claim.fencing_token))


# ---------------------------------------------------------------------------------------------------- releases


def test_a_release_that_waits_without_traffic_is_due_and_one_that_has_some_is_left_to_its_own_looks(api, author):
    service = api.service
    created_target(service, author)
    created_target(service, author, "other@prod")
    bundle = held(service, author, "a")
    serving, waiting = live(service, author, bundle, "other@prod"), started(service, author, bundle)
    control = Control.build(service, lambda _: None)
    with service.database.transaction() as session:
        session.execute(text("UPDATE releases SET due_at = NULL"))
    assert quarantines.wake(control) == 0
    with Client(api.url, api.tokens["manager"]) as manager:
        manager.bundles.quarantine(bundle.digest, WHY)
    assert quarantines.wake(control) == 1
    with service.database.transaction() as session:
        due = {row.id: row.due_at is not None for row in session.scalars(select(ReleaseRow))}
    assert due == {serving: False, waiting: True}


def test_what_was_measured_before_a_quarantine_counts_no_more_once_that_is_lifted(api, manager, author, sound):
    release = gated(api.service, author)
    bundle = manager.releases.get(release).bundle
    with api.service.database.transaction() as session:
        session.execute(text("UPDATE releases SET due_at = NULL"))
    manager.bundles.quarantine(bundle, WHY)
    manager.bundles.lift(bundle, "nobody has looked meanwhile")
    with api.service.database.transaction() as session:
        assert session.get_one(ReleaseRow, release).due_at is not None
    with pytest.raises(NotEligible, match="integrity ran before the bundle was quarantined"):
        manager.releases.approve(release, "read")
    phase, kinds = phase_and_log(api, release)
    assert (phase, Kind.APPROVAL_GRANTED in kinds) == (Phase.GATED, False)
    manager.releases.reject(release, "another one begins anew")
    again = gated(api.service, author, "again@prod")
    assert manager.releases.get(again).bundle == bundle
    assert manager.releases.approve(again, "read").phase is Phase.APPROVED


def test_what_is_live_says_loudly_that_it_is_quarantined(api, command, manager, author):
    created_target(api.service, author)
    bundle = held(api.service, author, "a")
    release = live(api.service, author, bundle)
    assert manager.targets.get("chat@prod").quarantined == []
    manager.bundles.quarantine(bundle.digest, WHY)
    target = manager.targets.get("chat@prod")
    assert (target.stable_release, target.quarantined) == (release, [f"manager: {WHY}"])
    assert manager.releases.get(release).quarantined == [f"manager: {WHY}"]
    command.be("viewer", api)
    shown = command.ok("target", "show", "chat@prod")
    assert f"the live bundle is QUARANTINED: manager: {WHY}" in shown.out
    assert f"release rollback {release}" in shown.out
    assert "(quarantined)" in command.ok("target", "list").out


def test_traffic_goes_back_past_a_quarantined_release_to_an_accepted_one(api, manager, author):
    service = api.service
    created_target(service, author)
    old, bad, new = (held(service, author, name) for name in ("old", "bad", "new"))
    first = live(service, author, old)
    second = live(service, author, bad, over=first)
    third = live(service, author, new, over=second)

    def back(release):
        with service.database.transaction() as session:
            found = targets.way_back(session, session.get_one(ReleaseRow, release))
            return found.id if found else None

    def again():
        manager.bundles.lift(bad.digest, "sound")
        manager.bundles.quarantine(bad.digest, WHY)

    assert back(third) == second
    with service.database.transaction() as session:
        target = targets.get(session, author.project_id, "chat@prod").id
        job = jobs.create(
            session, author.project_id, JobKind.SERVE, bundle=bad.digest, runner_class="cpu", release=second,
            created_by="controller", target=target, now=db.now(session),
        ).id  # fmt: skip
    manager.bundles.quarantine(bad.digest, WHY)
    assert back(third) == first  # what waits to boot is not kept warm,
    assert claimed(service, author) is None  # and does not boot
    manager.bundles.lift(bad.digest, "sound")
    with service.database.transaction() as session:
        session.execute(text("UPDATE jobs SET due_at = clock_timestamp()"))
    claim = claimed(service, author)
    manager.bundles.quarantine(bad.digest, WHY)
    ready = {"state": "ready", "cause": "it is", "address": "127.0.0.1:1", "pid": 1, "start_time": "1", "boot_id": "b"}
    said = Report(fencing_token=claim.fencing_token, act="replica:1", kind="replica_changed", body=ready)
    with service.database.transaction() as session:
        jobs.report(session, service, author.project_id, claim.job, said)
    assert back(third) == first  # it was quarantined while it booted
    again()
    assert back(third) == second  # kept warm: it was ready before
    with service.database.transaction() as session:
        session.execute(text("UPDATE jobs SET lease_until = clock_timestamp() - interval '1 second'"))
    assert back(third) == first  # nobody is heard of who holds it
    with service.database.transaction() as session:
        jobs.unwant(session, session.get_one(JobRow, job), now=db.now(session))
        split = [{"bundle": bad.digest, "weight_bp": 0}, {"bundle": new.digest, "weight_bp": 10_000}]
        session.get_one(TargetRow, target).applied = split
    assert back(third) == second  # the third is in its soak, and the way back to it is prepared
    with service.database.transaction() as session:
        session.get_one(TargetRow, target).applied = split[1:]
    assert back(third) == first
    manager.bundles.quarantine(old.digest, WHY)
    assert back(third) == second  # better than none
    manager.bundles.lift(old.digest, "sound")
    assert back(third) == first
    # What is live is the way back of whatever follows it, quarantined or not: it has the rest of the traffic.
    manager.bundles.quarantine(new.digest, WHY)
    assert back(started(service, author, held(service, author, "newest"))) == third
    with pytest.raises(Conflict, match="rollback target"):
        manager.bundles.delete(old.digest, "x")


def test_what_is_live_is_the_way_back_of_what_is_under_way_whatever_was_live_when_that_began(api, manager, author):
    service = api.service
    created_target(service, author)
    old, bad, new, next_ = (held(service, author, name) for name in ("old", "bad", "new", "next"))
    first = live(service, author, old)
    second = live(service, author, bad, over=first)
    third = live(service, author, new, over=second)
    manager.bundles.quarantine(bad.digest, WHY)
    moving = started(service, author, next_)
    at = datetime.now(UTC)
    went = Traffic(
        desired=[SplitEntry(bundle=old.digest, weight_bp=10_000)], revision="9", applied_ms=1.0, requested_at=at,
        applied_at=at,
    )  # fmt: skip
    record_act(service, third, Kind.TRAFFIC_RESTORED, went)
    record_act(service, first, Kind.REINSTATED, Replaced(release=third))
    manager.bundles.lift(bad.digest, "sound")
    with service.database.transaction() as session:
        assert targets.way_back(session, session.get_one(ReleaseRow, moving)).id == first


# ------------------------------------------------------------------------------------------------------- races


def first_of(api, bundle, kind, where):
    """Tell whether an entry of a kind was recorded before the bundle was quarantined last; None without one."""
    with api.service.database.transaction() as session:
        found = session.scalar(select(EntryRow.sequence).where(EntryRow.kind == kind, EntryRow.stream == where))
        imposed = session.scalar(
            select(func.max(EntryRow.sequence)).where(
                EntryRow.kind == Kind.BUNDLE_QUARANTINED,
                EntryRow.stream == f"documents/{api.project_id}/{bundle}",
            )
        )
    return None if found is None else found < imposed


@pytest.mark.parametrize(
    ("ready", "act", "kind"),
    [
        (gated, lambda client, release: client.releases.approve(release, "read"), Kind.APPROVAL_GRANTED),
        (in_canary, lambda client, release: client.releases.promote(release, "hotfix"), Kind.PROMOTION_REQUESTED),
    ],
    ids=["an approval", "a promotion"],
)
def test_of_a_quarantine_and_what_lets_a_release_go_on_one_is_first(api, manager, author, sound, ready, act, kind):
    for round_ in range(4):
        release = ready(api.service, author, f"chat{round_}@prod")
        bundle = manager.releases.get(release).bundle
        acts = [lambda r=release: act(manager, r), lambda b=bundle: manager.bundles.quarantine(b, WHY)]
        let, imposed = together(*acts) if round_ % 2 else reversed(together(*reversed(acts)))
        assert imposed.quarantine is not None, imposed
        if isinstance(let, Problem):
            assert isinstance(let, BundleQuarantined), let
            assert (let.members["quarantined_by"], WHY in let.detail) == ("manager", True)
        is_before = first_of(api, bundle, kind, evidence.release_stream(release))
        assert is_before is (None if isinstance(let, Problem) else True)
        manager.bundles.lift(bundle, "the next round")
        break_up(api, release)


def break_up(api, release):
    """End a release, so that the next round has its own."""
    phase, _ = phase_and_log(api, release)
    with Client(api.url, api.tokens["manager"]) as client:
        if phase != Phase.CANARY:
            client.releases.reject(release, "the next round")


def test_of_a_quarantine_and_a_new_release_one_is_first(api, manager, author, sound):
    policy = registered_policy(api.service, author).digest
    for round_ in range(6):
        created_target(api.service, author, f"chat{round_}@prod")
        bundle = held(api.service, author, f"b{round_}")
        body = ReleaseCreate(target=f"chat{round_}@prod", bundle=bundle.digest, policy=policy)
        acts = [lambda b=body: manager.releases.create(b), lambda b=bundle: manager.bundles.quarantine(b.digest, WHY)]
        made, imposed = together(*acts) if round_ % 2 else reversed(together(*reversed(acts)))
        assert imposed.quarantine is not None, imposed
        if isinstance(made, Problem):
            assert isinstance(made, BundleQuarantined), made
            continue
        with api.service.database.transaction() as session:
            begun = session.scalars(
                select(EntryRow.sequence).where(EntryRow.stream == evidence.release_stream(made.id))
            ).one()
            (imposed_at,) = session.scalars(
                select(EntryRow.sequence).where(
                    EntryRow.kind == Kind.BUNDLE_QUARANTINED,
                    EntryRow.stream == f"documents/{api.project_id}/{bundle.digest}",
                )
            )
        assert begun < imposed_at


def test_whoever_lets_a_bundle_go_on_is_waited_for_and_whoever_quarantines_it_too(api, manager, author):
    """Two connections, the one standing still in its transaction until the other is seen to wait."""
    bundle = held(api.service, author, "a")
    database = api.service.database

    locked = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype IN ('transactionid', 'tuple')"

    def is_waiting():
        with database.look() as connection:
            return connection.execute(text(locked)).scalar_one()

    with database.transaction() as session:
        quarantine.require_free(session, author.project_id, bundle.digest)
        found = []
        thread = threading.Thread(target=lambda: found.append(manager.bundles.quarantine(bundle.digest, WHY)))
        thread.start()
        until(is_waiting, what="the other one to wait")
        assert not found
    thread.join()
    assert found[0].quarantine is not None
    with database.transaction() as session, pytest.raises(BundleQuarantined):
        quarantine.require_free(session, author.project_id, bundle.digest)


def test_two_who_quarantine_at_once_are_two_grounds_and_of_two_who_lift_one_does(api, author, sound):
    bundle = held(api.service, author, "a")
    with Client(api.url, api.tokens["manager"]) as manager, Client(api.url, api.tokens["admin"]) as admin:
        together(*(lambda c=c: c.bundles.quarantine(bundle.digest, WHY) for c in (manager, admin)))
        assert sorted(one.by for one in manager.bundles.get(bundle.digest).quarantine.grounds) == ["admin", "manager"]
        lifted = together(*(lambda c=c: c.bundles.lift(bundle.digest, "sound") for c in (manager, admin)))
    assert sorted(type(one).__name__ for one in lifted) == ["Conflict", "QuarantineState"]
    assert [kind for kind, _ in log(api, bundle)].count(Kind.QUARANTINE_LIFTED) == 1


# ------------------------------------------------------------------------------------------- evidence and people


def test_what_is_cached_otherwise_than_the_log_says_is_a_fault(api, manager, author):
    bundle = held(api.service, author, "a")
    manager.bundles.quarantine(bundle.digest, WHY)
    with api.service.database.transaction() as session:
        session.execute(text("UPDATE project_documents SET quarantined_at = NULL"))
    with api.service.database.transaction() as session:
        (fault,) = verification.verify(session, author.project_id).faults
    assert (fault.stream.endswith(bundle.digest), fault.problem) == (True, "it is not quarantined as its log says")


def test_the_command_quarantines_shows_and_lifts(api, command, author):
    bundle = held(api.service, author, "a")
    command.be("engineer", api)
    ran = command.ok("bundle", "quarantine", bundle.digest[7:19], "--reason", WHY)
    assert f"quarantined: a {bundle.digest}" in ran.out
    shown = command.ok("bundle", "show", bundle.digest[7:19])
    assert ("QUARANTINED since" in shown.out, WHY in shown.out) == (True, True)
    assert command.ok("bundle", "show", bundle.digest[7:19], "--json").json["quarantine"]["version"] == "quarantined:2"
    assert "a (quarantined)" in command.ok("bundle", "list", "--quarantined").out
    assert command.ok("bundle", "list", "--not-quarantined", "--json").json["items"] == []
    created_target(api.service, author)
    policy = registered_policy(api.service, author)
    release = ("release", "create", "--target", "chat@prod", "--bundle", bundle.digest, "--policy", policy.digest)
    refused = command(*release)
    assert (refused.status, "is quarantined" in refused.err, "bundle lift" in refused.err) == (4, True, True)
    assert command("bundle", "lift", bundle.digest[7:19], "--reason", "sound").status == 4
    command.be("manager", api)
    stale = command("bundle", "lift", bundle.digest[7:19], "--reason", "sound", "--if-match", "quarantined:9")
    assert (stale.status, "quarantined:2" in stale.err) == (4, True)
    lifted = command.ok("bundle", "lift", bundle.digest[7:19], "--reason", "sound", "--json").json
    assert lifted == {"digest": bundle.digest, "name": "a", "quarantine": None}
    assert command("bundle", "quarantine", bundle.digest[7:19], "--reason", "").status == 2
