"""Archives of evidence: how one is written, and how it is verified with nothing but the file. Pure but for the file."""

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any, BinaryIO
from uuid import UUID

from pydantic import BaseModel, ValidationError

from gates.evidence import ALGORITHM, Key, Record, Verifier, key_id_of
from schemas.checkpoint import (
    ArchivedCheckpoint,
    ArchivedDocument,
    ArchivedEntry,
    ArchivedKey,
    ArchiveEnd,
    ArchiveHead,
)
from schemas.common import MAX_DOCUMENT_BYTES, canonical_json, sha256_digest, strict_json
from schemas.evidence import Fault, Kind, Verification

LINES: dict[str, type[BaseModel]] = {
    "archive": ArchiveHead,
    "key": ArchivedKey,
    "checkpoint": ArchivedCheckpoint,
    "entry": ArchivedEntry,
    "document": ArchivedDocument,
    "end": ArchiveEnd,
}
"""Kinds of lines, in the order in which they stand."""
BEGINNING = b'{"archive":'
"""What no other file begins with."""
ARCHIVE = "archive"
"""Stream of the faults that are of the file itself."""
MAX_LINE_BYTES = 2 * MAX_DOCUMENT_BYTES
MAX_FAULTS = 1000
_BINDS = {
    Kind.BUNDLE_REGISTERED: ("bundle", "digest"),
    Kind.POLICY_REGISTERED: ("policy", "digest"),
    Kind.SUITE_REGISTERED: ("suite", "digest"),
    Kind.REFERENCE_SET: ("reference", "reference"),
}
_COLUMNS = ArchivedEntry.model_fields.keys() - {"envelope"}
_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----\n.+?\n-----END PUBLIC KEY-----\n?", re.DOTALL)


