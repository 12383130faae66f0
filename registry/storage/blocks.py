"""Copying in blocks: one is read and hashed while those before are on their way to the disk, from the same memory."""

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
COUNT = 6
"""Of a file: one that is filled, and those that are on their way."""
_WRITERS = 4
"""A disk does more when it is told of several pieces at once."""
_ALIGNMENT = 4096
"""What every disk takes from memory without a copy: its sectors have that size or a part of it."""
_NOT_DIRECT = frozenset({errno.EINVAL, errno.ENOTSUP})
_BEGUN_BYTES = 32 << 20


class Blocks:
    """Blocks of memory in a ring: one to be filled, while others are written at the end of a file. Use it as a context.

    Whole blocks go past the page cache where the file system allows that: nothing copies them, and the disk works
    while the next ones are hashed. What is written is what was hashed: both are the same memory, which only this has.

    Writes end in any order, so a file is whole only once `end` has returned; before, it may have holes.
    """

    def __init__(self, file: BinaryIO, at: int) -> None:
        """Write to `file`, of which nothing is buffered, from the offset `at`."""
        self._descriptor, self._at, self._turn = file.fileno(), at, 0
        self._is_direct, self._may_be_direct, self._begun = False, True, at
        memory = mmap.mmap(-1, COUNT * BLOCK_BYTES)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(memory)
        self._blocks = [whole[start : start + BLOCK_BYTES] for start in range(0, len(whole), BLOCK_BYTES)]
        self._pending: list[Future[int] | None] = [None] * COUNT
        """What a block waits for before it is filled again: the offset behind what was written of it."""
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="write")

    def fill(self, source: BinaryIO) -> memoryview:
        """Return the next bytes of a file, a whole block unless it ends. They stay until `COUNT` calls after this.

        Raises OSError, also for a write before.
        """
        self._await(self._turn)
        block, count = self._blocks[self._turn], 0
        while count < BLOCK_BYTES and (more := source.readinto(block[count:])):  # type: ignore[attr-defined]
            count += more
        return block[:count]

    def write(self, block: memoryview) -> None:
        """Begin to write what `fill` returned. Raises OSError for a write before."""
        is_whole = len(block) == BLOCK_BYTES and self._at % _ALIGNMENT == 0
        if (is_wanted := is_whole and self._may_be_direct) != self._is_direct:
            self.end()
            self._turn_direct(is_wanted=is_wanted)
        self._pending[self._turn] = self._writers.submit(self._put, block, self._at)
        self._turn, self._at = (self._turn + 1) % COUNT, self._at + len(block)

    def end(self) -> None:
        """Return when everything is written. Raises OSError."""
        for place in range(self._turn, self._turn + COUNT):
            self._await(place % COUNT)

    def _await(self, place: int) -> None:
        """Wait for a block, and thereby for all that were written before it."""
        pending, self._pending[place] = self._pending[place], None
        if pending is None:
            return
        written = pending.result()
        if not self._is_direct and written - self._begun >= _BEGUN_BYTES:
            # The disk begins now, and not only when all has to be there. This drops nothing that is being written.
            os.posix_fadvise(self._descriptor, self._begun, written - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = written

    def _put(self, block: memoryview, at: int) -> int:
        """Write a block to its place. Returns the offset behind it."""
        while block:
            is_direct = self._is_direct
            try:
                count = os.pwrite(self._descriptor, block, at)
            except OSError as error:
                if not is_direct or error.errno not in _NOT_DIRECT:
                    raise
                count = 0
            # A disk with larger sectors, or one that is nearly full: this and the rest go the usual way.
            if is_direct and count < len(block):
                self._may_be_direct = False
                self._turn_direct(is_wanted=False)
            block, at = block[count:], at + count
        return at

    def _turn_direct(self, *, is_wanted: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if is_wanted else flags & ~os.O_DIRECT)
        except OSError:
            if not is_wanted:
                raise
            self._may_be_direct = False
            return  # the file system has no such way
        self._is_direct = is_wanted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The file and the memory are in use until the last write has ended, however it ended.
        self._writers.shutdown(wait=True)
        self._turn_direct(is_wanted=False)
