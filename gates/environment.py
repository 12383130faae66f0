"""Names the Python environment that an engine runs from, by what is installed in it."""

import base64
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What pip writes beside a distribution, or what depends on where it is installed: not part of what runs.
_IGNORED_NAMES = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
_CHUNK = 1 << 20


class EnvironmentAltered(RuntimeError):
    """An installed file is missing, or is not the file that its distribution recorded."""


class NotInstalled(RuntimeError):
    """The engine's distribution, or one that it needs, is not installed."""


@dataclass(frozen=True)
class Environment:
    """Identity of an environment: `digest` over `files` recorded files of `distributions` (name==version)."""

    version: str
    digest: str
    distributions: tuple[str, ...]
    files: int


@dataclass(frozen=True)
class _Recorded:
    path: str
    sha256: str
    size: int
    place: Path


def _closure(name: str, path: list[str]) -> dict[str, metadata.Distribution]:
    installed = {canonicalize_name(found.name): found for found in metadata.distributions(path=path)}
    wanted, closure = [name], {}
    while wanted:
        key = canonicalize_name(wanted.pop())
        if key in closure:
            continue
        if key not in installed:
            raise NotInstalled(f"{key} is not installed")
        closure[key] = installed[key]
        for line in installed[key].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return dict(sorted(closure.items()))


def _recorded(distribution: metadata.Distribution) -> Iterator[_Recorded]:
    if distribution.files is None:
        raise EnvironmentAltered(f"{distribution.name} has no record of its files")
    for file in distribution.files:
        if file.name in _IGNORED_NAMES and file.parent.name.endswith(".dist-info"):
            continue
        # Files outside site-packages are scripts; their first line names the interpreter of this machine.
        if file.suffix == ".pyc" or ".." in file.parts:
            continue
        if file.hash is None or file.size is None:
            raise EnvironmentAltered(f"{distribution.name}: {file} is recorded without hash or size")
        padded = file.hash.value + "=" * (-len(file.hash.value) % 4)
        sha256 = base64.urlsafe_b64decode(padded).hex()
        yield _Recorded(file.as_posix(), sha256, file.size, Path(str(file.locate())))


def _verify(recorded: _Recorded) -> None:
    hasher = hashlib.sha256()
    try:
        with recorded.place.open("rb") as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
    except OSError as error:
        raise EnvironmentAltered(f"{recorded.path} cannot be read: {error.strerror}") from error
    if hasher.hexdigest() != recorded.sha256:
        raise EnvironmentAltered(f"{recorded.path} is not the file that was installed")


def environment(name: str, *, path: list[str] | None = None) -> Environment:
    """Return the identity of distribution `name` with everything that it requires.

    The digest is SHA-256 over lines `name==version` and `path,sha256,size` of each recorded file, sorted; caches,
    scripts and what the installer wrote for itself are left out. Every file is hashed again (0.1 s for llama.cpp),
    so the digest says what is there, not only what was once installed.

    Args:
        name: distribution, such as xllamacpp.
        path: directories to look in; by default those of this interpreter.

    Raises:
        NotInstalled: it or a requirement is missing.
        EnvironmentAltered: a file was changed, removed or recorded without hash.
    """
    closure = _closure(name, sys.path if path is None else path)
    distributions = tuple(f"{key}=={found.version}" for key, found in closure.items())
    lines = list(distributions)
    files = 0
    for distribution in closure.values():
        for recorded in _recorded(distribution):
            _verify(recorded)
            lines.append(f"{recorded.path},{recorded.sha256},{recorded.size}")
            files += 1
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    return Environment(closure[canonicalize_name(name)].version, f"sha256:{digest}", distributions, files)
