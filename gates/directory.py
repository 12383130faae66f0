"""Reads a directory that shall become a bundle: which files, what each is for, their hashes and what they tell.

Nothing is followed, guessed or changed on the way: a link, a special file or a name that some file system reads
otherwise is refused, and all refusals are told at once. A file that was read before and has the same device,
inode, size, modification and change time is not opened again.
"""

import fnmatch
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from gates import facts
from gates.formats import FormatError
from schemas.bundle import MAX_FILES, Role
from schemas.common import canonical_json, check_path, folded, sha256_digest

_CHUNK = 1 << 20
# Times of two writes can be equal within one tick of the kernel's clock, 10 ms at most.
_CLOCK_TICK_NS = 20_000_000
_REVISION = re.compile(r"[0-9a-f]{40}")
_BLOB_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_ROLES: tuple[tuple[str, Role], ...] = (
    (r"mmproj.*\.gguf", Role.PROCESSOR),
    (r".*\.gguf", Role.WEIGHTS),
    (r"adapter_model\.safetensors|adapter_config\.json", Role.ADAPTER),
    (r".*\.safetensors", Role.WEIGHTS),
    (r".*\.safetensors\.index\.json", Role.WEIGHTS_INDEX),
    (r"config\.json", Role.CONFIG),
    (r"generation_config\.json", Role.GENERATION_CONFIG),
    (r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json", Role.TOKENIZER),
    (r"vocab\.(json|txt)|merges\.txt", Role.TOKENIZER),
    (r"((image_|video_|audio_)?pre)?processor_config\.json", Role.PROCESSOR),
    (r".*\.jinja|chat_template\.json", Role.TEMPLATE),
    (r"(quantize|quantization|quant|hf_quant)_config\.json", Role.QUANTIZATION),
    (r"(?i)(licen[sc]e|copying|notice|use_policy)([._-].*)?", Role.LICENCE),
    (r"(?i)readme([._-].*)?|.*\.md", Role.DOCUMENTATION),
)
_CODE = re.compile(r"(?i).*\.(py|pyc|pkl|pickle|pt|pth|bin|ckpt|joblib|npy|npz|h5|keras|onnx|so|dll|dylib|sh|exe)")


@dataclass(frozen=True, slots=True)
class Complaint:
    """One reason why a directory cannot become a bundle: where, what, and what to do."""

    path: str
    message: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f" ({self.advice})" if self.advice else ""
        return f"{self.path or '.'}: {self.message}{advice}"


class DirectoryRefused(Exception):
    """The directory cannot become a bundle. `complaints` has every reason."""

    def __init__(self, complaints: Iterable[Complaint]) -> None:
        self.complaints = tuple(complaints)
        super().__init__("; ".join(str(complaint) for complaint in self.complaints))


class Memory(Protocol):
    """Remembers what was read, by a key that names a file's exact state."""

    def get(self, key: str) -> str | None:
        """Return what was put under this key, or None."""

    def put(self, key: str, value: str) -> None:
        """Remember a value."""


@dataclass(frozen=True, slots=True)
class Found:
    """One file of the directory: its place in the bundle, where its bytes are, and what they tell."""

    path: str
    place: Path
    size: int
    sha256: str
    role: Role
    facts: Mapping[str, Any]
    was_read: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """All files by path, and what was left out."""

    files: tuple[Found, ...]
    left_out: tuple[str, ...]

    @property
    def revision(self) -> str:
        """Digest of the file list: the same files at the same paths have it on every machine."""
        return sha256_digest(canonical_json([{"path": f.path, "sha256": f.sha256, "size": f.size} for f in self.files]))

    def with_role(self, role: Role) -> list[Found]:
        """Return the files with this role, by path."""
        return [file for file in self.files if file.role is role]


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    place: Path
    role: Role
    state: os.stat_result
    blob: str | None


def read_directory(
    root: Path,
    *,
    exclude: Iterable[str] = (),
    roles: Mapping[str, Role] | None = None,
    memory: Memory | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Contents:
    """Read a directory: every regular file that is not hidden or excluded.

    Args:
        root: the directory. The user named it, so it may itself be reached through a link.
        exclude: patterns of relative paths, such as `original/*`; `*` also matches `/`.
        roles: path → role, for files that their name does not tell.
        memory: of earlier readings; without it every file is read.
        progress: called with bytes read and bytes in all, from several threads.

    Raises:
        DirectoryRefused: with every reason at once.
    """
    walk = _Walk(root.resolve(), tuple(exclude), dict(roles or {}))
    entries = walk.run()
    if walk.complaints:
        raise DirectoryRefused(walk.complaints)
    readings = _Readings(memory, sum(entry.state.st_size for entry in entries), progress)
    files = readings.run(entries)
    if readings.complaints:
        raise DirectoryRefused(sorted(readings.complaints, key=lambda complaint: complaint.path))
    return Contents(tuple(files), tuple(sorted(walk.left_out)))


# ------------------------------------------------------------------------------------------------- which files


class _Refusal(Exception):
    """One file cannot be in a bundle."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.message, self.advice = message, advice


class _Walk:
    """Lists files without following anything; collects what it leaves out and what it refuses."""

    def __init__(self, root: Path, exclude: tuple[str, ...], roles: dict[str, Role]) -> None:
        self.root, self.exclude, self.roles = root, exclude, roles
        self.complaints: list[Complaint] = []
        self.left_out: list[str] = []
        self.hub = root.parent.name == "snapshots" and _REVISION.fullmatch(root.name) is not None

    def run(self) -> list[_Entry]:
        try:
            entries = sorted(self._entries(self.root, ""), key=lambda entry: entry.path)
        except NotADirectoryError:
            raise DirectoryRefused([Complaint("", f"{self.root.name} is not a directory")]) from None
        except FileNotFoundError:
            raise DirectoryRefused([Complaint("", f"there is no directory {self.root.name}")]) from None
        except PermissionError as error:
            raise DirectoryRefused([Complaint("", f"{error.filename} cannot be read: {error.strerror}")]) from None
        self._check_names(entries)
        missing = sorted(set(self.roles) - {entry.path for entry in entries})
        self.complaints += [Complaint(path, "has a role, but is not in the directory") for path in missing]
        return entries

    def _entries(self, folder: Path, prefix: str) -> Iterator[_Entry]:
        with os.scandir(folder) as found:
            items = sorted(found, key=lambda item: item.name)
        for item in items:
            path = prefix + item.name
            if item.name.startswith(".") or any(fnmatch.fnmatchcase(path, pattern) for pattern in self.exclude):
                self.left_out.append(path + ("/" if item.is_dir(follow_symlinks=False) else ""))
            elif item.is_dir(follow_symlinks=False):
                yield from self._entries(Path(item.path), path + "/")
            else:
                try:
                    yield self._entry(path, Path(item.path))
                except _Refusal as refusal:
                    self.complaints.append(Complaint(path, refusal.message, refusal.advice))

    def _entry(self, path: str, place: Path) -> _Entry:
        blob = None
        if place.is_symlink():
            blob = self._hub_blob(path, place)
            if blob is None:
                advice = "replace it by the file; only the Hub cache's own links from a snapshot to its blobs are read"
                raise _Refusal("is a symbolic link", advice)
            place = self.root.parent.parent / "blobs" / blob
        try:
            state = place.lstat()
        except FileNotFoundError:
            raise _Refusal("leads to a blob that is not there", "download the snapshot again") from None
        if not stat.S_ISREG(state.st_mode):
            raise _Refusal("is no regular file")
        try:
            check_path(path)
        except ValueError as error:
            raise _Refusal(str(error), "rename it, or leave it out with --exclude") from None
        if _CODE.fullmatch(path):
            advice = "leave it out with --exclude"
            raise _Refusal("is code or pickled weights, which no bundle holds", advice)
        role = self.roles.get(path) or role_of(path)
        if role is None:
            advice = "leave it out with --exclude, or give it a role with -f"
            raise _Refusal("is of no kind that bundles know", advice)
        return _Entry(path, place, role, state, blob)

    def _hub_blob(self, path: str, place: Path) -> str | None:
        """Return the blob that a link in the Hub cache's own form names: snapshots/<40 hex>/… → ../../blobs/<hash>."""
        if not self.hub:
            return None
        up = "../" * (path.count("/") + 2) + "blobs/"
        target = str(place.readlink())
        name = target.removeprefix(up)
        return name if target.startswith(up) and _BLOB_NAME.fullmatch(name) else None

    def _check_names(self, entries: list[_Entry]) -> None:
        if len(entries) > MAX_FILES:
            self.complaints.append(Complaint("", f"holds {len(entries)} files; a bundle has at most {MAX_FILES}"))
        if not entries and not self.complaints:
            self.complaints.append(Complaint("", "holds no file"))
        seen: dict[str, str] = {}
        for entry in entries:
            other = seen.setdefault(folded(entry.path), entry.path)
            if other != entry.path:
                self.complaints.append(Complaint(entry.path, f"differs from {other} only in case or Unicode form"))


def role_of(path: str) -> Role | None:
    """Return what a file is for by its name, or None."""
    name = PurePosixPath(path).name
    return next((role for pattern, role in _ROLES if re.fullmatch(pattern, name)), None)


# ------------------------------------------------------------------------------------------------- their bytes


class _Stopped(Exception):
    """Another thread gave up, or the user did."""


class _Readings:
    """Hashes files on threads, unless the memory has them, and asks each what it tells."""

    def __init__(self, memory: Memory | None, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.memory, self.total, self.progress = memory, total, progress
        self.complaints: list[Complaint] = []
        self.stop = threading.Event()

    def run(self, entries: list[_Entry]) -> list[Found]:
        remembered = {entry.path: self._remembered(entry) for entry in entries}
        todo = [entry for entry in entries if remembered[entry.path] is None]
        # The largest first: the last file to end should be a small one.
        todo.sort(key=lambda entry: -entry.state.st_size)
        known = self.total - sum(entry.state.st_size for entry in todo)
        if self.progress is not None and known:
            self.progress(known, self.total)
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="hash")
        try:
            read = dict(zip((entry.path for entry in todo), pool.map(self._read, todo), strict=True))
        finally:
            self.stop.set()
            pool.shutdown(cancel_futures=True)
        for entry in todo:
            self._remember(entry, read[entry.path])
        found = [remembered[entry.path] or read[entry.path] for entry in entries]
        return [one for one in found if one is not None]

    def _remembered(self, entry: _Entry) -> Found | None:
        text = None if self.memory is None else self.memory.get(_key(entry))
        if text is None:
            return None
        try:
            value = json.loads(text)
            return _found(entry, value["sha256"], value["facts"], was_read=False)
        except (ValueError, KeyError, TypeError):
            return None  # written by something else, or damaged: read the file

    def _remember(self, entry: _Entry, found: Found | None) -> None:
        state = entry.state
        # Whole seconds in both times look like a file system with a coarse clock: two writes could share a time.
        coarse = state.st_ctime_ns % 10**9 == 0 and state.st_mtime_ns % 10**9 == 0
        in_future = state.st_ctime_ns > time.time_ns()
        if self.memory is not None and found is not None and not coarse and not in_future:
            value = {"sha256": found.sha256, "facts": found.facts}
            self.memory.put(_key(entry), json.dumps(value, sort_keys=True, separators=(",", ":")))

    def _read(self, entry: _Entry) -> Found | None:
        try:
            return self._read_exactly(entry)
        except FormatError as error:
            advice = "fetch the file again, or leave it out with --exclude"
            self.complaints.append(Complaint(entry.path, str(error), advice))
        except OSError as error:
            self.complaints.append(Complaint(entry.path, f"cannot be read: {error.strerror}"))
        return None

    def _read_exactly(self, entry: _Entry) -> Found:
        # A file written in this very tick could be written again without a new time; wait the tick out.
        wait_ns = entry.state.st_ctime_ns + _CLOCK_TICK_NS - time.time_ns()
        if 0 < wait_ns <= _CLOCK_TICK_NS:
            time.sleep(wait_ns / 1e9)
        # O_NONBLOCK: a pipe put in the file's place must not hang us.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with os.fdopen(os.open(entry.place, flags), "rb") as file:
            if _identity(os.fstat(file.fileno())) != _identity(entry.state):
                raise FormatError("changed while the directory was read")
            digest = self._hash(file, entry.state.st_size)
            told = facts.read(PurePosixPath(entry.path).name, entry.role, file, entry.state.st_size)
            if _identity(os.fstat(file.fileno())) != _identity(entry.state):
                raise FormatError("changed while it was read")
        if entry.blob is not None and len(entry.blob) == 64 and digest != f"sha256:{entry.blob}":
            raise FormatError(f"has the SHA-256 {digest[7:]}, but lies in the Hub cache as {entry.blob}")
        return _found(entry, digest, told, was_read=True)

    def _hash(self, file: BinaryIO, size: int) -> str:
        hasher, left = hashlib.sha256(), size
        # Not to the end of the file: it may be growing, faster than it is read.
        while left and (chunk := file.read(min(_CHUNK, left))):
            if self.stop.is_set():
                raise _Stopped
            hasher.update(chunk)
            count = len(chunk)
            left -= count
            if self.progress is not None:
                self.progress(count, self.total)
        return f"sha256:{hasher.hexdigest()}"


def _identity(state: os.stat_result) -> tuple[int, ...]:
    return (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def _key(entry: _Entry) -> str:
    reader = facts.reader_name(PurePosixPath(entry.path).name, entry.role)
    return ":".join([*map(str, _identity(entry.state)), reader])


def _found(entry: _Entry, digest: str, told: Mapping[str, Any], *, was_read: bool) -> Found:
    return Found(entry.path, entry.place, entry.state.st_size, digest, entry.role, told, was_read)
