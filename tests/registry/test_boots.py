"""What a boot took and why one failed, as the service, the command line and the pages tell it."""

from uuid import UUID

import httpx

from gates.gate import finding
from gates.plain import NO_AUTHORITY
from registry import db, jobs
from schemas.api import Complete
from schemas.failures import FAILURES, Cause
from schemas.result import Severity, Verdict
from schemas.runner import JobKind, Report
from tests.support.scene import BOOTED, Scene

TOOK = BOOTED.model_copy(
    update={
        "ready_ms": 1500, "loading_ms": 1200, "warming_ms": 300, "compile_ms": 700, "stage_ms": 40,
        "was_staged": False, "page_cache_percent": 100, "kernel_cache": "empty", "warm_requests": 2, "warm_failed": 0,
    }
)  # fmt: skip
WARM = {"kernel_cache": None, "compile_ms": None, "was_staged": True}
FAILED = {
    "state": "failed", "cause": "out_of_memory: the engine exited with status 1", "failure": "out_of_memory",
    "log_tail": ["loading", "std::bad_alloc <b>"],
}  # fmt: skip


def play(scene: Scene, *reports: tuple[str, dict[str, object]], gate: bool = True) -> str:
    """Claim the job that waits, report these things, and end it. Returns the job."""
    claim = None
    while claim is None:
        claim = scene.runner.runners.claim(scene.runner_id)
    said = list(reports)
    if gate:
        said += [
            ("gate_recorded", scene.result(name, Verdict.PASSED).model_dump(mode="json", exclude_none=True))
            for name in claim.gates
        ]
    for place, (kind, body) in enumerate(said):
        act = f"gate:{body['gate']}" if kind == "gate_recorded" else f"said:{place}"
        scene.runner.jobs.report(claim.job, Report(fencing_token=claim.fencing_token, act=act, kind=kind, body=body))
    scene.runner.jobs.complete(claim.job, Complete(fencing_token=claim.fencing_token))
    return str(claim.job)


def booted(**changes: object) -> tuple[str, dict[str, object]]:
    return "engine_booted", TOOK.model_copy(update=changes).model_dump(mode="json", exclude_none=True)


def page(scene: Scene, address: str) -> str:
    with httpx.Client(base_url=scene.api.url, trust_env=False, timeout=30, verify=NO_AUTHORITY) as client:
        client.post("/login", data={"token": scene.api.tokens["viewer"], "next": "/"})
        return client.get(address).text


def test_what_each_boot_took_is_told_newest_first_with_cold_and_warm_apart(scene: Scene) -> None:
    digest = scene.bundle.digest
    scene.command.ok("gate", "run", digest, "-p", scene.policy.digest)
    first = play(scene, booted())
    scene.command.ok("gate", "run", digest, "-p", scene.policy.digest)
    second = play(scene, booted(**WARM), booted(**WARM, page_cache_percent=None), gate=False)
    found = scene.command.ok("bundle", "show", digest, "--json").json["boots"]
    assert [(one["run"], one["is_cold"]) for one in found] == [(second, None), (second, False), (first, True)]
    oldest = found[-1]
    assert {name: oldest[name] for name in ("stage_ms", "loading_ms", "compile_ms", "warming_ms", "ready_ms")} == {
        "stage_ms": 40, "loading_ms": 1200, "compile_ms": 700, "warming_ms": 300, "ready_ms": 1500,
    }  # fmt: skip
    gates = len(scene.policy.gates)
    assert [one["gates_ms"] for one in found] == [None, None, 1500 * gates]
    said = scene.command.ok("bundle", "show", digest).out
    for expected in ("COMPILE", "cold", "warm", "0.70 s", "1.50 s"):
        assert expected in said
    shown = page(scene, f"/bundles/{digest}")
    assert "<h2>Boots</h2>" in shown
    assert "1.20 s" in shown
    other = scene.command("bundle", "show", "0" * 64)
    assert other.status != 0
    client = scene.api.clients["viewer"]
    assert client.get(f"/v1/bundles/{'0' * 64}/boots").status_code == 404
    assert len(client.get(f"/v1/bundles/{digest[7:19]}/boots").json()["items"]) == 3


