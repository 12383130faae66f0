"""Whom the Kubernetes client believes, and what it shows whom: real TLS, with authorities of our own."""

import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from ssl import PROTOCOL_TLS_SERVER, SSLContext

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from workers.launchers.kube_client import Cluster, ClusterUnreachable, KubeClient

NOW = datetime.now(UTC)


class Authority:
    """A certificate authority with a server's certificate of its own, in files."""

    def __init__(self, folder, name, address="127.0.0.1"):
        key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.root = self._sign(subject, key.public_key(), subject, key, is_authority=True)
        server = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api")])
        certificate = self._sign(server, server_key.public_key(), subject, key, address=address)
        self.ca = folder / f"{name}.crt"
        self.ca.write_bytes(self.root.public_bytes(serialization.Encoding.PEM))
        self.chain = folder / f"{name}-server.pem"
        self.chain.write_bytes(
            server_key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )

    @staticmethod
    def _sign(subject, key, issuer, issuer_key, *, is_authority=False, address=None):
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - timedelta(hours=1))
            .not_valid_after(NOW + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        )
        if address is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
            made = made.add_extension(names, critical=False)
        return made.sign(issuer_key, hashes.SHA256())


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """Say nothing of a client that breaks off since it does not believe this server."""


@contextmanager
def serving(chain):
    """Yield the address of a TLS server, and the tokens that it was shown."""
    tokens = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            tokens.append(self.headers.get("authorization"))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            """Say nothing."""

    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    server = _Server(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}", tokens
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


def test_the_cluster_s_own_authority_is_believed_and_the_token_is_shown_as_it_is_now(tmp_path, token):
    authority = Authority(tmp_path, "ours")
    with serving(authority.chain) as (url, tokens):
        client = KubeClient(Cluster(url, "engines", token, authority.ca))
        assert client.get("/api/v1/namespaces/engines/pods/x") == {}
        token.write_text("second\n")
        client.get("/api/v1/namespaces/engines/pods/x")
    assert tokens == ["Bearer first", "Bearer second"]


def test_a_server_that_another_authority_names_is_refused_and_never_sees_the_token(tmp_path, token):
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    with serving(other.chain) as (url, tokens):
        for ca_file in (ours.ca, None):
            with pytest.raises(ClusterUnreachable, match=r"(?i)certificate.verify.failed"):
                KubeClient(Cluster(url, "engines", token, ca_file)).get("/api")
    assert tokens == []


def test_a_certificate_for_another_address_is_refused(tmp_path, token):
    authority = Authority(tmp_path, "ours", address="127.0.0.2")
    refused = pytest.raises(ClusterUnreachable, match=r"(?i)not valid for '127\.0\.0\.1'|mismatch")
    with serving(authority.chain) as (url, tokens), refused:
        KubeClient(Cluster(url, "engines", token, authority.ca)).get("/api")
    assert tokens == []


def test_a_new_authority_is_believed_once_its_file_is_there_and_the_old_one_no_more(tmp_path, token):
    before, after = Authority(tmp_path, "before"), Authority(tmp_path, "after")
    ca_file = tmp_path / "ca.crt"
    ca_file.write_bytes(before.ca.read_bytes())
    with serving(before.chain) as (old, _), serving(after.chain) as (new, _):
        client, late = (KubeClient(Cluster(url, "engines", token, ca_file)) for url in (old, new))
        assert client.get("/api") == {}
        with pytest.raises(ClusterUnreachable):
            late.get("/api")
        after.ca.replace(ca_file)
        assert late.get("/api") == {}
        with pytest.raises(ClusterUnreachable, match=r"(?i)certificate.verify.failed"):
            client.get("/api")
        ca_file.write_text("no certificate")
        with pytest.raises(ClusterUnreachable):
            late.get("/api")
        ca_file.unlink()
        with pytest.raises(ClusterUnreachable, match="No such file"):
            late.get("/api")


def test_without_its_token_nothing_is_asked(tmp_path, token):
    authority = Authority(tmp_path, "ours")
    token.unlink()
    with serving(authority.chain) as (url, tokens), pytest.raises(ClusterUnreachable, match="No such file"):
        KubeClient(Cluster(url, "engines", token, authority.ca)).get("/api")
    assert tokens == []
