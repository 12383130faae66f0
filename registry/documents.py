"""Immutable documents by digest: bundles, policies, suites and references, and which project has them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, NoReturn, TypeVar
from uuid import UUID

from pydantic_core import from_json
from sqlalchemy import Row, Select, select
from sqlalchemy.orm import Session
from uuid6 import uuid7

from gates.files.document import refuse_document
from gates.policy import plan_problems
from gates.recent import Recent
from registry import auth, blobs, db, evidence, quotas, statements
from registry.auth import Actor
from registry.posted import ADAPTERS, AnyDocument, posted
from registry.posted import parse as parse  # noqa: PLC0414 - a part of what this module offers
from registry.quotas import Added
from registry.service import Service
from registry.tables import DocumentRow, ProjectDocumentRow
from schemas.api import LockedSource, Registered
from schemas.bundle import Bundle
from schemas.common import canonical_json, sha256_digest, strict_json
from schemas.evidence import Kind
from schemas.evidence import Registered as RegisteredBody
from schemas.lock import Lock
from schemas.policy import GoldenRule, LoadRule, Policy, RollbackRule, StructuredRule, SuiteRule
from schemas.problems import BlobsMissing, Conflict, InvalidDocument, NotFound, PolicyTooWeak, SuiteMissing
from schemas.reference import Reference
from schemas.suite import AnySuite, GoldenSuite, LoadSuite, StructuredSuite

DocumentT = TypeVar("DocumentT", bound=AnyDocument)

_ENTRY = {
    "bundle": Kind.BUNDLE_REGISTERED,
    "policy": Kind.POLICY_REGISTERED,
    "suite": Kind.SUITE_REGISTERED,
}
"""Kinds of documents whose registration is evidence by itself. A reference counts once it is set on a target."""

REGISTERED = {entry: kind for kind, entry in _ENTRY.items()}
"""Kind of an entry that registers a document → kind of the document."""

_SUITES: dict[type[SuiteRule], type[AnySuite]] = {
    GoldenRule: GoldenSuite,
    LoadRule: LoadSuite,
    StructuredRule: StructuredSuite,
    RollbackRule: LoadSuite,
}
"""Rule of a gate → the kind of suite that it takes."""

MAX_ERRORS = 100
KEPT = 32
LEAST_PREFIX = 8
_DIGITS = re.compile(rf"[0-9a-f]{{{LEAST_PREFIX},64}}")


_recent: Recent[str, AnyDocument] = Recent(KEPT)
"""The documents parsed last, by digest. They never change, so any process may keep any of them."""


class Found(NamedTuple):
    """A document that a project has."""

    id: UUID
    """By which lists are ordered."""
    registered: Registered
    is_quarantined: bool
    """Whether there is a quarantine to be told with it; see `registry.quarantine`."""


def register(session: Session, service: Service, actor: Actor, kind: str, raw: bytes) -> tuple[Registered, bool]:
    """Store a document in the actor's project; see `store`. Returns it, and whether this call stored it."""
    found, is_new = store(session, service, actor, kind, raw)
    return found.registered, is_new


def store(session: Session, service: Service, actor: Actor, kind: str, raw: bytes) -> tuple[Found, bool]:
    """Store a document in the actor's project; with a bundle, how its sources were resolved, where that was posted.

    Returns:
        The stored document, and whether this call stored it: what is there already is answered as it was.

    Raises:
        InvalidDocument: it is not such a document, or contradicts what is stored; or its locks contradict it.
        BlobsMissing: a bundle's files have not been uploaded to this project.
        SuiteMissing: a policy names suites that the project does not have.
        PolicyTooWeak: a policy asks for fewer samples than its rules can decide with.
        NotPermitted: a policy, by a token that is limited to some targets.
        QuotaExceeded.
    """
    if kind == "policy":
        auth.require_whole_project(actor, "register_policy")
        auth.confirm(session, actor)
    document, locks = posted(kind, raw)
    canonical = document.canonical()
    digest = sha256_digest(canonical)
    # Where nothing was, there is nothing to wait for; whoever is first meanwhile is met by `_store`.
    was_there, at = _held(session, actor.project_id, digest)
    known = _find(session, actor.project_id, kind, digest) if was_there else None
    if known is not None:
        return known, False
    match document:
        case Bundle():
            _check_contents(document)
            _check_files(session, actor.project_id, document)
        case Policy():
            _check_policy(session, service, actor.project_id, document)
        case Reference():
            _check_reference(session, actor.project_id, document)
        case _:
            pass
    stored = _store(session, service, actor, kind, document, digest=digest, canonical=canonical, locks=locks, at=at)
    if stored is not None:
        # What the service itself records is not refused.
        is_bound = kind != "reference"
        quotas.count(session, service.settings, actor.project_id, Added(documents=1), is_bound=is_bound)
    _recent.put(digest, document)
    return (stored, True) if stored is not None else (_get(session, actor.project_id, kind, digest), False)


