"""Lists what lies in a directory, and follows nothing on the way but the Hub cache's own links to its blobs."""

import fnmatch
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gates.files.names import refuse_hostile
from gates.files.refusal import FileRefused

MAX_ENTRIES = 50_000
MAX_FOLDERS_DEEP = 32

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_REVISION = re.compile(r"[0-9a-f]{40}")
_BLOB_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_READ = r"(?P<base>.+\.(?:safetensors|gguf|json|jinja|model|txt))"
_PART = re.compile(
    rf"{_READ}(?:\.(?P<kind>incomplete|part|partial|filepart|aria2|crdownload|download|tmp|gstmp)"
    r"|_\.gstmp|\.[0-9a-fA-F]{8})"
)
"""What browsers, aria2, gsutil and the command line of S3 call what they are still writing."""
_HIDDEN_PART = re.compile(rf"(?P<folder>(?:.+/)?)\.{_READ}\.[A-Za-z0-9]{{6}}")
"""What rsync calls it."""
_LINK_ADVICE = "replace it by the file; only the Hub cache's own links from a snapshot to its blobs are read"


@dataclass(frozen=True, slots=True)
class Entry:
    """One regular file: its path, where its bytes are, its state when listed, and its blob in the Hub's cache.

    `is_kept`: it lies in our own store, where it gets further names while it is read, and `blob` is its SHA-256.
    """

    path: str
    place: Path
    state: os.stat_result
    blob: str | None = None
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that a bundle does not take, or a folder, which ends in `/`: a stable `code`, and words for people."""

    path: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    """All regular files by path, what was left out, and what can be in no bundle."""

    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...]
    refused: tuple[FileRefused, ...]


def list_directory(root: Path, *, exclude: Iterable[str] = (), hard_links: bool = False) -> Listing:
    """List a directory: every file that is not hidden or excluded. No file is opened.

    Args:
        root: the directory. The user named it, so it may itself be reached through a link.
        exclude: patterns of relative paths, such as `original/*`; `*` also matches `/`.
        hard_links: take files that have a further name elsewhere, under which they could be changed.

    Raises:
        FileRefused: the directory itself cannot be listed (`directory-missing`, `directory-unreadable`).
    """
    walk = _Walk(root.resolve(), tuple(exclude), hard_links=hard_links)
    try:
        entries = sorted(walk.whole(), key=lambda entry: entry.path)
    except NotADirectoryError:
        raise FileRefused("directory-missing", f"{root.name} is not a directory", file="") from None
    except FileNotFoundError:
        raise FileRefused("directory-missing", f"there is no directory {root.name}", file="") from None
    except OSError as error:
        raise FileRefused("directory-unreadable", f"{root} cannot be read: {error.strerror}", file="") from None
    hidden = [one.path for one in walk.left_out if one.code == "hidden"]
    refused = [*walk.refused, *_unfinished({entry.path for entry in entries}, hidden)]
    return Listing(tuple(entries), tuple(sorted(walk.left_out, key=lambda one: one.path)), tuple(refused))


def _unfinished(paths: set[str], hidden: Iterable[str]) -> Iterator[FileRefused]:
    """Find files that a transfer has not finished, by the name that it gives what it is still writing.

    A part that lies beside its whole file is left over from an earlier try; but aria2 writes into a file that has its
    full length from the beginning, and removes its own at the end.
    """
    parts = [(path, match["base"], match["kind"]) for path in sorted(paths) if (match := _PART.fullmatch(path))]
    rsync = [(path, match) for path in hidden if (match := _HIDDEN_PART.fullmatch(path))]
    parts += [(path, match["folder"] + match["base"], None) for path, match in rsync]
    for path, base, kind in parts:
        if base not in paths or kind == "aria2":
            said = f"is not finished: its transfer has left {path}"
            advice = "wait until the transfer has ended, or begin it again"
            yield FileRefused("source-unstable", said, file=base, found=path, expected=base, advice=advice)


class _Walk:
    """A walk through folders that are held open: whatever takes the place of one on the way is not gone into."""

    def __init__(self, root: Path, exclude: tuple[str, ...], *, hard_links: bool) -> None:
        self.root, self.exclude, self.hard_links = root, exclude, hard_links
        self.left_out: list[LeftOut] = []
        self.refused: list[FileRefused] = []
        self.count = 0
        self.hub = root.parent.name == "snapshots" and _REVISION.fullmatch(root.name) is not None

    def whole(self) -> Iterator[Entry]:
        """Yield every file. Raises OSError: the directory itself cannot be opened."""
        return self._run(os.open(self.root, _FOLDER), "", 0)

    def _run(self, folder: int, prefix: str, depth: int) -> Iterator[Entry]:
        try:
            if depth > MAX_FOLDERS_DEEP:
                said, most = f"lies more than {MAX_FOLDERS_DEEP} folders deep", f"{MAX_FOLDERS_DEEP} folders"
                self.refused.append(FileRefused("name-depth", said, file=prefix, expected=most))
                return
            with os.scandir(folder) as found:
                items = sorted(found, key=lambda item: item.name)
            for item in items:
                self.count += 1
                if self.count > MAX_ENTRIES:
                    raise FileRefused("too-many-files", f"holds more than {MAX_ENTRIES} files", file="")
                yield from self._item(folder, item, prefix + item.name, depth)
        finally:
            os.close(folder)

    def _item(self, folder: int, item: "os.DirEntry[str]", path: str, depth: int) -> Iterator[Entry]:
        is_folder = item.is_dir(follow_symlinks=False)
        if item.name.startswith("."):
            self._leave_out(path, "hidden", "hidden", is_folder=is_folder)
        elif any(fnmatch.fnmatchcase(path, pattern) for pattern in self.exclude):
            self._leave_out(path, "excluded", "excluded by you", is_folder=is_folder)
        elif (hostile := refuse_hostile(path)) is not None:
            self.refused.append(hostile)
        else:
            try:
                if is_folder:
                    yield from self._run(self._opened(folder, item.name, path), path + "/", depth + 1)
                else:
                    yield self._entry(folder, item.name, path)
            except FileRefused as refused:
                if refused.file == "":
                    raise  # of the whole directory
                self.refused.append(refused.of(path))

    def _opened(self, folder: int, name: str, path: str) -> int:
        try:
            return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        except PermissionError as error:
            said = f"{self.root / path} cannot be read: {error.strerror}"
            raise FileRefused("directory-unreadable", said, file="") from None
        except OSError:
            raise FileRefused("source-unstable", "was a folder, and is none any more") from None

    def _leave_out(self, path: str, code: str, reason: str, *, is_folder: bool) -> None:
        self.left_out.append(LeftOut(path + "/" if is_folder else path, code, reason))

    def _entry(self, folder: int, name: str, path: str) -> Entry:
        blob, place = None, self.root / path
        try:
            state = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(state.st_mode):
                blob = self._hub_blob(path, place, os.readlink(name, dir_fd=folder))
                place = self.root.parent.parent / "blobs" / blob
                state = place.lstat()
        except FileNotFoundError:
            said = "leads to a blob that is not there" if blob else "vanished while the directory was read"
            code, advice = ("dangling-link", "download the snapshot again") if blob else ("source-unstable", None)
            raise FileRefused(code, said, found=blob, advice=advice) from None
        if not stat.S_ISREG(state.st_mode):
            raise FileRefused(
                "file-irregular", "is no regular file", found=stat.filemode(state.st_mode), expected="a regular file"
            )
        if state.st_nlink > 1 and not self.hard_links:
            said = f"has {state.st_nlink} names in the file system, and can be changed under another"
            advice = "copy it, or say --hard-links if you know who writes there"
            raise FileRefused("hard-link", said, found=state.st_nlink, expected=1, advice=advice)
        return Entry(path, place, state, blob)

    def _hub_blob(self, path: str, place: Path, target: str) -> str:
        """Return the blob that a link in the Hub cache's own form names: snapshots/<40 hex>/… → ../../blobs/<hash>."""
        up = "../" * (path.count("/") + 2) + "blobs/"
        name = target.removeprefix(up)
        if self.hub and target.startswith(up) and _BLOB_NAME.fullmatch(name):
            return name
        leads = Path(os.path.normpath(place.parent / target))
        if not leads.is_relative_to(self.root):
            said, code = f"is a symbolic link that leads out of the directory, to {target}", "link-escapes-root"
        elif not os.path.lexists(leads):
            said, code = f"is a symbolic link to {target}, which is not there", "dangling-link"
        else:
            said, code = f"is a symbolic link to {target}", "symbolic-link"
        raise FileRefused(code, said, found=target, expected="a regular file", advice=_LINK_ADVICE)
