"""How fast the machine is just now, so that numbers of two days or two machines can be told apart."""

import os
import tempfile
import time
from pathlib import Path

_STEPS = 1_000_000
_TRIES = 15
_WRITTEN = 8192


def told(folder: Path | None = None) -> str:
    """Return a line with what a million steps of Python take, and a write of 8 KiB until it is on the disk, in ms.

    `folder` is on the file system to be measured; otherwise that of TMPDIR.
    """
    steps, writes = [], []
    for _ in range(_TRIES):
        began, total = time.perf_counter(), 0
        for step in range(_STEPS):
            total += step
        steps.append(1000 * (time.perf_counter() - began))
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, _TRIES * 4 * _WRITTEN)
        os.fsync(file.fileno())
        for place in range(_TRIES * 4):
            began = time.perf_counter()
            os.pwrite(file.fileno(), bytes(_WRITTEN), place * _WRITTEN)
            os.fdatasync(file.fileno())
            writes.append(1000 * (time.perf_counter() - began))
    steps.sort()
    writes.sort()
    return (
        f"a million steps of Python take {steps[0]:.0f} to {steps[-1]:.0f} ms here, and 8 KiB are on the disk in "
        f"{writes[len(writes) // 2]:.1f} ms (median) to {writes[-1]:.1f} ms"
    )