def _store(
    session: Session,
    service: Service,
    actor: Actor,
    kind: str,
    document: AnyDocument,
    *,
    digest: str,
    canonical: bytes,
    locks: list[Lock] | None,
    at: datetime,
) -> Found | None:
    """Store a document with its entry; return None when somebody else has just done so."""
    components, labels = (document.components(), document.labels) if isinstance(document, Bundle) else (None, None)
    serving = sha256_digest(canonical_json(components)) if components is not None else None
    name = document.name if not isinstance(document, Reference) else document.suite
    identity = uuid7()
    resolved = None if locks is None else [one.model_dump(mode="json") for one in locks]
    files = sorted({file.sha256 for file in document.files}) if isinstance(document, Bundle) else []
    added = db.ask_one(
        session,
        statements.STORE,
        {
            "project": actor.project_id, "digest": digest, "identity": identity, "kind": kind, "name": name, "at": at,
            "by": actor.name, "schema": document.schema_id, "body": canonical, "serving": serving,
            "components": json.dumps(components), "labels": json.dumps(labels), "files": files,
            "label_names": list(labels or ()), "label_values": list((labels or {}).values()),
            "locks": json.dumps(resolved), "key": (key := service.signer.key_id),
        },
    )  # fmt: skip
    now, kept, own, known, ends_at, damaged = added
    if kept is None:
        return None
    if isinstance(document, Bundle) and damaged:
        _refuse_lacking(document, set(damaged))
    is_again = kept != identity
    evidence.note_here(session, key, (own, now, known, ends_at))
    if kind in _ENTRY:
        body = RegisteredBody(digest=digest, name=name, serving_digest=serving, components=components, locks=locks)
        _record(session, service, actor, kind, body, is_again=is_again, at=at)
    if is_again:
        return _get(session, actor.project_id, kind, digest)
    registered = Registered(
        digest=digest,
        name=name,
        schema_id=document.schema_id,
        created_at=at,
        created_by=actor.name,
        document=from_json(canonical),
        serving_digest=serving,
        components=_as_kept(components),
        labels=_as_kept(labels),
        quarantine=None,
        locks=_as_told(resolved),
        aliases=None,
    )
    return Found(identity, registered, is_quarantined=False)


def _record(
    session: Session, service: Service, actor: Actor, kind: str, body: RegisteredBody, *, is_again: bool, at: datetime
) -> None:
    """Append the entry of a registration; `is_again`: its stream is there from before it was deleted."""
    where = stream(actor.project_id, body.digest)
    act = f"registered:{evidence.next_position(session, where)}" if is_again else "registered"
    subjects = {kind: body.digest}
    signed = evidence.state(service.signer, where, act, actor.name, _ENTRY[kind], body, subjects=subjects, now=at)
    if is_again:
        evidence.append(session, actor.project_id, signed)
    else:
        evidence.open_stream(session, actor.project_id, signed)


def _as_kept(value: dict[str, str] | None) -> dict[str, str] | None:
    """Return an object in the order in which PostgreSQL gives it back, so that every answer has the same bytes."""
    return None if value is None else dict(sorted(value.items(), key=lambda item: (len(item[0]), item[0])))


