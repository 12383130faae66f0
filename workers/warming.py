"""What a replica is asked before it is ready, so that its first caller does not wait for what an engine does once."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from gates.dialects.base import Dialect, Request
from schemas.bundle import Bundle, Feature

TOKENS = 8
LONG_CHARACTERS = 2048
"""A token has at least one of them, so that a long prompt never takes more than half of a context."""
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
_WINDOW_BYTES = 1 << 20
_WINDOWS = 64
"""Looked at of each file, evenly spread."""


def requests(bundle: Bundle, dialect: Dialect) -> list[Request]:
    """Return one request for each shape that a bundle is meant for: a long prompt, and a schema where declared.

    The short prompt is the real completion by which it becomes ready.
    """
    model, features = bundle.serving.served_name, bundle.serving.features
    long = "one " * (min(LONG_CHARACTERS, bundle.runtime.context_tokens // 2) // 4)
    if Feature.CHAT not in features:
        return [dialect.completion(model, long, max_tokens=TOKENS)]
    found = [dialect.chat(model, [{"role": "user", "content": long}], max_tokens=TOKENS)]
    if Feature.JSON_SCHEMA in features:
        extra = dialect.schema_fields("warm", SCHEMA)
        found.append(dialect.chat(model, [{"role": "user", "content": "ok?"}], max_tokens=TOKENS, extra=extra))
    return found


def resident_percent(paths: Iterable[Path]) -> int | None:
    """Return how much of some files lies in the page cache, by the kernel's word on a sample; None when it says none.

    Source: mincore(2).
    """
    resident = pages = 0
    try:
        for path in paths:
            with path.open("rb") as file:
                here, seen = _resident(file.fileno(), os.fstat(file.fileno()).st_size)
            resident, pages = resident + here, pages + seen
    except OSError:
        return None
    return round(100 * resident / pages) if pages else None


def _resident(descriptor: int, size: int) -> tuple[int, int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    step = max(_WINDOW_BYTES, size // _WINDOWS // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY)
    resident = pages = 0
    for offset in range(0, size, step):
        length = min(_WINDOW_BYTES, size - offset)
        # A private, writable mapping of a file that is open for reading: ctypes wants one it could write to.
        with mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE,
                       offset=offset) as mapped:  # fmt: skip
            count = -(-length // mmap.PAGESIZE)
            told = ctypes.create_string_buffer(count)
            first = ctypes.c_char.from_buffer(mapped)
            failed = libc.mincore(ctypes.addressof(first), length, told)
            del first
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        resident += sum(byte & 1 for byte in told.raw)
        pages += count
    return resident, pages
