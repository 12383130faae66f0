"""What a finding found and expected reaches people and programs as the value that it is."""

import html
import re

from schemas.api import Complete
from schemas.evidence import Kind
from schemas.result import Finding, Severity, Verdict
from schemas.runner import Report
from tests.support.scene import STAGED

FOUND = {"layers": [1, 2.5, None], "is_tied": False}
AS_JSON = '{"is_tied": false, "layers": [1, 2.5, null]}'
FINDING = Finding(code="heads-divided", severity=Severity.BLOCK, message="It differs.", found=FOUND, expected=0)


def failed(scene):
    return scene.result("integrity", Verdict.FAILED).model_copy(update={"findings": [FINDING]})


def test_structured_values_of_a_finding_come_through_a_run_and_its_page(scene):
    scene.command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    claim = scene.runner.runners.claim(scene.runner_id)
    body = failed(scene).model_dump(mode="json", exclude_none=True)
    report = Report(fencing_token=claim.fencing_token, act="gate:integrity", kind="gate_recorded", body=body)
    scene.runner.jobs.report(claim.job, report)
    scene.runner.jobs.complete(claim.job, Complete(fencing_token=claim.fencing_token))
    ran = scene.command("gate", "watch", claim.job, "--json")
    (seen,) = ran.json["results"][0]["findings"]
    assert (ran.status, seen["found"], seen["expected"]) == (1, FOUND, 0)
    items = scene.command.ok("evidence", "list", "--json").json["items"]
    (entry,) = [one["entry_digest"] for one in items if one["kind"] == "gate_recorded"]
    viewer = scene.api.clients["viewer"]
    viewer.post("/login", data={"token": scene.api.tokens["viewer"], "next": "/"})
    page = html.unescape(re.sub(r"<[^>]*>", " ", viewer.get(f"/results/{entry}").text))
    assert f"found {AS_JSON}" in page
    assert "expected 0" in page


def test_a_release_tells_structured_values_as_json(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.act(identity, "staged", Kind.STAGED, STAGED)
    scene.act(identity, "gate:integrity", Kind.GATE_RECORDED, failed(scene))
    told = " ".join(scene.command.ok("release", "show", identity).out.split())
    assert f"found {AS_JSON}" in told
    assert "expected 0" in told
