"""Boots of llama.cpp by a runner of its own process, and what evidence says of the time around them."""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from registry import documents
from registry.service import Service
from schemas.api import RecordCreate
from schemas.bundle import Bundle
from schemas.evidence import Entry
from schemas.policy import Policy
from tests.support import factories, structured
from tests.support.runners import QUICK_GATES, Bench, bench, runner_process, until

TARGET = "boots@bench"
PROMISES = {"served_name": "chain", "usage": "all_tokens", "cancellation": "on_disconnect", **structured.JSON_FEATURES}
LOAD: dict[str, Any] = {
    "gate": "load",
    "percentile": "0.9",
    "confidence": "0.95",
    "requests": 60,
    "ttft_ms": 8000,
    "tpot_ms": 4000,
    "e2e_ms": 9000,
    "attainment_min": "0.9",
    "error_max": "0.1",
    "send_lag_ms": 800,
}


@dataclass
class Took:
    """How long one thing took, in ms, each time."""

    name: str
    is_gate: bool = False
    """Whether it is the time until a gate asks, and not until an engine begins."""
    ms: list[float] = field(default_factory=list)


def timed(service: Service, folder: Path, boots: int) -> tuple[list[Took], int, int]:
    """Boot for gates and for live traffic, so often each.

    Returns:
        What took how long; of how many gates one run was, which is made when there is more than one boot; and how often
        that run booted.
    """
    new, again = Took("claim to launch, gates, files new"), Took("claim to launch, gates, files there")
    live, asked = Took("claim to launch, live replica"), Took("ready to first gate", is_gate=True)
    with bench(service, folder) as stand, runner_process(stand):
        until(lambda: list(stand.client().runners.list()), seconds=60, what="the registration")
        quick = stand.policy()
        for number in range(boots):
            bundle = stand.bundle(description=f"boot {number}")
            for kind in (new, again):
                run = _passed(stand, stand.evaluate(bundle, quick))
                kind.ms.append(_launched_after(stand, run))
                asked.ms.append(_asked_after(stand.entries(run)))
            job = stand.serve(bundle)
            stand.ready(job, seconds=60)
            live.ms.append(_launched_after(stand, job))
            stand.unwant(job)
            stand.done(job)
        gates, started = _all_gates(stand) if boots > 1 else (0, 0)
    return [new, again, live, asked], gates, started


def _passed(stand: Bench, run: UUID) -> UUID:
    done = stand.done(run, seconds=120)
    if done.outcome != "passed":
        raise RuntimeError(f"a run of the bench is {done.outcome}: {done.problem}, {done.results}")
    return run


def _launched_after(stand: Bench, job: UUID) -> float:
    """Return how long after its claim a job's engine began, in ms."""
    claimed_at = stand.row(job).claimed_at
    (begun,) = _begun(stand.entries(job))
    if claimed_at is None:
        raise RuntimeError(f"job {job} was never claimed")
    return (begun - claimed_at).total_seconds() * 1000


def _begun(entries: Iterable[Entry]) -> Iterator[datetime]:
    """Yield when each engine's process began, by the kernel's word."""
    for entry in entries:
        if entry.kind == "replica_changed" and entry.body["replica"]["state"] == "loading":
            ticks = int(entry.body["replica"]["start_time"]) / os.sysconf("SC_CLK_TCK")
            ago = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks
            yield datetime.now(entry.recorded_at.tzinfo) - timedelta(seconds=ago)


def _asked_after(entries: list[Entry]) -> float:
    """Return how long after an engine was ready its first gate began at the latest, in ms."""
    (begun,) = _begun(entries)
    (booted,) = [entry.body for entry in entries if entry.kind == "engine_booted"]
    first = next(entry for entry in entries if entry.kind == "gate_recorded" and entry.body["gate"] == "compatibility")
    measured = timedelta(milliseconds=first.body["duration_ms"])
    ready = begun + timedelta(milliseconds=booted["ready_ms"])
    return (first.recorded_at - measured - ready).total_seconds() * 1000


def _all_gates(stand: Bench) -> tuple[int, int]:
    """Run every gate but the drill, which boots another engine. Returns how many, and how often they booted one."""
    bundle = stand.bundle("all", serving=PROMISES)
    policy = _whole_policy(stand, bundle)
    run = stand.evaluate(bundle, policy, target=TARGET)
    done = stand.done(run, seconds=120)
    told = {one["gate"]: one["verdict"] for one in done.results}
    # A load that is too slow on a busy machine is no matter here; a failure would keep later gates from running.
    if told.keys() != {rule.gate for rule in policy.gates} or "failed" in told.values():
        raise RuntimeError(f"a run of all gates is {done.outcome}: {done.problem}, {told}")
    return len(told), len(list(_begun(stand.entries(run))))


def _whole_policy(stand: Bench, bundle: Bundle) -> Policy:
    actor = stand.api.actor("manager")
    factories.created_target(stand.service, actor, TARGET)
    golden = factories.registered_golden(stand.service, actor)
    load = factories.registered_load(stand.service, actor, gap_us=50_000)
    schemas = structured.suite()
    with stand.service.database.transaction() as session:
        documents.register(session, stand.service, actor, "suite", schemas.canonical())
    asked = RecordCreate(suite=golden.digest, bundle=bundle.digest, target=TARGET, reason="the first yardstick")
    recorded = stand.done(stand.client("manager").runs.record(asked).id)
    if recorded.reference is None:
        raise RuntimeError(f"nothing was recorded: {recorded.problem}")
    gates: list[dict[str, Any]] = [
        {"gate": "integrity"},
        {"gate": "static"},
        {"gate": "placement", "activation_bytes": 1_000_000},
        QUICK_GATES[-1],
        {"gate": "golden", "suite": golden.digest, "margin_nat": "0.1", "min_prompts": 2},
        structured.rule_body(schemas.digest),
        LOAD | {"suite": load.digest},
    ]
    return stand.policy(gates, "every-gate")
