"""Sees what an engine that answers says of itself, and holds it against its bundle."""

from dataclasses import dataclass
from pathlib import Path

import httpx

from gates.booted.comparison import ITEMS, Comparison, compare
from gates.booted.expected import Wanted, wanted
from gates.booted.told import Said, older, pages, read
from gates.environment import Environment
from gates.plain import NO_AUTHORITY
from schemas.bundle import Bundle
from schemas.runner import EngineIdentity
from workers.launchers.made import Made
from workers.launchers.proc import arguments

MAX_PAGE_BYTES = 16 * 1024 * 1024
PAGE_SECONDS = 10.0
_INSTALLED = "the distribution installed"


@dataclass(frozen=True)
class Booted:
    """An engine that answers, as its runner knows it.

    `argv` is the command line that its driver made; `pid` of its process on this machine, None where it has none.
    `installed` is the environment that it was started from; None for an image, and for one that was taken up again.
    `made` is what the system that runs it says, where that is not this machine itself.
    `is_elsewhere`: what was started is a relay to it. `is_adopted`: an earlier runner started it.
    """

    bundle: Bundle
    root: Path
    argv: tuple[str, ...]
    pid: int | None
    installed: Environment | None
    is_elsewhere: bool
    is_adopted: bool
    made: Made | None = None


def expect(bundle: Bundle, root: Path, argv: tuple[str, ...]) -> dict[str, Wanted]:
    """Return what an engine should say of itself. Reads headers of files, so it is best asked while one loads."""
    found = wanted(bundle, root, argv)
    if argv:
        found["arguments"] = Wanted("\n".join(argv), "what its driver made of the bundle", "tail")
    if bundle.engine.environment is not None:
        found["environment"] = Wanted(bundle.engine.environment, "engine.environment")
    return found


def hold(one: Booted, base_url: str, identity: EngineIdentity) -> tuple[EngineIdentity, Comparison]:
    """Ask an engine for what it says of itself, and compare.

    Args:
        one: the engine.
        base_url: where it answers.
        identity: what its model list says.
    """
    engine = one.bundle.engine
    fetched = _pages(base_url, pages(engine.name))
    missing = {path: name for path, name in older(engine.name).items() if path not in fetched}
    if missing:
        before = _pages(base_url, list(missing.values()))
        fetched |= {path: before[name] for path, name in missing.items() if name in before}
    said = read(engine.name, fetched, one.argv)
    if identity.model_ids:
        said["model"] = Said(", ".join(identity.model_ids), "its model list")
    words = () if one.pid is None else tuple(arguments(one.pid))
    if one.made is not None:
        words = one.made.words
        said |= one.made.told
    # A single word is a title that the process gave itself, with nothing in the place of the others.
    elif any(words[1:]):
        said["arguments"] = Said("\n".join(words), "its process")
    if one.installed is not None and not one.is_elsewhere:
        said["environment"] = Said(one.installed.digest, "what is installed")
        said.setdefault("version", Said(one.installed.version, _INSTALLED))
    should = expect(one.bundle, one.root, one.argv)
    if one.made is not None:
        should |= one.made.asked
    if one.is_elsewhere:
        # The relay's command line says nothing of the engine.
        should = {name: value for name, value in should.items() if name != "arguments"}
        said.pop("arguments", None)
    # One that was taken up serves already, under what an earlier release of this program held it to.
    lenient = tuple(ITEMS) if one.is_adopted else ()
    found = compare(said, should, lenient=lenient, is_reported=one.is_elsewhere)
    told = {"version": said["version"].value} if "version" in said else {}
    seen = {"arguments": list(words)} if "arguments" in said else {}
    return identity.model_copy(update={**told, **seen, "image": engine.image}), found


def _pages(base_url: str, paths: list[str]) -> dict[str, bytes]:
    """Fetch an engine's pages. One that it does not answer with 200, or without end, is left out."""
    found = {}
    with httpx.Client(base_url=base_url, timeout=PAGE_SECONDS, trust_env=False, verify=NO_AUTHORITY) as client:
        for path in paths:
            try:
                with client.stream("GET", path) as response:
                    body = bytearray()
                    for chunk in response.iter_bytes():
                        body += chunk
                        if len(body) > MAX_PAGE_BYTES:
                            break
                    else:
                        if response.status_code == 200:
                            found[path] = bytes(body)
            except httpx.HTTPError:
                continue
    return found
