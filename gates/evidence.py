"""Verification of evidence, pure: chains, signatures, statements, checkpoints.

The service verifies its database with it and the command line an archive, so there is one verifier.
"""

import base64
import hashlib
import struct
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from operator import itemgetter
from typing import Any
from uuid import UUID

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from schemas.checkpoint import CHECKPOINT, Head, KeyValidity, Sealed
from schemas.common import canonical_json, format_instant, sha256_digest, strict_json
from schemas.evidence import (
    BODIES,
    GENESIS,
    PAYLOAD_TYPE,
    PREDICATE_BASE,
    TEST_RESULT,
    Envelope,
    Fault,
    KeyRotated,
    Kind,
    Signature,
    Statement,
    pre_authentication_encoding,
)

ALGORITHM = "ecdsa-p256-sha256"
_CLAIM = {"stream", "act", "kind", "actor", "stated_at", "body"}


@dataclass(frozen=True, slots=True)
class Record:
    """One entry as it is stored."""

    sequence: int
    id: UUID
    project: UUID
    stream: str
    position: int
    act: str
    kind: str
    actor: str
    recorded_at: datetime
    envelope: bytes
    previous: str
    entry_digest: str
    key_id: str

    def link(self) -> str:
        """Return the digest that the entry must have: SHA-256 of canonical JSON (see `schemas.evidence`)."""
        hashed = {
            "act": self.act,
            "envelope_sha256": sha256_digest(self.envelope),
            "id": str(self.id),
            "kind": self.kind,
            "position": self.position,
            "previous": self.previous,
            "project": str(self.project),
            "recorded_at": format_instant(self.recorded_at),
            "stream": self.stream,
        }
        return sha256_digest(canonical_json(hashed))


@dataclass(frozen=True, slots=True)
class Key:
    """A public key with the time it signs in."""

    key_id: str
    algorithm: str
    public_key_pem: str
    valid_from: datetime
    valid_until: datetime | None

    def signs_at(self, instant: datetime) -> bool:
        """Tell whether it may sign at an instant."""
        return self.valid_from <= instant and (self.valid_until is None or instant <= self.valid_until)


def claim_of(envelope: bytes) -> dict[str, Any]:
    """Return what an envelope's statement claims: stream, act, kind, actor, stated_at, body.

    Raises:
        ValueError: the bytes are not an envelope around a statement of ours.
    """
    return _claim_in(_statement_in(_opened(envelope)[0]))


def _opened(raw: bytes) -> tuple[Envelope, bool]:
    """Return the envelope in some bytes, and whether they are its canonical JSON. Raises ValueError.

    Nearly all are as the service writes them. Bytes that are exactly the frame of an envelope around the texts that
    were read from them have no key twice, no white space and no escapes; only what differs needs the slow reader.
    """
    with suppress(ValueError):
        envelope = Envelope.model_validate_json(raw)
        signature = envelope.signatures[0]
        frame = (
            f'{{"payload":"{envelope.payload}","payloadType":"{envelope.payload_type}",'
            f'"signatures":[{{"keyid":"{signature.keyid}","sig":"{signature.sig}"}}]}}'
        )
        if frame.encode() == raw:
            return envelope, True
    parsed = strict_json(raw)
    return Envelope.model_validate(parsed), canonical_json(parsed) == raw


def _statement_in(envelope: Envelope) -> Statement:
    return Statement.model_validate(strict_json(envelope.payload_bytes()))


def _claim_in(statement: Statement) -> dict[str, Any]:
    is_result = statement.predicate_type == TEST_RESULT
    claim: Any = statement.predicate.get("sluicegate") if is_result else statement.predicate
    if not isinstance(claim, dict) or set(claim) != _CLAIM or not isinstance(claim["body"], dict):
        raise ValueError("the statement's predicate is not one of ours")
    if not is_result and statement.predicate_type != f"{PREDICATE_BASE}{claim['kind']}/v1":
        raise ValueError("the statement's predicate is of another type")
    return claim


def sealed_in(envelope: bytes) -> tuple[Sealed, str]:
    """Return what a checkpoint claims, and the root that it is about.

    Raises:
        ValueError: the bytes are not an envelope around a checkpoint.
    """
    return _sealed_in(_opened(envelope)[0])


def _sealed_in(envelope: Envelope) -> tuple[Sealed, str]:
    statement = Statement.model_validate(strict_json(envelope.payload_bytes()))
    if statement.predicate_type != CHECKPOINT or len(statement.subject) != 1:
        raise ValueError("the statement is no checkpoint")
    return Sealed.model_validate(statement.predicate), f"sha256:{statement.subject[0].digest['sha256']}"


