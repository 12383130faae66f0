"""What people do to a release on the command line, and what they are told when it does not take it."""

import json
from datetime import timedelta
from uuid import UUID

import pytest

from registry import db, evidence, jobs, targets
from registry.client import transport
from registry.tables import ReleaseRow
from schemas.api import Complete, Progress
from schemas.evidence import Kind, Note, Replaced, Restored
from schemas.policy import Policy
from schemas.runner import JobKind, JobState, ReplicaState, RunnerRegistration
from tests.support.factories import policy_body, registered_bundle, registered_golden
from tests.support.scene import FINGERPRINT, traffic


def test_taking_back_where_nothing_can_be_taken_back_says_so_and_changes_nothing(scene):  # C142
    scene.target()
    identity = scene.release()["id"]

    def seen() -> tuple[object, object]:
        return tuple(
            scene.command.ok(*what, "--json").json for what in (("release", "show", identity), ("target", "list"))
        )

    before = seen()
    for _ in range(2):
        ran = scene.command("release", "rollback", identity, "-r", "stop")
        assert (ran.status, ran.out) == (4, "")
        assert f"there is nothing to take back; `sluicegate release reject {identity} --reason …` ends it" in ran.err
        assert seen() == before
    scene.command.ok("release", "reject", identity, "-r", "no")
    before = seen()
    ran = scene.command("release", "rollback", identity, "-r", "stop", "--json")
    assert (ran.status, ran.json["type"].rsplit("/", 1)[1], ran.json["phase"]) == (4, "transition-refused", "rejected")
    assert "it never had traffic" in ran.json["detail"]
    assert scene.command.ok("release", "reject", identity, "-r", "no", "--json").json["phase"] == "rejected"
    assert seen() == before


