import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from registry import db, jobs
from registry.cli.failures import Exit
from registry.client import Client
from registry.tables import ReleaseRow, TargetRow
from schemas.api import Complete, Progress
from schemas.evidence import (
    Decision,
    Kind,
    Note,
    Reasoned,
    Restored,
)
from schemas.reference import Reference
from schemas.result import Finding, Severity, Verdict
from schemas.suite import GoldenSuite
from tests.support.api import one_by_one
from tests.support.factories import golden_body, reference_body, registered_policy
from tests.support.scene import BOOTED, STAGED, traffic

ROOT = Path(__file__).parents[2]


# --------------------------------------------------------------------------------------- targets and runners


def test_a_target_is_made_shown_and_listed(scene):
    made = scene.command.ok("target", "create", "chat@prod", "--json").json  # the only class of runners is taken
    assert (made["name"], made["runner_class"], made["gateway"]) == ("chat@prod", "cpu", "local")
    assert scene.command.ok("target", "show", "chat@prod", "--json").json == made
    assert scene.command.ok("target", "list", "--json").json["items"] == [made]
    assert "no traffic is let through" in scene.command.ok("target", "show", "chat@prod").out
    assert "chat@prod" in scene.command.ok("target", "list").out


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["chat"], 2, "/name"),
        (["Chat@prod"], 2, "/name"),
        (["chat@prod", "--gateway", "edge"], 2, "/gateway"),
        (["chat@prod", "--runner-class", "C P U"], 2, "/runner_class"),
    ],
)
def test_a_target_that_cannot_be_is_refused_with_its_place(scene, arguments, status, said):
    ran = scene.command("target", "create", *arguments)
    assert (ran.status, ran.out) == (status, "")
    assert said in ran.err
    assert scene.command.ok("target", "list", "--json").json == {"items": []}


def test_a_target_without_an_environment_is_told_how_to_write_one(scene):
    ran = scene.command("target", "show", "chat")
    assert (ran.status, ran.out) == (2, "")
    assert "write NAME@ENVIRONMENT, such as chat@prod" in ran.err


def test_what_a_target_serves_is_told_for_now_for_any_instant_before_and_as_a_list(scene):
    scene.target()
    assert "nothing has served it" in scene.command.ok("target", "history", "chat@prod").out
    release = scene.release()["id"]
    scene.to_canary(release)
    (change,) = scene.command.ok("target", "history", "chat@prod", "--json").json["items"]
    assert (change["kind"], change["release"], change["actor"]) == ("traffic_shifted", release, "controller")
    assert change["split"] == [{"bundle": scene.bundle.digest, "weight_bp": 1000}]
    assert change["by"] == "controller"
    listed = " ".join(scene.command.ok("target", "history", "chat@prod").out.split())
    assert f"10 % {scene.bundle.name} ({scene.bundle.digest[7:15]}) " in listed.partition("DONE BY")[2]

    now = datetime.now(UTC).isoformat()
    served = scene.command.ok("target", "show", "chat@prod", "--at", now, "--json").json
    assert served["live_bundle"] is None
    assert (served["split"], served["split_entry"]) == (change["split"], change["entry"])
    before = scene.command.ok("target", "show", "chat@prod", "--at", "2020-01-01T00:00:00+02:00", "--json").json
    assert (before["at"], before["split"]) == ("2019-12-31T22:00:00.000000Z", [])
    told = scene.command.ok("target", "show", "chat@prod", "--at", now).out
    assert told.index(f"10 % {scene.bundle.digest[7:19]}") < told.index("live bundle  none")
    with scene.service.database.transaction() as session:
        target = session.get_one(ReleaseRow, UUID(release)).target_id
        session.get_one(TargetRow, target).applied = change["split"]
    assert f"none yet (10 % {scene.bundle.digest[7:19]} in canary)" in scene.command.ok("target", "list").out
    for wrong in ("yesterday", "2020-01-01T00:00:00", "2999-01-01T00:00:00Z"):
        assert scene.command("target", "show", "chat@prod", "--at", wrong).status == 2
    scene.shift(release, 5000)
    paged = one_by_one(scene.api.clients["viewer"], "/v1/targets/chat@prod/history")
    assert [one["split"][0]["weight_bp"] for one in paged] == [5000, 1000]


