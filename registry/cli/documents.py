"""Documents on the command line: files in JSON, TOML or YAML, and digests in full or in short."""

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import UUID

from pydantic import BaseModel, ValidationError

from registry.cli.failures import invalid
from registry.cli.files import STANDARD_INPUT, open_regular
from registry.cli.yaml_files import read_yaml
from registry.client import Client
from registry.client.documents import Bundles, Documents
from schemas.api import Registered
from schemas.bundle import Bundle
from schemas.common import MAX_DOCUMENT_BYTES, NAME_PATTERN, Document, canonical_json, strict_json
from schemas.policy import Policy
from schemas.problems import Conflict, InvalidDocument, NotFound, Usage
from schemas.release import Release

LISTED = {"release": "release", "run": "gate", "token": "token"}
"""Noun → the group of commands whose `list` shows all of them."""
REGISTERED_BY = {
    "policy": "register it with `sluicegate policy push {file}`",
    "suite": "register it with `sluicegate suite push {file}`",
}
"""Noun → how a file with such a document gets to the service."""
TAKEN_BY = {
    "bundle": "`sluicegate bundle create` registers one from its files",
    "policy": REGISTERED_BY["policy"],
    "suite": REGISTERED_BY["suite"],
}
"""Kind of document, as its schema has it → what takes a file with one."""
MOST_SHOWN = 10
"""Things that a beginning may mean which are listed; the rest is counted."""
_DIGEST = re.compile(r"(sha256:)?([0-9a-f]{8,64})")
ModelT = TypeVar("ModelT", bound=BaseModel)


class Registry(Protocol):
    """Documents of one kind on the service."""

    def get(self, digest: str) -> Registered:
        """Return a document by its digest or a unique beginning of it."""


