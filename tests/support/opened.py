"""Says which files this process opens, as the interpreter itself reports it: no opening can be hidden from it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_watched: list[tuple[Path, list[str]]] = []


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or not _watched or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    if isinstance(arguments[2], int) and arguments[2] & os.O_DIRECTORY:
        return  # a folder is listed
    path = Path(os.fsdecode(arguments[0])).absolute()
    for root, paths in _watched:
        if path.is_relative_to(root):
            paths.append(path.relative_to(root).as_posix())


# A hook cannot be taken away again; while nothing is watched it does nothing.
sys.addaudithook(_audit)


@contextmanager
def opened_under(root: Path) -> Iterator[list[str]]:
    """Collect the relative paths of files under `root` that are opened in the block, one an opening."""
    paths: list[str] = []
    watch = (root.resolve(), paths)
    _watched.append(watch)
    try:
        yield paths
    finally:
        _watched.remove(watch)
