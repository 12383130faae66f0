"""Which service, and as whom: from the environment, or from what `sluicegate login` wrote."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.client import Client
from schemas.problems import Unauthenticated, Usage

URL_VARIABLE, TOKEN_VARIABLE = "SLUICEGATE_URL", "SLUICEGATE_TOKEN"


@dataclass(frozen=True, slots=True)
class Profile:
    """A service and a token for it."""

    url: str
    token: str | None


def folder(kind: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the person's own folder for configuration (`config`) or for what can be made again (`cache`).

    Source: XDG Base Directory Specification 0.8, by which a relative path is ignored.
    """
    variable, fallback = {"config": ("XDG_CONFIG_HOME", ".config"), "cache": ("XDG_CACHE_HOME", ".cache")}[kind]
    named = Path(environment.get(variable, ""))
    return (named if named.is_absolute() else Path.home() / fallback) / "sluicegate"


def load(environment: Mapping[str, str] = os.environ) -> Profile:
    """Return the service to speak to. A token is only ever sent to the address that it was given for.

    Raises:
        Unauthenticated: nothing names a service.
        Usage: the file is not what `sluicegate login` writes.
    """
    written = _written(folder("config", environment) / "config.json")
    url = environment.get(URL_VARIABLE) or written.get("url")
    if not url:
        raise Unauthenticated(f"no service is known: run `sluicegate login URL`, or set {URL_VARIABLE}")
    url = str(url).rstrip("/")
    kept = written.get("token") if url == str(written.get("url", "")).rstrip("/") else None
    token = environment.get(TOKEN_VARIABLE) or kept
    return Profile(url, None if token is None else str(token))


def token_origin(environment: Mapping[str, str] = os.environ) -> str:
    """Return where the token comes from that commands send, for a person who is not let in with it."""
    if environment.get(TOKEN_VARIABLE):
        return f"from {TOKEN_VARIABLE}"
    return f"from {folder('config', environment) / 'config.json'}" if load(environment).token else "missing"


def connect() -> Client:
    """Return a client for the service to speak to. Raises Unauthenticated, Usage."""
    return client_for(load())


def client_for(profile: Profile) -> Client:
    """Return a client. Raises Usage when the address or the token is none."""
    try:
        return Client(profile.url, profile.token)
    except ValueError as error:
        raise Usage(str(error)) from None


def save(profile: Profile, environment: Mapping[str, str] = os.environ) -> Path:
    """Write the service and the token where only this person can read them. Returns the file."""
    place = folder("config", environment)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, part = place / "config.json", place / f".config.json.{os.getpid()}"
    with suppress(FileNotFoundError):
        part.unlink()
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"url": profile.url, "token": profile.token}, file, indent=2)
        file.write("\n")
    part.replace(path)
    return path


def _written(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Usage(f"{path} cannot be read ({error}); run `sluicegate login URL` again") from None
    if not isinstance(value, dict):
        raise Usage(f"{path} is not what login writes; run `sluicegate login URL` again")
    return value
