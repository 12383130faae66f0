"""Puts a bundle's files together from several sources, each resolved once and with a pin of its own.

Everything is resolved, listed and chosen before a byte is fetched, and only what was chosen is.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path

from gates.directory import Contents, DirectoryRefused, Memory, read_listing
from gates.files.contents import Reader
from gates.files.listing import Entry, LeftOut, Listing
from gates.files.names import collisions, refuse_name
from gates.files.refusal import FileRefused
from gates.sources.directory import DirectorySource
from gates.sources.fetch import Bounds, Fetched, Progress, fetch, patiently
from gates.sources.fronts import WEIGHTS, fetch_front, is_read_whole
from gates.sources.parts import BASE, Choice, Placed, choose, look_at_first, together
from gates.sources.source import Item, Resolved, Source, SourceRefused
from gates.sources.store import FetchStore
from schemas.bundle import Role
from schemas.common import folded


@dataclass(frozen=True, slots=True)
class Wants:
    """What is wanted of all sources together.

    Attributes:
        reader: the engine that will read the files.
        exclude: patterns of paths in the bundle that are left out.
        roles: path in the bundle → role, for files that their name does not tell.
        is_one_enough: where the base has several models and nobody chose one, the first is taken, to be looked at.
    """

    reader: Reader
    exclude: tuple[str, ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    is_one_enough: bool = False


@dataclass(frozen=True, slots=True)
class Assembled:
    """The files of a bundle, and part → its source with what pins it, the base first."""

    contents: Contents
    sources: Mapping[str, Resolved]


@dataclass(slots=True)
class _Part:
    name: str
    source: Source
    resolved: Resolved
    items: dict[str, Item]
    hidden: list[LeftOut]


@contextmanager
def _told_of(part: str) -> Iterator[None]:
    """Name the part in the refusal of its source, where no file is named."""
    try:
        yield
    except SourceRefused as refused:
        raise refused.of(refused.file or ("" if part == BASE else part)) from None


class Assembly:
    """Sources by the part that each brings; `base` has to be among them.

    Args:
        sources: part → source.
        wants: of them.
        store: where fetched files are kept.
        bounds: on the fetching.
    """

    def __init__(
        self, sources: Mapping[str, Source], wants: Wants, store: FetchStore, bounds: Bounds | None = None
    ) -> None:
        order = sorted(sources, key=lambda part: (part != BASE, part))
        self._sources = {part: sources[part] for part in order}
        self._wants, self._store, self._bounds = wants, store, bounds or Bounds()
        self._parts: dict[str, _Part] = {}
        self._whole = Choice()
        self.several: tuple[str, ...] = ()
        """The models in GGUF of which the first was taken; empty where there is one, or one was chosen."""
        self._fetched: dict[tuple[str, str], Fetched] = {}
        self._sketched: list[tuple[str, Path]] | None = None

    def choose(self) -> Choice:
        """Resolve and list all sources, and choose. Nothing is fetched.

        Raises:
            DirectoryRefused: with every reason at once; or for one source at once:
            SourceRefused, SourceUnavailable.
        """
        for name, source in self._sources.items():
            with _told_of(name):
                resolved = patiently(source.resolve, self._bounds)
                items = patiently(lambda one=source, to=resolved: one.list(to), self._bounds)  # type: ignore[misc]
            self._parts[name] = self._part(name, source, resolved, items)
        of_parts = self._of_parts()
        choices = {}
        for name, part in self._parts.items():
            paths = part.items if name != BASE else part.items.keys() - of_parts.keys()
            with _told_of(name):
                choices[name] = self._choice(name, list(paths), self._roles(part))
        self._whole = together(choices)
        self._whole.left_out += [LeftOut(path, "replaced", f"brought by {part}") for path, part in of_parts.items()]
        self._whole.left_out += [one for part in self._parts.values() for one in part.hidden]
        refused = [*self._whole.refused, *self._unlistable(), *self._names()]
        if refused:
            raise DirectoryRefused(refused)
        return self._whole

    def _choice(self, part: str, paths: list[str], roles: Mapping[str, Role]) -> Choice:
        choice = choose(part, paths, self._wants.reader, roles)
        if not choice.several or not self._wants.is_one_enough or self._wants.reader.weights is not None:
            return choice
        again = look_at_first(paths, self._wants.reader, roles, choice.several)
        self.several = tuple(group[0] for group in again.several)
        return again

    @property
    def left(self) -> int:
        """Bytes to fetch, as far as the sources list sizes. Those that are in the store already count."""
        return sum(item.size or 0 for part in self._parts.values() for item in self._away(part))

    def fetch(self, progress: Progress | None = None) -> int:
        """Fetch what was chosen and is not on this machine. Returns the bytes that arrived now.

        Args:
            progress: called with (bytes that were there or arrived, bytes in all of one source).

        Raises:
            SourceRefused, SourceUnavailable.
        """
        received = 0
        for part in self._parts.values():
            away = self._away(part)
            found = fetch(part.source, part.resolved, away, self._store, bounds=self._bounds, progress=progress)
            self._fetched |= {(part.name, one.item.path): one for one in found}
            received += sum(one.received for one in found)
        return received

    def sketch(self, root: Path) -> None:
        """Fetch, instead of all that was chosen, configurations, and of weights only the headers.

        Args:
            root: an empty folder for what has no bytes but a header; all else of it is a hole.

        Raises:
            SourceRefused, SourceUnavailable.
        """
        self._sketched = []
        for part in self._parts.values():
            taken = {one.path: one for one in self._taken(part)}
            small = [item for item in self._away(part) if is_read_whole(taken[item.path].placed)]
            fetched = fetch(part.source, part.resolved, small, self._store, bounds=self._bounds)
            self._sketched += [(taken[one.item.path].placed, one.place) for one in fetched]
            self._sketched += [(one.placed, place) for one in taken.values() if (place := part.items[one.path].place)]
            weights = [item for item in self._away(part) if item.path.endswith(WEIGHTS)]
            fronts = [(item, root / taken[item.path].placed) for item in weights]
            with ThreadPoolExecutor(self._bounds.at_once, thread_name_prefix="front") as pool:
                list(pool.map(self._front, repeat(part), *zip(*fronts, strict=True)) if fronts else ())
            self._sketched += [(taken[item.path].placed, place) for item, place in fronts]

    def _front(self, part: _Part, item: Item, place: Path) -> None:
        try:
            patiently(lambda: fetch_front(part.source, part.resolved, item, place), self._bounds)
        except FileRefused as refused:
            raise refused.of(item.path) from None

    @property
    def resolved(self) -> dict[str, Resolved]:
        """Part → what its source resolved to, the base first."""
        return {name: part.resolved for name, part in self._parts.items()}

    @property
    def places(self) -> list[tuple[str, Path]]:
        """Path in the bundle and where the bytes lie, of each file that was chosen and fetched, or sketched."""
        if self._sketched is not None:
            return sorted(self._sketched)
        entries = (self._entry(part, one) for part in self._parts.values() for one in self._taken(part))
        return [(entry.path, entry.place) for entry in entries]

    def read(self, *, memory: Memory | None = None, progress: Callable[[int, int], None] | None = None) -> Assembled:
        """Read all files where they lie now, as those of a directory are read.

        Args:
            memory: of earlier readings.
            progress: of the bytes that are read.

        Raises:
            DirectoryRefused.
        """
        entries = [self._entry(part, one) for part in self._parts.values() for one in self._taken(part)]
        entries.sort(key=lambda entry: entry.path)
        roles = {one.placed: one.role for one in self._whole.taken}
        listing = Listing(tuple(entries), tuple(self._whole.left_out), ())
        try:
            contents = read_listing(listing, self._wants.reader, roles=roles, memory=memory, progress=progress)
        except DirectoryRefused as refused:
            self._throw_out(entries, {one.file for one in refused.refusals if one.code == "digest-mismatch"})
            raise
        return Assembled(contents, self._pinned(contents))

    # ----------------------------------------------------------------------------------------------------- listing

    def _part(self, name: str, source: Source, resolved: Resolved, items: Iterable[Item]) -> _Part:
        found, hidden = {}, []
        for item in items:
            if any(piece.startswith(".") for piece in item.path.split("/")):
                hidden.append(LeftOut(item.path, "hidden", "hidden"))
            elif any(fnmatch.fnmatchcase(item.path, pattern) for pattern in self._wants.exclude):
                hidden.append(LeftOut(item.path, "excluded", "excluded by you"))
            else:
                found[item.path] = item
        if isinstance(source, DirectorySource):
            hidden += source.listing.left_out
        return _Part(name, source, resolved, found, hidden)

    def _of_parts(self) -> dict[str, str]:
        """Return the base's files that lie in the folder of another part, each with that part, which brings them."""
        found: dict[str, str] = {}
        for name, folder in self._folders().items():
            found |= {path: name for path in self._parts[BASE].items if path.startswith(f"{folder}/")}
        return found

    def _folders(self) -> dict[str, str]:
        """Return each part whose folder is inside the base's, and that folder's path there."""
        base = self._parts[BASE].source
        if not isinstance(base, DirectorySource):
            return {}
        root = base.root.resolve()
        places = {
            name: part.source.root.resolve()
            for name, part in self._parts.items()
            if name != BASE and isinstance(part.source, DirectorySource)
        }
        return {
            name: place.relative_to(root).as_posix()
            for name, place in places.items()
            if place != root and place.is_relative_to(root)
        }

    def _roles(self, part: _Part) -> dict[str, Role]:
        """Return the given roles of a part's own files. What no part has is told of the base."""
        others = {path for one in self._parts.values() if one.name != part.name for path in one.items}
        return {path: role for path, role in self._wants.roles.items() if path in part.items or path not in others}

    def _unlistable(self) -> Iterator[FileRefused]:
        for part in self._parts.values():
            if isinstance(part.source, DirectorySource):
                yield from part.source.listing.refused

    def _names(self) -> Iterator[FileRefused]:
        """Refuse names of files that are taken, and any name beside them that could be taken for one of them."""
        taken = {one.placed for one in self._whole.taken}
        for path in sorted(taken):
            refused = refuse_name(path)
            if refused is not None:
                yield refused
        near = {folded(path) for path in taken}
        beside = {one.path for one in self._whole.left_out if not one.path.endswith("/") and one.code != "replaced"}
        yield from collisions(taken | {path for path in beside if folded(path) in near})

    # ----------------------------------------------------------------------------------------------------- reading

    def _taken(self, part: _Part) -> list[Placed]:
        return [one for one in self._whole.taken if one.part == part.name]

    def _away(self, part: _Part) -> list[Item]:
        items = [part.items[one.path] for one in self._taken(part)]
        return [item for item in items if item.place is None]

    def _entry(self, part: _Part, one: Placed) -> Entry:
        if isinstance(part.source, DirectorySource):
            return replace(part.source.entries[one.path], path=one.placed)
        fetched = self._fetched[part.name, one.path]
        digits = fetched.sha256.removeprefix("sha256:")
        return Entry(one.placed, fetched.place, fetched.place.lstat(), digits, is_kept=True)

    def _throw_out(self, entries: list[Entry], paths: set[str | None]) -> None:
        """Let files of the store that were damaged without a trace be fetched again the next time."""
        for entry in entries:
            if entry.is_kept and entry.path in paths:
                self._store.discard(f"sha256:{entry.blob}")

    def _pinned(self, contents: Contents) -> dict[str, Resolved]:
        found = {file.path: file for file in contents.files}
        pinned = {}
        for part in self._parts.values():
            files = [(one.path, found[one.placed].sha256, found[one.placed].size) for one in self._taken(part)]
            pinned[part.name] = part.resolved.pinned(files)
        return pinned
