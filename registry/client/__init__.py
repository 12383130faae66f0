"""The client library: one `Client`, one group of methods a noun, the contract's own models in and out.

    with Client("http://127.0.0.1:8080", token) as client:
        for release in client.releases.list(target="chat@prod"):
            print(release.id, release.phase)
        for event in client.events(target="chat@prod"):
            print(event.entry.kind, event.cursor)

A refusal is raised as the class of `schemas.problems` that the service named; a service that cannot be reached,
or that answers with something that is not ours, is `Unavailable`. Safe to use from several threads.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self
from uuid import UUID

from registry.client.documents import Aliases, Bundles, Policies, References, Suites
from registry.client.events import Following, Selection
from registry.client.jobs import Jobs, Runners
from registry.client.storage import Blobs
from registry.client.stored import Reading, needed, read_again
from registry.client.transport import Transport
from registry.client.work import Evidence, Projects, Releases, Runs, Targets, Tokens
from schemas.api import Event, Identity, Version
from schemas.evidence import Kind
from schemas.problems import Unavailable

__all__ = ["Client"]


class Client:
    """Speaks to one Sluicegate service as the holder of one token.

    Args:
        url: of the service, such as http://127.0.0.1:8080.
        token: bearer token; None for what needs none.
        timeout_seconds: longest silence of a connection.

    Raises:
        ValueError: the URL or the token is not one.
    """

    def __init__(self, url: str, token: str | None, *, timeout_seconds: float = 30.0) -> None:
        self._transport = Transport(url, token, timeout_seconds=timeout_seconds)
        self.blobs = Blobs(self._transport)
        self.bundles = Bundles(self._transport)
        self.aliases = Aliases(self._transport)
        self.policies = Policies(self._transport)
        self.suites = Suites(self._transport)
        self.references = References(self._transport)
        self.targets = Targets(self._transport)
        self.releases = Releases(self._transport)
        self.runs = Runs(self._transport)
        self.evidence = Evidence(self._transport)
        self.projects = Projects(self._transport)
        self.tokens = Tokens(self._transport)
        self.runners = Runners(self._transport)
        self.jobs = Jobs(self._transport)

    def read_again(self, *, stream: str | None = None) -> Iterator[Reading]:
        """Have the service read every blob again that evidence names; yields how far that has come.

        The faults of what was read are complete at the end. With a stream, only what its entries name.

        Raises:
            Unavailable: the store cannot be read, so that nothing is known of the rest.
        """
        return read_again(self.blobs, needed(self.evidence, self.bundles, stream))

    @property
    def url(self) -> str:
        """Address of the service, without a slash at the end."""
        return self._transport.url

    @property
    def is_in_clear(self) -> bool:
        """Whether others on the way can read the token: plain HTTP to another machine."""
        return self._transport.is_in_clear

    def version(self) -> Version:
        """Ask what answers; needs no token."""
        return self._transport.get(Version, "/v1/version")

    def me(self) -> Identity:
        """Ask who the token is. Raises Unauthenticated."""
        return self._transport.get(Identity, "/v1/me")

    def events(
        self,
        *,
        after: str | None = None,
        stream: str | None = None,
        release: UUID | None = None,
        target: str | None = None,
        kinds: Sequence[Kind] = (),
        seconds: float | None = None,
        on_away: Callable[[Unavailable], None] | None = None,
        on_quiet: Callable[[], bool] | None = None,
    ) -> Iterator[Event]:
        """Follow the log: every entry that is there, then each new one as it happens, without end.

        A connection that is cut is made anew, and goes on after the last entry: each comes exactly once, in an order
        that is the same for all readers. `cursor` of an event is what a later call takes as `after`.
        Closing the client, from any thread, ends it.

        Args:
            after: a cursor; from the beginning when absent.
            stream: only of this stream, such as release/<id>.
            release: only of this release.
            target: only of this target and its releases, as name@environment.
            kinds: only of these kinds.
            seconds: end after so long.
            on_away: called once each time that the service is away.
            on_quiet: called about every 10 s while nothing happens; true ends it.

        Raises:
            Unavailable: the service has never answered.
            Unauthenticated: the token has ended.
            NotFound, InvalidDocument.
        """
        selection = Selection(stream, release, target, tuple(kinds))
        heard = (on_away or (lambda _: None), on_quiet or (lambda: False))
        return Following(self._transport, selection, *heard).follow(after, seconds)

    def close(self) -> None:
        """Give the connections back."""
        self._transport.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the connections back."""
        self.close()