def read_file(path: Path) -> Any:
    """Return what a JSON, TOML or YAML file says. TOML is told by the ending `.toml`, YAML by `.yaml` or `.yml`.

    `-` is JSON on standard input.

    Raises:
        Usage: there is no such file, it cannot be read, or it is a pipe or a device.
        InvalidDocument: it is none of these, too large, or says something twice.
    """
    raw = _raw(path)
    try:
        if path.suffix.lower() in {".yaml", ".yml"}:
            return read_yaml(raw, limit=MAX_DOCUMENT_BYTES)
        if path.suffix.lower() != ".toml":
            return strict_json(raw)
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"is larger than {MAX_DOCUMENT_BYTES} bytes")
        value = tomllib.loads(raw.decode())
        # Dates, and floats that two programs could print differently, are no part of a document.
        return strict_json(canonical_json(value))
    except UnicodeDecodeError as error:
        raise InvalidDocument(f"{path} is not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidDocument(f"{path} is not TOML: {error}") from None
    except (ValueError, TypeError) as error:
        raise InvalidDocument(f"{path} {error}") from None


def _raw(path: Path) -> bytes:
    try:
        if path == STANDARD_INPUT:
            return sys.stdin.buffer.read(MAX_DOCUMENT_BYTES + 1)
        with open_regular(path) as file:
            return file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise Usage(f"{path}: {error.strerror}") from None


def require_kind(path: Path, value: Any, wanted: str) -> None:
    """Refuse what says by its schema that it is a document of another kind. Raises InvalidDocument."""
    schema = value.get("schema") if isinstance(value, dict) else None
    kind = schema.split("/")[1] if isinstance(schema, str) and schema.startswith("sluicegate.dev/") else wanted
    if kind != wanted and kind in TAKEN_BY:
        advice = TAKEN_BY[kind].format(file=shlex.quote(str(path)))
        raise InvalidDocument(f"{path} is a {kind}, not a {wanted}; {advice}")


def read_document(path: Path, model: type[ModelT]) -> ModelT:
    """Return a file as a document. Raises Usage, InvalidDocument with each place by JSON Pointer."""
    value = read_file(path)
    require_kind(path, value, model.__name__.lower())
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(str(path), error, value, model) from None


def read_bundle(path: Path) -> Bundle:
    """Return a file's bundle. Raises as `read_document`."""
    return read_document(path, Bundle)


def read_policy(path: Path) -> Policy:
    """Return a file's policy. Raises as `read_document`."""
    return read_document(path, Policy)


def resolve(text: str, registry: Registry, read: Callable[[Path], Document], what: str) -> str:
    """Return the digest that a person means by a digest, 8 or more of its digits, or a file with the document.

    A bundle may also be named by an alias, as @NAME: it is looked up once, and only the digest goes on from here.

    Raises:
        Usage: it is none of these, or several documents begin so.
        NotFound: the service has no such document.
    """
    if text.startswith("@") and isinstance(registry, Bundles):
        if re.fullmatch(NAME_PATTERN, text[1:]) is None:
            raise Usage(f"{what} {text!r} is no alias: write @NAME, such as @champion")
        return registry.named(text[1:])
    match = _DIGEST.fullmatch(text)
    if match is not None and len(match[2]) == 64:
        return f"sha256:{match[2]}"
    if match is not None:
        try:
            return registry.get(match[2]).digest
        except Conflict as error:
            digests = [str(one) for one in error.members.get("digests") or ()]
            raise ambiguous(text, what, [(digest, _told(registry.get(digest))) for digest in digests]) from None
    if Path(text).is_file():
        return _registered(text, read(Path(text)).digest, registry, what)
    raise _unnamed(text, registry, what)


def _unnamed(text: str, registry: Registry, what: str) -> Usage:
    """Return the refusal of words that are no digest, which says the digests of those that have them for a name."""
    alias = ", nor @ and an alias" if isinstance(registry, Bundles) else ""
    said = f"{what} {text!r} is neither a digest, nor 8 or more of its hexadecimal digits{alias}, nor a file"
    if not isinstance(registry, Documents):
        return Usage(said)
    is_name = re.fullmatch(NAME_PATTERN, text) is not None
    found = list(islice(registry.list(name=text), MOST_SHOWN)) if is_name else []
    if not found:
        return Usage(f"{said}; `sluicegate {registry.noun} list` shows all of them")
    candidates = [{"name": one.digest, "is": _told(one)} for one in found]
    return Usage(f"{said}; it is a name, and a digest says which of those that have it is meant", candidates=candidates)


def _told(found: Registered) -> str:
    """Return what tells a document from another whose digest begins alike."""
    return f"{found.name}, created {found.created_at:%Y-%m-%d %H:%M:%S}Z by {found.created_by}"


def _registered(file: str, digest: str, registry: Registry, what: str) -> str:
    try:
        return registry.get(digest).digest
    except NotFound:
        advice = REGISTERED_BY.get(what, "`sluicegate bundle create` registers one from its files")
        raise NotFound(
            f"{file} is {what} {digest}, which is not registered; {advice.format(file=shlex.quote(file))}"
        ) from None


def resolve_release(text: str, client: Client) -> UUID:
    """Return the id that a person means by an id or its first 8 or more characters. Raises Usage."""
    return resolve_id(text, "release", ((one.id, told_release(one)) for one in client.releases.list()))


def told_release(one: Release) -> str:
    """Return what tells a release from another whose id begins alike."""
    return f"{one.bundle_name} on {one.target}, {one.phase}, created {one.created_at:%Y-%m-%d %H:%M:%S}Z"


def is_beginning(text: str) -> bool:
    """Tell whether a text could be the beginning of an id that is long enough to name one."""
    return re.fullmatch(r"[0-9a-f-]{8,36}", text.lower()) is not None


def resolve_id(text: str, what: str, known: Iterable[tuple[UUID, str]]) -> UUID:
    """Return the id that a person means by an id or its first 8 or more characters.

    Args:
        text: as written.
        what: noun, such as release.
        known: the ids that there are, newest first, and what each is; read only when `text` is no whole id, and as
            far as needed.

    Raises:
        Usage: it is neither, or none or several begin so; those are listed, each with what it is.
    """
    try:
        return UUID(text)
    except ValueError:
        pass
    if not is_beginning(text):
        raise Usage(f"{what} {text!r} is neither an id nor the first 8 or more characters of one")
    short, found = text.lower(), dict[UUID, str]()
    for one, said in known:
        head = str(one)[: len(short)]
        if head == short:
            found[one] = said
        elif head < short:
            break  # ids begin with the time: what follows is older still
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise Usage(f"no {what} begins with {text}; `sluicegate {LISTED[what]} list` shows all of them")
    raise ambiguous(text, what, [(str(one), said) for one, said in found.items()])


def ambiguous(text: str, what: str, found: Sequence[tuple[str, str]]) -> Usage:
    """Return the refusal of a beginning that several have, which lists each and what it is.

    Args:
        text: as written.
        what: noun, such as release.
        found: name and description of each, in the order in which they are listed.
    """
    candidates = [{"name": name, "is": said} for name, said in found]
    rest = "" if len(found) <= MOST_SHOWN else f"; the first {MOST_SHOWN} of {len(found)} are listed"
    return Usage(
        f"more than one {what} begins with {text}; give more characters{rest}", candidates=candidates[:MOST_SHOWN]
    )
