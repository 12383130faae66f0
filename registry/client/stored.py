"""Every stored byte that evidence names, read again: nobody's word for it, and by the same reading as `blob check`."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from registry.client.documents import Bundles
from registry.client.storage import Blobs
from registry.client.work import Evidence
from schemas.evidence import Fault, Kind
from schemas.problems import NotFound, TooManyRequests

PAUSE_SECONDS = 1.0
"""The service reads so much for one token and no more; who asks for all of it waits its turn."""


@dataclass(slots=True)
class Reading:
    """How far reading again has come."""

    blobs: int
    """How many there are to read."""
    read: int = 0
    faults: list[Fault] = field(default_factory=list)
    """One for each entry that needs a blob whose bytes are others, or gone."""


def needed(evidence: Evidence, bundles: Bundles, stream: str | None = None) -> dict[str, list[tuple[str, int]]]:
    """Return blob → (stream, position) of the entries that need it, of all streams or of one.

    Those are registrations of bundles that are not deleted, and results whose raw records were not erased.
    """
    made: dict[str, tuple[str, int]] = {}
    records: dict[str, list[tuple[str, int]]] = {}
    for entry in evidence.list(stream=stream):
        place = entry.stream, entry.position
        match entry.kind:
            case Kind.BUNDLE_REGISTERED:
                made[str(entry.body["digest"])] = place
            case Kind.BUNDLE_DELETED:
                made.pop(str(entry.body["digest"]), None)
            case Kind.GATE_RECORDED if entry.body.get("records"):
                records.setdefault(str(entry.body["records"]), []).append(place)
            case Kind.RECORDS_ERASED:
                records.pop(str(entry.body["records"]), None)
    found = {digest: list(places) for digest, places in records.items()}
    for bundle, place in made.items():
        document = bundles.get(bundle).document or {}
        files = document.get("files")
        for file in files if isinstance(files, list) else []:
            found.setdefault(str(file["sha256"]), []).append(place)
    return found


def read_again(blobs: Blobs, wanted: dict[str, list[tuple[str, int]]]) -> Iterator[Reading]:
    """Have each blob read again by the service, one after the other; yields after each how far that has come.

    What is damaged is quarantined as `blob check` does it. Raises Unavailable when the store cannot be read.
    """
    reading = Reading(len(wanted))
    for digest in sorted(wanted):
        problem = _problem(blobs, digest)
        if problem is not None:
            said = f"its blob {digest} {problem}"
            reading.faults += [Fault(stream=stream, position=at, problem=said) for stream, at in wanted[digest]]
        reading.read += 1
        yield reading


def _problem(blobs: Blobs, digest: str) -> str | None:
    while True:
        try:
            found = blobs.check(digest)
        except TooManyRequests:
            time.sleep(PAUSE_SECONDS)
        except NotFound:
            return "is missing"
        else:
            return None if found.is_intact else f"has the bytes of {found.found}"
