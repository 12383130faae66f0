"""Which hosts the fetcher may speak to, and which addresses a name may lead to.

A host is allowed by the list below, by being in an address that a person wrote, or by `--allow-host`. Only the last
lets it have an address inside a network; no host ever leads to an address of a machine's own metadata service.
Addresses are read here and nowhere else, so that no second reading can see another host.

Source of the hosts: `https://huggingface.co/.well-known/meta.json`.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from gates.files.refusal import shown
from gates.sources.source import SourceRefused, SourceUnavailable, bare

HUB_HOSTS = ("huggingface.co", "*.hf.co")
"""The hub, and the hosts that it sends downloads to."""
MAX_URL = 8192
"""Longest address, in characters. Signed ones have about 2,000."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_PRINTABLE = re.compile(r"[!-~]+")
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
# Machines of clouds ask these for their own credentials: link-local ones, and what some clouds use besides.
_METADATA = tuple(
    ipaddress.ip_network(one)
    for one in (
        "169.254.0.0/16",
        "fe80::/10",
        "fd00:ec2::/32",
        "100.100.100.200/32",
        "192.0.0.192/32",
        "168.63.129.16/32",
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_ADVICE = "allow it with --allow-host, if you trust it"


@dataclass(frozen=True, slots=True)
class Place:
    """An address taken apart: where to connect, and what to ask for there."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}"

    @property
    def bare(self) -> str:
        """The address in one spelling, without its query, and without the port that its scheme has anyway."""
        port = "" if self.port == _port_of(self.scheme) else f":{self.port}"
        return f"{self.scheme}://{_bracketed(self.host)}{port}{self.target.partition('?')[0]}"

    @property
    def shown(self) -> str:
        """The address without its query, which may hold a signature."""
        return shown(self.bare, 200)


class BadHost(ValueError):
    """What a person allows is no host."""


class Hosts:
    """The hosts that may be spoken to.

    Args:
        listed: names, or `*.` and a name for all hosts below it. They speak https on port 443 and have public
            addresses.
        named: what a person allows: `HOST`, `HOST:PORT`, `https://HOST:PORT`, or `http://HOST:PORT` for a loopback
            address. These may have inner addresses.

    Raises:
        BadHost: one of `named` is none of these.
    """

    def __init__(self, listed: Iterable[str] = HUB_HOSTS, named: Iterable[str] = ()) -> None:
        self._listed = tuple(host.lower() for host in listed)
        self._named = {_named(text) for text in named}

    def check(self, url: str) -> Place:
        """Take an address apart, and check that its host may be spoken to.

        Raises:
            SourceRefused: `address-malformed`, `scheme-not-allowed`, `host-not-allowed`.
        """
        place = read_url(url)
        if (place.scheme, place.host, place.port) in self._named:
            return place
        if place.scheme != "https":
            said = f"is asked for at {place.shown}, and {place.scheme} carries bytes that anyone could change"
            advice = "use https; for a server on this machine, --allow-host http://127.0.0.1:PORT"
            raise SourceRefused("scheme-not-allowed", said, found=place.scheme, expected="https", advice=advice)
        if any(_is_like(place, "https", host, 443) for host in self._listed):
            return place
        if any(_is_like(place, *entry) for entry in self._named):
            return place
        said = f"is asked for at {place.shown}, and {shown(place.host)} is no host that may be spoken to"
        raise SourceRefused("host-not-allowed", said, found=f"{place.host}:{place.port}", advice=_ADVICE)

    def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host, all of them checked.

        Raises:
            SourceRefused: `address-not-allowed`, when one of them is not public and no person named the host.
            SourceUnavailable: `name-unknown`.
        """
        is_plain = ("http", host, port) in self._named
        is_named = is_plain or any(_is_like(Place("https", host, port, "/"), *entry) for entry in self._named)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = str(error.strerror if isinstance(error, OSError) else error)
            advice = "check the name, and whether this machine has a network"
            raise SourceUnavailable("name-unknown", f"{shown(host)} is not found: {reason}", advice=advice) from None
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        for text in addresses:
            refusal = refuse_address(ipaddress.ip_address(text.partition("%")[0]), is_named=is_named, is_plain=is_plain)
            if refusal is not None:
                said = f"{shown(host)} leads to {text}, {refusal}"
                allow = None if is_named else _ADVICE
                raise SourceRefused("address-not-allowed", said, found=text, expected="a public one", advice=allow)
        return addresses


def external_hosts(told: str) -> Hosts:
    """Read the hosts of external engines, separated by commas; `inner:` before one lets it be inside a network.

    Raises:
        BadHost: one of them is no host.
    """
    entries = [entry.strip() for entry in told.split(",") if entry.strip()]
    inner = [entry.removeprefix("inner:") for entry in entries if entry.startswith("inner:")]
    listed = [entry.lower() for entry in entries if not entry.startswith("inner:")]
    for entry in listed:
        if not _NAME.fullmatch(entry.removeprefix("*.")):
            raise BadHost(f"{shown(entry)} is no host name; one inside a network, or with a port, is inner:HOST:PORT")
    return Hosts(listed, inner)


def refuse_address(address: Address, *, is_named: bool, is_plain: bool = False) -> str | None:
    """Return why nothing connects to an address, or None.

    Args:
        address: to connect to.
        is_named: a person allowed the host by name, so that it may be inside a network.
        is_plain: what is sent is not encrypted, so that it may not leave this machine.
    """
    for one in _meant(address):
        if any(one in network for network in _METADATA if network.version == one.version):
            return "where a machine's own metadata and credentials are served"
        if one.is_multicast or one.is_unspecified or (one.is_reserved and not one.is_loopback):
            return "which is no address of one machine"
        if is_plain and not one.is_loopback:
            return "and http may not leave this machine"
        # Site-local addresses were given up (RFC 3879), and are inside of networks that still have them.
        is_inside = not one.is_global or (isinstance(one, ipaddress.IPv6Address) and one.is_site_local)
        if not is_named and is_inside:
            return "which is inside a network"
    return None


def _meant(address: Address) -> Iterable[Address]:
    """Return an address, and the one that it carries: IPv4 mapped into IPv6, 6to4, Teredo or NAT64."""
    if isinstance(address, ipaddress.IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address in _NAT64:
        return (ipaddress.IPv4Address(int(address) & 0xFFFFFFFF),)
    carried = [one for one in (address.sixtofour, *(address.teredo or ())) if one is not None]
    return (address, *carried)


def read_url(url: str) -> Place:
    """Take an address apart. What two readers could take for two hosts is refused.

    Raises:
        SourceRefused: `address-malformed`.
    """
    if len(url) > MAX_URL:
        raise _malformed(url, f"has {len(url)} characters, more than {MAX_URL}")
    if not _PRINTABLE.fullmatch(url) or "\\" in url:
        raise _malformed(url, "has characters that no address has")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _malformed(url, f"cannot be read: {error}") from None
    scheme, host = parts.scheme.lower(), (parts.hostname or "").lower()
    if scheme not in {"http", "https"}:
        raise SourceRefused(
            "scheme-not-allowed", f"is asked for by {shown(scheme) or 'no scheme'}", found=scheme, expected="https"
        )
    if "@" in parts.netloc:
        raise _malformed("", "has a user name or password in it")
    if port == 0:
        raise _malformed(url, "has the port 0")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Place(scheme, _host(host, parts.netloc, url), port or _port_of(scheme), target)


def _host(host: str, netloc: str, url: str) -> str:
    if netloc.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            raise _malformed(url, "has a host that is no IPv6 address") from None
    last = host.rpartition(".")[2]
    if _NUMBER.fullmatch(last):
        # 2130706433, 0x7f.1 and 127.1 are 127.0.0.1 to some readers, and names to others.
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _malformed(url, "has a host that is neither a name nor four numbers") from None
    if not _NAME.fullmatch(host):
        raise _malformed(url, "has no host, or one that is no name")
    return host


def _malformed(url: str, why: str) -> SourceRefused:
    found = shown(bare(url)) if url else None
    return SourceRefused("address-malformed", f"is asked for at an address that {why}", found=found)


def _named(text: str) -> tuple[str, str, int]:
    """Return scheme, host and port of what a person allows. Raises BadHost."""
    below = text.startswith("*.")
    url = text if "://" in text else f"https://{text.removeprefix('*.')}"
    try:
        place = read_url(url)
    except SourceRefused as refused:
        raise BadHost(f"{text!r} is no host: {refused}") from None
    if place.target != "/":
        raise BadHost(f"{text!r} is more than a host: write HOST, HOST:PORT or http://127.0.0.1:PORT")
    return place.scheme, ("*." if below else "") + place.host, place.port


def _is_like(place: Place, scheme: str, pattern: str, port: int) -> bool:
    if (place.scheme, place.port) != (scheme, port):
        return False
    return place.host == pattern or (pattern.startswith("*.") and place.host.endswith(pattern[1:]))


def _port_of(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
