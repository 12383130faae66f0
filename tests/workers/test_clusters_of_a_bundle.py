"""Which bundle a gateway's cluster serves is read from its place in the name, whatever the target is called."""

from pathlib import Path

from gates.router import CANDIDATE, Arm, cluster_name
from registry import db, releases
from registry.auth import Actor
from registry.service import Service
from schemas.api import Act
from schemas.evidence import Kind
from schemas.release import Phase
from tests.support.streams import stream_engine
from tests.support.world import QUICK_CANARY, world

A, B = (f"sha256:{digit * 64}" for digit in "ab")


def test_an_arm_serves_the_bundle_of_its_cluster_and_no_other_that_the_name_holds() -> None:
    arm = Arm("stable", cluster_name(f"chat-{A[7:19]}@prod", B, f"r-{A[7:19]}"), "127.0.0.1:8001", 10_000)
    assert (arm.serves(A), arm.serves(B)) == (False, True)
    assert not Arm("stable", A[7:19], "127.0.0.1:8001", 10_000).serves(A)


def test_a_target_that_is_named_after_a_bundle_makes_no_other_traffic_that_of_the_bundle(
    service: Service, actor: Actor, tmp_path: Path
) -> None:
    with world(service, actor, tmp_path) as here, stream_engine("one") as one, stream_engine("two") as two:
        step = {"weight_bp": 100, "hold_seconds": "600", "min_requests": 29, "max_seconds": "6000"}
        slow = here.policy("slow", canary=QUICK_CANARY | {"steps": [step, step | {"weight_bp": 10_000}]})
        bundles = [here.bundle(name, name.encode()) for name in ("one", "two", "three")]
        named = here.beside(f"chat-{bundles[1].digest[7:19]}@prod")
        with stream_engine("three") as three:
            named.live(bundles[0], here.policy(), one)
            second = named.release(bundles[1], slow)
            named.evaluate()
            named.serve(two, pid=2000)
            named.until_phase(second, Phase.CANARY)
            with here.service.database.transaction() as session:
                releases.rollback(session, here.service, here.actor, second, Act(reason="wrong language"))
            named.until_phase(second, Phase.ROLLED_BACK)
            with named.traffic():
                named.until(named.is_settled)
            third = named.release(bundles[2], slow)
            named.evaluate()
            named.serve(three, pid=3000)
            named.until_phase(third, Phase.CANARY)
            # Whoever looks at the second one again, such as for streams that are open, leaves the third its traffic.
            with here.service.database.transaction() as session:
                releases.get(session, here.actor.project_id, second).due_at = db.now(session)
            for _ in range(3):
                named.turn()
            split = here.envoy.gateway.desired(named.name)
            assert split is not None
            assert split.weight_bp(CANDIDATE) == 100
            assert Kind.ATTEMPT_ERRORED not in [entry.kind for entry in here.show(second).log]
