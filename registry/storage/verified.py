"""Reading a blob so that its end is reached only when every byte was the right one."""

import hashlib
import io
from typing import Any, BinaryIO, cast

from schemas.problems import DigestMismatch

_BUFFER_BYTES = 1 << 18


def verified(file: BinaryIO, digest: str) -> BinaryIO:
    """Return a reader of `file`, which it closes, that raises DigestMismatch instead of reaching a wrong end."""
    # A BufferedReader reads, closes and is iterated as every file in binary mode.
    return cast("BinaryIO", io.BufferedReader(_Verified(file, digest), _BUFFER_BYTES))


class _Verified(io.RawIOBase):
    def __init__(self, file: BinaryIO, digest: str) -> None:
        self._file, self._digest = file, digest
        self._hasher = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raw = self._file.read(len(buffer))
        if raw:
            self._hasher.update(raw)
            buffer[: len(raw)] = raw
        elif (found := f"sha256:{self._hasher.hexdigest()}") != self._digest:
            raise DigestMismatch(
                f"the store has other bytes under {self._digest}: {found}", expected=self._digest, received=found
            )
        return len(raw)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