def row(item: str, outcome: str, **values: str) -> dict[str, str]:
    return {"item": item, "outcome": outcome, **values}


def test_how_a_boot_agrees_with_its_bundle_is_told_by_every_way_to_look_at_it(scene: Scene) -> None:
    digest = scene.bundle.digest
    rows = [
        row("version", "equal", expected="1", found="1", expected_by="engine.version", found_by="GET /version"),
        row(
            "slots", "differs", expected="4", found="2 <b>", expected_by="runtime.max_sequences", found_by="GET /props"
        ),
        row("tokenizer", "not_reported"),
    ]
    warning = {
        "code": "slots-differ", "severity": "warn", "message": "The engine takes 2 <b>, and the bundle says 4.",
        "found": "2 <b>", "expected": "4",
    }  # fmt: skip
    for more in ({}, {"compared": rows, "findings": [warning]}):
        scene.command.ok("gate", "run", digest, "-p", scene.policy.digest)
        kind, body = booted()
        play(scene, (kind, body | more), gate=False)
    newest, oldest = scene.command.ok("bundle", "show", digest, "--json").json["boots"]
    assert (oldest["compared"], oldest["findings"]) == (None, [])
    assert [one["item"] for one in newest["compared"]] == ["version", "slots", "tokenizer"]
    assert newest["findings"][0]["code"] == "slots-differ"
    said = scene.command.ok("bundle", "show", digest).out
    agreed = "1 equal, 1 differ, 1 not reported, 1 warning"
    for expected in (agreed, "does not say of itself: tokenizer", "warn slots-differ: The engine takes 2"):
        assert expected in said
    shown = page(scene, f"/bundles/{digest}")
    for expected in (agreed, "The engine takes 2 &lt;b&gt;, and the bundle says 4.", "runtime.max_sequences"):
        assert expected in shown


def test_a_failed_replica_is_shown_with_its_class_what_that_means_and_its_last_lines(scene: Scene) -> None:
    digest = scene.bundle.digest
    scene.command.ok("gate", "run", digest, "-p", scene.policy.digest)
    run = play(scene, booted(), ("replica_changed", FAILED), gate=False)
    told = scene.command.ok("runner", "show", "runner-1", "--json").json["runs"][0]["replica"]
    assert (told["failure"], told["log_tail"]) == ("out_of_memory", FAILED["log_tail"])
    said = scene.command.ok("runner", "show", "runner-1").out
    for expected in (run, FAILURES[Cause.OUT_OF_MEMORY].meaning, "| std::bad_alloc <b>"):
        assert expected in said
    shown = page(scene, f"/runners/{scene.runner_id}")
    assert "last 2 lines of its log" in shown
    assert "std::bad_alloc &lt;b&gt;" in shown

    scene.target()
    release = scene.release()["id"]
    with scene.service.database.transaction() as session:
        jobs.create(
            session,
            scene.api.project_id,
            JobKind.EVALUATE,
            bundle=digest,
            policy=scene.policy.digest,
            runner_class="cpu",
            release=UUID(release),
            created_by="controller",
            now=db.now(session),
        )
    with_release = ("replica_changed", FAILED)
    ready = booted(findings=[finding("slots-differ", "2 at once.", severity=Severity.WARN)])
    play(scene, ("staged", {"files": 1, "size": 10, "duration_ms": 1}), ready, with_release, gate=False)
    said = scene.command.ok("release", "show", release).out
    for expected in (
        "replica failed: out_of_memory",
        "ready in 1.5 s",
        "load 1.2 s",
        "warns of slots-differ",
        "| std::bad_alloc <b>",
    ):
        assert expected in said
    log = scene.command.ok("release", "show", release, "--json").json["log"]
    (entry,) = [one for one in log if one["kind"] == "replica_changed"]
    assert entry["body"]["replica"]["failure"] == "out_of_memory"
    shown = page(scene, f"/releases/{release}")
    assert "last 2 lines of its log" in shown
    assert "dot bad" in shown
