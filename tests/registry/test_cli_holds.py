"""What the command line says of a release that holds, and why a target's traffic moved."""

from registry.client import Client
from schemas.evidence import Judgement, Kind, Note, Reasoned
from schemas.holds import CAUSES, Hold, advice
from tests.support.scene import STAGED, traffic


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
