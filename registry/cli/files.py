"""Files that a person names: only what has an end is read."""

import hashlib
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from schemas.problems import Usage

STANDARD_INPUT = Path("-")
_PIECE = 1 << 20

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. It never waits, as opening a pipe would.

    Raises:
        Usage: there is none, it cannot be read, or it is something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Usage(f"{path}: {error.strerror}") from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise Usage(f"{path}: is {_KINDS.get(kind, 'something else')}, no regular file; `-` reads standard input")
    return os.fdopen(descriptor, "rb")


def digest_of(text: str) -> str:
    """Return the digest that a person means by a whole digest, or by a file with those bytes. Raises Usage."""
    if re.fullmatch(r"(sha256:)?[0-9a-f]{64}", text):
        return f"sha256:{text.removeprefix('sha256:')}"
    hashed = hashlib.sha256()
    with open_regular(Path(text)) as file:
        while read := file.read(_PIECE):
            hashed.update(read)
    return f"sha256:{hashed.hexdigest()}"
