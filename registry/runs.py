"""Runs without a release: gates asked for by hand, and references recorded from a bundle."""

from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from registry import (
    attempts,
    auth,
    conditions,
    db,
    documents,
    evidence,
    jobs,
    quarantine,
    releases,
    scheduling,
    targets,
)
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow
from schemas.api import RecordCreate, RunCreate
from schemas.evidence import Kind, RunAsked
from schemas.policy import GoldenRule, Policy, RollbackRule, SuiteRule
from schemas.problems import InvalidDocument
from schemas.reference import Reference
from schemas.runner import JobKind
from schemas.suite import GoldenSuite

ASKED = "asked"
"""Name of the act that begins the stream of a run."""


def create(session: Session, service: Service, actor: Actor, body: RunCreate) -> JobRow:
    """Run a policy's gates, or some of them, on a bundle, as a recorded act.

    Raises:
        NotFound: the project lacks the bundle, policy or target.
        NotPermitted: the actor's token is for other targets.
        InvalidDocument: a gate is not in the policy, or a golden or rollback gate runs without a target.
        ReferenceMissing, BundleQuarantined, NoRunnerFits.
    """
    if body.target is not None:
        auth.require_target(actor, body.target)
    auth.confirm(session, actor)
    documents.need_bundle(session, actor.project_id, body.bundle)
    quarantine.require_free(session, actor.project_id, body.bundle)
    policy = documents.load_policy(session, actor.project_id, body.policy)
    rules = {rule.gate: rule for rule in policy.gates}
    wanted = body.gates if body.gates is not None else list(rules)
    for index, gate in enumerate(wanted):
        if gate not in rules:
            known = ", ".join(rules)
            raise InvalidDocument(
                f"policy {policy.name} has no gate {gate}; it has {known}",
                errors=[{"pointer": f"/gates/{index}", "detail": f"is not one of {known}"}],
            )
    chosen = [rules[gate] for gate in rules if gate in wanted]
    references: dict[str, str] = {}
    target = targets.get(session, actor.project_id, body.target) if body.target else None
    if any(isinstance(rule, GoldenRule) for rule in chosen):
        if target is None:
            raise InvalidDocument(
                "the golden gate compares with a target's reference; name the target",
                errors=[{"pointer": "/target", "detail": "is required for the golden gate"}],
            )
        references = releases.frozen_references(policy, targets.references(session, target.id), target.name)
    if target is None and any(isinstance(rule, RollbackRule) for rule in chosen):
        raise InvalidDocument(
            "the rollback gate goes back to what a target has accepted; name the target",
            errors=[{"pointer": "/target", "detail": "is required for the rollback gate"}],
        )
    gates = [rule.gate for rule in chosen]
    needs = scheduling.needed(session, actor.project_id, body.bundle, JobKind.EVALUATE, gates)
    live = targets.stable_release(session, target.id) if target is not None else None
    both = scheduling.with_way_back(session, actor.project_id, needs, gates, live.bundle if live else None)
    scheduling.require_fit(session, actor.project_id, body.runner_class, both)
    job = jobs.create(
        session,
        actor.project_id,
        JobKind.EVALUATE,
        bundle=body.bundle,
        policy=body.policy,
        gates=gates,
        suites=suites_of(policy, {rule.gate for rule in chosen}),
        references=references,
        runner_class=body.runner_class,
        target=target.id if target else None,
        created_by=actor.name,
        now=db.now(session),
    )
    evidence.open_stream(session, job.project_id, asked(service, job, body.target, by=actor.name))
    return job


def suites_of(policy: Policy, gates: set[str]) -> list[str]:
    """Return the suites that some gates of a policy need, sorted."""
    return sorted({rule.suite for rule in policy.gates if rule.gate in gates and isinstance(rule, SuiteRule)})


def facts(job: JobRow, target: str | None) -> dict[str, Any]:
    """Return what evidence says of a run that belongs to no release, for a target of that name."""
    special = {"run": job.id, "target": target}
    names = [name for name in RunAsked.model_fields if name not in special and name != "was_found"]
    return special | {name: getattr(job, name) for name in names}


