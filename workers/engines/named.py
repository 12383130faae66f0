"""Starts engines that take the name they serve from the folder they read: a folder of that name leads to the files.

A shell makes it in the engine's HOME and becomes the engine, so that the same words do in a process, a container and a
pod. What the engine reads besides is written there too.
"""

from pathlib import Path

_SHELL = "/bin/sh"
_PLAIN = (
    'mkdir -p "$HOME/models/$(dirname "$1")"; ln -sfn "$2" "$HOME/models/$1"; printf %s "$3" > "$HOME/options.json"; '
    'cd "$HOME/models"; shift 3; exec "$@"'
)
_HUB = (
    'mkdir -p "$HOME/hub/$1/refs" "$HOME/hub/$1/snapshots"; printf %s bundle > "$HOME/hub/$1/refs/main"; '
    'ln -sfn "$2" "$HOME/hub/$1/snapshots/bundle"; export HF_HUB_CACHE="$HOME/hub"; cd "$HOME"; shift 2; exec "$@"'
)
OPTIONS = "../options.json"
"""Where the engine, which runs in the folder of folders, finds its options."""


def in_folder(name: str, root: Path, words: list[str], *, options: str = "{}") -> tuple[str, ...]:
    """Return words that start an engine where the relative path `name` leads to `root`, and OPTIONS to its options."""
    return (_SHELL, "-ec", _PLAIN, "starter", name, str(root), options, *words)


def in_cache(name: str, root: Path, words: list[str]) -> tuple[str, ...]:
    """Return words that start an engine whose hub cache holds `root` alone, as the repository `name`."""
    return (_SHELL, "-ec", _HUB, "starter", "models--" + name.replace("/", "--"), str(root), *words)