def _as_told(locks: list[Any] | None) -> list[LockedSource] | None:
    return None if locks is None else [LockedSource.model_validate(one) for one in locks]


def stream(project: UUID, digest: str) -> str:
    """Return the stream of what happened to a document of a project."""
    return f"documents/{project}/{digest}"


def hold(session: Session, project: UUID, digest: str) -> bool:
    """Let nobody delete or quarantine a document until the transaction ends; whoever does so now is waited for.

    Returns whether it is quarantined.
    """
    found = db.ask_one(session, statements.HOLD, {"project": project, "digest": digest})
    return bool(found.is_quarantined)


def _held(session: Session, project: UUID, digest: str) -> tuple[bool, datetime]:
    """Hold a document. Returns whether the project has it, or had, and the database's clock."""
    found = db.ask_one(session, statements.HOLD, {"project": project, "digest": digest})
    return found.is_there, found.at


def _check_contents(bundle: Bundle) -> None:
    """Hold a bundle to what directories are held to, whoever wrote its document; what bytes show, a gate finds."""
    wrong: list[dict[str, Any]] = []
    for place, refused in refuse_document(bundle):
        detail = f"{refused.file or 'the launch'} {refused}" + (f"; {refused.advice}" if refused.advice else "")
        more = {"code": refused.code, "found": refused.found, "expected": refused.expected}
        wrong.append({"pointer": place, "detail": detail, **{key: one for key, one in more.items() if one is not None}})
    if wrong:
        more_of = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        first = f"{wrong[0]['pointer']} {wrong[0]['detail']}{more_of}"
        raise InvalidDocument(f"the bundle is not valid: {first}", errors=wrong[:MAX_ERRORS])


def _check_files(session: Session, project: UUID, bundle: Bundle) -> None:
    held = blobs.sizes(session, project, (file.sha256 for file in bundle.files), is_needed=True)
    if lacking := {file.sha256 for file in bundle.files} - held.keys():
        _refuse_lacking(bundle, lacking)
    wrong = [
        {"pointer": f"/files/{place}/size", "detail": f"{file.path} has {held[file.sha256]} bytes, not {file.size}"}
        for place, file in enumerate(bundle.files)
        if held[file.sha256] != file.size
    ]
    if wrong:
        raise InvalidDocument(
            f"the bundle is not valid: {wrong[0]['pointer']} {wrong[0]['detail']}", errors=wrong[:MAX_ERRORS]
        )


def _refuse_lacking(bundle: Bundle, lacking: set[str]) -> NoReturn:
    """Raise BlobsMissing: these of a bundle's blobs are not there, or not as they were."""
    missing = list(dict.fromkeys(file.sha256 for file in bundle.files if file.sha256 in lacking))
    raise BlobsMissing(
        f"{len(missing)} of the bundle's blobs have not been uploaded to this project; "
        "PUT each to /v1/blobs/{digest} and post the bundle again",
        missing=missing,
        errors=[
            {"pointer": f"/files/{place}/sha256", "detail": f"the bytes of {file.path} have not been uploaded"}
            for place, file in enumerate(bundle.files)
            if file.sha256 in lacking
        ][:MAX_ERRORS],
    )


def _check_policy(session: Session, service: Service, project: UUID, policy: Policy) -> None:
    suites: dict[str, AnySuite] = {}
    lacking, wrong = [], []
    for place, rule in enumerate(policy.gates):
        if not isinstance(rule, SuiteRule):
            continue
        try:
            suites[rule.suite] = load_suite(session, project, rule.suite)
        except NotFound:
            lacking.append((place, rule.suite))
            continue
        expected = _SUITES[type(rule)]
        if not isinstance(suites[rule.suite], expected):
            detail = f"{rule.suite} is a {suites[rule.suite].schema_id}, and {rule.gate} needs {expected.SCHEMA_ID}"
            wrong.append({"pointer": f"/gates/{place}/suite", "detail": detail})
    if lacking:
        raise SuiteMissing.at(lacking)
    lease = service.settings.release_lease_seconds
    if policy.canary.dead_man_seconds <= lease:
        detail = f"must be more than {lease:g}: so long a canary waits for a controller when its own was killed"
        wrong.append({"pointer": "/canary/dead_man_seconds", "detail": detail})
    if wrong:
        raise InvalidDocument(f"the policy is not valid: {wrong[0]['pointer']} {wrong[0]['detail']}", errors=wrong)
    if problems := plan_problems(policy, suites):
        places = [dict(zip(("pointer", "detail"), one.split(": ", 1), strict=True)) for one in problems]
        raise PolicyTooWeak(f"the policy cannot decide: {'; '.join(problems)}", errors=places)


