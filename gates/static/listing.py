"""Which files there are, under names that every system reads alike; nothing is followed but the Hub cache's links."""

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from gates.files import listing
from gates.files.contents import is_aside
from gates.files.names import refuse_name
from gates.files.refusal import FileRefused, opened
from gates.static.flaw import Flaw, flaw
from schemas.common import folded
from schemas.short import many

_POINTER_BYTES = 1024
_MOST_POINTER = 1024 * 1024
"""Bytes of a pointer that somebody padded; a pointer by itself has less than a kilobyte."""
_LFS = re.compile(rb"(?:\xef\xbb\xbf)?\s*version https?://[a-z0-9./_-]+/spec/[a-z0-9.]+\s")
_LFS_SIZE = re.compile(rb"^size ([0-9]{1,19})\s*$", re.MULTILINE)
_LFS_OID = re.compile(rb"^oid (sha256:[0-9a-f]{64})\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Entry:
    """One regular file: its path in the composition, where its bytes are, and its state when it was listed."""

    path: str
    place: Path
    size: int
    mtime_ns: int
    inode: int
    pointer: tuple[int | None, str | None] | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def is_stub(self) -> bool:
        """Whether nothing can be read here: it is empty, or a Git-LFS pointer."""
        return self.size == 0 or self.pointer is not None

    @property
    def folder(self) -> str:
        """All of the path before the name; empty for the root."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Listing:
    """All files by path, and what was wrong with others."""

    entries: Mapping[str, Entry]
    flaws: tuple[Flaw, ...]
    left_out: tuple[str, ...] = ()

    def without(self, paths: AbstractSet[str], *, unread: AbstractSet[str] = frozenset()) -> "Listing":
        """Return the listing with some files left out; of those in `unread` only what they hold is left out."""
        entries = {path: entry for path, entry in self.entries.items() if path not in paths}
        silent = paths | unread
        flaws = tuple(one for one in self.flaws if one.file not in silent or one.code not in OF_CONTENT)
        return Listing(entries, flaws, tuple(sorted({*self.left_out, *paths})))


def list_directory(root: Path) -> Listing:
    """List every file under a directory that is not hidden, as registering it does.

    Raises:
        OSError: the directory itself cannot be read.
    """
    try:
        # A further name in the file system is no fault of what is written in the file.
        found = listing.list_directory(root, hard_links=True)
    except FileRefused as refused:
        raise OSError(None, refused.message) from None
    entries, refused_files = {}, list(found.refused)
    left_out = [one.path for one in found.left_out]
    for one in found.entries:
        refusal = refuse_name(one.path)
        if refusal is None:
            entries[one.path] = _entry(one.path, one.place, one.state)
        elif is_aside(one.path):
            left_out.append(one.path)
        else:
            refused_files.append(refusal)
    flaws = [*_refusals(refused_files), *_collisions(entries), *_stubs(entries.values())]
    return Listing(entries, tuple(flaws), tuple(sorted(left_out)))


def list_named(places: Mapping[str, Path]) -> Listing:
    """List the files that a bundle names: path in it → where its bytes are."""
    entries, flaws = {}, []
    for path, place in places.items():
        try:
            state = place.lstat()
        except OSError as error:
            said = f"{path} is not there: {error.strerror}."
            flaws.append(flaw("file-missing", said, file=path, found=error.strerror, expected="a regular file"))
            continue
        if not stat.S_ISREG(state.st_mode):
            said, kind = f"{path} is no regular file.", stat.filemode(state.st_mode)
            flaws.append(flaw("file-irregular", said, file=path, found=kind, expected="a regular file"))
            continue
        entries[path] = _entry(path, place, state)
    flaws += [*_collisions(entries), *_stubs(entries.values())]
    return Listing(entries, tuple(flaws))


def changed(listing: Listing) -> Iterator[Flaw]:
    """Find files that changed after they were listed: what was checked is then no one state of the directory."""
    for entry in listing.entries.values():
        try:
            state = entry.place.lstat()
            now: tuple[int, int, int] | None = (state.st_size, state.st_mtime_ns, state.st_ino)
        except OSError:
            now = None
        if now != (entry.size, entry.mtime_ns, entry.inode):
            yield flaw(
                "source-unstable",
                f"{entry.path} changed while the directory was read.",
                file=entry.path,
                found="gone" if now is None else {"size": now[0]},
                expected={"size": entry.size},
            )


def _entry(path: str, place: Path, state: os.stat_result) -> Entry:
    pointer = _pointer(place) if 0 < state.st_size <= _MOST_POINTER else None
    return Entry(path, place, state.st_size, state.st_mtime_ns, state.st_ino, pointer)


OF_CONTENT = frozenset({"empty-file", "lfs-pointer"})
"""Codes that are about what a file holds: nobody needs it of a file that is left out."""

REFUSALS = {
    "dangling-link": "dangling-link",
    "link-escapes-root": "link-escapes-root",
    "symbolic-link": "file-irregular",
    "file-irregular": "file-irregular",
    "source-unstable": "source-unstable",
}
"""Codes of what listing refuses → codes of the catalogue."""
OTHER_REFUSALS = "name-refused"


def _refusals(refused: Iterable[FileRefused]) -> Iterator[Flaw]:
    """Say what the listing and the rule of names refuse; links without their blobs are one finding."""
    dangling: list[str] = []
    for one in refused:
        path = one.file or "."
        if one.code == "dangling-link":
            dangling.append(path)
            continue
        code = REFUSALS.get(one.code, OTHER_REFUSALS)
        yield flaw(
            code,
            f"{path} {one.message}.",
            file=path,
            found=one.found or path,
            expected=one.expected or "a regular file inside the directory",
            advice=sentence(one.advice),
        )
    if dangling:
        names = sorted(dangling)
        message = f"{many(len(names), 'link')} to what is not there, such as {names[0]}."
        yield flaw("dangling-link", message, file=names[0], found=names, expected=[])


def sentence(text: str | None) -> str | None:
    """Return advice that goes on after a semicolon as a sentence of its own."""
    return None if text is None else f"{text[:1].upper()}{text[1:]}."


def _collisions(entries: Mapping[str, Entry]) -> Iterator[Flaw]:
    seen: dict[str, str] = {}
    told = set()
    for path in sorted(entries):
        other = seen.setdefault(folded(path), path)
        if other != path:
            told |= {path, other}
            yield flaw(
                "case-collision",
                f"{other} and {path} differ only in case or Unicode form; some file systems keep one of them.",
                file=path,
                found=[other, path],
                expected="one of the two",
            )
    for path in sorted(entries):
        name = path.rsplit("/", 1)[-1]
        usual = unicodedata.normalize("NFKC", name).casefold()
        if name != usual and path not in told and _WELL_KNOWN.fullmatch(usual):
            yield flaw(
                "case-collision",
                f"Engines read {usual}, and this file is called {name}.",
                file=path,
                found=[name],
                expected=usual,
                advice=f"Rename {name} to {usual}.",
            )
        elif usual.endswith(_WEIGHTS) and not name.endswith(_WEIGHTS):
            ending = usual.rpartition(".")[2]
            yield flaw(
                "case-collision",
                f"Engines read names that end in .{ending}, and this file is called {name}.",
                file=path,
                found=[name],
                expected=f"{name[: -len(ending)]}{ending}",
                advice=f"Write .{ending} in small letters.",
            )


_WEIGHTS = (".gguf", ".safetensors")


_WELL_KNOWN = re.compile(
    r"(generation_|tokenizer_|adapter_|preprocessor_|processor_|params)?config\.json|params\.json|tokenizer\.(json|model)"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|chat_template\.(jinja|json)"
    r"|model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json|adapter_model\.safetensors"
)


def _stubs(entries: Iterable[Entry]) -> Iterator[Flaw]:
    for entry in entries:
        if entry.size == 0:
            if _is_read(entry.name):
                said = f"{entry.path} has 0 bytes."
                yield flaw("empty-file", said, file=entry.path, found=0, expected="1 byte or more")
        elif entry.pointer is not None:
            size, oid = entry.pointer
            said = "" if size is None else f" of {size} bytes"
            yield flaw(
                "lfs-pointer",
                f"{entry.path} is a Git-LFS pointer of {entry.size} bytes in place of the file{said}.",
                file=entry.path,
                found={"size": entry.size},
                expected={"size": size, "oid": oid},
            )


def _pointer(place: Path) -> tuple[int | None, str | None] | None:
    try:
        with opened(place) as (file, _):
            raw = file.read(_POINTER_BYTES)
    except FileRefused:
        return None  # whoever needs it says so; nobody may
    if not _LFS.match(raw):
        return None
    size, oid = _LFS_SIZE.search(raw), _LFS_OID.search(raw)
    return (int(size[1]) if size else None, oid[1].decode() if oid else None)


def _is_read(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".json", ".jinja", ".model", "merges.txt"))
