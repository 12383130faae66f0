"""Files that were fetched, by their SHA-256, in a person's own cache. Nothing is there before it was verified.

    sha256/ab/abcdef…   whole files, read-only
    parts/KEY           what has arrived of a file; who writes it holds its lock
    parts/KEY.tag       what its bytes were called when they arrived
    names/KEY           the digest of a file whose source knows it by another name that cannot move

It may be deleted at any time: what is needed is fetched again.
"""

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_LOCK_POLL_SECONDS = 0.1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class FetchStore:
    """A cache of fetched files under one directory, which several processes may use at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

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

    def known(self, key: str) -> str | None:
        """Return the digest of the file that was kept under this key, or None."""
        try:
            text = (self.root / "names" / key).read_text("ascii")
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return text if _DIGEST.fullmatch(text) else None

    def name(self, key: str, sha256: str) -> None:
        """Remember the digest of a file that is kept."""
        folder = self.root / "names"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = folder / f".{key}.{os.getpid()}.{threading.get_ident()}"
        part.write_text(sha256, "ascii")
        part.replace(folder / key)

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
        self._tag.unlink(missing_ok=True)
        return place

    def discard(self) -> None:
        """Leave nothing of it."""
        self._tag.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


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