def _check_reference(session: Session, project: UUID, reference: Reference) -> None:
    wrong = []
    try:
        need_bundle(session, project, reference.bundle)
    except NotFound as problem:
        wrong.append({"pointer": "/bundle", "detail": problem.detail})
    try:
        suite = load_suite(session, project, reference.suite)
    except NotFound as problem:
        wrong.append({"pointer": "/suite", "detail": problem.detail})
    else:
        if not isinstance(suite, GoldenSuite):
            wrong.append({"pointer": "/suite", "detail": f"{reference.suite} is no golden suite"})
        elif [one.prompt for one in reference.recordings] != [prompt.id for prompt in suite.prompts]:
            wrong.append({"pointer": "/recordings", "detail": "must answer the prompts of the suite, in its order"})
    if wrong:
        raise InvalidDocument(f"the reference is not valid: {wrong[0]['pointer']} {wrong[0]['detail']}", errors=wrong)


def _wire(row: Row[Any], document: dict[str, object] | None, locks: list[Any] | None) -> Found:
    registered = Registered(
        digest=row.digest,
        name=row.name,
        schema_id=row.schema_id,
        created_at=row.created_at,
        created_by=row.created_by,
        document=document,
        serving_digest=row.serving_digest,
        components=row.components,
        labels=row.labels,
        # Told by whoever answers for them: `registry.quarantine` and `registry.aliases`.
        quarantine=None,
        locks=_as_told(locks),
        aliases=None,
    )
    return Found(row.id, registered, row.is_quarantined)


def _select(project: UUID, kind: str) -> Select[ProjectDocumentRow, DocumentRow]:
    return (
        select(ProjectDocumentRow, DocumentRow)
        .join(DocumentRow, DocumentRow.digest == ProjectDocumentRow.digest)
        .where(
            ProjectDocumentRow.project_id == project,
            ProjectDocumentRow.kind == kind,
            ProjectDocumentRow.deleted_at.is_(None),
        )
    )


def _find(session: Session, project: UUID, kind: str, digest: str) -> Found | None:
    found = db.ask_any(session, statements.FIND, {"project": project, "kind": kind, "digest": digest})
    # It was read strictly when it came, and has been canonical since.
    return None if found is None else _wire(found, from_json(found.body), found.locks)


def _get(session: Session, project: UUID, kind: str, digest: str) -> Found:
    found = _find(session, project, kind, digest)
    if found is None:
        raise absent(session, project, kind, digest)
    return found


def absent(session: Session, project: UUID, kind: str, named: str) -> NotFound:
    """Return the refusal of a document that a project has not, by digest or its beginning, or has no more.

    Of a bundle that was deleted it says who did so and when; `digest`, `deleted_at` and `deleted_by` have it.
    """
    digits = named.removeprefix("sha256:")
    once = select(ProjectDocumentRow.digest).where(
        ProjectDocumentRow.project_id == project,
        ProjectDocumentRow.kind == kind,
        ProjectDocumentRow.digest >= f"sha256:{digits}",
        ProjectDocumentRow.digest < f"sha256:{digits}g",
        ProjectDocumentRow.deleted_at.is_not(None),
    )
    deleted = session.scalars(once.limit(2)).all()
    log = evidence.read(session, stream(project, deleted[0])) if len(deleted) == 1 else []
    last = next((row for row in reversed(log) if row.kind == Kind.BUNDLE_DELETED), None)
    if last is None:
        return NotFound(f"there is no {kind} {named}", digest=named)
    entry = evidence.wire(last)
    at = f"{entry.recorded_at:%Y-%m-%d %H:%M:%S}Z"
    return NotFound(
        f"{kind} {entry.body['name']} {deleted[0]} was deleted by {entry.actor} at {at}: {entry.body['reason']}",
        digest=deleted[0],
        deleted_at=entry.recorded_at.isoformat(),
        deleted_by=entry.actor,
    )


