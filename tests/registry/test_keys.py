import stat
import threading
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from gates.evidence import verify_signature
from registry import keys
from registry.keys import Signer
from schemas.evidence import Signature
from schemas.problems import Unavailable

PAYLOAD = b'{"_type":"https://in-toto.io/Statement/v1"}'


def pem(key, encryption=None):
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())


@pytest.fixture
def signer(tmp_path) -> Signer:
    return Signer.load(tmp_path / "deep" / "signing.pem")


def test_a_key_is_made_once_in_a_file_of_its_owners_only(tmp_path):
    path = tmp_path / "deep" / "signing.pem"
    first = Signer.load(path)
    assert Signer.load(path).key_id == first.key_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["signing.pem"]


def test_of_many_that_start_at_once_all_use_one_key(tmp_path):
    path, found, begin = tmp_path / "signing.pem", [], threading.Barrier(8)

    def start():
        begin.wait()
        found.append(Signer.load(path).key_id)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a key",
        pem(ed25519.Ed25519PrivateKey.generate()),
        pem(ec.generate_private_key(ec.SECP384R1())),
        pem(ec.generate_private_key(ec.SECP256R1()), BestAvailableEncryption(b"x")),
        ec.generate_private_key(ec.SECP256R1())
        .public_key()
        .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    ],
)
def test_a_file_without_such_a_key_is_refused(tmp_path, content):
    (tmp_path / "signing.pem").write_bytes(content)
    with pytest.raises((ValueError, TypeError)):
        Signer.load(tmp_path / "signing.pem")


def test_while_the_file_holds_no_key_nothing_is_signed_and_then_the_next_one_signs(tmp_path):
    """As while somebody copies a backup over it."""
    path = tmp_path / "signing.pem"
    signer, following = Signer.load(path), pem(ec.generate_private_key(ec.SECP256R1()))
    for content in (b"", following[:100]):
        path.write_bytes(content)
        with pytest.raises(Unavailable, match="no key that can be read"):
            signer.sign(PAYLOAD)
    path.write_bytes(following)
    assert signer.sign(PAYLOAD).signatures[0].keyid == Signer.load(path).key_id


def test_a_signature_verifies_under_its_own_key_only(signer, tmp_path):
    envelope = signer.sign(PAYLOAD)
    assert envelope.payload_bytes() == PAYLOAD
    assert verify_signature(envelope, signer.public_key_pem) is None
    stranger = Signer.load(tmp_path / "other.pem")
    assert verify_signature(envelope, stranger.public_key_pem) == (
        "the public key does not have the key id that it is stored under"
    )
    renamed = envelope.model_copy(
        update={"signatures": [Signature(keyid=stranger.key_id, sig=envelope.signatures[0].sig)]}
    )
    assert verify_signature(renamed, stranger.public_key_pem) == "the signature does not match the statement"


@pytest.mark.parametrize("public", ["", "-----BEGIN PUBLIC KEY-----", "x" * 100])
def test_a_public_key_that_cannot_be_read_verifies_nothing(signer, public):
    assert verify_signature(signer.sign(PAYLOAD), public) == "the public key cannot be read"


def test_a_key_is_enrolled_once(session, signer):
    before = len(keys.history(session))
    for day in (1, 2):
        keys.enroll(session, signer, at=datetime(2026, 1, day, tzinfo=UTC))
    history = keys.history(session)
    assert len(history) == before + 1
    (row,) = [row for row in history if row.key_id == signer.key_id]
    assert (row.algorithm, row.valid_from.day, row.valid_until) == ("ecdsa-p256-sha256", 1, None)
