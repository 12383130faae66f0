"""A directory on this machine as a source. Its files are read where they lie; their bytes are what names them."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gates.files.listing import Entry, Listing, list_directory
from gates.files.refusal import FileRefused, shown
from gates.files.refusal import opened as opened_file
from gates.sources.source import Item, Opened, Resolved, SourceRefused, SourceUnavailable, resolved_now

_CHUNK = 1 << 20


class DirectorySource:
    """A directory. `entries` has, once it was listed, the state of each file when it was."""

    def __init__(self, root: Path, *, exclude: Iterable[str] = (), hard_links: bool = False) -> None:
        self.root, self.exclude, self.hard_links = root, tuple(exclude), hard_links
        self.listing = Listing((), (), ())

    @property
    def entries(self) -> dict[str, Entry]:
        """The files that were listed, by path."""
        return {entry.path: entry for entry in self.listing.entries}

    def resolve(self) -> Resolved:
        """Resolve the directory: it has no revision until its files were read. Raises SourceRefused."""
        if not self.root.is_dir():
            said, advice = (
                f"there is no directory {shown(str(self.root))}",
                "name a directory, or hf:…, s3://… or https://…",
            )
            if self.root.is_file():
                said = f"{shown(str(self.root))} is a file, and what is taken is a directory"
                advice = "put it into a directory of its own, and name that"
            raise SourceRefused("directory-missing", said, file="", advice=advice)
        return resolved_now("directory", self.root.resolve().name, location=None, revision=None)

    def list(self, resolved: Resolved) -> list[Item]:
        """List the directory; what can be in no bundle stays in `listing.refused`. Raises SourceRefused."""
        try:
            self.listing = list_directory(self.root, exclude=self.exclude, hard_links=self.hard_links)
        except FileRefused as refused:
            raise SourceRefused(refused.code, refused.message, file=resolved.asked) from None
        return [Item(entry.path, entry.state.st_size, place=entry.place) for entry in self.listing.entries]

    @contextmanager
    def open(
        self,
        resolved: Resolved,  # noqa: ARG002 - other sources need it
        item: Item,
        *,
        offset: int,
        tag: str | None,
    ) -> Iterator[Opened]:
        """Open a file where it lies. The tag is its inode, size and time. Raises SourceRefused, SourceUnavailable."""
        try:
            with opened_file(item.place or self.root / item.path, item.path) as (file, size):
                state = os.fstat(file.fileno())
                own = f"{state.st_dev}:{state.st_ino}:{size}:{state.st_mtime_ns}"
                start = offset if own == tag and offset <= size else 0
                file.seek(start)
                yield Opened(start, size, own, iter(lambda: file.read(_CHUNK), b""))
        except FileRefused as refused:
            if isinstance(refused, SourceRefused | SourceUnavailable):
                raise
            raise SourceRefused(refused.code, refused.message, file=item.path, found=refused.found) from None
