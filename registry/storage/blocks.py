"""Copying in blocks: one is read and hashed while the one before is on its way to the disk, from the same memory."""

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, Self

BLOCK_BYTES = 1 << 21
"""One huge page: the disk is told of few pieces, and what is hashed was read a moment ago."""
_ALIGNMENT = 4096
"""What every disk takes from memory without a copy: its sectors have that size or a part of it."""
_NOT_DIRECT = frozenset({errno.EINVAL, errno.ENOTSUP})
_BEGUN_BYTES = 32 << 20


class Blocks:
    """Two blocks of memory: one to be filled, while the other is written at the end of a file. Use it as a context.

    Whole blocks go past the page cache where the file system allows that: nothing copies them, and the disk works
    while the next one is hashed. What is written is what was hashed: both are the same memory, which only this has.
    """

    def __init__(self, file: BinaryIO, at: int) -> None:
        """Write to `file`, of which nothing is buffered, from the offset `at`."""
        self._descriptor, self._at, self._turn = file.fileno(), at, 0
        self._is_direct, self._begun = False, at
        memory = mmap.mmap(-1, 2 * BLOCK_BYTES)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(memory)
        self._blocks = (whole[:BLOCK_BYTES], whole[BLOCK_BYTES:])
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._pending: Future[None] | None = None

    def fill(self, source: BinaryIO) -> memoryview:
        """Return the next bytes of a file, a whole block unless it ends. They stay until the second call after this."""
        block, count = self._blocks[self._turn], 0
        while count < BLOCK_BYTES and (more := source.readinto(block[count:])):  # type: ignore[attr-defined]
            count += more
        return block[:count]

    def write(self, block: memoryview) -> None:
        """Begin to write what `fill` returned, once the block before is written. Raises OSError for either."""
        self.end()
        self._pending = self._writer.submit(self._put, block)
        self._turn = 1 - self._turn

    def end(self) -> None:
        """Return when everything is written. Raises OSError."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _put(self, block: memoryview) -> None:
        self._turn_direct(is_wanted=len(block) == BLOCK_BYTES and self._at % _ALIGNMENT == 0)
        while block:
            try:
                count = os.pwrite(self._descriptor, block, self._at)
            except OSError as error:
                if not self._is_direct or error.errno not in _NOT_DIRECT:
                    raise
                count = 0
            # A disk with larger sectors, or one that is nearly full: the rest goes the usual way.
            if self._is_direct and count < len(block):
                self._turn_direct(is_wanted=False)
            block, self._at = block[count:], self._at + count
        if not self._is_direct and self._at - self._begun >= _BEGUN_BYTES:
            # The disk begins now, and not only when all has to be there. This drops nothing that is being written.
            os.posix_fadvise(self._descriptor, self._begun, self._at - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._at

    def _turn_direct(self, *, is_wanted: bool) -> None:
        if is_wanted == self._is_direct:
            return
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if is_wanted else flags & ~os.O_DIRECT)
        except OSError:
            if not is_wanted:
                raise
            return  # the file system has no such way
        self._is_direct = is_wanted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The file and the memory are in use until the last write has ended, however it ended.
        self._writer.shutdown(wait=True)
        self._turn_direct(is_wanted=False)