def get(session: Session, project: UUID, kind: str, named: str) -> Registered:
    """Return a document by its digest or by the beginning of it; see `find`."""
    return find(session, project, kind, named).registered


def find(session: Session, project: UUID, kind: str, named: str) -> Found:
    """Return a document by its digest or by the beginning of it.

    `named` is `sha256:…`, or at least 8 of its hexadecimal digits, with or without `sha256:`.

    Raises:
        NotFound: the project has none.
        Conflict: more than one begins so; `digests` lists them.
    """
    return _get(session, project, kind, resolve(session, project, kind, named))


def resolve(session: Session, project: UUID, kind: str, named: str) -> str:
    """Return the whole digest that a beginning of it means. Raises as `get`."""
    digits = named.removeprefix("sha256:")
    if not _DIGITS.fullmatch(digits):
        # What is no digest goes no further: pages make addresses of what is returned.
        raise NotFound(f"there is no {kind} {named}; a digest is named by {LEAST_PREFIX} of its digits or more")
    if len(digits) == 64:
        return f"sha256:{digits}"
    found = session.scalars(
        select(ProjectDocumentRow.digest)
        .where(
            ProjectDocumentRow.project_id == project,
            ProjectDocumentRow.kind == kind,
            *begins(ProjectDocumentRow.digest, digits),
            ProjectDocumentRow.deleted_at.is_(None),
        )
        .order_by(ProjectDocumentRow.digest)
        .limit(10)
    ).all()
    if not found:
        raise absent(session, project, kind, named)
    if len(found) > 1:
        raise Conflict(f"more than one {kind} begins with {named}; give more digits", digests=list(found))
    return found[0]


@dataclass(frozen=True, slots=True)
class Relative:
    """Another bundle of the same family, and the components in which it differs."""

    digest: str
    created_at: datetime
    created_by: str
    differs: list[str]


def neighbours(session: Session, project: UUID, bundle: str) -> tuple[Relative | None, Relative | None]:
    """Return the bundles of a family that were registered just before and just after one of it.

    Raises:
        NotFound: the project has no such bundle.
    """
    selected = _select(project, "bundle")
    found = session.execute(selected.where(ProjectDocumentRow.digest == bundle)).one_or_none()
    if found is None:
        raise NotFound(f"there is no bundle {bundle}", digest=bundle)
    member, stored = found
    family = selected.where(ProjectDocumentRow.name == member.name)
    before = family.where(ProjectDocumentRow.id < member.id).order_by(ProjectDocumentRow.id.desc()).limit(1)
    after = family.where(ProjectDocumentRow.id > member.id).order_by(ProjectDocumentRow.id).limit(1)
    return _relative(session, before, stored), _relative(session, after, stored)


def _relative(session: Session, query: Select[ProjectDocumentRow, DocumentRow], to: DocumentRow) -> Relative | None:
    found = session.execute(query).one_or_none()
    if found is None:
        return None
    member, stored = found
    ours, theirs = to.components or {}, stored.components or {}
    differs = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return Relative(member.digest, member.created_at, member.created_by, differs)


def names(session: Session, project: UUID, digests: Sequence[str]) -> dict[str, str]:
    """Return digest → name of those of these documents that the project has."""
    rows = db.ask(session, statements.NAMES, {"project": project, "digests": list(set(digests))})
    return {row.digest: row.name for row in rows}


