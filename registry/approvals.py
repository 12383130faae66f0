"""Approvals: people let a gated release through, answer for its warnings, and may take that back before traffic."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy.orm import Session

from gates.policy import Outcome
from registry import acts, documents, evidence, holding, quarantine, releases
from registry.advice import Deed
from registry.auth import Actor
from registry.logged import Logged
from registry.releases import Standing, act, log, require_eligible, standing
from registry.service import Service
from registry.tables import ReleaseRow
from schemas.api import Act, Approve, Withdraw
from schemas.evidence import Accepted, Approved, Kind, Note, Withdrawn
from schemas.policy import Policy
from schemas.problems import Conflict, InvalidDocument, NotEligible, NotPermitted
from schemas.release import TERMINAL, Phase
from schemas.result import Severity


def unaccepted(entries: Sequence[Logged], found: Standing) -> dict[str, list[str]]:
    """Return gate → codes of its `warn` findings that no manager has accepted; gates without any are left out.

    `entries` is the release's log.
    """
    accepted: dict[str, set[str]] = {}
    for entry in entries:
        if entry.kind == Kind.FINDING_ACCEPTED:
            body = Accepted.model_validate(evidence.claim_of(entry.envelope)["body"])
            accepted.setdefault(body.result, set()).update(body.codes)
    left = {
        gate: sorted(
            {one.code for one in result.findings if one.severity is Severity.WARN} - accepted.get(digest, set())
        )
        for gate, (entry, result) in found.results.items()
        if (digest := entry.entry_digest)
    }
    return {gate: codes for gate, codes in left.items() if codes}


def warnings(left: dict[str, list[str]]) -> list[str]:
    """Return unaccepted findings as reasons, one sentence a gate."""
    return [f"{gate} passed with warnings that nobody has accepted: {', '.join(codes)}" for gate, codes in left.items()]


def _accept(
    session: Session,
    service: Service,
    actor: Actor,
    release: ReleaseRow,
    policy: Policy,
    body: Act,
    entries: Sequence[Logged],
) -> tuple[ReleaseRow, Standing]:
    """Record the acceptance of findings; refuse when a warning is left, or a code is none.

    Returns the release, and what its gates say.
    """
    found = require_eligible(session, release, policy, now=acts.moment(session), entries=entries)
    left = unaccepted(entries, found)
    wanted = set(body.accept or ()) if isinstance(body, Approve) else set()
    present = {one.code for _, result in found.results.values() for one in result.findings}
    if unknown := sorted(wanted - present):
        raise InvalidDocument(
            f"no gate of release {release.id} has the finding {unknown[0]}",
            errors=[{"pointer": "/accept", "detail": f"{code} is no finding of its gates"} for code in unknown],
        )
    if open_ := {gate: rest for gate, codes in left.items() if (rest := [one for one in codes if one not in wanted])}:
        raise NotEligible(
            f"release {release.id} may not be approved: {'; '.join(warnings(open_))}; name each with --accept",
            reasons=warnings(open_),
            findings=open_,
        )
    for gate, codes in left.items():
        digest = found.results[gate][0].entry_digest
        accepted = Accepted(gate=gate, result=digest, codes=codes, reason=body.reason)
        name = f"accepted:{gate}:{digest[7:19]}"
        release = act(session, service, release, name, actor.name, Kind.FINDING_ACCEPTED, accepted)
    return release, found


def approve(
    session: Session, service: Service, actor: Actor, release_id: UUID, body: Act, *, if_match: str | None = None
) -> ReleaseRow:
    """Approve a gated release, and accept the warnings that an `Approve` names.

    When the policy's number of managers is reached and no warning is left, the release is approved; unless statements
    are signed ahead: `approved` names the entry of the approval, and is then an act of its own (`settle`).

    Raises:
        NotPermitted: the actor is the release's author.
        NotEligible: evidence is missing or expired, or a warning is not accepted; `findings` names gate and codes.
        BundleQuarantined: nothing goes on with its bundle.
        InvalidDocument: a code to accept is no finding of the release's gates.
        NotFound, TransitionRefused.
    """
    release = releases.hold(session, actor, release_id, if_match)
    policy = documents.bound_policy(session, release.policy)
    entries = log(session, release.id)
    is_granted = actor.name in in_force(entries)
    if not is_granted or release.phase in TERMINAL:
        releases.require_place(session, release, Deed.APPROVE)
    releases.require_other(release, actor, "approve")
    found: Standing | None = None
    if release.phase == Phase.GATED:
        release, found = _accept(session, service, actor, release, policy, body, entries)
    if not is_granted:
        holding.require_room(release, holding.MOST_TO_REPEAT)
        before = sum(entry.kind == Kind.APPROVAL_GRANTED and entry.actor == actor.name for entry in entries)
        name = _numbered(f"approval:{actor.name}", before)
        release = act(session, service, release, name, actor.name, Kind.APPROVAL_GRANTED, Note(reason=body.reason))
    return release if acts.is_ahead(session) else settle(session, service, release, policy, found)


def in_force(entries: Sequence[Logged]) -> dict[str, Logged]:
    """Return who approves a release with this log → the entry of it. What was withdrawn counts no more."""
    found: dict[str, Logged] = {}
    for entry in entries:
        if entry.kind == Kind.APPROVAL_GRANTED:
            found[entry.actor] = entry
        elif entry.kind == Kind.APPROVAL_WITHDRAWN:
            found.pop(evidence.claim_of(entry.envelope)["body"]["approver"], None)
    return found


def _numbered(name: str, before: int) -> str:
    """Return the name of an act that happened so often before: the first has no number."""
    return f"{name}:{before + 1}" if before else name


def look(session: Session, service: Service, release_id: UUID) -> ReleaseRow:
    """Have a release approved that is so by its log."""
    release = evidence.hold(session, release_id)
    return settle(session, service, release, documents.bound_policy(session, release.policy))


def withdraw(
    session: Session, service: Service, actor: Actor, release_id: UUID, body: Withdraw, *, if_match: str | None = None
) -> ReleaseRow:
    """Take an approval back, before there is traffic: a release that stands on it waits for approval again.

    Managers take back their own; an administrator that of anybody. Asking twice changes nothing.

    Raises:
        NotPermitted: the approval is somebody else's, and the actor is no administrator.
        Conflict: whoever is named has not approved the release.
        TransitionRefused: it has traffic (roll it back instead) or has ended.
        NotFound.
    """
    release = releases.hold(session, actor, release_id, if_match)
    approver = body.approver or actor.name
    if approver != actor.name and actor.role != "admin":
        raise NotPermitted(f"the approval of {approver} is withdrawn by {approver}, or by an administrator")
    releases.require_place(session, release, Deed.WITHDRAW)
    entries = log(session, release.id)
    granted = [entry for entry in entries if entry.kind == Kind.APPROVAL_GRANTED and entry.actor == approver]
    if not granted:
        raise Conflict(f"{approver} has not approved release {release.id}")
    if approver not in in_force(entries):
        return release
    said = Withdrawn(approval=granted[-1].entry_digest, approver=approver, reason=body.reason)
    name = _numbered(f"withdrawal:{approver}", len(granted) - 1)
    return act(session, service, release, name, actor.name, Kind.APPROVAL_WITHDRAWN, said)


def settle(
    session: Session, service: Service, release: ReleaseRow, policy: Policy, found: Standing | None = None
) -> ReleaseRow:
    """Record that the approval rule is met, when it is. Zero approvals required is an entry of its own.

    `found` is the standing of the release, where this unit of work has looked at it under the release's lock.
    """
    if release.phase != Phase.GATED:
        return release
    quarantine.require_free(session, release.project_id, release.bundle)
    entries = log(session, release.id)
    if found is None:
        found = standing(session, release, policy, now=acts.moment(session), entries=entries)
    # Since its grant a result may have been revoked, or have grown too old.
    if found.decision.outcome is not Outcome.PASSED or unaccepted(entries, found):
        return release
    required = policy.approval.required
    granted = in_force(entries)
    if len(granted) < required:
        return release
    if required == 0:
        note = Note(reason=f"policy {policy.name} asks for no approval")
        release = act(session, service, release, "approval_not_required", "policy", Kind.APPROVAL_NOT_REQUIRED, note)
    approved = Approved(approvals=sorted(e.entry_digest for e in granted.values()), required=required)
    name = _numbered("approved", sum(entry.kind == Kind.APPROVED for entry in entries))
    return act(session, service, release, name, "policy", Kind.APPROVED, approved)
