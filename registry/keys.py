"""Signing of evidence: an ECDSA P-256 key in a file, DSSE envelopes, and the history of public keys.

`python -m registry.keys rotate --reason WHY` puts a new key in place; see `registry.rotation`.
"""

import base64
import hashlib
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gates.evidence import ALGORITHM, Key
from registry.tables import SigningKeyRow
from schemas.evidence import PAYLOAD_TYPE, Envelope, Signature, pre_authentication_encoding
from schemas.problems import Unavailable


class Signer:
    """Signs with one local key. The key's file may be replaced at any time: the next signature is the new key's.

    While the file holds no key, as when somebody copies over it, nothing is signed: that raises Unavailable.

    Source: DSSE protocol v1.0.2; the key id is the SHA-256 of the public key's DER, in hexadecimal.
    """

    def __init__(self, private_key: ec.EllipticCurvePrivateKey, path: Path | None = None) -> None:
        """Wrap a P-256 private key, and the file that it is read from."""
        self._path = path
        self._seen = _identity(path)
        self._current = _Loaded.of(private_key)

    @classmethod
    def load(cls, path: Path) -> "Signer":
        """Read the key from a PEM file; make it (mode 0600) when the file does not exist.

        Raises:
            ValueError: the file does not hold an unencrypted P-256 private key.
        """
        if not path.exists():
            create(path)
        return cls(_read(path), path)

    @property
    def key_id(self) -> str:
        """Id of the key that signs now."""
        return self._fresh().key_id

    @property
    def public_key_pem(self) -> str:
        """Public half of the key that signs now."""
        return self._fresh().public_key_pem

    @property
    def is_quick(self) -> bool:
        """Whether signing asks nobody else, and takes microseconds."""
        return True

    def sign(self, payload: bytes) -> Envelope:
        """Return a DSSE envelope around an in-toto statement's bytes."""
        loaded = self._fresh()
        signature = loaded.key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload), ec.ECDSA(hashes.SHA256()))
        return Envelope(
            payload=base64.b64encode(payload).decode(),
            payload_type=PAYLOAD_TYPE,
            signatures=[Signature(keyid=loaded.key_id, sig=base64.b64encode(signature).decode())],
        )

    def _fresh(self) -> "_Loaded":
        try:
            identity = _identity(self._path)
            if self._path is not None and identity is not None and identity != self._seen:
                # The key first: whoever looks meanwhile loads it once more, and nobody signs with the old one.
                self._current = _Loaded.of(_read(self._path))
                self._seen = identity
        except (OSError, ValueError) as error:
            # It is being written, or is none: it may have been meant to end the key that is known here.
            self._seen = None
            raise Unavailable("the file of the signing key has just now no key that can be read") from error
        return self._current


@dataclass(frozen=True, slots=True)
class _Loaded:
    key: ec.EllipticCurvePrivateKey
    key_id: str
    public_key_pem: str

    @classmethod
    def of(cls, key: ec.EllipticCurvePrivateKey) -> "_Loaded":
        public = key.public_key()
        der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        return cls(key, hashlib.sha256(der).hexdigest(), pem)


def _identity(path: Path | None) -> tuple[int, ...] | None:
    """What tells one file from another in the same place; None while there is none."""
    try:
        found = path.stat() if path is not None else None
    except FileNotFoundError:
        return None
    return None if found is None else (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def _read(path: Path) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the signing key is not an ECDSA P-256 private key")  # noqa: TRY004 - about the file, not a type
    return key


def create(path: Path) -> None:
    """Make a key and put it in place whole: of two processes that start at once, both use the first one's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
    finally:
        temporary.unlink()
    settle(path.parent)


def settle(folder: Path) -> None:
    """Return when what was put into a folder would outlive a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def enroll(session: Session, signer: Signer, *, at: datetime) -> None:
    """Record the signer's public key, once."""
    session.execute(
        insert(SigningKeyRow)
        .values(
            key_id=signer.key_id,
            algorithm=ALGORITHM,
            public_key_pem=signer.public_key_pem,
            valid_from=at,
            valid_until=None,
        )
        .on_conflict_do_nothing(index_elements=["key_id"])
    )


def history(session: Session) -> list[SigningKeyRow]:
    """Return every key that ever signed, oldest first."""
    return list(session.scalars(select(SigningKeyRow).order_by(SigningKeyRow.valid_from, SigningKeyRow.key_id)))


def signing_time(session: Session, key_id: str) -> datetime:
    """Return when something that a key signs now is recorded: the database's clock, and never before the key began.

    The clock may have been set back to before that.

    Raises:
        Unavailable: the key is unknown, or signs no more.
    """
    found = session.execute(
        select(func.greatest(func.clock_timestamp(), SigningKeyRow.valid_from), SigningKeyRow.valid_until).where(
            SigningKeyRow.key_id == key_id
        )
    ).one_or_none()
    instant, ends_at = found or (datetime.now(UTC), None)
    require_in_force(key_id, instant, is_known=found is not None, ends_at=ends_at)
    return instant


def require_in_force(key_id: str, at: datetime, *, is_known: bool, ends_at: datetime | None) -> None:
    """Return when what a key signed may be recorded at an instant. Raises Unavailable."""
    if not is_known or (ends_at is not None and at > ends_at):
        raise Unavailable(f"the signing key {key_id[:12]} is not in force; another one has taken its place")


def require_lasting(session: Session, key_id: str) -> None:
    """Return when no end has been set for a key. Raises Unavailable: another one is about to take its place."""
    if session.scalar(select(SigningKeyRow.valid_until).where(SigningKeyRow.key_id == key_id)) is not None:
        raise Unavailable("the signing key is being replaced just now; try again")


def known(session: Session) -> list[Key]:
    """Return every key that ever signed, as the verifier takes them."""
    return [
        Key(row.key_id, row.algorithm, row.public_key_pem, row.valid_from, row.valid_until) for row in history(session)
    ]


def main(arguments: list[str]) -> int:
    """Run the operator's command. Returns the exit status."""
    from registry import rotation  # it stands on this module, as does all that it needs

    return rotation.main(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
