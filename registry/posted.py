"""Documents as they were posted: parsed strictly, and a bundle held against the locks that came with it."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import TypeAdapter, ValidationError

from schemas.bundle import Bundle
from schemas.common import strict_json
from schemas.faults import faults_of
from schemas.lock import BASE, BundleRegistration, Lock
from schemas.policy import Policy
from schemas.problems import InvalidDocument
from schemas.reference import Reference
from schemas.suite import AnySuite, Suite

AnyDocument = Bundle | Policy | AnySuite | Reference

ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "bundle": TypeAdapter(Bundle),
    "policy": TypeAdapter(Policy),
    "suite": TypeAdapter(Suite),
    "reference": TypeAdapter(Reference),
}
"""Kind of a document → what validates it."""
EARLIEST = datetime(2015, 1, 1, tzinfo=UTC)
LATEST = timedelta(minutes=10)
"""When a source may have been resolved: not before there were any, and no later than clocks differ."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REGISTRATION: TypeAdapter[BundleRegistration] = TypeAdapter(BundleRegistration)


def parse(kind: str, raw: bytes) -> AnyDocument:
    """Return a document of a kind.

    Raises:
        InvalidDocument: not strict JSON, or not such a document; `errors` names each place.
    """
    document: AnyDocument = _validated(ADAPTERS[kind], kind, _read(raw))
    return document


def posted(kind: str, raw: bytes) -> tuple[AnyDocument, list[Lock] | None]:
    """Return a document of a kind, and the locks of a bundle that was posted with them.

    Raises:
        InvalidDocument: as `parse`; or the locks are not about the sources that the bundle has.
    """
    body = _read(raw)
    if kind != "bundle" or not isinstance(body, dict) or "bundle" not in body:
        document: AnyDocument = _validated(ADAPTERS[kind], kind, body)
        return document, None
    registration: BundleRegistration = _validated(_REGISTRATION, kind, body)
    wrong = [{"pointer": pointer, "detail": detail} for pointer, detail in _contradictions(registration)]
    if wrong:
        said = f"{wrong[0]['pointer']} {wrong[0]['detail']}"
        raise InvalidDocument(f"the bundle's locks are not valid: {said}", errors=wrong)
    return registration.bundle, registration.locks


def _contradictions(registration: BundleRegistration) -> list[tuple[str, str]]:
    sources = {(one.kind, one.location, one.revision): place for place, one in enumerate(registration.bundle.sources)}
    found, seen = [], set[str]()
    for place, lock in enumerate(registration.locks):
        if sources.get((lock.kind, lock.location, lock.revision)) is None:
            found.append((f"/locks/{place}", f"resolves {lock.part} to what is none of the bundle's sources"))
        if lock.part in seen:
            found.append((f"/locks/{place}/part", f"is {lock.part}, as another lock's is"))
        found += [(f"/locks/{place}/{name}", detail) for name, detail in _untrue(lock, datetime.now(UTC))]
        seen.add(lock.part)
    if BASE not in seen:
        found.append(("/locks", f"has none for the part {BASE}"))
    locked = {(one.kind, one.location, one.revision) for one in registration.locks}
    found += [(f"/bundle/sources/{place}", "has no lock") for one, place in sources.items() if one not in locked]
    return found


def _untrue(lock: Lock, now: datetime) -> Iterator[tuple[str, str]]:
    """Yield field and fault of what a lock cannot say: it is another person's word, and shown as that."""
    if not lock.asked.isprintable():
        yield "asked", "must be printable: no control characters and none that turn the direction of text"
    if lock.kind == "https":
        if "?" in lock.asked or "@" in lock.asked.partition("://")[2].partition("/")[0]:
            yield "asked", "must have no query, and no name or password before the host"
    elif lock.kind == "huggingface":
        repository, _, revision = lock.asked.partition("@")
        if repository != f"hf:{lock.location}":
            yield "asked", f"must begin with hf:{lock.location}, as its location does"
        elif _COMMIT.fullmatch(revision) and revision != lock.revision:
            yield "asked", "names another commit than the one it resolved to"
    if not EARLIEST <= lock.resolved_at <= now + LATEST:
        yield "resolved_at", "must be between 2015 and now"


def _read(raw: bytes) -> Any:
    try:
        return strict_json(raw)
    except ValueError as error:
        raise InvalidDocument(f"the document {error}", errors=[{"pointer": "", "detail": str(error)}]) from None


def _validated(adapter: TypeAdapter[Any], kind: str, body: Any) -> Any:
    try:
        return adapter.validate_python(body)
    except ValidationError as error:
        places = faults_of(error, body, adapter)
        first = f"{places[0]['pointer']} {places[0]['detail']}".strip()
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise InvalidDocument(f"the {kind} is not valid: {first}{more}", errors=places) from None
