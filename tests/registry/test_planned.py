"""On a processor a job reserves what the placement plan of its bundle says, once there is one that passed."""

from typing import Any

import pytest

from registry import jobs
from registry.auth import Actor
from registry.service import Service
from schemas.result import GateResult
from schemas.runner import Claim, JobKind, Report
from tests.registry.test_scheduling import DRILLED, ask, bundle, change, claim, register, shown, shown_needs, taken
from tests.support import factories, phases

GB = 10**9
PLAN = {"usable": 9 * GB, "cache_room": 8 * GB, "sequence": GB}


def planned(service: Service, actor: Actor, held: Claim, verdict: str = "passed", **numbers: int) -> None:
    """Have a job's gate `placement` say what a device has, what is left of it for sequences, and what one takes."""
    body: dict[str, Any] = {
        "gate": "placement", "definition": "sha256:" + "d" * 64, "verdict": verdict, "summary": "added up",
        "measurements": [
            {"name": name, "unit": "bytes", "statistic": "value", "value": value, "n": 1}
            for name, value in (PLAN | numbers).items()
        ],
        "findings": [], "duration_ms": 1, "source": "run",
    }  # fmt: skip
    told = GateResult.model_validate(body).model_dump(mode="json", exclude_none=True)
    said = Report(fencing_token=held.fencing_token, act="gate:placement", kind="gate_recorded", body=told)
    with service.database.transaction() as session:
        jobs.report(session, service, actor.project_id, held.job, said)


def test_a_plan_counts_as_soon_as_it_has_passed_for_the_job_itself_and_for_what_comes_after(
    service: Service, actor: Actor
) -> None:
    runner = register(service, actor, "r1", fingerprint={"memory_bytes": 10 * GB})
    one = bundle(service, actor)
    first = ask(service, actor, one, gates=["placement", "compatibility"])
    held = taken(service, actor, runner)
    assert held.planned_bytes is None
    assert "planned_bytes" not in shown_needs(service, first)
    planned(service, actor, held)
    # One gigabyte that is no cache, and one for each sequence that the bundle promises.
    sequences = factories.bundle_body()["runtime"]["max_sequences"]
    assert shown_needs(service, first)["planned_bytes"] == (1 + sequences) * GB
    change(service, first, needs=shown_needs(service, first) | {"planned_bytes": 5 * GB})
    serve = ask(service, actor, one, JobKind.SERVE)
    change(service, serve, needs=shown_needs(service, serve) | {"planned_bytes": 5 * GB})
    assert claim(service, actor, runner) is None
    assert str(shown(service, actor, serve).waits).endswith("r1 has reserved 5.0 of 10.0 GB")
    change(service, serve, needs=shown_needs(service, serve) | {"planned_bytes": 4 * GB})
    held = taken(service, actor, runner)
    assert (held.job, held.planned_bytes) == (serve, 4 * GB)


@pytest.mark.parametrize("count", [0, 1])
def test_what_did_not_pass_is_not_counted(service: Service, actor: Actor, count: int) -> None:
    runner = register(service, actor, "r1", {"sku": "NVIDIA H100 80GB HBM3", "memory_bytes": 85 * GB})
    one = bundle(service, actor, count=count)
    ask(service, actor, one, gates=["placement", "compatibility"])
    planned(service, actor, taken(service, actor, runner), verdict="failed", device=10 * GB, sequences=8)
    assert (
        shown_needs(service, ask(service, actor, one, JobKind.SERVE))
        .keys()
        .isdisjoint({"planned_bytes", "device_bytes"})
    )


def test_where_accelerators_of_a_class_differ_what_a_plan_takes_goes_to_those_that_have_it(
    service: Service, actor: Actor
) -> None:
    small, large = ({"sku": "NVIDIA H100", "memory_bytes": size * GB} for size in (40, 80))
    one = bundle(service, actor, count=1)
    ask(service, actor, one, gates=["placement", "compatibility"])
    first = register(service, actor, "large", large)
    held = taken(service, actor, first)
    # Of its 80 GB the engine may use 72; all but 8 of them are taken, and 8 more by one sequence for each it promises.
    planned(service, actor, held, device=80 * GB, usable=72 * GB, cache_room=8 * GB, sequence=GB, sequences=8)
    sequences = factories.bundle_body()["runtime"]["max_sequences"]
    least = -(-(64 + sequences) * 80 * GB // 72)
    assert shown_needs(service, held.job)["device_bytes"] == least
    serve = ask(service, actor, one, JobKind.SERVE)
    assert claim(service, actor, register(service, actor, "small", small)) is None
    assert "1 × nvidia-h100 of 7" in str(shown(service, actor, serve).waits)
    assert taken(service, actor, register(service, actor, "large-too", large)).job == serve


def test_a_machine_that_a_plan_does_not_fit_lacks_memory_and_a_drill_takes_both_plans(
    service: Service, actor: Actor
) -> None:
    runner = register(service, actor, "r1")
    target = factories.created_target(service, actor)
    accepted = bundle(service, actor, "accepted")
    phases.promoted(service, actor, accepted, factories.registered_policy(service, actor).digest)
    ask(service, actor, accepted, gates=["placement", "compatibility"])
    planned(service, actor, taken(service, actor, runner))
    drill = ask(service, actor, bundle(service, actor, "candidate"), gates=DRILLED, target=target)
    beside = shown_needs(service, drill)["beside"]["planned_bytes"]
    assert beside > GB
    assert claim(service, actor, runner) is None
    said = str(shown(service, actor, drill).waits)
    assert "for the accepted bundle beside it: it has 1.1 GB of memory, and by its plan a replica takes " in said
