"""Documents on the command line: files in JSON, TOML or YAML, and digests in full or in short."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import UUID

from pydantic import BaseModel, ValidationError

from registry.cli.failures import Usage, invalid
from registry.cli.yaml_files import read_yaml
from registry.client import Client
from schemas.api import Registered
from schemas.bundle import Bundle
from schemas.common import MAX_DOCUMENT_BYTES, Document, canonical_json, strict_json
from schemas.policy import Policy
from schemas.problems import Conflict, InvalidDocument

_DIGEST = re.compile(r"(sha256:)?([0-9a-f]{8,64})")
ModelT = TypeVar("ModelT", bound=BaseModel)


class Registry(Protocol):
    """Documents of one kind on the service."""

    def get(self, digest: str) -> Registered:
        """Return a document by its digest or a unique beginning of it."""


def read_file(path: Path) -> Any:
    """Return what a JSON, TOML or YAML file says. TOML is told by the ending `.toml`, YAML by `.yaml` or `.yml`.

    Raises:
        Usage: there is no such file, or it cannot be read.
        InvalidDocument: it is none of these, too large, or says something twice.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise Usage(f"{path}: {error.strerror}") from None
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


def read_document(path: Path, model: type[ModelT]) -> ModelT:
    """Return a file as a document. Raises Usage, InvalidDocument with each place by JSON Pointer."""
    value = read_file(path)
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

    Raises:
        Usage: it is none of these, or several documents begin so.
        NotFound: the service has no such document.
    """
    match = _DIGEST.fullmatch(text)
    if match is not None and len(match[2]) == 64:
        return f"sha256:{match[2]}"
    if match is not None:
        try:
            return registry.get(match[2]).digest
        except Conflict as error:
            raise Usage(f"{what} {text}: {error.detail}") from None
    if Path(text).is_file():
        return read(Path(text)).digest
    raise Usage(f"{what} {text!r} is neither a digest, nor 8 or more of its hexadecimal digits, nor a file")


def resolve_release(text: str, client: Client) -> UUID:
    """Return the id that a person means by an id or its first 8 or more characters. Raises Usage."""
    try:
        return UUID(text)
    except ValueError:
        pass
    short = text.lower()
    if not re.fullmatch(r"[0-9a-f-]{8,36}", short):
        raise Usage(f"release {text!r} is neither an id nor the first 8 or more characters of one")
    found = [release.id for release in client.releases.list() if str(release.id).startswith(short)]
    if len(found) != 1:
        said = "no release begins" if not found else f"{len(found)} releases begin"
        raise Usage(f"{said} with {text}")
    return found[0]
