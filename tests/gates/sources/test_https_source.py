import hashlib
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gates.sources.fetch import fetch
from gates.sources.hosts import Hosts
from gates.sources.https import HttpsSource
from gates.sources.source import SourceRefused, SourceUnavailable
from gates.sources.store import FetchStore
from gates.sources.web import Web
from tests.gates.sources.conftest import QUICK
from tests.support.hub import Hub, answer, ranged

BODY = b"GGUF and so on"
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def served(tmp_path):
    """Fetch an address of a plain server on this machine; yields a function and its answers by path."""
    answers = {"/models/a.gguf": BODY}
    with Hub({}) as hub:
        hub.lies["cdn"] = lambda request: (
            ranged(request, answers[path], '"tag"') if (path := request.path.partition("?")[0]) in answers else None
        )

        def run(path):
            with Web(Hosts(named=[hub.url("cdn")])) as web:
                source = HttpsSource(hub.url("cdn") + path, web)
                resolved = source.resolve()
                found = fetch(source, resolved, source.list(resolved), FetchStore(tmp_path / "store"), bounds=QUICK)
                return resolved, {one.item.path: one for one in found}

        yield run, answers


def test_a_file_with_its_digest_is_pinned_by_it(served):
    run, _ = served
    resolved, found = run(f"/models/a.gguf#sha256={DIGEST}")
    assert resolved.revision == f"sha256:{DIGEST}"
    assert found["a.gguf"].place.read_bytes() == BODY
    with pytest.raises(SourceRefused) as refused:
        run(f"/models/a.gguf#sha256={'0' * 64}")
    assert refused.value.code == "digest-mismatch"


def test_a_file_without_a_digest_is_pinned_by_what_was_received(served):
    run, _ = served
    resolved, found = run("/models/a.gguf?signature=secret")
    assert resolved.revision is None
    assert found["a.gguf"].sha256 == f"sha256:{DIGEST}"
    pinned = resolved.pinned([("a.gguf", found["a.gguf"].sha256, found["a.gguf"].size)])
    assert pinned.revision.startswith("sha256:")
    assert "secret" not in repr(pinned)


def test_a_list_names_files_beside_it_by_their_digests(served):
    run, answers = served
    answers["/models/SHA256SUMS"] = f"{DIGEST}  a.gguf\n{DIGEST} *./in/b.gguf\n".encode()
    answers["/models/in/b.gguf"] = BODY
    resolved, found = run("/models/SHA256SUMS")
    assert resolved.revision == "sha256:" + hashlib.sha256(answers["/models/SHA256SUMS"]).hexdigest()
    assert sorted(found) == ["a.gguf", "in/b.gguf"]
    with pytest.raises(SourceRefused) as refused:
        run(f"/models/SHA256SUMS#sha256={DIGEST}")
    assert (refused.value.code, refused.value.file) == ("digest-mismatch", "SHA256SUMS")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "list-malformed"),
        (b"\xff\xfe", "list-malformed"),
        (b"abc  a.gguf\n", "list-malformed"),
        (f"{DIGEST}  ../a.gguf\n".encode(), "name-path"),
        (f"{DIGEST}  /a.gguf\n".encode(), "name-path"),
        (f"{DIGEST}  a.gguf\n{'0' * 64}  a.gguf\n".encode(), "list-malformed"),
    ],
)
def test_a_list_that_is_none_is_refused(served, body, code):
    run, answers = served
    answers["/models/SHA256SUMS"] = body
    with pytest.raises(SourceRefused) as refused:
        run("/models/SHA256SUMS")
    assert refused.value.code == code


def from_(hub, path, store):
    with Web(Hosts(named=[hub.url("cdn")])) as web:
        source = HttpsSource(hub.url("cdn") + path, web)
        resolved = source.resolve()
        return fetch(source, resolved, source.list(resolved), store, bounds=QUICK)


def test_a_body_without_a_length_is_taken_only_where_a_digest_tells_its_end(tmp_path):
    store = FetchStore(tmp_path / "store")
    line = f"{DIGEST}  a.gguf\n".encode()
    with Hub({}) as hub:
        hub.lies["cdn"] = lambda request: answer(
            200, line if "SHA256SUMS" in request.path else BODY, {"content-length": None}
        )
        for path in ("/a.gguf", "/SHA256SUMS"):
            with pytest.raises(SourceRefused) as refused:
                from_(hub, path, store)
            assert refused.value.code == "end-unknown"
        assert list(tmp_path.rglob("parts/*")) == []
        for path in (f"/a.gguf#sha256={DIGEST}", f"/SHA256SUMS#sha256={hashlib.sha256(line).hexdigest()}"):
            (found,) = from_(hub, path, store)
            assert found.place.read_bytes() == BODY
        hub.lies["cdn"] = lambda request: answer(
            200, b"e\r\n" + BODY + b"\r\n0\r\n\r\n", {"content-length": None, "transfer-encoding": "chunked"}
        )
        (found,) = from_(hub, "/in-chunks.gguf", store)
        assert found.place.read_bytes() == BODY


def test_files_that_only_a_query_tells_apart_share_no_part(tmp_path):
    store, bodies = FetchStore(tmp_path / "store"), {"1": b"A" * 1000, "2": b"B" * 1000}
    with Hub({}) as hub:

        def cut(request):
            whole = ranged(request, bodies[request.path[-1]], '"one"')
            return whole[:-600] if request.path[-1] == "1" and "range" not in request.headers else whole

        def broken(request):
            return cut(request) if "range" not in request.headers else b""

        hub.lies["cdn"] = broken
        with pytest.raises(SourceUnavailable):
            from_(hub, "/download?id=1", store)
        hub.lies["cdn"] = cut
        for number in "21":
            (found,) = from_(hub, f"/download?id={number}", store)
            assert found.place.read_bytes() == bodies[number]


@pytest.mark.parametrize(
    "url",
    [
        "https://host.example/",
        "https://host.example/a#sha1=00",
        "https://u:p@host.example/a",
        "https:///a",
        "https://x y/a",
    ],
)
def test_an_address_that_names_no_file_is_refused(url):
    with pytest.raises(SourceRefused), Web(Hosts()) as web:
        HttpsSource(url, web)


# ------------------------------------------------------------------------------------------------------------ TLS


def certificate(folder, name):
    """Write a key and a certificate that a name issued for itself, and return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + built.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize(("name", "code"), [("localhost", None), ("other.example", "certificate-untrusted")])
def test_the_certificate_is_that_of_the_name_though_the_connection_goes_to_an_address(tmp_path, name, code):
    path = certificate(tmp_path, name)
    names = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    context.sni_callback = lambda connection, asked, _: names.append(asked)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        try:
            connection, _ = listening.accept()
            with context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(65536)
                secure.sendall(answer(200, BODY))
        except OSError:
            return  # the client does not trust us

    thread = threading.Thread(target=serve)
    thread.start()
    port = listening.getsockname()[1]
    trust = ssl.create_default_context(cafile=str(path))
    try:
        with Web(Hosts(named=[f"localhost:{port}"]), tls=trust) as web:
            if code is None:
                with web.get(f"https://localhost:{port}/a") as got:
                    assert got.read(100) == BODY
            else:
                with pytest.raises(SourceRefused) as refused, web.get(f"https://localhost:{port}/a"):
                    raise AssertionError("it was trusted")
                assert refused.value.code == code
    finally:
        thread.join(30)
        listening.close()
    assert names == ["localhost"]
