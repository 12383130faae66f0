"""The one way a file is refused: a reason code, the place, what was found there, and what was expected."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

_SHOWN = 120


class FileRefused(ValueError):
    """A file that no bundle takes: unsound, too large, or readable in two ways.

    `message` goes on where a sentence begins with the file's name. `offset` counts bytes from the start of the
    file, `pointer` is a JSON Pointer (RFC 6901); where neither fits, both are None. `code` is stable.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        file: str | None = None,
        offset: int | None = None,
        pointer: str | None = None,
        found: object = None,
        expected: object = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.file, self.offset, self.pointer = code, message, file, offset, pointer
        self.found = None if found is None else shown(found)
        self.expected = None if expected is None else shown(expected)
        self.advice = advice

    def __str__(self) -> str:
        where = "" if self.offset is None else f" (at byte {self.offset})"
        return f"{self.message}{where}"

    def of(self, file: str) -> Self:
        """Say which file it is about, and return the refusal."""
        self.file = file
        return self


def shown(value: object, limit: int = _SHOWN) -> str:
    """Return a value as printable text of at most `limit` characters; what a terminal would act on is escaped."""
    if isinstance(value, bytes):
        value = value[: limit + 1].decode("utf-8", "backslashreplace")
    text = (value if isinstance(value, str) else str(value))[: limit + 1]
    plain = "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in text)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def pointer(*parts: str | int) -> str:
    """Return the JSON Pointer of a place, such as `/model.norm.weight/shape`."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


@contextmanager
def opened(path: Path, name: str | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file, and yield it with its size; refusals inside are told of `name`, else of the path's name.

    Raises:
        FileRefused: it is a link, no regular file, or cannot be read (`file-unreadable`, `file-irregular`).
    """
    name = path.name if name is None else name
    try:
        # O_NONBLOCK: a pipe put in the file's place must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        irregular = error.errno in {errno.ELOOP, errno.ENXIO}
        code = "file-irregular" if irregular else "file-unreadable"
        raise FileRefused(code, f"cannot be read: {error.strerror}", file=name) from None
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise FileRefused("file-irregular", "is no regular file", file=name, found=stat.filemode(state.st_mode))
    with os.fdopen(descriptor, "rb") as file:
        try:
            yield file, state.st_size
        except FileRefused as refused:
            raise refused.of(name) from None
        except OSError as error:
            raise FileRefused("file-unreadable", f"cannot be read: {error.strerror}", file=name) from None