def test_a_name_that_is_taken_is_status_4_and_one_that_is_not_there_status_2(scene):
    scene.target()
    assert scene.command("target", "create", "chat@prod").status == 4
    assert scene.command("target", "show", "other@prod").status == 2


def test_without_runners_their_class_must_be_named(command, stack):
    command.be("manager", stack)
    ran = command("target", "create", "chat@prod")
    assert ran.status == 2
    assert "--runner-class" in ran.err
    command.ok("target", "create", "chat@prod", "--runner-class", "cpu")


# -------------------------------------------------------------------------------------------------- releases


def test_a_release_shows_and_follows_what_a_runner_does_for_it(scene):
    scene.target()
    release = scene.release()["id"]
    with scene.service.database.transaction() as session:
        now, bundle = db.now(session), scene.bundle.digest
        job = jobs.create(
            session, scene.api.project_id, "evaluate", bundle=bundle, runner_class="cpu", created_by="x", now=now
        )
        job.release_id = UUID(release)
    claim = scene.runner.runners.claim(scene.runner_id)
    scene.runner.jobs.renew(claim.job, Progress(fencing_token=claim.fencing_token, progress="load 12/64"))
    assert scene.command.ok("release", "show", release, "--json").json["doing"] == "evaluate: load 12/64"
    assert "evaluate: load 12/64" in scene.command.ok("release", "show", release).out
    watched = scene.command("release", "watch", release, "--timeout", "0.1")
    assert watched.status == 3
    assert watched.err.count("evaluate: load 12/64") == 1


