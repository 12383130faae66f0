"""Two bundles compared by the command line and the library, here and by the service, with what is in evidence."""

import json
from uuid import UUID

import pytest

from gates import catalog
from gates.difference import IN_WEIGHTS, diff
from gates.impact import ADVICE, NO_RESULT
from registry import db, jobs
from registry.client import Client
from schemas.bundle import Bundle
from schemas.evidence import Kind
from schemas.policy import Policy
from schemas.problems import NotFound
from schemas.result import Verdict
from schemas.runner import JobKind
from tests.support.factories import bundle_body, policy_body, registered_bundle
from tests.support.phases import promoted
from tests.support.scene import BOOTED, STAGED

WIDER = {"context_tokens": 1024, "max_sequences": 4}


@pytest.fixture
def written(tmp_path):
    def write(name, body):
        path = tmp_path / name
        path.write_text(json.dumps(body))
        return path

    return write


def outcomes(found):
    return {one["gate"]: one["outcome"] for one in found["gates"]}


# ------------------------------------------------------------------------------------------------ without a service


def test_two_files_are_compared_without_a_service(command, written):
    a, b = written("a.json", bundle_body()), written("b.json", bundle_body(runtime=WIDER, description="Wider."))
    said = command.ok("bundle", "diff", a, b).out
    for expected in ("runtime", "1 value", "/runtime/context_tokens", "512", "1024", "/description", "—", "Wider."):
        assert expected in said
    found = command.ok("bundle", "diff", a, b, "--json").json
    assert [change["part"] for change in found["changed"]] == ["runtime", "description"]
    assert found["changed"][0]["values"] == [{"pointer": "/runtime/context_tokens", "was": 512, "now": 1024}]
    assert command("bundle", "diff", a, b, "--exit-code").status == 1
    assert command("bundle", "diff", a, a, "--exit-code").status == 0
    assert "the same bundle" in command.ok("bundle", "diff", a, a).out

    c = written("c.json", bundle_body(files=[bundle_body()["files"][0] | {"sha256": "sha256:" + "1" * 64}]))
    said = command.ok("bundle", "diff", a, c).out
    assert f"tokenizer  {IN_WEIGHTS}" in said
    assert "tokenizer" not in said.split("the same  ")[1]
    found = command.ok("bundle", "diff", a, c, "--json").json
    assert [(one["part"], one["within"]) for one in found["within"]] == [
        *(("tokenizer", "weights"), ("template", "weights")),
    ]

    policy = written("policy.json", policy_body())
    ran = command.ok("bundle", "impact", a, b, "--policy", policy)
    assert "run again" in ran.out
    assert ADVICE in ran.err
    assert command("bundle", "impact", a, b, "--exit-code").status == 1
    titled = written("c.json", bundle_body(description="A title."))
    ran = command.ok("bundle", "impact", a, titled)
    assert "would carry over" in ran.out
    assert "not looked up" in ran.err
    found = command.ok("bundle", "impact", a, titled, "--policy", policy, "--json").json
    assert outcomes(found) == {"integrity": "again", "compatibility": "would_carry"}
    assert found["policy"] == Policy.model_validate(policy_body()).digest


def test_a_comparison_that_does_not_say_of_what_is_refused(command, written):
    a = written("a.json", bundle_body())
    for asked in (["bundle", "diff", a], ["bundle", "impact", a], ["bundle", "diff", a, a, "--target", "chat@prod"]):
        ran = command(*asked)
        assert ran.status == 2, ran
        assert "--target" in ran.err
    ran = command("bundle", "impact", a, a, "--policy", "9c1d77aa")
    assert ran.status == 2
    assert "without a service" in ran.err
    ran = command("bundle", "diff", a, written("b.json", bundle_body(runtime={"context_tokens": -1})), "--json")
    assert ran.status == 2
    assert "/runtime/context_tokens" in {error["pointer"] for error in ran.json["errors"]}


def test_many_files_are_counted_and_long_values_are_cut(command, written):
    files = bundle_body()["files"] + [
        {"path": f"x{place:03}.md", "size": 1, "sha256": "sha256:" + "1" * 64, "role": "documentation"}
        for place in range(60)
    ]
    engine = bundle_body()["engine"] | {"arguments": ["--long", "x" * 400]}
    a, b = written("a.json", bundle_body()), written("b.json", bundle_body(files=files, engine=engine))
    ran = command.ok("bundle", "diff", a, b)
    assert "60 files" in ran.out
    assert "x049.md" in ran.out
    assert "x050.md" not in ran.out
    assert "10 more files" in ran.err
    assert "--long xxx" in ran.out
    assert "x" * 200 not in ran.out
    assert len(command.ok("bundle", "diff", a, b, "--json").json["changed"][1]["files"]) == 60


# --------------------------------------------------------------------------------------------------- by the service


def of(found, gate):
    return next(one for one in found["gates"] if one["gate"] == gate)


