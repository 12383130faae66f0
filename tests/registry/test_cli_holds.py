"""What the command line says of a release that holds, and why a target's traffic moved."""

from registry.client import Client
from schemas.evidence import Decision, Judgement, Kind, Note, Reasoned
from schemas.holds import CAUSES, Hold, advice
from tests.support.factories import registered_policy
from tests.support.scene import BOOTED, STAGED, traffic


def test_a_release_that_is_held_says_what_to_do_for_each_cause(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.act(identity, "staged", Kind.STAGED, STAGED)
    told = {}
    for cause in (*sorted(CAUSES), Hold.UNKNOWN):
        scene.act(identity, f"held:{cause}", Kind.HELD, Reasoned(reasons=[f"for {cause}"], cause=str(cause)))
        shown = scene.command.ok("release", "show", identity, "--json").json
        assert shown["held"] == [f"for {cause}"]
        told[cause] = shown["what_to_do"].removesuffix("; managers and administrators may resume")
        seen = scene.command("release", "watch", identity, "--timeout", "0.2", "--json")
        assert (seen.status, seen.json["outcome"]) == (3, "held")
        assert told[cause] in seen.json["why"]
    with Client(scene.api.url, scene.api.tokens["viewer"]) as client:
        found = client.releases.get(identity)
    assert told == {cause: advice(cause, found) for cause in told}
    said = " ".join(scene.command.ok("release", "show", identity).out.split())
    assert f"what to do {told[Hold.UNKNOWN]}" in said


def test_nobody_is_asked_to_agree_to_a_release_that_nobody_can_let_through(scene):
    scene.target()
    policy = registered_policy(scene.service, scene.api.actor("manager"), approval={"required": 1})
    identity = scene.release("--policy", policy.digest)["id"]
    scene.act(identity, "staged", Kind.STAGED, STAGED)
    scene.act(identity, "booted", Kind.ENGINE_BOOTED, BOOTED)
    scene.act(identity, "gates", Kind.GATES_PASSED, Decision(gates={"integrity": "sha256:" + "1" * 64}))
    asked = f"release approve {identity}"
    assert asked in scene.command.ok("release", "show", identity, "--json").json["what_to_do"]
    reasons = ["integrity was revoked: the probe was wrong"]
    scene.act(identity, "held", Kind.HELD, Reasoned(reasons=reasons, cause=str(Hold.NOT_ELIGIBLE)))
    told = scene.command.ok("release", "show", identity, "--json").json["what_to_do"]
    assert ("only a new release measures again" in told, asked in told) == (True, False)


def test_the_history_of_a_target_says_why_each_step_of_a_canary_began(scene):
    scene.target()
    identity = scene.release()["id"]
    scene.to_canary(identity)
    split = scene.bundle.digest

    def step(number: int, act: str) -> None:
        body = traffic(split, 1000 * (number + 1), step=number)
        scene.act(identity, act, Kind.TRAFFIC_SHIFTED, body)

    step(0, "again")
    passed = Judgement(step=0, reasons=["60 requests"], measurements=[])
    scene.act(identity, "passed", Kind.STEP_PASSED, passed)
    step(1, "second")
    scene.act(identity, "asked", Kind.PROMOTION_REQUESTED, Note(reason="well known"))
    step(2, "last")
    items = scene.command.ok("target", "history", "chat@prod", "--json").json["items"]
    assert [one["reason"] for one in reversed(items)] == [
        "approved: step 1 begins",
        "step 1 again: what answers has changed",
        "step 1 passed",
        "asked to skip the rest: well known",
    ]
    assert "step 1 passed" in scene.command.ok("target", "history", "chat@prod").out


def test_a_release_that_holds_is_marked_in_the_list_and_says_why_once_and_where_its_page_is(scene):
    scene.target()
    identity = scene.release()["id"]
    reason = "load errored: the machine was busy"
    scene.act(identity, "staged", Kind.STAGED, STAGED)
    scene.act(identity, "held", Kind.HELD, Reasoned(reasons=[reason], cause=str(Hold.GATES_UNDECIDED)))
    assert "staged (held)" in scene.command.ok("release", "list").out
    head = scene.command.ok("release", "show", identity).out.partition("GATE")[0]
    assert head.count(reason) == 1
    assert f"{scene.api.url}/releases/{identity}" in head
    scene.command.ok("release", "reject", identity, "-r", "another time")
    head = scene.command.ok("release", "show", identity).out.partition("GATE")[0]
    assert "another time" in head
    assert "(held)" not in scene.command.ok("release", "list").out


def test_an_empty_list_says_what_makes_the_first_one_and_a_chosen_part_that_nothing_is_so(scene):
    for group, makes in (
        ("release", "create"),
        ("target", "create"),
        ("suite", "push"),
        ("alias", "set"),
        ("gate", "run"),
    ):
        what = "run" if group == "gate" else group
        said = scene.command.ok(group, "list").out
        assert said == f"no {what} yet; see `sluicegate {group} {makes} --help`\n"
        assert scene.command.ok(group, "list", "--json").json == {"items": []}
    for asked in (("release", "list", "--phase", "gated"), ("bundle", "list", "--label", "team=nobody")):
        assert scene.command.ok(*asked).out == f"no {asked[0]} matches\n"


def test_a_release_asked_for_again_under_its_key_is_shown_as_it_is_now(scene):
    scene.target()
    identity = scene.release("--key", "build-17")["id"]
    scene.command.ok("release", "reject", identity, "-r", "wrong template")
    assert scene.release("--key", "build-17")["phase"] == "candidate"
    again = ["-t", "chat@prod", "-b", scene.bundle.digest[7:19], "-p", scene.policy.digest, "--key", "build-17"]
    said = scene.command.ok("release", "create", *again).out
    assert "rejected since" in said
    assert "wrong template" in said
