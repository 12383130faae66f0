"""Sources by the words that people write for them: a directory, `hf:owner/name@revision`, `s3://…`, `https://…`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gates.sources.directory import DirectorySource
from gates.sources.hosts import HUB_HOSTS, Hosts, read_url
from gates.sources.source import Source
from gates.sources.web import Web

HUB_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class Access:
    """How sources are reached.

    Attributes:
        endpoint: address of the hub, or of a mirror that a person named.
        token: for the hub, and sent to nobody else.
        allowed: hosts that a person allows, as `Hosts` takes them.
        exclude: patterns of paths that a directory's listing leaves out.
        hard_links: whether a directory's files may have further names.
        s3_endpoint: URL of the S3 server that a person named; None for AWS.
    """

    endpoint: str = HUB_ENDPOINT
    token: str | None = None
    allowed: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hard_links: bool = False
    s3_endpoint: str | None = None

    def web(self, asked: Iterable[str]) -> Web:
        """Return what speaks to the hosts of these sources.

        A host in an address that somebody wrote is allowed by that, though not to be inside a network.

        Raises:
            SourceRefused: an address cannot be read.
            BadHost: one of `allowed` is no host.
        """
        listed, named, tokens = list(HUB_HOSTS), list(self.allowed), {}
        hub = read_url(self.endpoint)
        if hub.origin != read_url(HUB_ENDPOINT).origin:
            named.append(hub.origin)
        if self.token:
            tokens[hub.origin] = self.token
        for text in asked:
            if text.startswith("https://"):
                place = read_url(text.partition("#")[0])
                if place.port == 443:
                    listed.append(place.host)
        return Web(Hosts(listed, named), tokens=tokens)


def is_directory(asked: str) -> bool:
    """Tell whether words name a directory: they have no scheme of another source."""
    return _scheme(asked) not in _OPENERS


def open_source(asked: str, web: Web, access: Access) -> Source:
    """Return the source that words name. Raises SourceRefused: they name none."""
    return _OPENERS.get(_scheme(asked), _directory)(asked, web, access)


def _scheme(asked: str) -> str:
    head, colon, _ = asked.partition(":")
    return head if colon else ""


def _directory(asked: str, web: Web, access: Access) -> Source:  # noqa: ARG001 - no directory is reached so
    return DirectorySource(Path(asked), exclude=access.exclude, hard_links=access.hard_links)


def _hub(asked: str, web: Web, access: Access) -> Source:
    # Only where it is asked for: the hub's library takes a moment to load.
    from gates.sources.hub import HubSource

    return HubSource(asked, web, access.endpoint)


def _https(asked: str, web: Web, access: Access) -> Source:  # noqa: ARG001 - it has no settings of its own
    from gates.sources.https import HttpsSource  # as above

    return HttpsSource(asked, web)


def _s3(asked: str, web: Web, access: Access) -> Source:  # noqa: ARG001 - the S3 client has connections of its own
    from gates.sources.s3 import S3Source  # as above

    return S3Source(asked, access.s3_endpoint)


_OPENERS: Mapping[str, Callable[[str, Web, Access], Source]] = {"hf": _hub, "s3": _s3, "https": _https, "http": _https}
"""Scheme → what opens such a source."""