def evaluated_release(scene):
    """Return the id of a release whose gates have passed on a runner."""
    scene.target()
    release = scene.release()["id"]
    with scene.service.database.transaction() as session:
        jobs.create(
            session,
            scene.api.project_id,
            JobKind.EVALUATE,
            bundle=scene.bundle.digest,
            policy=scene.policy.digest,
            gates=[rule.gate for rule in scene.policy.gates],
            runner_class="cpu",
            release=UUID(release),
            created_by="controller",
            now=db.now(session),
        )
    scene.act(release, "staged", Kind.STAGED, STAGED)
    scene.act(release, "booted", Kind.ENGINE_BOOTED, BOOTED)
    scene.evaluate()
    return release


def test_registered_bundles_are_compared_by_the_service_and_a_file_with_what_is_registered(scene, written):
    command, wider = scene.command, registered_bundle(scene.service, scene.api.actor("manager"), runtime=WIDER)
    a, b = scene.bundle.digest, wider.digest
    found = command.ok("bundle", "diff", a[7:19], b[7:19], "--json").json
    assert found == diff(scene.bundle, wider).model_dump(mode="json")
    file = written("b.json", bundle_body(runtime=WIDER))
    assert command.ok("bundle", "diff", a[7:19], file, "--json").json == found
    assert command("bundle", "diff", a, b, "--exit-code").status == 1
    command.ok("alias", "set", "champion", a, "-r", "the first one")
    assert command.ok("bundle", "diff", "@champion", b, "--json").json == found
    with Client(scene.api.url, scene.api.tokens["viewer"]) as viewer:
        assert viewer.bundles.diff(a, b) == diff(scene.bundle, wider)
        assert viewer.bundles.impact(a, b, policy=scene.policy.digest).policy == scene.policy.digest
        for wrong in ({"policy": "0" * 64}, {"policy": None}):
            with pytest.raises(NotFound):
                viewer.bundles.impact(a, b if wrong["policy"] else "0" * 64, **wrong)

    scene.target()
    for asked in ("diff", "impact"):
        ran = command("bundle", asked, "--target", "chat@prod", b)
        assert ran.status == 4
        assert "has accepted no bundle" in ran.err
    promoted(scene.service, scene.api.actor("manager"), a, scene.policy.digest)
    assert command.ok("target", "show", "chat@prod", "--json").json["stable_bundle"] == a
    assert command.ok("bundle", "diff", "--target", "chat@prod", b, "--json").json == found
    local = command.ok(
        "bundle", "impact", "--target", "chat@prod", file, "-p", scene.policy.digest[7:19], "--json"
    ).json
    assert outcomes(local) == {"integrity": "again", "compatibility": "again"}


def test_what_is_in_evidence_of_the_first_decides_what_carries_over(scene):
    command = scene.command
    titled = registered_bundle(scene.service, scene.api.actor("manager"), description="A title.")
    asked = ("bundle", "impact", scene.bundle.digest, titled.digest, "--json")
    found = command.ok(*asked).json
    assert {*outcomes(found).values()} == {"again"}
    assert NO_RESULT in [reason["why"] for reason in of(found, "compatibility")["reasons"]]

    release = evaluated_release(scene)
    found = command.ok(*asked).json
    assert {gate for gate, outcome in outcomes(found).items() if outcome == "carries"} == {"compatibility"}
    held = of(found, "compatibility")["held"]
    assert (held["verdict"], held["runner"], held["refused"]) == ("passed", "runner-1", None)
    shown = command.ok(*asked[:-1]).out
    assert "carries over" in shown
    assert held["entry"][7:19] in shown
    # By a policy, only what its own rule has judged counts.
    by_policy = command.ok(*asked, "--policy", scene.policy.digest).json
    assert outcomes(by_policy)["compatibility"] == "again"
    assert "another rule" in of(by_policy, "compatibility")["held"]["refused"]

    command.ok("evidence", "revoke", "--release", release, "--gate", "compatibility", "-r", "the clock was wrong")
    found = command.ok(*asked).json
    assert outcomes(found)["compatibility"] == "again"
    assert "the clock was wrong" in of(found, "compatibility")["held"]["refused"]
    command.ok("release", "reject", release, "-r", "over")

    for verdict, outcome in ((Verdict.PASSED, "carries"), (Verdict.FAILED, "again")):
        command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
        scene.evaluate(compatibility=verdict)
        assert outcomes(command.ok(*asked).json)["compatibility"] == outcome


def test_a_result_by_the_policy_s_own_rule_counts_for_it(scene):
    titled = registered_bundle(scene.service, scene.api.actor("manager"), description="A title.")
    rules = {rule.gate: rule for rule in scene.policy.gates}
    plain = scene.result
    scene.result = lambda gate, verdict: plain(gate, verdict).model_copy(
        update={"definition": catalog.definition(gate, rules[gate])}
    )
    scene.command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    scene.evaluate()
    asked = ("bundle", "impact", scene.bundle.digest, titled.digest, "-p", scene.policy.digest, "--json")
    found = scene.command.ok(*asked).json
    assert outcomes(found) == {"integrity": "again", "compatibility": "carries"}
    assert Bundle.model_validate(scene.command.ok("bundle", "show", titled.digest, "--json").json["document"]) == titled
    assert scene.command("bundle", "impact", scene.bundle.digest, titled.digest, "--exit-code").status == 1