def browse(
    session: Session,
    project: UUID,
    kind: str,
    *,
    names: Sequence[str],
    after: UUID | None,
    limit: int,
    labels: Mapping[str, str] | None = None,
    quarantined: bool | None = None,
    file: str | None = None,
) -> list[Found]:
    """Return a project's documents without their bodies, newest first, before a cursor.

    `names` are families, any of them; `labels` are name → value, all of them; `quarantined` bundles, or the others;
    `file` is the digest of one that bundles are made of.
    """
    labels = labels or {}
    asked: dict[str, Any] = {"project": project, "kind": kind, "limit": limit}
    asked |= {f"named{place}": name for place, name in enumerate(names)}
    for place, (label, value) in enumerate(labels.items()):
        asked |= {f"label{place}": label, f"is{place}": value}
    if after is not None:
        asked["after"] = after
    if file is not None:
        asked["file"] = file
    query = statements.page(
        len(labels), len(names), quarantined=quarantined, is_after=after is not None, of_file=file is not None
    )
    rows = db.ask(session, query, asked)
    return [_wire(row, None, None) for row in rows]


def _read(session: Session, kind: str, digest: str) -> AnyDocument:
    body = session.scalars(select(DocumentRow.body).where(DocumentRow.digest == digest)).one()
    document: AnyDocument = ADAPTERS[kind].validate_python(strict_json(body))
    _recent.put(digest, document)
    return document


def is_there(session: Session, project: UUID, kind: str, digest: str, *, or_deleted: bool = False) -> bool:
    """Tell whether a project has a document; with `or_deleted`, whether it ever had it."""
    found = db.ask_any(session, statements.IS_THERE, {"project": project, "kind": kind, "digest": digest})
    return found is not None and (or_deleted or not found.is_deleted)


def _load(
    session: Session,
    project: UUID,
    kind: str,
    digest: str,
    expected: type[DocumentT],
    *,
    or_deleted: bool = False,
) -> DocumentT:
    if not is_there(session, project, kind, digest, or_deleted=or_deleted):
        raise absent(session, project, kind, digest)
    known = _recent.get(digest)
    document = known if known is not None else _read(session, kind, digest)
    if not isinstance(document, expected):
        raise TypeError(f"{digest} is a {type(document).__name__}, not a {expected.__name__}")
    return document


def bound_policy(session: Session, digest: str) -> Policy:
    """Return the policy that something in a project is bound to: it was looked for there when it was bound."""
    known = _recent.get(digest)
    document = known if known is not None else _read(session, "policy", digest)
    if not isinstance(document, Policy):
        raise TypeError(f"{digest} is a {type(document).__name__}, not a policy")
    return document


def load_bundle(session: Session, project: UUID, digest: str, *, or_deleted: bool = False) -> Bundle:
    """Return a bundle of a project; with `or_deleted`, also one whose files may be gone. Raises NotFound."""
    return _load(session, project, "bundle", digest, Bundle, or_deleted=or_deleted)


def need_bundle(session: Session, project: UUID, digest: str) -> Bundle:
    """Return a bundle that nobody deletes until the transaction ends. Raises NotFound."""
    hold(session, project, digest)
    return load_bundle(session, project, digest)


def load_policy(session: Session, project: UUID, digest: str) -> Policy:
    """Return a policy of a project. Raises NotFound."""
    return _load(session, project, "policy", digest, Policy)


def load_suite(session: Session, project: UUID, digest: str) -> AnySuite:
    """Return a suite of a project. Raises NotFound."""
    return _load(session, project, "suite", digest, AnySuite)  # type: ignore[arg-type] # a union is a type to isinstance


def load_reference(session: Session, project: UUID, digest: str) -> Reference:
    """Return a reference of a project. Raises NotFound."""
    return _load(session, project, "reference", digest, Reference)


def begins(column: Any, digits: str) -> tuple[Any, Any]:
    """Return the conditions of a digest that begins with some hexadecimal digits, as an index answers them."""
    # `g` follows every hexadecimal digit.
    return column >= f"sha256:{digits}", column < f"sha256:{digits}g"
