"""What people do to a release on the command line, and what they are told when it does not take it."""

from uuid import UUID

from registry import db, jobs, targets
from schemas.runner import JobKind, JobState, ReplicaState


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