def asked(service: Service, job: JobRow, target: str | None, *, by: str, was_found: bool = False) -> evidence.Signed:
    """Return the signed entry that says who asked for a run that belongs to no release, and for what."""
    return evidence.state(
        service.signer,
        f"run/{job.id}",
        ASKED,
        by,
        Kind.RUN_ASKED,
        RunAsked(**facts(job, target), was_found=True if was_found else None),
        subjects={"bundle": job.bundle, **({"policy": job.policy} if job.policy else {})},
        now=job.created_at,
    )


def record(
    session: Session, service: Service, actor: Actor, body: RecordCreate, *, if_match: str | None = None
) -> JobRow:
    """Have a bundle answer a golden suite, as a recorded act; its answers become the target's reference.

    They take the place of the one that the actor saw, by `expected` or by the target's generation in `if_match`, and
    of no other: that is looked at now, before a runner begins, and when the answers come.

    Raises:
        Conflict: another reference is in force than the actor saw; the problem names who set it.
        StaleEdit: the target is of another generation than `if_match`.
        NotFound, InvalidDocument: the suite is not a golden one.
        NotPermitted: the actor's token is for other targets.
        BundleQuarantined, NoRunnerFits.
    """
    auth.require_target(actor, body.target)
    auth.confirm(session, actor)
    target = targets.lock(session, targets.get(session, actor.project_id, body.target).id)
    conditions.require_target(session, target, if_match)
    documents.need_bundle(session, actor.project_id, body.bundle)
    quarantine.require_free(session, actor.project_id, body.bundle)
    suite = documents.load_suite(session, actor.project_id, body.suite)
    if not isinstance(suite, GoldenSuite):
        raise InvalidDocument(
            f"suite {suite.name} is not a golden suite",
            errors=[{"pointer": "/suite", "detail": "must name a golden suite"}],
        )
    before = targets.references(session, target.id).get(body.suite)
    if body.expected is not None or if_match is None:
        targets.require_reference(session, target, body.suite, body.expected)
    needs = scheduling.needed(session, actor.project_id, body.bundle, JobKind.RECORD)
    scheduling.require_fit(session, actor.project_id, target.runner_class, needs)
    job = jobs.create(
        session,
        actor.project_id,
        JobKind.RECORD,
        bundle=body.bundle,
        suites=[body.suite],
        references={} if before is None else {body.suite: before},
        runner_class=target.runner_class,
        target=target.id,
        created_by=actor.name,
        reason=body.reason,
        now=db.now(session),
    )
    evidence.open_stream(session, job.project_id, asked(service, job, body.target, by=actor.name))
    return job


def store_reference(
    session: Session, service: Service, project: UUID, job: UUID, fencing_token: int, raw: bytes
) -> JobRow:
    """Store the reference that a recording job made, and put it in force on the job's target.

    Raises:
        LeaseLost, InvalidDocument: the reference is not of the job's suite and bundle.
        BundleQuarantined: what it answers is no yardstick.
        Conflict: another reference was put in force since the recording was asked for.
    """
    row = jobs.held(session, project, job, fencing_token)
    attempts.require_wanted(row)
    quarantine.require_free(session, project, row.bundle)
    author = Actor(project_id=project, project="", name=row.created_by, role="manager")
    registered, _ = documents.register(session, service, author, "reference", raw)
    reference = Reference.parse(raw)
    if row.kind != JobKind.RECORD or row.target_id is None:
        raise InvalidDocument(f"job {job} does not record a reference", errors=[])
    if [reference.suite] != row.suites or reference.bundle != row.bundle:
        raise InvalidDocument(
            "the reference is not of the suite and bundle that the job names",
            errors=[
                {"pointer": "/suite", "detail": "must be the job's"},
                {"pointer": "/bundle", "detail": "must be the job's"},
            ],
        )
    target = targets.lock(session, row.target_id)
    row.reference = targets.set_reference(
        session,
        service,
        target,
        suite=reference.suite,
        reference=registered.digest,
        bundle=row.bundle,
        actor=row.created_by,
        act=f"job:{row.id}:reference",
        expected=row.references.get(reference.suite),
    )
    session.flush()
    return row