def root_of(entries: Iterable[tuple[int, str]]) -> str:
    """Return the digest over (sequence, entry digest), in the order of the sequence."""
    hasher = hashlib.sha256()
    for sequence, digest in entries:
        hasher.update(f"{sequence} {digest}\n".encode())
    return f"sha256:{hasher.hexdigest()}"


def key_id_of(public_key_pem: str) -> str:
    """Return the key id of a public key: the SHA-256 of its DER.

    Raises:
        ValueError: it is no ECDSA P-256 public key, or not written as keys are.
    """
    return _loaded(public_key_pem)[1]


@lru_cache(maxsize=64)
def _loaded(public_key_pem: str) -> tuple[ec.EllipticCurvePublicKey, str]:
    try:
        key = load_pem_public_key(public_key_pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("the public key cannot be read") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the public key is not an ECDSA P-256 key")  # noqa: TRY004 - about the text, not a type
    # A PEM has many spellings of the same key; only one is stored.
    if key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode() != public_key_pem:
        raise ValueError("the public key was altered: it is not written as keys are")
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return key, hashlib.sha256(der).hexdigest()


def verify_signature(envelope: Envelope, public_key_pem: str) -> str | None:
    """Return what is wrong with an envelope's signature under a key, or None when it is right."""
    try:
        key, key_id = _loaded(public_key_pem)
    except ValueError as error:
        return str(error)
    signature = envelope.signatures[0]
    if key_id != signature.keyid:
        return "the public key does not have the key id that it is stored under"
    try:
        payload = envelope.payload_bytes()
        raw = base64.b64decode(signature.sig, validate=True)
        key.verify(raw, pre_authentication_encoding(envelope.payload_type, payload), ec.ECDSA(hashes.SHA256()))
    except ValueError as error:
        return f"the envelope cannot be decoded: {error}"
    except InvalidSignature:
        return "the signature does not match the statement"
    return None


def _signature_problems(envelope: Envelope, key_id: str, key: Key | None, at: datetime) -> Iterator[str]:
    """Yield what is wrong with an envelope's key, its signature and the time of signing."""
    if key is None or envelope.signatures[0].keyid != key_id:
        yield "it was signed by a key that is not known"
        return
    if key.algorithm != ALGORITHM:
        yield f"its key is said to be for {key.algorithm}"
    if problem := verify_signature(envelope, key.public_key_pem):
        yield problem
    if not key.signs_at(at):
        yield "it was signed outside its key's validity"


def entry_problems(record: Record, position: int, previous: str, key: Key | None) -> list[str]:
    """Return what is wrong with one entry by itself, and with its link to the one before."""
    return _judge(record, position, previous, key)[0]


def _judge(
    record: Record, position: int, previous: str, key: Key | None
) -> tuple[list[str], dict[str, Any] | None, Statement | None]:
    """Return what is wrong with an entry, what it claims, and its statement, if these can be read.

    Everything is read once.
    """
    problems = []
    if record.position != position:
        problems.append(f"position {position} is missing")
    if record.previous != previous:
        problems.append("its link does not name the entry before it")
    if record.link() != record.entry_digest:
        problems.append("its digest is not that of its row: a column or the envelope was altered")
    try:
        envelope, is_canonical = _opened(record.envelope)
    except ValueError as error:
        why = str(error).splitlines()[0]
        return [*problems, f"its envelope cannot be read: {why}", f"its statement cannot be read: {why}"], None, None
    if not is_canonical:
        problems.append("its envelope is not canonical")
    problems += _signature_problems(envelope, record.key_id, key, record.recorded_at)
    try:
        statement = _statement_in(envelope)
        claim = _claim_in(statement)
    except ValueError as error:
        return [*problems, f"its statement cannot be read: {str(error).splitlines()[0]}"], None, None
    for field in ("stream", "act", "kind", "actor"):
        if claim[field] != getattr(record, field):
            problems.append(f"its {field} is not the one that was signed")
    try:
        BODIES[Kind(record.kind)].model_validate(claim["body"])
    except ValueError as error:
        problems.append(f"its body is not that of its kind: {str(error).splitlines()[0]}")
    return problems, claim, statement


def is_signed(payload: bytes, key_id: str, signature: str, public_key_pem: str) -> bool:
    """Tell whether bytes that are no statement of ours carry a key's signature, in the form that an envelope has it."""
    with suppress(ValueError):
        envelope = Envelope(
            payload=base64.b64encode(payload).decode(),
            payload_type=PAYLOAD_TYPE,
            signatures=[Signature(keyid=key_id, sig=signature)],
        )
        return verify_signature(envelope, public_key_pem) is None
    return False


@dataclass(slots=True)
class _Stream:
    position: int = 0
    sequence: int = 0
    digest: str = GENESIS
    length: int = 0


class _Heads(Sequence[tuple[int, str, int]]):
    """What checkpoints sealed of one stream: (position, entry digest, place of the checkpoint), packed."""

    __slots__ = ("_packed",)
    _FORM = struct.Struct(">Q32sI")

    def __init__(self) -> None:
        self._packed = bytearray()

    def add(self, position: int, digest: str, place: int) -> None:
        self._packed += self._FORM.pack(position, bytes.fromhex(digest.removeprefix("sha256:")), place)

    def __len__(self) -> int:
        return len(self._packed) // self._FORM.size

    def __getitem__(self, place: Any) -> Any:
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(place)
        position, digest, seal = self._FORM.unpack_from(self._packed, place * self._FORM.size)
        return position, f"sha256:{digest.hex()}", seal


class Verifier:
    """Takes a project's checkpoints and entries, and gathers what is wrong with them.

    Call `seal` for each checkpoint in order, then `entry` for each entry, those of a stream in order of position,
    and `sequenced` for each (sequence, digest) in the order of the sequence; then `close` once.
    """

    def __init__(self, project: UUID, keys: Iterable[Key]) -> None:
        """Trust no key yet, only know them."""
        self.project = project
        self.faults: list[Fault] = []
        self.entries = 0
        self.erased = 0
        self.about: dict[str, str] = {}
        """Name → digest of what the last entry's statement is about."""
        self._keys = {key.key_id: key for key in keys}
        self._streams: dict[str, _Stream] = {}
        self._seals: list[Sealed] = []
        self._roots: list[str] = []
        self._heads: dict[str, _Heads] = {}
        self._interval, self._hasher = 0, hashlib.sha256()
        self._used: dict[str, tuple[str, int]] = {}
        self._introduced: dict[str, set[str]] = {}
        self._retired: set[str] = set()
        self._first: dict[str, datetime] = {}
        """Key → when its earliest entry was recorded."""
        self._last_digest = GENESIS
        self._digests: set[str] = set()

    @property
    def streams(self) -> int:
        """Streams seen."""
        return len(self._streams)

    @property
    def checkpoints(self) -> int:
        """Checkpoints seen."""
        return len(self._seals)

    @property
    def sealed(self) -> int:
        """Entries that the checkpoints say they cover."""
        return self._seals[-1].entries if self._seals else 0

    def sealed_of(self, stream: str) -> int:
        """Return how many entries of one stream the checkpoints say they cover."""
        heads = self._heads.get(stream)
        return int(heads[-1][0]) if heads else 0

    def fault(self, stream: str, position: int, problem: str) -> None:
        """Add something that is wrong."""
        self.faults.append(Fault(stream=stream, position=position, problem=problem))

    # ---------------------------------------------------------------------------------------- checkpoints

    def seal(self, envelope: bytes, *, digest: str | None = None, key_id: str | None = None) -> Sealed | None:
        """Take the next checkpoint: its envelope, and what is stored beside it. Returns what it claims, when readable.

        A checkpoint that cannot be read is a fault, and what it covered is judged by the next one.
        """
        number, stream = self._seals[-1].number + 1 if self._seals else 1, f"checkpoints/{self.project}"
        try:
            opened, is_canonical = _opened(envelope)
            sealed, root = _sealed_in(opened)
        except ValueError as error:
            self.fault(stream, number, f"the checkpoint cannot be read: {str(error).splitlines()[0]}")
            return None
        own, signer = sha256_digest(envelope), opened.signatures[0].keyid
        if digest is not None and digest != own:
            self.fault(stream, sealed.number, "its digest is not that of its envelope")
        if not is_canonical:
            self.fault(stream, sealed.number, "its envelope is not canonical")
        for problem in _signature_problems(opened, key_id or signer, self._keys.get(signer), sealed.made_at):
            self.fault(stream, sealed.number, problem)
        self.uses(signer, stream, sealed.number)
        for problem in self._seal_problems(sealed, number):
            self.fault(stream, sealed.number, problem)
        for head in sealed.heads:
            self._heads.setdefault(head.stream, _Heads()).add(head.position, head.digest, len(self._seals))
        # Its heads are kept above, in a tenth of the space.
        self._seals.append(sealed.model_copy(update={"heads": []}))
        self._roots.append(root)
        self._last_digest = own
        self._digests.add(own)
        return sealed

    def _seal_problems(self, sealed: Sealed, number: int) -> Iterator[str]:
        before = self._seals[-1] if self._seals else None
        if sealed.project != self.project:
            yield "the checkpoint is of another project"
        if sealed.number != number:
            yield f"checkpoint {number} is missing"
        if sealed.previous != self._last_digest:
            yield "it does not name the checkpoint before it"
        if sealed.sequence <= (before.sequence if before else 0):
            yield "its sequence is not above that of the checkpoint before"
        if [head.stream for head in sealed.heads] != sorted({head.stream for head in sealed.heads}):
            yield "its streams are not sorted"
        grown = streams = 0
        for head in sealed.heads:
            known = self._heads.get(head.stream)
            last = known[-1][0] if known else 0
            grown += head.position - last
            streams += not known
            if known and head.position <= last:
                yield f"{head.stream} is not longer than at the checkpoint before"
        if before is None or sealed.number == before.number + 1:
            if sealed.entries != (before.entries if before else 0) + grown:
                yield f"it counts {sealed.entries} entries, which its streams do not add up to"
            if sealed.streams != (before.streams if before else 0) + streams:
                yield f"it counts {sealed.streams} streams, which its streams do not add up to"
        yield from self._key_problems(sealed.keys)

    def _key_problems(self, then: Sequence[KeyValidity]) -> Iterator[str]:
        for one in then:
            key = self._keys.get(one.key_id)
            if key is None:
                yield f"key {one.key_id} is missing"
            elif key.valid_from != one.valid_from or one.valid_until not in {None, key.valid_until}:
                yield f"key {one.key_id} had another validity when the checkpoint was made"

    # -------------------------------------------------------------------------------------------- entries

    def entry(self, record: Record) -> dict[str, Any] | None:
        """Take the next entry of its stream. Returns what it claims, if that can be read."""
        self.entries += 1
        self.erased += record.kind == Kind.RECORDS_ERASED
        stream = self._streams.setdefault(record.stream, _Stream())
        expected = stream.position + 1
        if record.project != self.project:
            self.fault(record.stream, record.position, "the entry is of another project")
        if record.sequence <= stream.sequence:
            self.fault(record.stream, record.position, "its sequence is not above the one before")
        problems, claim, statement = _judge(record, expected, stream.digest, self._keys.get(record.key_id))
        self.about = (
            {} if statement is None else {one.name: f"sha256:{one.digest['sha256']}" for one in statement.subject}
        )
        for problem in problems:
            self.fault(record.stream, record.position, problem)
        self.uses(record.key_id, record.stream, record.position)
        self._first[record.key_id] = min(self._first.get(record.key_id, record.recorded_at), record.recorded_at)
        self._check_seal(record)
        if claim is not None:
            self._hand_on(record, claim["body"])
            if record.kind == Kind.KEY_ROTATED:
                self._rotation(record, claim["body"])
        stream.position, stream.sequence, stream.digest = record.position, record.sequence, record.entry_digest
        stream.length += 1
        return claim

    def _check_seal(self, record: Record) -> None:
        heads: Sequence[tuple[int, str, int]] = self._heads.get(record.stream, ())
        place = bisect_left(heads, record.position, key=itemgetter(0))
        if place < len(heads):
            position, digest, index = heads[place]
            number = self._seals[index].number
            if record.position == position and record.entry_digest != digest:
                self.fault(record.stream, record.position, f"it is not the entry that checkpoint {number} sealed")
            after = self._seals[index - 1].sequence if index else 0
            if not after < record.sequence <= self._seals[index].sequence:
                self.fault(record.stream, record.position, f"its sequence is not one that checkpoint {number} covers")
        elif self._seals and record.sequence <= self._seals[-1].sequence:
            number = self._seals[-1].number
            self.fault(record.stream, record.position, f"it was slipped in below checkpoint {number}")

    def learn(self, record: Record) -> None:
        """Take from an entry of a stream that is not verified which keys it hands trust on to; none if it is wrong."""
        problems, claim, _ = _judge(record, record.position, record.previous, self._keys.get(record.key_id))
        if claim is not None and not problems:
            self._hand_on(record, claim["body"])

    def _hand_on(self, record: Record, said: dict[str, Any]) -> None:
        """Note which keys the signer of an entry, or the key that it puts in place, vouches for."""
        with suppress(ValueError, TypeError):  # already a fault of the entry
            if record.kind == Kind.PROJECT_SET:
                self._introduced.setdefault(record.key_id, set()).update(said.get("keys") or ())
            elif record.kind == Kind.KEY_ROTATED:
                body = KeyRotated.model_validate(said)
                self._introduced.setdefault(record.key_id, set()).add(body.key_id)
                # That it takes the place of the old one, the new one says too: then it vouches for that.
                sig = body.countersigned
                if sig is not None and is_signed(body.payload(), body.key_id, sig, body.public_key_pem):
                    self._introduced.setdefault(body.key_id, set()).add(body.retired)

    def _rotation(self, record: Record, said: dict[str, Any]) -> None:
        try:
            body = KeyRotated.model_validate(said)
        except ValueError:
            return  # already a fault of the entry
        self._retired.add(body.retired)
        new, old = self._keys.get(body.key_id), self._keys.get(body.retired)
        if new is None or (new.public_key_pem, new.valid_from) != (body.public_key_pem, body.valid_from):
            self.fault(record.stream, record.position, f"key {body.key_id} is not the one that was put in place")
        if old is None or body.retired != record.key_id or old.valid_until != body.valid_until:
            self.fault(record.stream, record.position, f"key {body.retired} does not end when it was retired")

    def sequenced(self, sequence: int, digest: str) -> None:
        """Take the next entry of the project, by its sequence alone."""
        while self._interval < len(self._seals) and sequence > self._seals[self._interval].sequence:
            self._close_interval()
        if self._interval < len(self._seals):
            self._hasher.update(f"{sequence} {digest}\n".encode())

    def _close_interval(self) -> None:
        sealed = self._seals[self._interval]
        if f"sha256:{self._hasher.hexdigest()}" != self._roots[self._interval]:
            problem = f"the entries up to sequence {sealed.sequence} are not those that it sealed"
            self.fault(f"checkpoints/{self.project}", sealed.number, problem)
        self._interval, self._hasher = self._interval + 1, hashlib.sha256()

    # ------------------------------------------------------------------------------------------------ end

    def close(
        self, pinned: Collection[str] | None = None, *, stream: str | None = None, must_have: str | None = None
    ) -> list[Fault]:
        """Return everything that is wrong, once everything has been taken.

        Args:
            pinned: ids of the keys that are trusted from elsewhere; a key that one of them introduced is trusted too.
                Without it, every key that is known is.
            stream: the one stream that was taken; by default all were.
            must_have: digest of a checkpoint that must be there.
        """
        for name, heads in sorted(self._heads.items()):
            if stream is not None and name != stream:
                continue
            found = self._streams.get(name, _Stream())
            lacking = next((head for head in heads if head[0] > found.position), None)
            if lacking is not None:
                position, _, index = lacking
                what = f"it was cut: it has {found.length} entries" if found.length else "the stream was removed"
                self.fault(name, 0, f"{what}, and checkpoint {self._seals[index].number} sealed {position}")
        if stream is None:
            while self._interval < len(self._seals):
                self._close_interval()
            self._check_ends()
        if pinned is not None:
            self._check_trust(pinned)
        if must_have is not None and must_have not in self._digests:
            self.fault(f"checkpoints/{self.project}", 0, f"checkpoint {must_have} is not there")
        return self.faults

    def _check_ends(self) -> None:
        """A key ends by an entry, in every project that it signed for before another took its place."""
        for key_id, at in sorted(self._first.items()):
            key = self._keys.get(key_id)
            if key is None or key.valid_until is None or key_id in self._retired:
                continue
            following = [one.valid_from for one in self._keys.values() if one.valid_from > key.valid_from]
            if not following or at < min(following):
                self.fault(
                    f"project/{self.project}", 0, f"key {key_id}, which signed here, ends, and no entry retired it"
                )

    def uses(self, key_id: str, stream: str, position: int) -> None:
        """Note that a key signed something, which is named when nobody trusts the key."""
        self._used.setdefault(key_id, (stream, position))

    def _check_trust(self, pinned: Collection[str]) -> None:
        trusted, waiting = set(pinned), list(pinned)
        while waiting:
            for key_id in self._introduced.get(waiting.pop(), set()) - trusted:
                trusted.add(key_id)
                waiting.append(key_id)
        for key_id, (stream, position) in self._used.items():
            if key_id not in trusted:
                problem = f"key {key_id} signed here, and neither is it trusted nor did a trusted key introduce it"
                self.fault(stream, position, problem)


def heads_of(entries: Iterable[tuple[str, int, str]]) -> list[Head]:
    """Return the heads of streams, sorted, from (stream, position, entry digest) in any order."""
    found: dict[str, tuple[int, str]] = {}
    for stream, position, digest in entries:
        if stream not in found or position > found[stream][0]:
            found[stream] = (position, digest)
    return [Head(stream=name, position=at, digest=digest) for name, (at, digest) in sorted(found.items())]
