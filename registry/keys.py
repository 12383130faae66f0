"""Signing of evidence: an ECDSA P-256 key in a file, DSSE envelopes, and the history of public keys."""

import base64
import hashlib
import os
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry.tables import SigningKeyRow
from schemas.evidence import PAYLOAD_TYPE, Envelope, Signature, pre_authentication_encoding

ALGORITHM = "ecdsa-p256-sha256"


class Signer:
    """Signs with one local key.

    Source: DSSE protocol v1.0.2; the key id is the SHA-256 of the public key's DER, in hexadecimal.
    """

    def __init__(self, private_key: ec.EllipticCurvePrivateKey) -> None:
        """Wrap a P-256 private key."""
        self._key = private_key
        public = private_key.public_key()
        self.key_id = hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
        self.public_key_pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    @classmethod
    def load(cls, path: Path) -> "Signer":
        """Read the key from a PEM file; make it (mode 0600) when the file does not exist.

        Raises:
            ValueError: the file does not hold an unencrypted P-256 private key.
        """
        if not path.exists():
            _create(path)
        key = load_pem_private_key(path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("the signing key is not an ECDSA P-256 private key")  # noqa: TRY004 - about the file, not a type
        return cls(key)

    def sign(self, payload: bytes) -> Envelope:
        """Return a DSSE envelope around an in-toto statement's bytes."""
        signature = self._key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload), ec.ECDSA(hashes.SHA256()))
        return Envelope(
            payload=base64.b64encode(payload).decode(),
            payload_type=PAYLOAD_TYPE,
            signatures=[Signature(keyid=self.key_id, sig=base64.b64encode(signature).decode())],
        )


def _create(path: Path) -> None:
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


def verify(envelope: Envelope, public_key_pem: str) -> str | None:
    """Return what is wrong with an envelope's signature under a key, or None when it is right."""
    try:
        key = load_pem_public_key(public_key_pem.encode())
    except ValueError:
        return "the public key cannot be read"
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return "the public key is not an elliptic-curve key"
    if key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode() != public_key_pem:
        return "the public key was altered: it is not written as keys are"
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    signature = envelope.signatures[0]
    if hashlib.sha256(der).hexdigest() != signature.keyid:
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
