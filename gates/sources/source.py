"""What every source can do: `resolve` once to something that cannot move, `list` it, `open` the bytes of a file.

A new kind of source implements `Source`. It need neither hash nor retry nor store anything: `gates.sources.fetch`
does that for all of them, and trusts none.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol

from gates.files.refusal import FileRefused
from schemas.common import canonical_json, sha256_digest

Kind = Literal["directory", "huggingface", "s3", "https"]


def bare(asked: str) -> str:
    """Return the words for a source without what may be secret: an address's user, password and query."""
    scheme, mark, rest = asked.partition("://")
    if not mark:
        return asked
    rest, hash_mark, fragment = rest.partition("#")
    authority, slash, path = rest.partition("?")[0].partition("/")
    return scheme + mark + authority.rpartition("@")[2] + slash + path + hash_mark + fragment


class SourceRefused(FileRefused):
    """A source, or one of its files, is not what was asked for or cannot be trusted. Trying again changes nothing."""


class SourceUnavailable(FileRefused):
    """A source cannot be reached now: no network, a silent or slow server, or one that says to come back later."""

    wait_seconds: float | None = None
    """How long the source asks to be left alone, where it says so."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a source was asked for, and what it resolved to at one instant.

    `location` is the repository, bucket and prefix, or URL, without credentials; None for a directory. `revision` is
    immutable: a commit, a version id, or a digest. It is None where nothing but the bytes names them; `pinned` then
    gives it.
    """

    kind: Kind
    asked: str
    location: str | None
    revision: str | None
    resolved_at: datetime
    is_by_bytes: bool = False
    """Whether nothing but the bytes that were received gave the revision."""

    def pinned(self, files: "list[tuple[str, str, int]]") -> "Resolved":
        """Return it with a revision; without one, the digest of the list of (path, sha256, size) that was received."""
        if self.revision is not None:
            return self
        listed = [{"path": path, "sha256": sha256, "size": size} for path, sha256, size in sorted(files)]
        return replace(self, revision=sha256_digest(canonical_json(listed)), is_by_bytes=True)


def resolved_now(kind: Kind, asked: str, *, location: str | None, revision: str | None) -> Resolved:
    """Return what was asked for with what it resolved to just now."""
    return Resolved(kind, asked, location, revision, datetime.now(UTC))


@dataclass(frozen=True, slots=True)
class Item:
    """One file that a source lists.

    Attributes:
        path: in the source, as the source spells it. Not checked yet.
        size: in bytes, where the source says so.
        sha256: `sha256:…`, where the source says so; the bytes have to have it.
        git_blob: the git object id (40 hexadecimal digits), where the source is a git repository.
        version: what names these bytes in the source, such as an object's version id; only the source reads it.
        address: a digest of its whole address, where the location leaves a part out that may name another file.
        place: where the bytes lie already, in a file on this machine; it is read there and not copied.
    """

    path: str
    size: int | None
    sha256: str | None = None
    git_blob: str | None = None
    version: str | None = None
    address: str | None = None
    place: Path | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The bytes of a file from an offset on.

    Attributes:
        offset: where `chunks` begin: the offset asked for, or 0 when the source cannot go on there.
        size: of the whole file in bytes, where the source says so.
        tag: what changes when the bytes change, such as a strong ETag; None when there is nothing like it.
        chunks: the bytes. The iterator raises SourceUnavailable when they stop before their end.
    """

    offset: int
    size: int | None
    tag: str | None
    chunks: Iterator[bytes]


class Source(Protocol):
    """One kind of source, for one thing that was asked for.

    Every method raises SourceRefused for what is wrong for good, and SourceUnavailable for what another try may mend.
    """

    def resolve(self) -> Resolved:
        """Resolve what was asked for, once."""

    def list(self, resolved: Resolved) -> list[Item]:
        """List all files of what it resolved to. No byte of theirs is read."""

    def open(self, resolved: Resolved, item: Item, *, offset: int, tag: str | None) -> AbstractContextManager[Opened]:
        """Open a file's bytes from an offset on, if they are still those that had this tag; else from their start."""
