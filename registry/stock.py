"""What is kept of bytes beside the log: it must be what bundles are made of, and what results name and nobody erased.

Documents, entries and rows go by while a project is verified; a few hundred bundles are held at a time.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import and_, exists, func, select
from sqlalchemy.orm import Session

from gates.evidence import Record, Verifier, is_signed
from registry import blobs, documents, erasure, keys, projects
from registry.tables import BlobRow, BundleBlobRow, ProjectBlobRow, ProjectDocumentRow, ProjectUsageRow, RecordRow
from schemas.common import format_instant
from schemas.evidence import Fault, Kind

HELD = 100
"""Bundles that are held at a time."""


@dataclass(slots=True)
class Stock:
    """Takes a project's bundles and entries, and compares what is kept of their bytes with them."""

    session: Session
    project: UUID
    _bundles: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bundle → blob → size of what it is made of; of one that is deleted nothing is kept."""
    _named: set[str] = field(default_factory=set)
    _erased: dict[str, str] = field(default_factory=dict)
    """Records → when they were erased last."""

    def take(self, record: Record, claim: Mapping[str, Any] | None) -> None:
        """Take the next entry. One that cannot be read is a fault already."""
        if claim is None:
            return
        records = claim["body"].get("records")
        if record.kind == Kind.GATE_RECORDED and records is not None:
            self._named.add(records)
        elif record.kind == Kind.RECORDS_ERASED:
            self._erased[str(records)] = claim["stated_at"]

    def bundle(self, digest: str, files: Iterable[Mapping[str, Any]], *, is_deleted: bool) -> Iterator[Fault]:
        """Take the next bundle. Yields the faults of those before it."""
        if len(self._bundles) >= HELD:
            yield from self._compare()
        self._bundles[digest] = {} if is_deleted else {file["sha256"]: file["size"] for file in files}

    def close(self, verifier: Verifier) -> Iterator[Fault]:
        """Yield what is otherwise than it must be."""
        yield from self._compare()
        yield from self._strays()
        yield from self._unshown(verifier)
        yield from self._record_faults()
        yield from self._usage_faults()

    def _compare(self) -> Iterator[Fault]:
        made, self._bundles = self._bundles, {}
        held = and_(ProjectBlobRow.project_id == BundleBlobRow.project_id, ProjectBlobRow.digest == BundleBlobRow.blob)
        rows = self.session.execute(
            select(BundleBlobRow.bundle, BundleBlobRow.blob, ProjectBlobRow.digest.label("held"), BlobRow.size)
            .outerjoin(ProjectBlobRow, held)
            .outerjoin(BlobRow, BlobRow.digest == BundleBlobRow.blob)
            .where(BundleBlobRow.project_id == self.project, BundleBlobRow.bundle.in_(made))
        )
        kept: dict[str, dict[str, tuple[str | None, int | None]]] = {}
        for bundle, blob, is_held, size in rows:
            kept.setdefault(bundle, {})[blob] = is_held, size
        for bundle, files in made.items():
            of, found = documents.stream(self.project, bundle), kept.get(bundle, {})
            for blob in sorted(files.keys() | found.keys()):
                if (problem := _otherwise(files.get(blob), found.get(blob))) is not None:
                    yield Fault(stream=of, position=0, problem=f"its blob {blob} {problem}")

    def _strays(self) -> Iterator[Fault]:
        is_bundle = exists().where(
            ProjectDocumentRow.project_id == BundleBlobRow.project_id,
            ProjectDocumentRow.digest == BundleBlobRow.bundle,
            ProjectDocumentRow.kind == "bundle",
        )
        nobodys = select(BundleBlobRow.bundle).where(BundleBlobRow.project_id == self.project, ~is_bundle).distinct()
        for bundle in sorted(self.session.scalars(nobodys)):
            of = documents.stream(self.project, bundle)
            yield Fault(stream=of, position=0, problem="blobs are kept for it, and the project has no such bundle")
        is_known = exists().where(BlobRow.digest == ProjectBlobRow.digest)
        unknown = select(ProjectBlobRow.digest).where(ProjectBlobRow.project_id == self.project, ~is_known)
        for blob in sorted(self.session.scalars(unknown)):
            problem = f"the blob {blob}, which the project holds, is missing"
            yield Fault(stream=projects.stream(self.project), position=0, problem=problem)

    def _unshown(self, verifier: Verifier) -> Iterator[Fault]:
        """The service has signed of each blob that the project has shown that it holds the bytes."""
        of, known = projects.stream(self.project), {key.key_id: key.public_key_pem for key in keys.known(self.session)}
        held = (
            select(ProjectBlobRow.digest, ProjectBlobRow.proof, BlobRow.size)
            .join(BlobRow, BlobRow.digest == ProjectBlobRow.digest)
            .where(ProjectBlobRow.project_id == self.project)
        )
        for digest, proof, size in self.session.execute(
            held.order_by(ProjectBlobRow.digest).execution_options(yield_per=HELD)
        ):
            key_id, _, signature = (proof or "").partition(":")
            payload = blobs.shown(self.project, digest, size)
            if key_id in known and is_signed(payload, key_id, signature, known[key_id]):
                verifier.uses(key_id, of, 0)
            else:
                problem = f"it holds the blob {digest}, and nobody has sent that"
                yield Fault(stream=of, position=0, problem=problem)

    def _record_faults(self) -> Iterator[Fault]:
        """Raw records are kept for every result that names some, until an entry says that they were erased."""
        held = and_(ProjectBlobRow.project_id == RecordRow.project_id, ProjectBlobRow.digest == RecordRow.digest)
        rows = self.session.execute(
            select(RecordRow.digest, RecordRow.recorded_at, RecordRow.erased_at, ProjectBlobRow.digest.label("held"))
            .outerjoin(ProjectBlobRow, held)
            .where(RecordRow.project_id == self.project)
            .order_by(RecordRow.digest)
        )
        lacking = self._named | self._erased.keys()
        for digest, recorded_at, erased_at, is_held in rows:
            lacking.discard(digest)
            said, of = self._erased.get(digest), erasure.stream(self.project, digest)
            if erased_at is not None:
                if format_instant(erased_at) != said:
                    yield Fault(stream=of, position=0, problem="the records are not erased as their log says")
            # What was erased may have been sent again.
            elif said is not None and format_instant(recorded_at) <= said:
                yield Fault(stream=of, position=0, problem="the records are not erased as their log says")
            elif is_held is None:
                yield Fault(
                    stream=of, position=0, problem="the project does not hold the records, and nobody erased them"
                )
        for digest in sorted(lacking):
            of = erasure.stream(self.project, digest)
            yield Fault(stream=of, position=0, problem="nothing is kept of the records, not that they were erased")

    def _usage_faults(self) -> Iterator[Fault]:
        """A project is counted with what it holds."""
        of = ProjectBlobRow.project_id == self.project
        size = select(func.coalesce(func.sum(BlobRow.size), 0)).join(
            ProjectBlobRow, ProjectBlobRow.digest == BlobRow.digest
        )
        member = ProjectDocumentRow.project_id == self.project, ProjectDocumentRow.deleted_at.is_(None)
        holds = {
            "bytes": int(self.session.scalar(size.where(of)) or 0),
            "documents": self.session.scalar(select(func.count()).select_from(ProjectDocumentRow).where(*member)) or 0,
        }
        parts = ProjectUsageRow.project_id == self.project
        for name, value in holds.items():
            counted = select(func.coalesce(func.sum(getattr(ProjectUsageRow, name)), 0)).where(parts)
            told = int(self.session.scalar(counted) or 0)
            if told != value:
                problem = f"the project is counted with {told} {name}, and holds {value}"
                yield Fault(stream=projects.stream(self.project), position=0, problem=problem)


def _otherwise(size: int | None, kept: tuple[str | None, int | None] | None) -> str | None:
    """Return what is wrong with what is kept of a blob, that a bundle says has this size; None for one it has not."""
    if size is None:
        return "is kept for it, and it is not made of that"
    if kept is None:
        return "is not kept for it"
    held, stored = kept
    if held is None:
        return "is not held by the project"
    return None if stored == size else f"is said to have {stored} bytes, and has {size}"
