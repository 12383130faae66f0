"""Files that were fetched, by their SHA-256, in a person's own cache. Nothing is there before it was verified.

    sha256/ab/abcdef…   whole files, read-only
    states/abcdef…      the state in which a whole file was when its bytes were last verified
    parts/KEY           what has arrived of a file; who writes it holds its lock
    parts/KEY.tag       what its bytes were called when they arrived
    names/KEY           the digest of a file whose source knows it by another name that cannot move

It may be deleted at any time: what is needed is fetched again. What has arrived of a file that nobody has gone on with
for two weeks goes by itself. A file is verified again before it is handed out, unless
it is in the state that was noted. Nobody else may write here: whoever can, could note a state too.
"""

import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gates.files.refusal import FileRefused, opened
from gates.sources.source import SourceRefused

ABANDONED_SECONDS = 14 * 24 * 3600.0
_CHUNK = 1 << 20
_OTHERS_WRITE = 0o022
_LOCK_POLL_SECONDS = 0.1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class FetchStore:
    """A cache of fetched files under one directory, which several processes may use at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the directory, if it is missing.

        Raises:
            SourceRefused: `store-foreign`, when it belongs to somebody else, or others may write in it.
            OSError: it cannot be made.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = self.root.stat()
        if state.st_uid != os.geteuid() or state.st_mode & _OTHERS_WRITE:
            said = f"cannot be kept in {self.root}, where others could write: it has to be yours alone"
            advice = "take write permission from others (chmod go-w), or name another place with --cache"
            raise SourceRefused("store-foreign", said, file="", found=f"{state.st_mode & 0o777:o}", advice=advice)
        self._clear_up()

    def _clear_up(self) -> None:
        """Remove what nobody has gone on with for long: parts, their tags, and what a killed process was writing."""
        oldest = time.time() - ABANDONED_SECONDS
        for name in ("parts", "states", "names"):
            for path in (self.root / name).glob("*"):
                if name != "parts" and not path.name.startswith("."):
                    continue
                with suppress(FileNotFoundError):  # another process may be first
                    if path.lstat().st_mtime < oldest:
                        _remove(path)

    def place(self, sha256: str) -> Path:
        """Return where a file with this digest (`sha256:…`) lies, or would."""
        digits = sha256.removeprefix("sha256:")
        return self.root / "sha256" / digits[:2] / digits

    def holds(self, sha256: str, size: int | None = None) -> bool:
        """Tell whether a file with this digest, and this size if it is known, is there."""
        try:
            found = self.place(sha256).lstat()
        except FileNotFoundError:
            return False
        return size is None or found.st_size == size

    def is_whole(self, sha256: str, git_blob: str | None, go_on: Callable[[], None]) -> bool:
        """Tell whether the file with this digest has it still. One that has not is thrown out.

        Args:
            sha256: of the file, which is read unless its state is the one that was noted.
            git_blob: git's name of it; what has it is small, and is always read.
            go_on: called between pieces; it may raise to stop.

        Raises:
            OSError: the store cannot be read or written.
        """
        place = self.place(sha256)
        try:
            with opened(place) as (file, size):
                state = _state(file)
                if git_blob is None and self._noted(sha256) == state:
                    return True
                digest, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    if git_blob is not None:
                        git.update(chunk)
                    go_on()
                is_sound = f"sha256:{digest.hexdigest()}" == sha256 and _state(file) == state
                # Another process may have put a sound one in its place meanwhile.
                is_gone = not _is_at(file, place)
        except FileRefused:
            self.discard(sha256)  # no file, or one that cannot be read
            return False
        if not is_sound:
            if not is_gone:
                self.discard(sha256)
            return False
        self.note(sha256, state)
        return git_blob in {None, git.hexdigest()}

    def discard(self, sha256: str) -> None:
        """Throw a whole file out."""
        (self.root / "states" / sha256.removeprefix("sha256:")).unlink(missing_ok=True)
        self.place(sha256).unlink(missing_ok=True)

    def note(self, sha256: str, state: str) -> None:
        """Note the state of a file whose bytes were verified."""
        self._write("states", sha256.removeprefix("sha256:"), state)

    def _noted(self, sha256: str) -> str | None:
        return self._read("states", sha256.removeprefix("sha256:"))

    def _read(self, folder: str, key: str) -> str | None:
        try:
            return (self.root / folder / key).read_text("ascii")
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def _write(self, name: str, key: str, text: str) -> None:
        folder = self.root / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = folder / f".{key}.{os.getpid()}.{threading.get_ident()}"
        part.write_text(text, "ascii")
        part.replace(folder / key)

    def known(self, key: str) -> str | None:
        """Return the digest of the file that was kept under this key, or None."""
        text = self._read("names", key)
        return text if text is not None and _DIGEST.fullmatch(text) else None

    def name(self, key: str, sha256: str) -> None:
        """Remember the digest of a file that is kept."""
        self._write("names", key, sha256)

    @contextmanager
    def part(self, key: str, is_wanted: Callable[[], bool]) -> Iterator["Part | None"]:
        """Hold what has arrived of a file; yields None when it is wanted no more once its lock is ours.

        Whoever else holds it is waited for. A process that is killed lets go of it.

        Args:
            key: of the file: 64 hexadecimal digits.
            is_wanted: tells whether the file is still missing; it may raise to stop waiting.

        Raises:
            OSError: the store cannot be written.
        """
        folder = self.root / "parts"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / key
        while is_wanted():
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+b") as file:
                if not _locked(file):
                    time.sleep(_LOCK_POLL_SECONDS)
                    continue
                if not _is_at(file, path):
                    continue  # whoever had it before has finished it, or thrown it away
                part = Part(self, path, file)
                if not is_wanted():
                    part.discard()
                    break
                yield part
                return
        yield None


class Part:
    """What has arrived of one file, held by its lock."""

    def __init__(self, store: FetchStore, path: Path, file: BinaryIO) -> None:
        self._store, self._path, self.file = store, path, file
        self._tag = path.with_name(f"{path.name}.tag")

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return os.fstat(self.file.fileno()).st_size

    @property
    def tag(self) -> str | None:
        """What the bytes were called when they arrived; None when they have no name."""
        try:
            return self._tag.read_text("utf-8") or None
        except (OSError, UnicodeDecodeError):
            return None

    def begin(self, tag: str | None) -> None:
        """Throw away what is there, and begin anew with bytes that are called so."""
        self._tag.unlink(missing_ok=True)
        self.file.seek(0)
        self.file.truncate()
        if tag is not None:
            self._tag.write_text(tag, "utf-8")

    def keep(self, sha256: str) -> Path:
        """Let the verified part become the file with its digest, on disk and at once. Returns its place."""
        place = self._store.place(sha256)
        self.file.flush()
        os.fchmod(self.file.fileno(), 0o400)
        os.fsync(self.file.fileno())
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.replace(place)
        _sync(place.parent)
        self._store.note(sha256, _state(self.file))
        self._tag.unlink(missing_ok=True)
        return place

    def discard(self) -> None:
        """Leave nothing of it."""
        self._tag.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Remove a file, unless somebody holds it. Raises FileNotFoundError."""
    with path.open("rb") as file:
        if _locked(file) and _is_at(file, path):
            path.unlink()


def _state(file: BinaryIO) -> str:
    """Return what changes when a file is written. Not its change time, which also a further name of it changes."""
    state = os.fstat(file.fileno())
    return f"{state.st_dev}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}"


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: BinaryIO, path: Path) -> bool:
    own = os.fstat(file.fileno())
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
