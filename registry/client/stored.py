"""Every stored byte that evidence names, read again: nobody's word for it, and by the same reading as `blob check`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from registry.client.documents import Bundles
from registry.client.storage import Blobs
from registry.client.work import Evidence
from schemas.evidence import Agreement, Fault, Kind
from schemas.problems import NotFound, TooManyRequests

PAUSE_SECONDS = 1.0
"""The service reads so much for one token and no more; who asks for all of it waits its turn."""
MISSING = "is missing"


@dataclass(slots=True)
class Reading:
    """How far reading again has come."""

    blobs: int
    """How many there are to read."""
    read: int = 0
    faults: list[Fault] = field(default_factory=list)
    """One for each entry that needs a blob whose bytes are others, or gone."""


@dataclass(frozen=True, slots=True)
class Need:
    """An entry that needs a blob."""

    stream: str
    position: int
    is_over: Callable[[], bool]
    """Asks whether it is needed no more: the records were erased, or the bundle was deleted, also since."""


def needed(evidence: Evidence, bundles: Bundles, stream: str | None = None) -> dict[str, list[Need]]:
    """Return blob → the entries that need it, of all streams or of one.

    Those are registrations of bundles that are not deleted, and results whose raw records are not known to be erased:
    what a stream of its own says of records is asked when they are missing.
    """
    made: dict[str, tuple[str, int]] = {}
    found: dict[str, list[Need]] = {}
    for entry in evidence.list(stream=stream):
        match entry.kind:
            case Kind.BUNDLE_REGISTERED:
                made[str(entry.body["digest"])] = entry.stream, entry.position
            case Kind.BUNDLE_DELETED:
                made.pop(str(entry.body["digest"]), None)
            case Kind.GATE_RECORDED if entry.body.get("records"):
                is_over = partial(_is_erased, evidence, entry.entry_digest)
                need = Need(entry.stream, entry.position, is_over)
                found.setdefault(str(entry.body["records"]), []).append(need)
            case Kind.RECORDS_ERASED:
                found.pop(str(entry.body["records"]), None)
    for bundle, (of, position) in made.items():
        is_deleted = partial(_is_deleted, bundles, bundle)
        try:
            files = (bundles.get(bundle).document or {}).get("files")
        except NotFound:
            if not is_deleted():
                raise
            continue
        for file in files if isinstance(files, list) else []:
            found.setdefault(str(file["sha256"]), []).append(Need(of, position, is_deleted))
    return found


def _is_erased(evidence: Evidence, entry: str) -> bool:
    return evidence.recompute(entry).outcome is Agreement.ERASED


def _is_deleted(bundles: Bundles, bundle: str) -> bool:
    try:
        bundles.get(bundle)
    except NotFound as problem:
        return "deleted_at" in problem.members
    return False


def read_again(blobs: Blobs, wanted: dict[str, list[Need]]) -> Iterator[Reading]:
    """Have each blob read again by the service, one after the other; yields after each how far that has come.

    What is damaged is quarantined as `blob check` does it. Raises Unavailable when the store cannot be read.
    """
    reading = Reading(len(wanted))
    for digest in sorted(wanted):
        problem = _problem(blobs, digest)
        if problem is not None:
            needs = [need for need in wanted[digest] if problem != MISSING or not need.is_over()]
            said = f"its blob {digest} {problem}"
            reading.faults += [Fault(stream=need.stream, position=need.position, problem=said) for need in needs]
        reading.read += 1
        yield reading


def _problem(blobs: Blobs, digest: str) -> str | None:
    while True:
        try:
            found = blobs.check(digest)
        except TooManyRequests:
            time.sleep(PAUSE_SECONDS)
        except NotFound:
            return MISSING
        else:
            return None if found.is_intact else f"has the bytes of {found.found}"