def bound_document(kind: Kind, body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the (kind, digest) of the document that an entry puts in the registry or in force."""
    if kind not in _BINDS:
        return None
    what, field = _BINDS[kind]
    return what, str(body[field])


def public_keys(text: str) -> dict[str, str]:
    """Return key id → PEM of the public keys in a file.

    Raises:
        ValueError: it holds none, or one that is no ECDSA P-256 public key.
    """
    found = {key_id_of(pem): pem for pem in (f"{one.strip()}\n" for one in _PEM.findall(text.replace("\r\n", "\n")))}
    if not found:
        raise ValueError("there is no public key in it: PEM, `-----BEGIN PUBLIC KEY-----`")
    return found


class Writer:
    """Writes an archive, line by line, in the order of `LINES`."""

    def __init__(self, file: BinaryIO) -> None:
        """Begin at the file's present end."""
        self._file = file
        self._hasher = hashlib.sha256()
        self._lines = 0
        self.size = 0

    def write(self, line: BaseModel) -> None:
        """Write one line."""
        name = next(name for name, model in LINES.items() if type(line) is model)
        raw = canonical_json({name: line.model_dump(mode="json", by_alias=True, exclude_none=True)}) + b"\n"
        self._file.write(raw)
        self._hasher.update(raw)
        self._lines, self.size = self._lines + 1, self.size + len(raw)

    def end(self) -> None:
        """Write the last line."""
        self.write(ArchiveEnd(lines=self._lines, sha256=f"sha256:{self._hasher.hexdigest()}"))


def verify(file: BinaryIO, *, pinned: Collection[str] | None = None, must_have: str | None = None) -> Verification:
    """Recompute everything in an archive.

    Every line must be written as archives are, in their order, and the last one must have the digest of all above.
    Then checkpoints, entries and signatures as in the service's own verification; every document that an entry
    names must be there, with its digest.

    Args:
        file: the archive, open for reading bytes.
        pinned: ids of the keys that are trusted from elsewhere. Without it the archive vouches for its own keys, and
            whoever could sign it anew with other keys is not found out.
        must_have: digest of a checkpoint that was kept elsewhere; the archive must hold it.
    """
    reader = _Reader(pinned, must_have)
    while line := file.readline(MAX_LINE_BYTES):
        if not reader.take(line):
            break
    return reader.close()


class _Reader:
    def __init__(self, pinned: Collection[str] | None, must_have: str | None) -> None:
        self._pinned, self._must_have = pinned, must_have
        self._faults: list[Fault] = []
        self._number, self._rank = 0, -1
        self._hasher = hashlib.sha256()
        self._project: UUID | None = None
        self._keys: dict[str, Key] = {}
        self._verifier: Verifier | None = None
        self._sequence = 0
        self._bound: dict[str, str] = {}
        self._documents: set[str] = set()
        self._is_ended = False

    def _fault(self, problem: str) -> None:
        self._faults.append(Fault(stream=ARCHIVE, position=self._number, problem=problem))

    def take(self, raw: bytes) -> bool:
        """Take a line. Tells whether what follows can be read."""
        self._number += 1
        if self._is_ended:
            self._fault("something follows the last line")
            return False
        try:
            name, line = _parsed(raw)
        except ValueError as error:
            self._fault(f"the line cannot be read: {str(error).splitlines()[0]}")
            self._hasher.update(raw)
            return self._project is not None
        rank = list(LINES).index(name)
        if rank < self._rank or (rank == 0) != (self._number == 1):
            self._fault(f"a line {name} has no place here")
        self._rank = max(rank, self._rank)
        if isinstance(line, ArchiveEnd):
            self._end(line)
        else:
            self._hasher.update(raw)
            self._use(line)
        return self._project is not None

    def _use(self, line: BaseModel) -> None:
        match line:
            case ArchiveHead():
                self._project = line.project
            case ArchivedKey():
                if line.key_id in self._keys:
                    self._fault(f"key {line.key_id} stands there twice")
                fields = {name: getattr(line, name) for name in ArchivedKey.model_fields}
                self._keys[line.key_id] = Key(**fields)
            case ArchivedCheckpoint():
                self._ready().seal(canonical_json(line.envelope.model_dump(mode="json", by_alias=True)))
            case ArchivedEntry():
                self._entry(line)
            case ArchivedDocument():
                if sha256_digest(canonical_json(line.document)) != line.digest:
                    self._fault(f"document {line.digest} does not have its digest")
                if line.digest not in self._bound or line.digest in self._documents:
                    self._fault(f"document {line.digest} is named by no entry, or stands there twice")
                self._documents.add(line.digest)

    def _ready(self) -> Verifier:
        """The keys stand above whatever they signed."""
        if self._verifier is None:
            self._verifier = Verifier(self._project or UUID(int=0), self._keys.values())
        return self._verifier

    def _entry(self, line: ArchivedEntry) -> None:
        if line.sequence <= self._sequence:
            self._fault("the entries are not in the order of their sequence")
        self._sequence = line.sequence
        envelope = canonical_json(line.envelope.model_dump(mode="json", by_alias=True))
        verifier = self._ready()
        fields = {name: getattr(line, name) for name in _COLUMNS}
        claim = verifier.entry(Record(**fields, project=verifier.project, envelope=envelope))
        verifier.sequenced(line.sequence, line.entry_digest)
        try:
            bound = bound_document(line.kind, claim["body"]) if claim is not None else None
        except LookupError:
            return  # already a fault of the entry
        if bound is not None:
            self._bound[bound[1]] = bound[0]

    def _end(self, line: ArchiveEnd) -> None:
        self._is_ended = True
        if line.lines != self._number - 1:
            self._fault(f"there are {self._number - 1} lines above the last one, not {line.lines}")
        if line.sha256 != f"sha256:{self._hasher.hexdigest()}":
            self._fault("the archive does not have the digest that it ends with")

    def close(self) -> Verification:
        if not self._is_ended:
            self._number += 1
            self._fault("the archive was cut: its last line is missing")
        for digest in sorted(self._bound.keys() - self._documents):
            self._fault(f"{self._bound[digest]} {digest} is missing")
        verifier = self._ready()
        for key in self._keys.values():
            try:
                is_itself = key_id_of(key.public_key_pem) == key.key_id
            except ValueError:
                is_itself = False
            if not is_itself or key.algorithm != ALGORITHM:
                self._fault(f"key {key.key_id} is not the one that is stored under its id")
        if verifier.entries > verifier.sealed:
            self._fault("no checkpoint covers its last entries: what was cut off would not be missed")
        faults = [*verifier.close(self._pinned, must_have=self._must_have), *self._faults]
        return Verification(
            entries=verifier.entries,
            streams=verifier.streams,
            checkpoints=verifier.checkpoints,
            sealed=verifier.sealed,
            erased=verifier.erased,
            verified=verifier.entries > 0 and not faults,
            faults=faults[:MAX_FAULTS],
        )


def _parsed(raw: bytes) -> tuple[str, BaseModel]:
    if not raw.endswith(b"\n"):
        raise ValueError("it has no end, or is too long")
    value = strict_json(raw[:-1], limit=MAX_LINE_BYTES)
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= LINES.keys():
        raise ValueError("it is not an object of one known key")
    if canonical_json(value) + b"\n" != raw:
        raise ValueError("it is not canonical JSON")
    ((name, body),) = value.items()
    try:
        return name, LINES[name].model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{name} {'/'.join(map(str, first['loc']))}: {first['msg']}") from None
