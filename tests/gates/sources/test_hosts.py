import ipaddress

import pytest

from gates.sources.hosts import Hosts, read_url, refuse_address
from gates.sources.source import SourceRefused, bare


@pytest.mark.parametrize(
    "url",
    ["https://huggingface.co/api/models/x", "https://us.aws.cdn.hf.co/x?sig=a%2Fb", "HTTPS://HuggingFace.co:443/x"],
)
def test_the_hub_and_its_download_hosts_are_allowed(url):
    assert Hosts().check(url).port == 443


def test_an_address_reads_as_one_host_one_port_and_one_target():
    place = read_url("https://Mirror.example:8443/a/b?c=d#e")
    assert (place.scheme, place.host, place.port, place.target) == ("https", "mirror.example", 8443, "/a/b?c=d")
    assert place.origin == "https://mirror.example:8443"
    assert place.shown == "https://mirror.example:8443/a/b"
    assert read_url("https://[2001:DB8::1]").origin == "https://[2001:db8::1]:443"


@pytest.mark.parametrize(
    ("named", "url", "allowed"),
    [
        ("mirror.example", "https://mirror.example/x", True),
        ("mirror.example", "https://mirror.example:8443/x", False),
        ("mirror.example:8443", "https://mirror.example:8443/x", True),
        ("mirror.example:8443", "https://mirror.example/x", False),
        ("mirror.example", "http://mirror.example/x", False),
        ("*.corp.example", "https://a.b.corp.example/x", True),
        ("*.corp.example", "https://corp.example/x", False),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/x", True),
        ("http://127.0.0.1:8080", "https://127.0.0.1:8080/x", False),
        ("https://[::1]:8443", "https://[::1]:8443/x", True),
    ],
)
def test_what_a_person_allows_is_one_scheme_host_and_port(named, url, allowed):
    hosts = Hosts(named=[named])
    if allowed:
        assert hosts.check(url).target == "/x"
    else:
        with pytest.raises(SourceRefused):
            hosts.check(url)


@pytest.mark.parametrize("text", ["", "a b", "mirror.example/path", "ftp://x", "user@host", "127.1", "a..b", "*.", "*"])
def test_what_is_no_host_cannot_be_allowed(text):
    with pytest.raises(ValueError, match="host"):
        Hosts(named=[text])


@pytest.mark.parametrize(
    ("address", "is_listed", "is_named", "is_plain"),
    [
        ("93.184.216.34", True, True, False),
        ("2606:2800:220:1::1", True, True, False),
        ("10.0.0.1", False, True, False),
        ("192.168.1.1", False, True, False),
        ("100.64.0.1", False, True, False),
        ("fd12::1", False, True, False),
        ("fec0::1", False, True, False),
        ("168.63.129.16", False, False, False),
        ("127.0.0.1", False, True, True),
        ("::1", False, True, True),
        ("::ffff:10.0.0.1", False, True, False),
        ("::ffff:127.0.0.1", False, True, True),
        ("64:ff9b::a00:1", False, True, False),
        ("2002:a00:1::1", False, True, False),
        ("169.254.169.254", False, False, False),
        ("::ffff:169.254.169.254", False, False, False),
        ("64:ff9b::a9fe:a9fe", False, False, False),
        ("fe80::1", False, False, False),
        ("fd00:ec2::254", False, False, False),
        ("100.100.100.200", False, False, False),
        ("0.0.0.0", False, False, False),
        ("::", False, False, False),
        ("224.0.0.1", False, False, False),
        ("ff02::1", False, False, False),
        ("240.0.0.1", False, False, False),
        ("255.255.255.255", False, False, False),
        ("::127.0.0.1", False, False, False),
    ],
)
def test_an_address_is_refused_by_what_it_is_and_by_who_named_its_host(address, is_listed, is_named, is_plain):
    one = ipaddress.ip_address(address)
    assert (refuse_address(one, is_named=False) is None) is is_listed
    assert (refuse_address(one, is_named=True) is None) is is_named
    assert (refuse_address(one, is_named=True, is_plain=True) is None) is is_plain


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("https://h.example/x.gguf?X-Amz-Signature=secret", "https://h.example/x.gguf"),
        ("https://u:secret@h.example/@a/x?b=secret#sha256=00", "https://h.example/@a/x#sha256=00"),
        ("s3://key:secret@bucket/x", "s3://bucket/x"),
        ("base=https://h.example?secret", "base=https://h.example"),
        ("hf:org/base@main", "hf:org/base@main"),
        ("./what?/a@b", "./what?/a@b"),
    ],
)
def test_a_source_is_shown_without_what_may_be_secret(asked, shown):
    assert bare(asked) == shown


def test_a_name_that_leads_inside_is_refused_unless_a_person_named_it():
    with pytest.raises(SourceRefused) as refused:
        Hosts(["localhost"]).addresses("localhost", 443)
    assert refused.value.code == "address-not-allowed"
    assert set(Hosts(named=["localhost"]).addresses("localhost", 443)) <= {"127.0.0.1", "::1"}