def test_who_takes_the_first_release_back_is_told_that_nothing_will_serve(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.to_canary(identity)
    ran = scene.command.ok("release", "rollback", identity, "-r", "stop")
    assert "no earlier release to go back to: chat@prod will answer 503" in ran.err


def test_a_target_shows_the_replicas_that_run_and_the_others_when_asked(scene):
    scene.target()
    identity = scene.release()["id"]
    with scene.service.database.transaction() as session:
        target = targets.get(session, scene.api.project_id, "chat@prod")
        for state in (ReplicaState.STOPPED, ReplicaState.FAILED, ReplicaState.READY):
            job = jobs.create(
                session,
                scene.api.project_id,
                JobKind.SERVE,
                bundle=scene.bundle.digest,
                runner_class="cpu",
                created_by="test",
                now=db.now(session),
                release=UUID(identity),
                target=target.id,
            )
            job.state = JobState.CLAIMED if state is ReplicaState.READY else JobState.DONE
            job.replica = {"state": state, "since": "2026-11-29T10:00:00Z", "cause": f"it is {state}"}
            session.flush()
    shown = scene.command.ok("target", "show", "chat@prod").out
    assert "it is ready" in shown
    assert "it is stopped" not in shown
    assert "2 more ended; --all shows them" in shown
    everything = scene.command.ok("target", "show", "chat@prod", "--all").out
    assert "it is stopped" in everything
    assert "it is failed" in everything
    assert "more ended" not in everything
    assert len(scene.command.ok("target", "show", "chat@prod", "--json").json["replicas"]) == 3


def test_a_release_s_log_is_shown_with_how_long_each_entry_took(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.to_canary(identity)
    rows = [line.split() for line in scene.command.ok("release", "show", identity).out.splitlines()]
    heads = rows.index(["AT", "AFTER", "WHAT"])
    log = rows[heads + 1 :]
    assert [row[2] for row in log][:1] == ["created"]
    assert [row[4] for row in log[1:]] == [
        "staged:",
        "engine_booted:",
        "gates_passed:",
        "approved:",
        "traffic_shifted:",
    ]
    assert all(row[3] == "s" for row in log[1:])


def test_a_runner_is_drained_waited_for_and_let_in_again(scene):
    scene.target()
    job = scene.command.ok("gate", "run", scene.bundle.digest[7:19], "-p", scene.policy.digest, "--json").json["id"]
    held = scene.runner.runners.claim(scene.runner_id)
    assert str(held.job) == job
    ran = scene.command("runner", "drain", "runner-1", "-r", "a new driver", "--wait", "--timeout", "0", "--json")
    assert ran.status == 3
    assert ran.json["drain"]["reason"] == "a new driver"
    assert [line.split(":")[0] for line in ran.json["drain"]["waits_for"]] == [f"run {job}"]
    assert "it drains on: `sluicegate runner show runner-1` says what for" in ran.err
    assert "waits for run" in scene.command.ok("runner", "show", "runner-1").out
    assert "yes, drained" in scene.command.ok("runner", "list").out
    # A deadline says what it loses, and does nothing without a word for that.
    forced = ("runner", "drain", "runner-1", "-r", "it burns", "--force")
    ran = scene.command(*forced)
    assert (ran.status, "loses: run" in ran.err, "say --yes" in ran.err) == (4, True, True)
    ran = scene.command(*forced, "--json")
    lost = f"run {job} begins its gate again elsewhere; it has lost no attempt"
    assert (ran.status, ran.json["title"], ran.json["loses"]) == (4, "Conflict", [lost])
    assert scene.runner.jobs.renew(held.job, Progress(fencing_token=held.fencing_token)).is_wanted
    assert scene.command(*forced, "--deadline", "5").status == 2
    assert scene.command.ok(*forced[:-1], "--deadline", "900", "--yes", "--json").json["drain"]["empty_at"]
    assert "Z is ended" in scene.command.ok(*forced, "--yes").out
    assert not scene.runner.jobs.renew(held.job, Progress(fencing_token=held.fencing_token)).is_wanted
    said = scene.command.ok("evidence", "list", "--stream", f"runner/{scene.runner_id}", "--json").json["items"]
    assert [one["kind"] for one in said] == ["runner_drained"] * 3
    assert [bool(one["body"].get("empty_at")) for one in said] == [False, True, True]
    assert said[2]["body"]["loses"] == [lost]
    scene.command.ok("runner", "undrain", "runner-1")
    scene.command.ok("runner", "drain", "runner-1", "-r", "a new driver")
    scene.runner.runners.heartbeat(scene.runner_id, disk_free_bytes=5_000_000_000)
    scene.runner.jobs.complete(held.job, Complete(fencing_token=held.fencing_token))
    assert "it holds nothing" in scene.command.ok("runner", "drain", "runner-1", "-r", "again", "--wait").out
    shown = scene.command.ok("runner", "show", "runner-1", "--json").json
    assert (shown["drain"]["reason"], shown["disk_free_bytes"]) == ("a new driver", 5_000_000_000)
    again = scene.command.ok("runner", "undrain", "runner-1", "-r", "the driver is in", "--json").json
    assert (again["drain"], again["undrained"]["reason"]) == (None, "the driver is in")
    # Of one that takes jobs already, it changes nothing.
    scene.command.ok("runner", "undrain", "runner-1")
    told = scene.command.ok("runner", "show", "runner-1").out
    assert "takes jobs again since" in told
    assert ": the driver is in" in told
    scene.command.be("engineer", scene.api)
    assert scene.command("runner", "drain", "runner-1", "-r", "why not").status == 4


def test_what_no_runner_could_run_is_told_when_it_is_asked_for(scene):
    scene.target()
    hardware = {"accelerator": "nvidia-h100", "count": 2}
    large = registered_bundle(scene.service, scene.api.actor("manager"), "large", b"large", hardware=hardware).digest
    for command in (
        ["gate", "run", large, "-p", scene.policy.digest],
        ["release", "create", "-t", "chat@prod", "-b", large, "-p", scene.policy.digest],
    ):
        ran = scene.command(*command)
        assert ran.status == 4
        assert "no runner of class cpu has 2 × nvidia-h100" in ran.err
        said = " ".join(ran.err.split())
        assert "runner-1: it has no accelerator, only a processor with 8.6 GB of memory" in said


def test_hardware_that_no_runner_of_the_class_has_is_said_at_once_with_who_has_it(scene):
    scene.target()
    hardware = {"accelerator": "nvidia-h100", "count": 4}
    four = registered_bundle(scene.service, scene.api.actor("manager"), "four", hardware=hardware)
    cards = [{"sku": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984}] * 4
    found = FINGERPRINT.model_dump(mode="json", exclude_none=True) | {"accelerators": cards}
    large = {"name": "large", "runner_class": "h100", "fingerprint": found, "engines": ["llamacpp"], "boot_id": "b"}
    scene.runner.runners.register(RunnerRegistration.model_validate(large))
    for command in (
        ("release", "create", "-t", "chat@prod", "-b", four.digest, "-p", scene.policy.digest),
        ("gate", "run", four.digest, "--policy", scene.policy.digest, "--runner-class", "cpu"),
    ):
        refused = scene.command(*command)
        assert refused.status == 4, refused
        said = " ".join(refused.err.split())
        assert "no runner of class cpu has 4 × nvidia-h100" in said
        assert "runner-1: it has no accelerator" in said
        assert "it fits large of class h100" in said


def test_the_commands_that_a_refusal_names_have_all_that_they_need(scene, tmp_path):
    scene.target()
    missing = scene.command("alias", "show", "nobody")
    assert "`sluicegate alias set nobody BUNDLE --reason …`" in missing.err
    other = registered_bundle(scene.service, scene.api.actor("manager"), "other", b"other").digest
    scene.command.ok("alias", "set", "champion", other, "-r", "the first")
    blind = scene.command("alias", "set", "champion", scene.bundle.digest, "-r", "better")
    assert blind.status == 4
    assert "say what you saw with `--expect BUNDLE` or `--if-match GENERATION`" in blind.err
    fresh = scene.command("alias", "set", "fresh", other, "--expect", other, "-r", "none is there")
    assert fresh.status == 4
    assert "make it without `--expect`" in fresh.err

    suite = registered_golden(scene.service, scene.api.actor("manager"))
    rule = {"gate": "golden", "suite": suite.digest, "margin_nat": "0.5", "min_prompts": 1}
    body = policy_body("exact")
    policy = Policy.model_validate(body | {"gates": [*body["gates"], rule]})
    file = tmp_path / "exact.json"
    file.write_bytes(policy.canonical())
    create = ("release", "create", "-t", "chat@prod", "-b", scene.bundle.digest, "-p", file)
    unknown = scene.command(*create)
    assert unknown.status == 2
    assert f"{file} is policy {policy.digest}, which is not registered" in unknown.err
    assert f"`sluicegate policy push {file}`" in unknown.err
    scene.command.ok("policy", "push", file)
    unrecorded = scene.command(*create)
    assert unrecorded.status == 4
    assert f"record {suite.digest[7:19]} --target chat@prod --bundle BUNDLE --reason …`" in unrecorded.err


def test_who_takes_a_release_back_may_wait_for_that_and_is_told_when_nothing_else_would_serve(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.to_canary(identity)
    scene.shift(identity, 10_000)
    scene.act(identity, "promoted", Kind.PROMOTED, Note(reason="every step passed"))
    scene.command.ok("bundle", "quarantine", scene.bundle.digest, "-r", "it leaks names")
    shown = scene.command.ok("target", "show", "chat@prod").out
    assert f"sluicegate release rollback {identity} --to-nothing --reason …" in " ".join(shown.split())
    asked = scene.command.ok("release", "rollback", identity, "--to-nothing", "-r", "it leaks names")
    watch = ["release", "watch", identity, "--until", "rolled_back"]
    assert f"follow it: sluicegate {' '.join(watch)}" in asked.err
    assert scene.command(*watch, "--timeout", "0").status == 3
    scene.act(identity, "restored", Kind.TRAFFIC_RESTORED, traffic(scene.bundle.digest, 0, reasons=["it leaks names"]))
    scene.act(identity, "observed", Kind.RESTORE_OBSERVED, Restored(observed=12, seconds=0.8))
    assert scene.command.ok(*watch, "--json").json["outcome"] == "rolled_back"
    assert scene.command("release", "watch", identity, "--until", "ended").status == 1


def test_who_takes_back_what_is_live_beside_a_canary_is_told_of_the_canary_first(scene):
    scene.target()
    live = scene.release()["id"]
    scene.to_canary(live)
    scene.shift(live, 10_000)
    scene.act(live, "promoted", Kind.PROMOTED, Note(reason="every step passed"))
    with scene.service.database.transaction() as session:
        row = session.get_one(ReleaseRow, UUID(live))
        row.phase_since -= timedelta(days=30)  # its soak is long over, and nothing was before it
    alone = scene.command("release", "rollback", live, "-r", "slow")
    assert (alone.status, "say so with --to-nothing" in alone.err) == (4, True)
    scene.bundle = registered_bundle(scene.service, scene.api.actor("manager"), "other", b"other")
    canary = scene.release()["id"]
    scene.to_canary(canary)
    for more in ((), ("--to-nothing",)):
        ran = scene.command("release", "rollback", live, *more, "-r", "slow")
        assert (ran.status, "--to-nothing" in ran.err) == (4, False)
        assert f"`sluicegate release rollback {canary} --reason …`" in ran.err


def test_what_is_live_again_is_not_switched_off_by_who_takes_back_once_more(scene):
    scene.target()
    first = scene.release()["id"]
    first_bundle = scene.bundle
    scene.to_canary(first)
    scene.shift(first, 10_000)
    scene.act(first, "promoted", Kind.PROMOTED, Note(reason="every step passed"))
    scene.bundle = registered_bundle(scene.service, scene.api.actor("manager"), "other", b"other")
    second = scene.release()["id"]
    scene.to_canary(second)
    scene.act(first, "replaced", Kind.REPLACED, Replaced(release=UUID(second)))
    scene.act(second, "promoted", Kind.PROMOTED, Note(reason="every step passed"))
    scene.act(second, "restored", Kind.TRAFFIC_RESTORED, traffic(first_bundle.digest, 0, reasons=["slow"]))
    scene.act(first, "reinstated", Kind.REINSTATED, Replaced(release=UUID(second)))
    # Its phase has begun this moment, and yet it is in no soak: nothing is behind it.
    again = scene.command("release", "rollback", first, "-r", "slow")
    assert (again.status, "say so with --to-nothing" in again.err) == (4, True)
    said = scene.command.ok("release", "rollback", first, "--to-nothing", "-r", "it leaks names")
    assert "will answer 503" in said.err


def test_what_was_done_already_is_said_to_have_been(scene):
    scene.target()
    identity = scene.release()["id"]
    digest, done = scene.bundle.digest, "nothing has changed"
    other = registered_bundle(scene.service, scene.api.actor("manager"), "other", b"other").digest
    assert done not in scene.command.ok("release", "pause", identity, "-r", "a look").err
    assert f"{done}: this was done already" in scene.command.ok("release", "pause", identity, "-r", "a look").err
    assert done not in scene.command.ok("alias", "set", "best", digest, "-r", "first").err
    again = scene.command.ok("alias", "set", "best", digest, "--expect", other, "-r", "again", "--json")
    assert (again.json["bundle"], again.json["generation"]) == (digest, 1)
    assert f"{done}: @best names it already, and not {other[7:19]} as expected" in again.err
    scene.command.ok("bundle", "quarantine", other, "-r", "a doubt")
    assert scene.command.ok("bundle", "lift", other, "-r", "none").out.startswith("lifted: other")
    assert f"{done}: it was lifted already" in scene.command.ok("bundle", "lift", other, "-r", "none").out


def test_who_may_not_push_a_policy_is_told_so_before_what_it_lacks(scene, tmp_path):
    rule = {"gate": "golden", "suite": "sha256:" + "e" * 64, "margin_nat": "0.5", "min_prompts": 1}
    body = policy_body("exact")
    (tmp_path / "policy.json").write_text(json.dumps(body | {"gates": [*body["gates"], rule]}))
    assert "sluicegate suite push" in scene.command("policy", "push", tmp_path / "policy.json").err
    scene.command.be("ci", scene.api)
    ran = scene.command("policy", "push", tmp_path / "policy.json", "--json")
    assert (ran.status, ran.json["type"].rsplit("/", 1)[1]) == (4, "not-permitted")


def test_evidence_is_listed_from_its_newest_entry_on(scene):
    scene.target()
    of, backwards = ("--release", scene.release()["id"]), ("--newest-first", "--json")
    listed = scene.command.ok("evidence", "list", "--json").json["items"]
    assert scene.command.ok("evidence", "list", *backwards).json["items"] == listed[::-1]
    (newest,) = scene.command.ok("evidence", "list", "--limit", "1", *backwards).json["items"]
    assert newest == scene.command.ok("evidence", "list", *of, *backwards).json["items"][0] == listed[-1]
    assert scene.command("evidence", "list", *of, "--after", "1", "--newest-first").status == 2


@pytest.mark.parametrize("few", [500, 0])
def test_evidence_is_listed_of_a_target_and_of_kinds_page_by_page(scene, monkeypatch, few):
    monkeypatch.setattr(transport, "PAGE_SIZE", 2)
    monkeypatch.setattr(evidence, "FEW", few)
    scene.target()
    scene.command.ok("target", "create", "chat@staging")
    scene.release()
    everything = scene.command.ok("evidence", "list", "--json").json["items"]
    own = [one for one in everything if one["stream"].startswith(("release/", "target/")) and "staging" not in str(one)]
    kinds = {"created", "target_created"}
    cases = {
        ("--target", "chat@prod"): own,
        ("--kind", "created", "--kind", "target_created"): [one for one in everything if one["kind"] in kinds],
        ("-t", "chat@prod", "--kind", "target_created"): [one for one in own if one["kind"] == "target_created"],
        ("--stream", own[-1]["stream"], "--kind", "created"): [one for one in own if one["kind"] == "created"],
        ("--kind", "promoted"): [],
    }
    for asked, expected in cases.items():
        assert scene.command.ok("evidence", "list", *asked, "--json").json["items"] == expected, asked
        backwards = scene.command.ok("evidence", "list", *asked, "--newest-first", "--json").json["items"]
        assert backwards == expected[::-1], asked
    assert [len(one) for one in cases.values()] == [len(own), 3, 1, 1, 0]
    assert len(own) > 1
    assert scene.command("evidence", "list", "--target", "nobody@prod").status == 2
    assert scene.command("evidence", "list", "--target", "chat@prod", "--stream", own[0]["stream"]).status == 2
    ask = scene.api.clients["viewer"].get
    assert ask("/v1/evidence", params={"target": "chat@prod", "stream": own[0]["stream"]}).status_code == 422
    assert ask("/v1/evidence", params={"target": "nobody@prod"}).status_code == 404
    assert ask("/v1/evidence", params={"kind": "nothing"}).status_code == 422
