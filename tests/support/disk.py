"""A small disk of a test's own: a tmpfs where this account may mount one."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Disk:
    """A mounted file system of a chosen size."""

    def __init__(self, path: Path) -> None:
        """Stand at a mount point."""
        self.path = path
        self.filler = path / "filler"

    def fill(self) -> None:
        """Leave no byte free."""
        with self.filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass

    def make_room(self) -> None:
        """Take away what filled it."""
        self.filler.unlink()

    def resize(self, size: str) -> None:
        """Make it larger or smaller while it is in use."""
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.path)], check=True)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Disk]:
    """Mount a disk of this size, such as `1m`, at a folder; skips the test where that is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this account may not mount a file system of its own")
    try:
        yield Disk(path)
    finally:
        os.sync()
        subprocess.run(["umount", "-l", str(path)], check=True)