def test_what_the_step_of_a_canary_waits_for_is_shown_and_followed_until_it_holds(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.to_canary(identity)
    told = "step 1 of 1: 12 of 60 requests, 0 refused, 1 in flight; begun 40 s ago, limit 4 min"
    with scene.service.database.transaction() as session:
        session.get_one(ReleaseRow, UUID(identity)).progress = told
    assert scene.command.ok("release", "show", identity, "--json").json["doing"] == told
    watch = ("release", "watch", identity, "--until", "ended")
    assert told in (watched := scene.command(*watch, "--timeout", "0.1").err)
    assert f"come back to it: sluicegate {' '.join(watch)}" in watched
    scene.shift(identity, 5000)  # what was said before an entry is not said after it
    assert scene.command.ok("release", "show", identity, "--json").json["doing"] is None


def test_a_release_is_started_shown_and_listed(scene):
    scene.target()
    made = scene.release("--reason", "because")
    assert made["phase"] == "candidate"
    identity = made["id"]

    shown = scene.command.ok("release", "show", identity, "--json").json
    assert [entry["kind"] for entry in shown["log"]] == ["created"]
    human = scene.command.ok("release", "show", identity[:23]).out
    for expected in (identity, "candidate since", "integrity", "not run", "no traffic has moved", "created (manager)"):
        assert expected in human
    assert [one["id"] for one in scene.command.ok("release", "list", "--json").json["items"]] == [identity]
    assert "TRAFFIC" in scene.command.ok("release", "list").out
    assert scene.command.ok("release", "list", "--phase", "canary", "--json").json == {"items": []}
    assert identity in scene.command.ok("release", "list", "-t", "chat@prod", "--phase", "candidate").out


def test_what_a_release_lacks_is_told(scene):
    scene.target()
    create = ("release", "create", "-t", "chat@prod")
    unknown = scene.command(*create, "-b", "0" * 64, "-p", scene.policy.digest)
    assert unknown.status == 2
    assert "Not found" in unknown.err
    assert scene.command(*create, "-b", "missing.json", "-p", scene.policy.digest).status == 2
    assert scene.command("release", "create", "-t", "nope", "-b", scene.bundle.digest, "-p", "0" * 64).status == 2
    scene.release()
    again = scene.command(*create, "-b", scene.bundle.digest, "-p", scene.policy.digest)
    assert again.status == 4
    assert "Conflict" in again.err


@pytest.mark.parametrize("text", ["0", "nonsense", "00000000", "00000000-0000-7000-8000-000000000000"])
def test_a_release_that_is_not_there_is_status_2(scene, text):
    assert scene.command("release", "show", text).status == 2


def test_a_beginning_that_two_releases_share_is_refused(scene):
    scene.target()
    first = scene.release()["id"]
    scene.command.ok("release", "reject", first, "-r", "no")
    second = scene.release()["id"]
    ran = scene.command("release", "show", first[:8])
    assert ran.status == 2
    assert f"more than one release begins with {first[:8]}; give more characters" in ran.err
    # Each is listed with what tells it from the other.
    assert [line.split(":")[0].strip() for line in ran.err.splitlines()[1:]] == [second, first]
    assert f"{first}: {scene.bundle.name} on chat@prod, rejected, created " in ran.err
    listed = scene.command("release", "show", first[:8], "--json")
    assert (listed.status, [one["name"] for one in listed.json["candidates"]]) == (2, [second, first])
    # Thirteen characters are one millisecond.
    assert scene.command.ok("release", "show", first[:13], "--json").json["id"] == first


def test_watch_prints_every_entry_and_ends_as_the_release_does(scene):
    scene.target()
    identity = scene.release()["id"]

    def play() -> None:
        time.sleep(0.3)
        scene.to_canary(identity)
        time.sleep(0.7)
        scene.act(identity, "promoted", Kind.PROMOTED, Note(reason="every step passed"))

    player = threading.Thread(target=play)
    player.start()
    ran = scene.command("release", "watch", identity, "--timeout", "60")
    player.join()
    assert ran.status == 0
    kinds = [line.split()[1].rstrip(":") for line in ran.out.splitlines()[:-1]]
    assert kinds[-2:] == ["traffic_shifted", "promoted"]
    assert len(kinds) == 7
    assert ran.out.splitlines()[-1] == "promoted: every step passed"
    assert f" {scene.bundle.name} ({scene.bundle.digest[7:15]}), acknowledged" in ran.out


@pytest.mark.parametrize(("until", "status"), [("gated", 0), ("approved", 0), ("promoted", 3), ("ended", 3)])
def test_watch_goes_as_far_as_it_is_told(scene, until, status):
    scene.target()
    identity = scene.release()["id"]
    scene.to_canary(identity)
    ran = scene.command("release", "watch", identity, "--until", until, "--timeout", "0.1", "--json")
    assert ran.status == status
    assert ran.json["outcome"] == ("canary" if status == 0 else "time-out")
    assert ran.json["id"] == identity
    assert "traffic_shifted" in ran.err


def test_a_rejected_release_is_status_1_with_the_reason(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.act(identity, "staged", Kind.STAGED, STAGED)
    scene.act(identity, "gate", Kind.GATE_RECORDED, scene.result("integrity", Verdict.FAILED))
    scene.act(identity, "refused", Kind.REFUSED, Reasoned(reasons=["integrity: model.gguf has other bytes"]))

    ran = scene.command("release", "watch", identity, "--json")

    assert ran.status == 1
    assert (ran.json["outcome"], ran.json["why"]) == ("rejected", "integrity: model.gguf has other bytes")
    human = scene.command.ok("release", "show", identity).out
    for expected in ("integrity said failed", "1.5 s", "token 5", "token 9", "compare the templates", "p7"):
        assert expected in human


def test_a_release_taken_back_is_status_1(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.to_canary(identity)
    restored = traffic(scene.bundle.digest, 0, cause="stop_condition", reasons=["TTFT p90 above 300 ms"])
    scene.act(identity, "restored", Kind.TRAFFIC_RESTORED, restored)
    scene.act(identity, "observed", Kind.RESTORE_OBSERVED, Restored(observed=12, seconds=0.8))
    ran = scene.command("release", "watch", identity, "--json")
    assert ran.status == 1
    assert (ran.json["outcome"], ran.json["why"]) == ("rolled_back", "TTFT p90 above 300 ms")


def test_a_release_that_holds_before_traffic_is_status_3_until_a_person_acts(scene):
    scene.target()
    identity = scene.release()["id"]
    held = Reasoned(reasons=["load: inconclusive"], cause="gates_undecided")
    scene.act(identity, "held", Kind.HELD, held)
    ran = scene.command("release", "watch", identity, "--timeout", "30")
    assert ran.status == 3
    assert "load: inconclusive" in ran.out.splitlines()[-1]
    assert "sluicegate release resume" in ran.out.splitlines()[-1]
    scene.command.ok("release", "resume", identity, "-r", "try once more")
    assert scene.command("release", "watch", identity, "--timeout", "0.1", "--json").json["outcome"] == "time-out"


def test_a_release_that_holds_in_its_canary_is_waited_for(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.to_canary(identity)
    scene.act(identity, "held", Kind.HELD, Reasoned(reasons=["too few requests"], cause="step_inconclusive"))
    ran = scene.command("release", "watch", identity, "--timeout", "0.2", "--json")
    assert (ran.status, ran.json["outcome"]) == (3, "time-out")
    told = " ".join(scene.command.ok("release", "show", identity).out.split())
    assert f"`sluicegate release resume {identity} --reason …` gives the step a fresh start, " in told
    assert f"`sluicegate release rollback {identity} --reason …` takes its traffic back" in told
    watched = " ".join(scene.command("release", "watch", identity, "--timeout", "0.2").err.split())
    assert watched.count(f"release resume {identity}") == 1


@pytest.mark.parametrize("required", [0, 1])
def test_who_waits_is_told_that_people_must_approve(scene, required):
    scene.target()
    policy = registered_policy(scene.service, scene.api.actor("manager"), approval={"required": required})
    identity = scene.release("--policy", policy.digest)["id"]
    scene.act(identity, "staged", Kind.STAGED, STAGED)
    scene.act(identity, "booted", Kind.ENGINE_BOOTED, BOOTED)
    scene.act(identity, "gates", Kind.GATES_PASSED, Decision(gates={"integrity": "sha256:" + "1" * 64}))
    ran = scene.command("release", "watch", identity, "--timeout", "0.2")
    said = f"waits for 1 approval by somebody other than manager: sluicegate release approve {identity} --reason …"
    assert (ran.status, ran.err.count(said)) == (3, required)
    ran = scene.command.ok("release", "watch", identity, "--until", "gated", "--json")
    assert ("waits for" in ran.err, said in ran.json["why"]) == (False, bool(required))
    told = [ran.json, scene.command.ok("release", "show", identity, "--json").json]
    assert [one["what_to_do"] for one in told] == [said if required else None] * 2


def test_an_interrupted_wait_says_that_the_release_goes_on(scene):
    scene.target()
    identity = scene.release()["id"]
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from registry.cli import main; sys.exit(main(['release', 'watch', '{identity}']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        assert "created" in ran.stdout.readline()
        ran.send_signal(signal.SIGINT)
        _, err = ran.communicate(timeout=30)
    assert ran.returncode == Exit.INTERRUPTED
    assert f"the release goes on: sluicegate release watch {identity}" in err
    assert "Traceback" not in err


def test_creating_and_waiting_is_one_command(scene):
    scene.target()

    def play() -> None:
        found: list[dict] = []
        with Client(scene.api.url, scene.api.tokens["engineer"]) as client:
            while not found:
                found = list(client.releases.list())
                time.sleep(0.05)
        scene.to_canary(str(found[0].id))

    player = threading.Thread(target=play)
    player.start()
    made = scene.release("--until", "approved", "--timeout", "60")
    player.join()
    assert made["outcome"] in ("approved", "canary")


def test_people_act_on_releases_and_their_reasons_are_kept(scene, stack):
    scene.target()
    identity = scene.release()["id"]
    command = scene.command
    assert command.ok("release", "pause", identity, "-r", "a complaint", "--json").json["is_paused"] is True
    told = " ".join(command.ok("release", "show", identity).out.split())
    assert f"what to do `sluicegate release resume {identity} --reason …` lets it go on, " in told
    assert "managers and administrators may resume" in told
    command.ok("release", "resume", identity, "-r", "another model")
    assert "rejected by manager: no" in command.ok("release", "reject", identity, "-r", "no").out
    for act in ("approve", "promote", "rollback", "pause"):
        refused = command("release", act, identity, "-r", "too late")
        assert refused.status == 4, (act, refused)
        said = f"error: Transition refused: release {identity} was rejected (rejected by manager: no); "
        assert refused.err.startswith(said)
    bodies = command.ok("evidence", "list", "--release", identity, "--json").json["items"]
    assert [entry["body"].get("reason") for entry in bodies if entry["kind"] in ("paused", "resumed")] == [
        "a complaint",
        "another model",
    ]

    command.be("engineer", stack)
    ran = command("release", "approve", identity, "-r", "mine")
    assert ran.status == 4
    assert "Not permitted" in ran.err


def test_an_empty_reason_is_refused(scene):
    scene.target()
    identity = scene.release()["id"]
    assert scene.command("release", "reject", identity, "-r", "").status == 2


# ------------------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize(
    ("verdicts", "status", "outcome"),
    [
        ({}, 0, "passed"),
        ({"compatibility": Verdict.FAILED}, 1, "failed"),
        ({"compatibility": Verdict.INCONCLUSIVE}, 3, "undecided"),
        ({"compatibility": Verdict.ERRORED}, 3, "undecided"),
    ],
)
def test_gates_are_run_and_their_verdict_is_the_exit_status(scene, verdicts, status, outcome):
    player = threading.Thread(target=lambda: scene.evaluate(**verdicts))
    player.start()
    ran = scene.command("gate", "run", scene.bundle.digest, "-p", scene.policy.digest[7:19], "--wait", "--json")
    player.join()
    assert (ran.status, ran.json["outcome"]) == (status, outcome)
    assert [result["gate"] for result in ran.json["results"]] == ["integrity", "compatibility"]
    assert "integrity passed: integrity said passed" in ran.err
    (last,) = scene.command.ok("evidence", "list", "--stream", f"run/{ran.json['id']}", "--json").json["items"][-1:]
    assert (last["kind"], last["body"]["outcome"]) == ("run_ended", outcome)
    again = scene.command("gate", "watch", ran.json["id"][:23], "--json")
    assert (again.status, again.json["outcome"], again.json["why"]) == (status, outcome, ran.json["why"])
    assert [one["outcome"] for one in scene.command.ok("gate", "list", "--json").json["items"]] == [outcome]
    assert outcome in scene.command.ok("gate", "list").out


def test_who_waits_for_a_run_is_rung_for_and_does_not_ask_again_and_again(scene):
    def asked() -> int:
        told = scene.api.clients["manager"].get("/v1/metrics").text
        route = '{method="GET",route="/v1/runs/{run}",status="2xx"}'
        return sum(
            int(float(line.split()[-1])) for line in told.splitlines() if "requests_total" in line and route in line
        )

    run = ("gate", "run", scene.bundle.digest, "-p", scene.policy.digest, "--wait", "--json")
    ran = scene.command(*run, "--timeout", "2").json
    assert (ran["outcome"], ran["why"]) == ("time-out", f"it is pending after 2 s: {ran['waits']}")
    assert 1 <= asked() <= 3
    scene.evaluate()


def test_an_interrupted_wait_for_a_run_says_how_to_come_back_to_it(scene):
    arguments = ["gate", "run", scene.bundle.digest, "-p", scene.policy.digest, "--wait"]
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from registry.cli import main; sys.exit(main({arguments}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        identity = ran.stderr.readline().removeprefix("run ").strip()
        time.sleep(0.3)
        ran.send_signal(signal.SIGINT)
        _, err = ran.communicate(timeout=30)
    assert ran.returncode == Exit.INTERRUPTED
    assert f"the run goes on: sluicegate gate watch {identity}" in err
    scene.evaluate()
    assert scene.command.ok("gate", "watch", identity).out.splitlines()[-1] == "passed: 2 gates passed"


def test_only_the_gates_that_are_named_are_run(scene):
    player = threading.Thread(target=scene.evaluate)
    player.start()
    options = ("-p", scene.policy.digest, "--gate", "integrity", "--wait")
    ran = scene.command.ok("gate", "run", scene.bundle.digest, *options)
    player.join()
    assert ran.out.splitlines() == ["integrity passed: integrity said passed", "passed: 1 gate passed"]


def test_a_run_that_nobody_takes_is_status_3_after_the_time_given(scene):
    run = ("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    ran = scene.command(*run, "--wait", "--timeout", "0.1", "--json")
    assert (ran.status, ran.json["outcome"]) == (3, "time-out")
    assert scene.command.ok(*run, "--json").json["state"] == "pending"


def test_a_gate_that_there_is_not_is_refused_with_its_place(scene):
    run = ("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    ran = scene.command(*run, "--gate", "magic", "--json")
    assert ran.status == 2
    assert ran.json["errors"][0]["pointer"] == "/gates/0"
    assert scene.command(*run, "--gate", "Not A Name").status == 2
    assert scene.command(*run, "--target", "other@prod").status == 2


def test_a_reference_is_recorded_and_set_on_the_target(scene, tmp_path):
    scene.target()
    suite = GoldenSuite.model_validate(golden_body())
    (tmp_path / "golden.json").write_bytes(suite.canonical())
    scene.command.ok("suite", "push", tmp_path / "golden.json")
    record = ("suite", "record", suite.digest[7:19], "-b", scene.bundle.digest, "-t", "chat@prod", "-r", "accepted")

    def play() -> None:
        claim = None
        while claim is None:
            claim = scene.runner.runners.claim(scene.runner_id)
        reference = Reference.model_validate(reference_body(suite, scene.bundle.digest))
        scene.runner.jobs.post_reference(claim.job, reference.canonical(), fencing_token=claim.fencing_token)
        scene.runner.jobs.complete(claim.job, Complete(fencing_token=claim.fencing_token))

    player = threading.Thread(target=play)
    player.start()
    ran = scene.command.ok(*record, "--wait", "--json")
    player.join()

    assert ran.json["outcome"] == "recorded"
    short = ran.json["reference"][7:19]
    assert f"what it answered: sluicegate suite reference {short}" in ran.err
    answered = Reference.model_validate(scene.command.ok("suite", "reference", short, "--json").json["document"])
    assert answered.suite == suite.digest
    shown = scene.command.ok("suite", "reference", ran.json["reference"]).out
    prompts = {one.id: one for one in suite.prompts}
    for one in answered.recordings:
        asked = prompts[one.prompt].messages[-1].content
        row = [one.prompt, asked, str(len(one.output)), one.finish_reason, "".join(token.text for token in one.output)]
        assert " ".join(row).split() in [line.split() for line in shown.splitlines()]
    assert scene.command("suite", "reference", suite.digest).status == 2
    assert "sluicegate suite reference" in scene.command.ok("target", "show", "chat@prod").err
    stream = ("--stream", f"run/{ran.json['id']}")
    assert "run_ended: recorded" in scene.command.ok("evidence", "list", *stream).out
    references = scene.command.ok("target", "show", "chat@prod", "--json").json["references"]
    assert references == {suite.digest: ran.json["reference"]}
    # Another takes its place only where it was seen.
    refused = scene.command(*record)
    assert (refused.status, "say what you saw with `--expect REFERENCE`" in refused.err) == (4, True), refused
    assert scene.command(*record, "--if-match", "1").status == 4
    assert scene.command.ok(*record, "--expect", short, "--json").json["kind"] == "record"


# -------------------------------------------------------------------------------------------------- evidence


def test_evidence_is_listed_and_verified(scene):
    scene.target()
    identity = scene.release()["id"]
    listed = scene.command.ok("evidence", "list", "--json").json["items"]
    assert [entry["kind"] for entry in listed][-1] == "created"
    assert "created (manager): created for chat@prod" in scene.command.ok("evidence", "list", "--release", identity).out
    last = listed[-1]["sequence"]
    of = ("--release", identity)
    after = scene.command.ok("evidence", "list", *of, "--after", last - 1, "--envelopes", "--json").json["items"]
    assert [entry["sequence"] for entry in after] == [last]
    assert after[0]["envelope"]["signatures"]
    assert len(scene.command.ok("evidence", "list", "--limit", "2", "--json").json["items"]) == 2

    verified = scene.command.ok("evidence", "verify", "--json").json
    assert verified["verified"] is True
    assert verified["entries"] == len(listed)
    assert scene.command.ok("evidence", "verify", "--release", identity[:23]).out == "verified: 1 entry in 1 stream\n"
    assert scene.command("evidence", "verify", "--release", identity, "--stream", "x").status == 2


def test_evidence_that_is_not_what_was_signed_is_status_1_and_named(scene):
    scene.target()
    identity = scene.release()["id"]
    with scene.service.database.transaction() as session:
        connection = session.connection()
        connection.exec_driver_sql("SET LOCAL session_replication_role = replica")  # past the trigger that refuses it
        connection.exec_driver_sql("UPDATE releases SET phase = 'promoted'")
    ran = scene.command("evidence", "verify", "--json")
    assert ran.status == 1
    assert ran.json["verified"] is False
    assert identity in ran.json["faults"][0]["stream"]
    human = scene.command("evidence", "verify")
    assert human.status == 1
    assert "not verified" in human.out
    assert f"release/{identity}" in human.out


def test_a_verdict_without_records_cannot_be_recomputed_and_is_undecided(scene):
    scene.command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    scene.evaluate()
    ran = scene.command("evidence", "verify", "--recompute", "--json")
    assert (ran.status, ran.json["verified"]) == (3, True)
    assert {(one["gate"], one["outcome"], one["recorded"]) for one in ran.json["recomputations"]} == {
        ("integrity", "impossible", "passed"),
        ("compatibility", "impossible", "passed"),
    }
    human = scene.command("evidence", "verify", "--recompute")
    assert human.status == 3
    assert "impossible, passed; the result names no records" in human.out


def test_nothing_to_verify_is_not_verified(command, stack):
    command.be("engineer", stack)
    ran = command("evidence", "verify", "--stream", "release/none", "--json")
    assert (ran.status, ran.json["verified"]) == (1, False)


# -------------------------------------------------------------------------------------------------- warnings


def test_a_warning_is_accepted_by_its_code_on_the_command_line(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.act(identity, "staged", Kind.STAGED, STAGED)
    scene.act(identity, "booted", Kind.ENGINE_BOOTED, BOOTED)
    warned = Finding(code="slow", severity=Severity.WARN, message="It is slow.", advice="Ask for less.", found="9 s")
    for attempt, found in enumerate(("9 s", "8 s", "9 s")):
        slow = warned.model_copy(update={"found": found})
        result = scene.result("integrity", Verdict.PASSED).model_copy(update={"findings": [slow]})
        scene.act(identity, f"gate:integrity:{attempt}", Kind.GATE_RECORDED, result)
    for gate in ("integrity", "compatibility"):
        warned = Finding(code="odd-name", severity=Severity.WARN, message="A name is odd.")
        result = scene.result(gate, Verdict.PASSED).model_copy(update={"findings": [warned]})
        scene.act(identity, f"gate:{gate}", Kind.GATE_RECORDED, result)
    shown = scene.command.ok("release", "show", identity).out
    assert (shown.count("integrity: It is slow. (3 times)"), shown.count("Ask for less.")) == (1, 1)
    assert "9 s; 8 s" in shown
    assert shown.count(": A name is odd.\n") == 2, "each of another gate"
    scene.act(identity, "gates", Kind.GATES_PASSED, Decision(gates={"integrity": "sha256:" + "1" * 64}))
    approve = ("release", "approve", identity, "--reason", "odd but right")
    scene.command.be("admin", scene.api)
    refused = scene.command(*approve)
    assert refused.status == 4
    assert "odd-name" in refused.err
    assert "--accept" in refused.err
    assert scene.command(*approve, "--accept", "even-name").status == 2
    assert scene.command.ok(*approve, "--accept", "odd-name", "--json").json["phase"] == "approved"
    assert "integrity: odd-name: odd but right" in scene.command.ok("evidence", "list", "--release", identity).out
